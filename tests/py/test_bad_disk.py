# SPDX-License-Identifier: Apache-2.0
"""A sector that cannot be read (HR_BAD_SECTOR_LIBRARY makes one): each way to read tells tensor, file and byte, and what is elsewhere
on the disk stays readable through the same handles."""
import json
import os
import subprocess
import sys

import checkpoints
import pytest

LIBRARY = os.environ.get("HR_BAD_SECTOR_LIBRARY", "")
SIZE = 3 << 20

CHILD = """
import ctypes, errno, json, sys
import headrace, numpy
from headrace import numpy as drop_in

path, want = sys.argv[1], json.loads(sys.argv[2])
model = headrace.open(path)
loader = headrace.Loader("cpu", engine="pread", staging_bytes="1MiB")
opened = headrace.safe_open(path, "np", engine="pread")
plain = headrace.safe_open(path, "np")
room = numpy.empty(want["size"], "u1")
at = room.ctypes.data

def job():
    with loader.start(model, [(i, 0, None, at, room.nbytes) for i in (0, 1)], keep=room) as running:
        running.wait()

ways = {
    "get": lambda: loader.get(model, "bad"),
    "read_into": lambda: loader.read_into(model, "bad", at, room.nbytes),
    "job": job,
    "feed": lambda: list(loader.feed(model)),
    "load": lambda: headrace.load(path, engine="pread"),
    "get_tensor": lambda: opened.get_tensor("bad"),
    "get_tensors": lambda: opened.get_tensors(),
    "load_file": lambda: drop_in.load_file(path, engine="pread"),
    "slice": lambda: opened.get_slice("bad")[10:],
    "small slice": lambda: plain.get_slice("bad")[want["at"] - 5 : want["at"] + 5],
    "read_part": lambda: model.read_part("bad", want["at"], 1),
    "read_shard": lambda: model.read_shard(0, want["offset"], 1),
    "digest": lambda: model.digest(0),
}
told = {}
for name, way in ways.items():
    try:
        way()
        told[name] = "no error"
    except headrace.Error as error:
        told[name] = [error.name, error.errno == errno.EIO, error.path, error.tensor, error.offset, str(error)]
good = [loader.get(model, "good").tobytes(), opened.get_tensor("good").tobytes(), plain.get_slice("good")[:].tobytes(),
        opened.get_slice("bad")[: want["at"] // 2].tobytes()]
print(json.dumps([told, [[len(data), data[0], data[-1]] for data in good]]))
"""


def test_every_way_to_read_tells_which_tensor_and_which_byte(tmp_path):
    if not os.path.exists(LIBRARY):
        pytest.skip("HR_BAD_SECTOR_LIBRARY is not set")
    path = str(tmp_path / "a.safetensors")
    checkpoints.write(path, [("good", "U8", [SIZE], b"\5" * SIZE), ("bad", "U8", [SIZE], b"\7" * SIZE)])
    begin = os.path.getsize(path) - SIZE
    at = 2 << 20
    want = {"size": SIZE, "at": at, "offset": begin + at}
    environ = {**os.environ, "LD_PRELOAD": LIBRARY, "HR_BAD_SECTOR": str(begin + at)}
    done = subprocess.run([sys.executable, "-c", CHILD, path, json.dumps(want)], capture_output=True, text=True, env=environ, timeout=100)
    assert done.returncode == 0, done.stderr
    told, good = json.loads(done.stdout)
    for way, what in told.items():
        assert what != "no error", way
        name, is_eio, where, tensor, offset, text = what
        assert (name, is_eio, where) == ("HR_E_IO", True, path), (way, what)
        assert path in text and "\n" not in text, (way, text)
        if way not in ("read_shard", "digest", "read_part"):
            assert tensor == "bad", (way, what)
        if way != "digest":
            assert begin <= offset <= begin + at, (way, what)
    assert good == [[SIZE, 5, 5]] * 3 + [[at // 2, 7, 7]]
