# SPDX-License-Identifier: Apache-2.0
"""engine="cufile" from Python, over the look-alikes of tests/fakes for driver, library and kernel. What the library is like is set
before it is loaded, so each case is a process of its own."""
import os
import subprocess
import sys

import headrace
import pytest

PROGRAM = """
import sys, headrace
options = dict(pair.split("=") for pair in sys.argv[2:])
model = headrace.open(sys.argv[1])
with headrace.Loader("cuda:0", engine="cufile", staging_bytes="1MiB", slot_bytes="128KiB", **options) as loader:
    for info, array in loader.feed(model):
        shard = model.shards[info.shard]
        with open(shard.path, "rb") as file:
            file.seek(info.offset)
            assert array.tobytes() == file.read(info.nbytes), info.name
    stats = loader.stats()
print(sorted(stats["direct_bytes"]), sorted(stats["cached_bytes"]), stats["note"])
"""


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        headrace.Loader("cuda:0", engine="cufile", staging_bytes="1MiB").close()
    except headrace.Error as error:
        pytest.skip(f"no look-alikes here: {error}")


def run(root, *options, **settings):
    like = ",".join(f"{key}={value}" for key, value in settings.items())
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, root / "two", *options], env={**os.environ, "HR_FAKE_CUFILE": like}, capture_output=True, text=True
    )


def test_what_arrives_is_what_is_in_the_file(root):
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['cufile'] [] cuFile 1.15, nvidia-fs 2.24")


def test_without_nvidia_fs_it_fails_and_says_so(root):
    done = run(root, nvidia_fs=0)
    assert done.returncode == 1 and "nvidia-fs is not loaded" in done.stderr and "cufile=compat" in done.stderr, done.stderr


def test_compat_is_allowed_by_name(root):
    done = run(root, "cufile=compat", nvidia_fs=0)
    assert done.returncode == 0, done.stderr
    assert "went through host memory" in done.stdout


def test_a_read_through_host_memory_is_an_error(root):
    done = run(root, fallback=1)
    assert done.returncode == 1 and "through host memory although that is forbidden" in done.stderr, done.stderr


def test_options_that_make_no_sense_are_told():
    with pytest.raises(ValueError, match="compat"):
        headrace.Loader("cuda:0", engine="cufile", cufile="maybe")
    with pytest.raises(headrace.Error, match="engine auto"):
        headrace.Loader("cuda:0", cufile="compat")
    with pytest.raises(headrace.Error, match="the device is cpu"):
        headrace.Loader("cpu", engine="cufile")
