# SPDX-License-Identifier: Apache-2.0
"""What the lint scripts share: which files there are, and C text with its comments and strings blanked out."""
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_TOKEN = re.compile(
    r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


def blank(text, keep_strings=False):
    """Comments (and what is inside strings) become spaces; every line keeps its number and its length."""

    def spaces(match):
        token = match.group(0)
        if token[0] in "\"'":
            if keep_strings:
                return token
            return token[0] + " " * (len(token) - 2) + token[-1]
        return re.sub(r"[^\n]", " ", token)

    return _TOKEN.sub(spaces, text)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def c_files(*folders):
    """Paths of .c and .h files below these folders, relative to the root, sorted."""
    found = []
    for folder in folders:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            found += [os.path.relpath(os.path.join(where, n), ROOT) for n in names if n.endswith((".c", ".h"))]
    return sorted(found)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def finish(problems, what):
    """Prints the problems and gives the exit status."""
    for problem in problems:
        print(problem)
    print(f"{what}: {len(problems)} found" if problems else f"{what}: none")
    return 1 if problems else 0
