#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""doc_paths.py ROOT: every path of the tree that the documentation names is there (the build's own ones aside)."""
import glob
import os
import re
import sys

PATH = re.compile(r"(?<![\w./-])((?:src|cli|include|tests|tools|docs|bench|\.ci)/[\w./*{},-]*[\w*}/])")


def main(root):
    os.chdir(root)
    missing = []
    n = 0
    for doc in sorted(glob.glob("*.md") + glob.glob("docs/**/*.md", recursive=True)):
        with open(doc, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                for path in PATH.findall(line):
                    n += 1
                    if not glob.glob(path):
                        missing.append(f"{doc}:{number}: {path} is not there")
    print("\n".join(missing) or f"{n} paths, all there")
    return 1 if missing or n < 20 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
