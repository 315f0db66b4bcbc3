#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/summary.py decides whether a change may land, so it is tested itself."""
import contextlib
import io
import json
import os
import tempfile
import unittest

import summary


def counted(*tests, name="build.json"):
    """(passed, failed, skipped) and the text printed for these Meson results."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            for test in tests:
                file.write(json.dumps({"name": "t", "stdout": "", "returncode": 0, **test}) + "\n")
        out = io.StringIO()
        count = summary.Count()
        summary.add_file(count, path)
        summary.report(count, out)
        with contextlib.redirect_stdout(io.StringIO()):
            status = summary.main([path])
    return (count.passed, len(count.failures), sum(map(len, count.skips.values()))), out.getvalue(), status


class Summary(unittest.TestCase):
    def test_subtests_are_counted_one_by_one(self):
        numbers, text, _ = counted({"result": "FAIL", "stdout": "1..4\nok 1 - a\nnot ok 2 - b\n# why\nok 3 # SKIP c\nok 4 - d\n"})
        self.assertEqual(numbers, (2, 1, 1))
        self.assertIn("FAILED: build: t: b", text)
        self.assertEqual(text.splitlines()[-1], "2 passed, 1 failed, 1 skipped")

    def test_a_plain_test_counts_once(self):
        self.assertEqual(counted({"result": "OK"}, {"result": "FAIL"}, {"result": "SKIP", "stdout": "no GPU"})[0], (1, 1, 1))

    def test_a_crash_after_good_subtests_is_a_failure(self):
        numbers, text, _ = counted({"result": "ERROR", "returncode": -11, "stdout": "1..2\nok 1 - a\n"})
        self.assertEqual(numbers, (1, 1, 0))
        self.assertIn("status -11", text)

    def test_a_time_out_is_a_failure(self):
        self.assertEqual(counted({"result": "TIMEOUT"})[0], (0, 1, 0))
        self.assertEqual(counted({"result": "TIMEOUT", "stdout": "ok 1 - a\n"})[0], (1, 1, 0))

    def test_reasons_of_skips_are_told(self):
        _, text, _ = counted({"result": "SKIP", "stdout": "1..0 # SKIP no GPU here\n"})
        self.assertIn("skipped: build: t: no GPU here", text)
        _, text, _ = counted({"result": "OK", "stdout": "1..1\n# no O_DIRECT on tmpfs\nok 1 # SKIP direct_reads\n"})
        self.assertIn("build: t: direct_reads: no O_DIRECT on tmpfs", text)

    def test_the_end_of_a_failing_output_is_shown(self):
        _, text, _ = counted({"result": "FAIL", "stdout": "x\n" * 1000, "stderr": "the reason\n"})
        self.assertIn("the reason", text)
        self.assertLess(len(text.splitlines()), 60)

    def test_nothing_passed_is_a_failure(self):
        self.assertEqual(counted({"result": "SKIP"})[2], 1)
        self.assertEqual(counted({"result": "OK"})[2], 0)
        self.assertEqual(counted({"result": "OK"}, {"result": "FAIL"})[2], 1)


if __name__ == "__main__":
    unittest.main()
