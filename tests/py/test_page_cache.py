# SPDX-License-Identifier: Apache-2.0
"""Several processes that load the same files, as the ranks of a node do: with caching="fill" the disk is read once for all of them."""
import os
import subprocess
import sys

import checkpoints
import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench"))

import page_cache  # noqa: E402

BYTES = 48 << 20
RANK = """
import sys, headrace

def from_disk():
    with open("/proc/self/io") as file:
        return int(dict(line.split(":") for line in file)["read_bytes"])

with headrace.open(sys.argv[1]) as model, headrace.Loader("cpu", staging_bytes="16MiB", caching=sys.argv[2]) as loader:
    print("ready", flush=True)
    sys.stdin.readline()
    before = from_disk()
    total = sum(array.nbytes for _, array in loader.feed(model))
    print(total, from_disk() - before, flush=True)
"""


def from_disk(folder, caching, n_ranks):
    """What each of so many ranks reads from the disk, all of them started at the same moment, in bytes."""
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, folder, caching], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(n_ranks)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * n_ranks
        resident, good = page_cache.prepare(paths, "cold")
        if not good:
            pytest.skip(f"the files cannot be made cold: {resident:.1%} stay in memory")
        for rank in ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
        told = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [int(total) for total, _ in told] == [BYTES] * n_ranks
    return [int(n) for _, n in told]


@pytest.fixture
def model(tmp_path):
    piece = BYTES // 2 // 4
    shards = {
        f"model-{shard + 1:05}-of-00002.safetensors": [(f"t{shard}.{i}", "U8", [piece], os.urandom(piece)) for i in range(4)]
        for shard in range(2)
    }
    checkpoints.write_sharded(str(tmp_path / "model"), shards)
    if not os.access("/proc/self/io", os.R_OK):
        pytest.skip("/proc/self/io cannot be read here")
    return str(tmp_path / "model")


def test_two_ranks_read_the_disk_once(model):
    alone = from_disk(model, "fill", 1)
    if sum(alone) < 0.9 * BYTES:
        pytest.skip(f"this kernel or file system does not count what is read from the disk: {sum(alone)} of {BYTES} bytes")
    two = from_disk(model, "fill", 2)
    print(f"from the disk, MiB: one rank {alone[0] >> 20}, two ranks {two[0] >> 20} and {two[1] >> 20}, of {BYTES >> 20}")
    assert sum(two) < 1.1 * BYTES, (alone, two)
    around = from_disk(model, "bypass", 2)
    assert sum(around) > 1.9 * BYTES, around
