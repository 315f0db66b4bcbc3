#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each file of the corpus gets its verdict, from the parser and from the public API alike: test_corpus.py DUMP_HEADER [--big]"""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
import make_corpus  # noqa: E402
from headers import Tap, dump  # noqa: E402


def problem_of(row, got, folder):
    """Why this verdict is wrong, or ''."""
    if got["code"] != row["code"]:
        return "gave %s, expected %s: %s" % (got["code"], row["code"], got.get("message", ""))
    if row["code"] == "HR_OK":
        for part in ("tensors", "metadata"):
            if got[part] != row[part]:
                return "%s: %.300r, expected %.300r" % (part, got[part], row[part])
        return ""
    message = got["message"]
    if row.get("hint", "") not in message:
        return "the message has no %r: %s" % (row["hint"], message)
    if got["stage"] != "header":
        return "stage %r" % got["stage"]
    if got["offset"] is None or got["offset"] > os.path.getsize(os.path.join(folder, row["file"])):
        return "offset %r is not in the file: %s" % (got["offset"], message)
    if str(got["offset"]) not in message and "bytes" not in message:
        return "the position %d is not in the message: %s" % (got["offset"], message)
    if any(ord(c) < 0x20 for c in message) or len(message.encode()) > 1023:
        return "control bytes in the message, or too long: %r" % message
    return ""


def big(tap, program, folder):
    """The cap itself, and headers made to cost: time and memory are bounded by the size of the header."""
    rows = [r for r in make_corpus.make(folder, big=True) if r.get("big")]
    for row in rows:
        got = dump(program, [os.path.join(folder, row["file"])], "--count")[0]
        problem = "" if got["code"] == row["code"] else "gave %(code)s: %(message)s" % got
        if got.get("n_tensors", row.get("n_tensors")) != row.get("n_tensors", got.get("n_tensors")):
            problem = "%d tensors" % got["n_tensors"]
        limit = (make_corpus.CAP + 64 * 2_100_000) // 1024  # beside the header's own text
        if got["kib"] > limit:
            problem = "took %d KiB of memory, at most %d are allowed" % (got["kib"], limit)
        if got["ms"] > 20_000:
            problem = "took %d ms" % got["ms"]
        tap.check("%s is answered with %s (%d ms, %d KiB)" % (row["id"], row["code"], got["ms"], got["kib"]), problem)
        os.unlink(os.path.join(folder, row["file"]))


def main(program, with_big):
    tap = Tap()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        rows = make_corpus.make(folder)
        paths = [os.path.join(folder, r["file"]) for r in rows]
        for options, way in (((), "parser"), (("--api",), "API")):
            for row, got in zip(rows, dump(program, paths, *options)):
                name = "the %s gives %s for %s" % (way, row["code"], row["id"])
                tap.check(name, problem_of(row, got, folder))
        if with_big:
            big(tap, program, folder)
    tap.end()


if __name__ == "__main__":
    main(sys.argv[1], "--big" in sys.argv)
