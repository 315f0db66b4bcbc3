#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the shape of the house: which room may include what, that file names are unique, and how long things are.

Rooms see what stands to their left (core <- format <- model <- loader <- cache). Engines and devices see core; the loader sees
their contracts (engine.h, device.h), never a member. The command and the Python binding see headrace.h alone.
With --self-test it checks instead that each rule can find something.
"""
import collections
import os
import re
import sys

import sources

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
MAX_PARAMETERS = 6
MANY_PARAMETERS = {"hr_model_metadata"}  # two strings out, each with its length: a struct would be read once and thrown away

# Room: what it may include beside its own files, headrace.h and the system's headers.
ROOMS = {
    "src/core": [],
    "src/format": ["core/"],
    "src/model": ["core/", "format/"],
    "src/device": ["core/"],
    "src/engine": ["core/"],
    "src/loader": ["core/", "format/", "model/", "engine/engine.h", "device/device.h"],
    "src/cache": ["core/", "format/", "model/", "loader/"],
    "src/store": ["core/", "format/", "model/source.h"],
    "src": ["core/", "format/", "model/", "store/", "engine/ugds_driver.h", "device/device.h"],
    "cli": [],
    "python": [],
}
VENDOR_HEADERS = re.compile(r"^(cuda|cuda_runtime|cufile|ugds|nvml)(_api)?\.h$")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)


def include_problem(path, style, name):
    """Why `path` may not include `name`, or None."""
    room = os.path.dirname(path)
    if VENDOR_HEADERS.match(os.path.basename(name)):
        return f"{name}: drivers are opened at run time; headrace has its own prototypes"
    if style == "<" or name == "headrace.h":
        return None
    if room not in ROOMS:
        return f"{room}/ is not a room of the house"
    if "/" not in name:
        return None  # its own room; the compiler looks nowhere else for it first
    if ".." in name.split("/"):
        return f"{name}: name the room instead of climbing"
    address = "src/" + name
    if os.path.dirname(address) == room:
        return None
    if any(name == allowed or (allowed.endswith("/") and name.startswith(allowed)) for allowed in ROOMS[room]):
        return None
    allowed = ", ".join(["headrace.h"] + ROOMS[room])
    return f"{name} is not for {room}/, which sees only its own files, {allowed}"


def check_includes(path, text):
    code = sources.blank(text, keep_strings=True)
    for match in INCLUDE.finditer(code):
        problem = include_problem(path, *match.groups())
        if problem:
            yield f"{path}:{sources.line_of(code, match.start())}: {problem}"


def check_own_room(path, text, exists):
    """A name without a room must be a file of the same room (or made there by the build): it can mean nothing else."""
    for match in INCLUDE.finditer(sources.blank(text, keep_strings=True)):
        style, name = match.groups()
        if style == '"' and "/" not in name and name != "headrace.h":
            address = os.path.join(os.path.dirname(path), name)
            if not exists(address) and not exists(address + ".in"):
                yield f"{path}: includes \"{name}\", which is not in its room: write room/{name}"


def check_names(paths):
    places = collections.defaultdict(list)
    for path in paths:
        places[os.path.basename(path)].append(path)
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name} is the name of {len(where)} files: {', '.join(where)}"


def without_preprocessor(code):
    """Blanks preprocessor lines and the branches after the first one of each #if, so that braces balance."""
    out = []
    depth_off = []  # per open #if: whether its current branch is left out
    continued = False
    for line in code.split("\n"):
        word = re.match(r"\s*#\s*(\w+)", line)
        directive = continued or word is not None
        if word and not continued:
            if word.group(1) in ("if", "ifdef", "ifndef"):
                depth_off.append(False)
            elif word.group(1) in ("else", "elif") and depth_off:
                depth_off[-1] = True
            elif word.group(1) == "endif" and depth_off:
                depth_off.pop()
        continued = directive and line.rstrip().endswith("\\")
        out.append("" if directive or any(depth_off) else line)
    return "\n".join(out)


def functions(code):
    """Yields (first line, name, parameters, lines) of each function body in blanked code."""
    depth = 0
    start = None
    last = 0  # where the text of the current top-level item begins
    for match in re.finditer(r"[{};]", code):
        char, at = match.group(0), match.start()
        if char == "{":
            if depth == 0:
                head = code[last:at]
                start = (at, head) if head.rstrip().endswith(")") else None
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and start:
                opened, head = start
                signature = re.search(r"(\w+)\s*\((.*)\)\s*$", head, re.DOTALL)
                parts = split_parameters(signature.group(2)) if signature else []
                name = signature.group(1) if signature else "?"
                lines = sources.line_of(code, at) - sources.line_of(code, opened) - 1
                yield sources.line_of(code, opened), name, len(parts), lines
                start = None
            if depth == 0:
                last = at + 1
        elif depth == 0:
            last = at + 1


