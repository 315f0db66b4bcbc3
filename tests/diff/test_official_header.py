#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The official parser as judge of ours: test_official_header.py DUMP_HEADER

What headrace accepts, safetensors 0.8.0 accepts, with the same names, dtypes, shapes, bytes and metadata. What only the
official parser accepts falls into the classes that docs/format.md lists as deliberately stricter. Checked on the corpus and on
thousands of random changes to its headers. HR_PYTHON names a Python that has the package; without it the test is skipped.
"""
import json
import os
import random
import struct
import sys
import tempfile

HR_PYTHON = os.environ.get("HR_PYTHON")
if HR_PYTHON and os.environ.get("HR_PYTHON_RUNS") != HR_PYTHON:
    os.execve(HR_PYTHON, [HR_PYTHON] + sys.argv, dict(os.environ, HR_PYTHON_RUNS=HR_PYTHON))
try:
    import safetensors
except ImportError:
    print("1..0 # SKIP the package safetensors is not here: set HR_PYTHON to a Python that has it")
    sys.exit(0)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
import make_corpus  # noqa: E402
from headers import Tap, dump  # noqa: E402

# What headrace refuses on purpose: the error's code and words of its message.
STRICTER = [("HR_E_DUPLICATE", "occurs twice"), ("HR_E_LIMIT", "dimensions"), ("HR_E_LIMIT", "a tensor name of"),
            ("HR_E_LIMIT", "nested deeper"), ("HR_E_LIMIT", "a number of more than"), ("HR_E_LIMIT", "unknown fields"),
            ("HR_E_TYPE", "a tensor's entry must be an object, not an array"),
            ("HR_E_TYPE", "dtype must be a string, not an object")]
N_CHANGED = int(os.environ.get("HR_MUTATIONS", "6000"))


def official(content):
    """What the official parser returns, or None where it refuses."""
    try:
        return safetensors.deserialize(content)
    except BaseException as error:  # a panic of the official parser is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None


def compare(content, theirs, ours):
    """'' if the verdicts agree as they must."""
    if theirs is None:
        return "only headrace accepts it" if ours["code"] == "HR_OK" else ""
    if ours["code"] != "HR_OK":
        for code, words in STRICTER:
            if ours["code"] == code and words in ours["message"]:
                return ""
        return "refused for a reason that is not on the list: %(code)s %(message)s" % ours
    start = 8 + struct.unpack("<Q", content[:8])[0]
    a = {n: (t["dtype"], list(t["shape"]), bytes(t["data"])) for n, t in theirs}
    b = {n: (d, s, content[start + x:start + y]) for n, d, s, x, y in ours["tensors"]}
    if len(b) != len(ours["tensors"]):
        return "headrace returned a name twice"
    return "" if a == b else "official %.500r, headrace %.500r" % (a, b)


TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"0", b"1", b"8", b"-", b".", b"e", b"null", b"true", b" ", b"\n", b"\0",
          b"\\u0061", b"\\ud83d", b"\\ude00", b"\xc3\xa9", b"\xed\xa0\x80", b"\xff", b'"dtype"', b'"shape"', b'"F32"', b'"F4"',
          b'"__metadata__"', b'"x":1,', b'"x":[{"y":[]}],', b"18446744073709551615", b"18446744073709551616", b"1e999", b"2.0",
          b'"t":', make_corpus.T.encode(), b"[[[[[[[[[[[[[[[[[", b'{"F32":null}', b'["F32",[2],[0,8]]']


def change(rng, content):
    """A few random edits of the header; the length before it is set right nine times of ten."""
    n = struct.unpack("<Q", content[:8])[0]
    header, rest = bytearray(content[8:8 + n]), content[8 + n:]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(header) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            header[at:at] = rng.choice(TOKENS)
        elif kind == 1:
            del header[at:at + rng.choice((1, 1, 2, 5))]
        elif kind == 2 and at < len(header):
            header[at] ^= 1 << rng.randrange(8)
        elif kind == 3 and at < len(header):
            header[at] = rng.choice(b'0123456789{}[],:"\\ -.eE')
        elif kind == 4:
            end = min(len(header), at + rng.randrange(1, 60))
            to = rng.randrange(len(header) + 1)
            header[to:to] = header[at:end]
        else:
            spots = [i for i, c in enumerate(header) if c in b"0123456789"]
            if spots:
                header[rng.choice(spots)] = rng.choice(b"0123456789")
    size = len(header) if rng.random() < 0.9 else max(0, len(header) + rng.choice((-1, 1)))
    if rng.random() < 0.2:
        rest = rest[:-1] if rng.random() < 0.5 else rest + b"\0"
    return struct.pack("<Q", size) + bytes(header) + rest


def corpus_tests(tap, program, folder, rows):
    paths = [os.path.join(folder, r["file"]) for r in rows]
    for row, path, ours in zip(rows, paths, dump(program, paths)):
        with open(path, "rb") as file:
            content = file.read()
        theirs = official(content)
        problem = compare(content, theirs, ours)
        if not problem and (theirs is not None) != row["official"]:
            problem = "the corpus says official=%s" % row["official"]
        if not problem and ours["code"] == "HR_OK":
            with safetensors.safe_open(path, "np") as opened:
                if dict(map(tuple, ours["metadata"])) != (opened.metadata() or {}):
                    problem = "metadata %r, official %r" % (ours["metadata"], opened.metadata())
        tap.check("both parsers answer as they must to %s" % row["id"], problem)


def changed_tests(tap, program, folder, rows):
    seed = int(os.environ.get("HR_SEED", random.SystemRandom().randrange(2**32)))
    rng = random.Random(seed)
    print("# SEED=%d" % seed)
    bases = []
    for row in rows:
        with open(os.path.join(folder, row["file"]), "rb") as file:
            content = file.read()
        if row["code"] == "HR_OK" and len(content) < 2000:
            bases.append(content)
    contents = [change(rng, rng.choice(bases)) for _ in range(N_CHANGED)]
    paths = []
    for i, content in enumerate(contents):
        paths.append(os.path.join(folder, "changed%d" % i))
        with open(paths[-1], "wb") as out:
            out.write(content)
    problems, n_accepted, n_stricter = [], 0, 0
    for content, ours in zip(contents, dump(program, paths)):
        theirs = official(content)
        problem = compare(content, theirs, ours)
        n_accepted += ours["code"] == "HR_OK"
        n_stricter += theirs is not None and ours["code"] != "HR_OK"
        if problem:
            problems.append("%s\n%r" % (problem, content))
    print("# of %d changed files headrace accepts %d, and refuses %d that the official parser accepts"
          % (N_CHANGED, n_accepted, n_stricter))
    tap.check("both parsers answer as they must to random changes", "\n".join(problems[:5]))
    tap.check("random changes give enough files that are accepted, and enough that are not",
              "" if N_CHANGED // 50 < n_accepted < N_CHANGED - N_CHANGED // 10 else "%d accepted" % n_accepted)


def main(program):
    tap = Tap()
    print("# safetensors %s" % safetensors.__version__)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        make_corpus.make(folder)
        with open(os.path.join(folder, "expected.json"), encoding="utf-8") as file:
            rows = json.load(file)
        corpus_tests(tap, program, folder, rows)
        changed_tests(tap, program, folder, rows)
    tap.end()


if __name__ == "__main__":
    main(sys.argv[1])
