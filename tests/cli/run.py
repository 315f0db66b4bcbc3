#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the command, from outside: run.py --exe build/cli/headrace --source .

Golden cases are scripts in cases/: NAME.sh with what it must print (NAME.out, NAME.err: exact; NAME.out.glob, NAME.err.glob:
line by line with * and ?, a line "..." for any lines) and its status (NAME.rc, 0 if there is none). What is not there must be
empty. --update writes what is printed now into the exact ones. All else is Python, in the other files here. Prints TAP.
"""
import argparse
import fnmatch
import os
import subprocess
import sys

import checkpoints
import harness
import test_agreement  # noqa: F401 (they register themselves)
import test_json  # noqa: F401
import test_behaviour  # noqa: F401
import test_diagnosis  # noqa: F401
import test_store  # noqa: F401
import test_store_devices  # noqa: F401
import test_verify  # noqa: F401

HERE = os.path.dirname(os.path.abspath(__file__))


def glob_lines(patterns, lines):
    """Whether all lines match; "..." stands for any number of them."""
    if not patterns:
        return not lines
    if patterns[0] == "...":
        return any(glob_lines(patterns[1:], lines[i:]) for i in range(len(lines) + 1))
    return bool(lines) and fnmatch.fnmatchcase(lines[0], patterns[0]) and glob_lines(patterns[1:], lines[1:])


def compare(base, kind, got, update):
    exact, pattern = f"{base}.{kind}", f"{base}.{kind}.glob"
    if os.path.exists(pattern):
        with open(pattern, encoding="utf-8") as file:
            patterns = file.read().splitlines()
        if not glob_lines(patterns, got.splitlines()):
            raise AssertionError(f"{pattern} does not match:\n{got}")
        return
    expected = ""
    if os.path.exists(exact):
        with open(exact, encoding="utf-8") as file:
            expected = file.read()
    if got != expected and update:
        with open(exact, "w", encoding="utf-8") as file:
            file.write(got)
    elif got != expected:
        raise AssertionError(f"{os.path.basename(exact)}: expected\n{expected}\ngot\n{got}")


def run_case(context, base):
    done = subprocess.run(["bash", base + ".sh"], cwd=context.work, env=context.environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, check=False)
    status = 0
    if os.path.exists(base + ".rc"):
        with open(base + ".rc", encoding="utf-8") as file:
            status = int(file.read())
    if done.returncode != status:
        raise AssertionError(f"status {done.returncode}, expected {status}; stderr:\n{done.stderr.decode()}")
    compare(base, "out", done.stdout.decode("utf-8", "backslashreplace"), context.options.update)
    compare(base, "err", done.stderr.decode("utf-8", "backslashreplace"), context.options.update)


def add_cases():
    folder = os.path.join(HERE, "cases")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".sh"):
            base = os.path.join(folder, name[:-3])
            title = "case " + name[:-3].replace("_", " ")
            harness.test(title)(lambda context, base=base: run_case(context, base))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--exe", required=True, help="the command")
    parser.add_argument("--source", required=True, help="the project's folder")
    parser.add_argument("--suite", default="main", help="main, slow or store")
    parser.add_argument("--only", help="tests whose title has this in it")
    parser.add_argument("--update", action="store_true", help="write golden outputs anew")
    parser.add_argument("--library", help="folder of libheadrace.so")
    parser.add_argument("--redirect", help="a library that makes --verify read other files")
    parser.add_argument("--fake-cuda", help="folder of the look-alike libcuda.so.1")
    parser.add_argument("--fake-kernel", help="a library that shows the command a kernel with modules")
    parser.add_argument("--fake-root", help="the files of that kernel")
    parser.add_argument("--with-handle", help="the program that makes several calls on one handle")
    parser.add_argument("--sanitized", action="store_true", help="built with sanitizers: memory is not measured")
    add_cases()
    return harness.main(parser.parse_args(), checkpoints.make_all)


if __name__ == "__main__":
    sys.exit(main())
