#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that headrace.h, the version map and the shared library name the same functions, and that the list of the open
structs' layout knows every struct and every field of the header.

    symtest.py LIBRARY    the library is libheadrace.so, as built
    symtest.py --self-test
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def header_functions(text):
    """Names declared with HR_API."""
    return set(re.findall(r"\bHR_API\b[^;{]*?\b(hr_\w+)\s*\(", without_comments(text)))


def map_symbols(text):
    """What the map lists as global, in all of its nodes."""
    names = set()
    for part in re.findall(r"global:(.*?)(?:local:|\})", without_comments(text), flags=re.S):
        names.update(name for name in part.replace("\n", " ").replace("\t", " ").split(";") if name.strip())
    return {name.strip() for name in names}


def library_symbols(nm_output):
    """Defined dynamic symbols, but for the names of the map's nodes."""
    names = set()
    for line in nm_output.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1] != "A":
            names.add(fields[0].split("@")[0])
    return names


def field_names(declarations):
    """Names of a struct's fields from the text between its braces."""
    names = []
    for declaration in declarations.split(";"):
        declaration = declaration.strip()
        if not declaration:
            continue
        function = re.search(r"\(\*(\w+)\)\s*\(", declaration)
        if function:
            names.append(function.group(1))
            continue
        for part in re.sub(r"\[[^\]]*\]", "", declaration).split(","):
            names.append(re.search(r"(\w+)\s*$", part).group(1))
    return names


def header_layout(text):
    """The header's open structs and their fields, as structs.txt names them."""
    names = set()
    for struct, body in re.findall(r"\bstruct (\w+) \{(.*?)\n\};", without_comments(text), flags=re.S):
        names.add(struct)
        names.update(f"{struct}.{field}" for field in field_names(body))
    return names


def listed_layout(text):
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def compare(what, wanted, got):
    """One line per name that only one of the two has."""
    lines = [f"{name}: missing from {what}" for name in sorted(wanted - got)]
    return lines + [f"{name}: in {what}, but not in headrace.h" for name in sorted(got - wanted)]


def check(header, version_map, nm_output, layout):
    functions = header_functions(header)
    faults = compare("headrace.map", functions, map_symbols(version_map))
    faults += compare("the shared library", functions, library_symbols(nm_output))
    faults += compare("tests/abi/structs.txt", header_layout(header), listed_layout(layout))
    return faults


SAMPLE = {
    "header": "HR_API int hr_a(void);\nHR_API const char *hr_b(int x, /* HR_API int hr_no(void); */\n\tint y);\n"
              "struct hr_s {\n\tsize_t size; /* one; two */\n\tuint64_t x[4], y;\n\tvoid *(*alloc)(void *ctx, int n);\n};\n",
    "version_map": "HR_0 {\nglobal:\n\thr_a;\n\thr_b;\nlocal:\n\t*;\n};\n",
    "nm_output": "HR_0 A 0\nhr_a@@HR_0 T 10 20\nhr_b@@HR_0 T 30 40\n",
    "layout": "hr_s 56\n  hr_s.size 0 8\n  hr_s.x 8 32\n  hr_s.y 40 8\n  hr_s.alloc 48 8\n",
}
BAD = [
    ("version_map", "\thr_b;\n", ""),
    ("version_map", "\thr_b;\n", "\thr_b;\n\thr_c;\n"),
    ("nm_output", "hr_b@@HR_0 T 30 40\n", ""),
    ("nm_output", "hr_a@@HR_0 T 10 20\n", "hr_a@@HR_0 T 10 20\nhelper T 1 2\n"),
    ("layout", "  hr_s.y 40 8\n", ""),
    ("layout", "  hr_s.alloc 48 8\n", ""),
    ("header", "HR_API int hr_a(void);\n", ""),
]


def self_test():
    faults = check(**SAMPLE)
    for which, old, new in BAD:
        sample = dict(SAMPLE)
        sample[which] = sample[which].replace(old, new)
        if not check(**sample):
            faults.append(f"does not notice {old!r} -> {new!r} in {which}")
    return faults


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        faults = self_test()
    else:
        nm = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", sys.argv[1]], check=True,
                            capture_output=True, text=True)
        faults = check((ROOT / "include/headrace.h").read_text(), (ROOT / "src/headrace.map").read_text(), nm.stdout,
                       (ROOT / "tests/abi/structs.txt").read_text())
    for fault in faults:
        print(fault)
    print("symbols and structs: " + ("none out of place" if not faults else f"{len(faults)} out of place"))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
