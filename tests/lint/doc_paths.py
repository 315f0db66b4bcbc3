#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""doc_paths.py ROOT: every path of the tree that the documentation names is there, and every test that the README's promises
name."""
import glob
import os
import re
import sys

PATH = re.compile(r"(?<![\w./-])((?:src|cli|include|tests|tools|docs|bench|\.ci)/[\w./*{},-]*[\w*}/])")


def unknown_tests():
    """Names in the last column of the table of promises that no test has."""
    tests = ""
    for path in glob.glob("tests/**/*.*", recursive=True):
        if path.endswith((".c", ".py", ".build")):
            with open(path, encoding="utf-8") as file:
                tests += file.read()
    with open("README.md", encoding="utf-8") as file:
        rows = re.findall(r"^\|.*\|([^|]+)\|$", file.read().split("## What it promises")[1].split("\n## ")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    if len(names) < 5:
        yield "README.md: the table of promises names no tests"
    for name in names:
        if name not in tests:
            yield f"README.md: there is no test '{name}'"


def main(root):
    os.chdir(root)
    missing = list(unknown_tests())
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