def split_parameters(text):
    depth, parts, current = 0, [], ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    parts.append(current)
    return [p for p in parts if p.strip() not in ("", "void")]


def check_sizes(path, text):
    n_lines = text.count("\n")
    if n_lines > MAX_FILE_LINES:
        yield f"{path}: {n_lines} lines; {MAX_FILE_LINES} is the most"
    for line, name, n_parameters, lines in functions(without_preprocessor(sources.blank(text))):
        if lines > MAX_FUNCTION_LINES:
            yield f"{path}:{line}: {name}() has {lines} lines; {MAX_FUNCTION_LINES} is the most"
        if n_parameters > MAX_PARAMETERS and name not in MANY_PARAMETERS:
            yield f"{path}:{line}: {name}() has {n_parameters} parameters; {MAX_PARAMETERS} is the most"


def self_test():
    """Each rule fires on a bad sample and keeps quiet on a good one."""
    bad = [
        ("src/core/a.c", '#include "format/json.h"\n'),
        ("src/format/a.c", '#include "model/model.h"\n'),
        ("src/model/a.c", '#include "loader/loader.h"\n'),
        ("src/device/a.c", '#include "engine/engine.h"\n'),
        ("src/engine/a.c", '#include "model/source.h"\n'),
        ("src/loader/a.c", '#include "device/cuda_syms.h"\n'),
        ("src/loader/a.c", '#include "engine/uring.h"\n'),
        ("src/store/a.c", '#include "model/model.h"\n'),
        ("src/core/a.c", "#include <cuda.h>\n"),
        ("src/core/a.c", '#include "../format/json.h"\n'),
        ("src/new_room/a.c", '#include "core/mem.h"\n'),
        ("cli/a.c", '#include "core/mem.h"\n'),
        ("python/a.c", '  #  include "loader/loader.h"\n'),
        ("src/open.c", '#include "loader/loader.h"\n'),
    ]
    good = [
        ("src/loader/a.c", '#include "device/device.h"\n#include "engine/engine.h"\n#include "core/os.h"\n#include "pool.h"\n'),
        ("src/model/a.c", '/* #include "loader/x.h" */\n#include <stdio.h>\n#include "format/header.h"\n'),
        ("src/store/a.c", '#include "model/source.h"\n'),
        ("cli/a.c", '#include "headrace.h"\n#include "args.h"\n'),
    ]
    problems = [f"self-test: not found: {path}: {text!r}" for path, text in bad if not list(check_includes(path, text))]
    problems += [f"self-test: false alarm: {p}" for path, text in good for p in check_includes(path, text)]
    long_one = "int f(int a)\n{\n" + "\ta++;\n" * 101 + "}\n"
    wide_one = "int g(int a, int b, int c, int d, int e, int f, int (*h)(int, int))\n{\n}\n"
    fine = "int f(void (*g)(int, int), int b)\n{\n" + "\tb++;\n" * 100 + "}\nstruct s x = {\n" + "\t1,\n" * 150 + "};\n"
    for name, text, n in (("long", long_one, 1), ("wide", wide_one, 1), ("fine", fine, 0), ("file", "\n" * 801, 1)):
        found = list(check_sizes("a.c", text))
        if len(found) != n:
            problems.append(f"self-test: sizes of '{name}': {found}")
    if len(list(check_names(["src/a/x.c", "src/b/x.c", "src/b/y.c"]))) != 1:
        problems.append("self-test: unique names")
    if not list(check_own_room("src/core/a.c", '#include "json.h"\n', lambda path: False)):
        problems.append("self-test: own room")
    return problems


def main():
    if "--self-test" in sys.argv:
        return sources.finish(self_test(), "rules that do not work")
    problems = []
    paths = sources.c_files("src", "cli", "python")
    for path in paths:
        text = sources.read(path)
        problems += check_includes(path, text)
        problems += check_own_room(path, text, lambda p: os.path.exists(os.path.join(sources.ROOT, p)))
        problems += check_sizes(path, text)
    problems += check_names(paths)
    return sources.finish(problems, "breaches of the house's shape")


if __name__ == "__main__":
    sys.exit(main())
