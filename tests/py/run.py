#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py NEEDED,NEEDED FILE...: runs tests with pytest and tells their results as TAP. Without a needed package it skips, and says why."""
import importlib.util
import sys


def main() -> int:
    if sys.version_info < (3, 11):
        print(f"1..0 # SKIP {sys.executable} is Python {sys.version.split()[0]}; the package needs 3.11")
        return 0
    needed, files = sys.argv[1].split(","), sys.argv[2:]
    missing = [name for name in ["pytest", *needed] if name and importlib.util.find_spec(name) is None]
    if missing:
        print(f"1..0 # SKIP {sys.executable} has no {', '.join(missing)}")
        return 0
    import pytest

    class Tap:
        n = 0

        def tell(self, verdict: str, name: str, more: str = "") -> None:
            self.n += 1
            print(f"{verdict} {self.n} - {name.replace('#', ' ')}{more}", flush=True)

        @pytest.hookimpl
        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            name = report.nodeid.rpartition("/")[2]
            if report.failed:
                print("\n".join("# " + line for line in str(report.longrepr).splitlines()[-40:]))
                self.tell("not ok", name)
            elif report.skipped:
                self.tell("ok", name, " # SKIP " + str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "").replace("Skipped: ", ""))
            elif report.when == "call":
                self.tell("ok", name)

        @pytest.hookimpl
        def pytest_collectreport(self, report):  # type: ignore[no-untyped-def]
            if report.failed:
                print("\n".join("# " + line for line in str(report.longrepr).splitlines()[-40:]))
                self.tell("not ok", f"{report.nodeid} can be collected")
            elif report.skipped:
                self.tell("ok", report.nodeid, " # SKIP " + str(report.longrepr[2]).replace("Skipped: ", ""))

    tap = Tap()
    status = pytest.main(["-p", "no:terminal", "-p", "no:cacheprovider", *files], plugins=[tap])
    print(f"1..{tap.n}")
    return 0 if status in (0, 1, 5) and tap.n else 1


sys.exit(main())
