#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks docs/errors.md against the header: every code, in the header's order, with its number and meaning and an advice."""
import re
import sys

import sources


def main():
    header = sources.read("include/headrace.h")
    wanted = re.findall(r'X\((HR_E_\w+),\s*(-\d+),\s*"([^"]*)"\)', header)
    rows = re.findall(r"^\|\s*`(HR_E_\w+)`\s*\|(.*)\|\s*$", sources.read("docs/errors.md"), re.MULTILINE)
    problems = []
    if len(wanted) < 30:
        problems.append(f"include/headrace.h: only {len(wanted)} codes were understood")
    if [name for name, _, _ in wanted] != [name for name, _ in rows]:
        missing = {name for name, _, _ in wanted} ^ {name for name, _ in rows}
        problems.append(f"docs/errors.md: not the header's codes in the header's order: {sorted(missing) or 'order'}")
    cells = {name: [cell.strip() for cell in row.split("|")] for name, row in rows}
    for name, number, text in wanted:
        row = cells.get(name, [])
        if row and (len(row) != 4 or row[:2] != [number, text] or not all(row)):
            problems.append(f"docs/errors.md: {name}: expected | {number} | {text} | when | what to do |, found {row}")
    return sources.finish(problems, "errors that the documentation does not tell")


if __name__ == "__main__":
    sys.exit(main())
