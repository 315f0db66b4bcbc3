#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts test results: summary.py FILE...

Each file has one JSON object per line, as Meson's testlog.json has: name, result, stdout. A test that speaks TAP counts as
its subtests; any other as one. Prints the reasons of skips, what failed with the end of its output, and as the last line
"N passed, N failed, N skipped". Ends with status 1 if anything failed or nothing passed.
"""
import collections
import json
import os
import re
import sys

TAP_LINE = re.compile(r"^(not ok|ok)\b\s*\d*\s*-?\s*(.*)$")
TAP_SKIP = re.compile(r"^(.*?)\s*#\s*SKIP\b\S*:?\s*(.*)$", re.IGNORECASE)
TAP_NONE = re.compile(r"^1\.\.0\s*(?:#\s*SKIP\b\S*:?\s*(.*))?$", re.IGNORECASE)
GOOD = {"OK", "EXPECTEDFAIL"}
TAIL_LINES = 40


class Count:
    def __init__(self):
        self.passed = 0
        self.failures = []  # (name, output)
        self.skips = collections.defaultdict(list)  # reason -> names

    def skip(self, name, reason):
        self.skips[reason.strip() or "no reason given"].append(name)


def tap_results(text):
    """[(verdict, name, reason)] of the subtests in a test's output; the verdict is "ok", "not ok" or "skip"."""
    found = []
    comment = ""
    for line in text.splitlines():
        none = TAP_NONE.match(line)
        if none:
            found.append(("skip", "", none.group(1) or comment))
            continue
        match = TAP_LINE.match(line)
        if not match:
            comment = line[1:].strip() if line.startswith("#") else comment
            continue
        verdict, rest = match.groups()
        skip = TAP_SKIP.match(rest)
        if skip:
            # cmocka writes the test's name where TAP has the reason; the reason is then the comment before it.
            name, reason = skip.groups()
            found.append(("skip", name or reason, reason if name else comment))
        else:
            found.append((verdict, rest, ""))
        comment = ""
    return found


def tail(text):
    """The end of an output, without the lines that say that all is well."""
    lines = [line for line in text.rstrip().splitlines() if not re.match(r"ok\b|1\.\.\d|\[\d+/\d+\] ", line)]
    cut = ["[...]"] if len(lines) > TAIL_LINES else []
    return cut + lines[-TAIL_LINES:]


def add_test(count, label, test):
    name = f"{label}: {test['name']}" if label else test["name"]
    output = test.get("stdout", "") + test.get("stderr", "")
    result = test["result"]
    failed_before = len(count.failures)
    subtests = tap_results(test.get("stdout", ""))
    for verdict, sub, reason in subtests:
        if verdict == "skip":
            count.skip(f"{name}: {sub}" if sub else name, reason)
        elif verdict == "ok":
            count.passed += 1
        else:
            count.failures.append((f"{name}: {sub}", output))
    if subtests:
        # A crash, a time-out, a sanitizer's report or a broken plan is a failure although each subtest said "ok".
        if result not in GOOD | {"SKIP"} and len(count.failures) == failed_before:
            count.failures.append((f"{name} ({result.lower()}, status {test.get('returncode')})", output))
    elif result in GOOD:
        count.passed += 1
    elif result == "SKIP":
        count.skip(name, (output.strip().splitlines() or [""])[-1])
    else:
        count.failures.append((f"{name} ({result.lower()}, status {test.get('returncode')})", output))


def add_file(count, path):
    label = os.path.basename(path).removesuffix(".json")
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                add_test(count, "" if label.startswith("steps") else label, json.loads(line))


def report(count, out):
    for reason, names in sorted(count.skips.items()):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"skipped: {names[0]}{more}: {reason}", file=out)
    shown = set()
    for name, output in count.failures:
        print(f"FAILED: {name}", file=out)
        if output not in shown:  # one program's output once, however many of its subtests failed
            for line in tail(output):
                print(f"    {line}", file=out)
        shown.add(output)
    n_skipped = sum(len(names) for names in count.skips.values())
    print(f"{count.passed} passed, {len(count.failures)} failed, {n_skipped} skipped", file=out)


def main(paths):
    count = Count()
    for path in paths:
        add_file(count, path)
    report(count, sys.stdout)
    return 1 if count.failures or count.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
