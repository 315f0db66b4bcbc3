#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Brings C files into the house's form: format.py [--check] [FILE...]; without files, all of them.

Code is clang-format's (version 14; other versions differ), but for macros of several lines, most of which are tables, and
for initialisers that are macros. Comments are left as they were written, tables and lists included,
but for paragraphs with a line beyond 120 columns: those are filled anew, and a long comment at the end of a line of code
moves above it.
"""
import re
import subprocess
import sys
import textwrap

import sources

LIMIT = 120
MARKER = re.compile(r"(?:[-*] |\d+[.)] |\S+(?: \S+)?  +)")


def width(line):
    return len(line.expandtabs(8))


def fill(lines, room):
    """A comment's lines without their frame; paragraphs that are too wide are filled anew."""
    out = []
    at = 0
    while at < len(lines):
        first = lines[at]
        if not first.strip():
            out.append("")
            at += 1
            continue
        indent = len(first) - len(first.lstrip())
        marker = MARKER.match(first.lstrip())
        hang = indent + (len(marker.group(0)) if marker else 0)
        end = at + 1
        while end < len(lines) and lines[end].strip():
            line = lines[end]
            if len(line) - len(line.lstrip()) != hang or (MARKER.match(line.lstrip()) and "  " in line.strip()):
                break
            if hang == indent and re.match(r"(?:[-*] |\d+[.)] )", line.lstrip()):
                break
            end += 1
        if any(len(line) > room for line in lines[at:end]):
            text = " ".join([first[hang:]] + [line.strip() for line in lines[at + 1:end]])
            out += textwrap.wrap(text, room, initial_indent=first[:hang], subsequent_indent=" " * hang,
                                 break_long_words=False, break_on_hyphens=False)
        else:
            out += lines[at:end]
        at = end
    return out


def comment_block(lines):
    """One comment that stands alone, as a list of lines, made narrower."""
    if all(width(line) <= LIMIT for line in lines):
        return lines
    lead = re.match(r"\s*", lines[0]).group(0)
    opening = re.match(r"\s*(/\*\*?) ?", lines[0])
    body = [lines[0][opening.end():]] + [re.sub(r"^\s*\* ?", "", line) if not line.strip().startswith("*/") else "*/"
                                          for line in lines[1:]]
    closes_alone = len(body) > 1 and body[-1] == "*/"
    if closes_alone:
        body.pop()
    else:
        body[-1] = re.sub(r"\s*\*/\s*$", "", body[-1])
    opens_alone = not body[0].strip()
    if opens_alone:
        body.pop(0)
    room = LIMIT - 4 - width(lead) - (0 if closes_alone else 3)
    body = fill(body, room)
    out = [lead + opening.group(1)] if opens_alone else []
    for line in body:
        start = (opening.group(1) + " ") if not out else " * "
        out.append((lead + start + line).rstrip())
    if closes_alone:
        out.append(lead + " */")
    else:
        out[-1] += " */"
    return out


def narrow(text):
    """The same text with its comments inside the limit."""
    out = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if re.match(r"\s*/\*", line) and not re.search(r"\*/\s*\S", line):
            end = at
            while "*/" not in lines[end] and end + 1 < len(lines):
                end += 1
            out += comment_block(lines[at:end + 1])
            at = end + 1
            continue
        tail = re.match(r"^(\s*)(\S.*?)\s*(/\*(?:(?!\*/).)*\*/)$", line)
        if tail and width(line) > LIMIT and '"' not in tail.group(3) and not line.lstrip().startswith(("*", "else", "}")):
            out += comment_block([tail.group(1) + tail.group(3)])
            line = tail.group(1) + tail.group(2)
        out.append(line)
        at += 1
    return "\n".join(out)


OFF = "/* fenced */\n/* clang-format off */\n"
ON = "\n/* clang-format on */\n/* fenced */"


def fence(text):
    """Puts what clang-format does not understand between marks that switch it off."""
    out = []
    start = None
    for line in text.split("\n"):
        if start is None and re.match(r"\s*#\s*define\b", line) and (line.endswith("\\") or re.search(r"\{.*\}$", line)):
            start = len(out)
        out.append(line)
        if start is not None and not line.endswith("\\"):
            out[start] = OFF + out[start]
            out[-1] += ON
            start = None
    return "\n".join(out)


def unfence(text):
    return re.sub(r"[ \t]*/\* fenced \*/\n[ \t]*/\* clang-format off \*/\n|\n[ \t]*/\* clang-format on \*/\n[ \t]*/\* fenced \*/",
                  "", text)


def formatted(path, text):
    for _ in range(4):  # moving a comment can change what clang-format aligns
        done = subprocess.run(["clang-format", "--style=file", f"--assume-filename={path}"], input=fence(narrow(text)), text=True,
                              capture_output=True, check=True, cwd=sources.ROOT)
        new = unfence(done.stdout)
        if new == text:
            break
        text = new
    return text


def main(arguments):
    check = "--check" in arguments
    paths = [a for a in arguments if a != "--check"] or sources.c_files("src", "cli", "include", "tests", "bench")
    changed = []
    for path in paths:
        text = sources.read(path)
        new = formatted(path, text)
        if new != text:
            changed.append(path)
            if not check:
                with open(f"{sources.ROOT}/{path}", "w", encoding="utf-8") as file:
                    file.write(new)
    for path in changed:
        print(f"{path}: {'would be changed by tools/format.py' if check else 'formatted'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
