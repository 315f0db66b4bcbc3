# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a load. Each in a process of its own, with a checkpoint that takes seconds to load."""
import subprocess
import sys
import textwrap

import pytest

CALLS = {
    "get": "loader.get(model, 0)",
    "read_into": "loader.read_into(model, 0, room.ctypes.data, room.nbytes)",
    "a job's wait": "loader.start(model, read, keep=room).wait()",
    "a feed": "next(loader.feed(model))",
    "load": "headrace.load(model, framework=None, staging_bytes='128KiB', readers=1)",
    "digest": "model.digest(0)",
}


@pytest.mark.parametrize("what", CALLS)
def test_ctrl_c_ends(holes, what):
    code = """
        import os, signal, sys, threading, time
        import headrace, numpy
        model = headrace.open(sys.argv[1])
        loader = headrace.Loader(staging_bytes="128KiB", readers=1)
        room = numpy.empty(4 << 30, "u1")
        read = [(0, 0, room.nbytes, room.ctypes.data, room.nbytes)]
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            {}
        except KeyboardInterrupt:
            took = time.monotonic() - start
        else:
            sys.exit("it was not interrupted")
        assert took < 10, took
        room[:65536] = 0xEE  # nothing writes there any more
        time.sleep(0.05)
        assert (room[:65536] == 0xEE).all()
        assert loader.get(model, 0).nbytes if False else loader.stats()
        loader.close()
        assert headrace._native._n_parked() == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).format(CALLS[what]), str(holes)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
