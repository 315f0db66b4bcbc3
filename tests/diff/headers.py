# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: running dump_header, reporting in TAP."""
import json
import subprocess
import sys


def dump(program, paths, *options, timeout=600):
    """One verdict (a dict, see dump_header.c) for each path."""
    done = subprocess.run([program, *options], input="".join(p + "\n" for p in paths), stdout=subprocess.PIPE, text=True,
                          encoding="utf-8", timeout=timeout)
    if done.returncode != 0:
        sys.exit("dump_header ended with status %d after %r" % (done.returncode, paths[done.stdout.count("\n")]))
    return [json.loads(line) for line in done.stdout.splitlines()]


class Tap:
    """Each check is a named test; the process ends with status 1 if one failed."""

    def __init__(self):
        self.n = self.n_failed = 0

    def check(self, name, problem=""):
        self.n += 1
        self.n_failed += bool(problem)
        print("%s %d - %s" % ("not ok" if problem else "ok", self.n, name.replace("#", "")))
        for line in str(problem).splitlines() if problem else ():
            print("# " + line)

    def skip(self, name, reason):
        self.n += 1
        print("ok %d - %s # SKIP %s" % (self.n, name, reason))

    def end(self):
        print("1..%d" % self.n)
        sys.exit(1 if self.n_failed else 0)
