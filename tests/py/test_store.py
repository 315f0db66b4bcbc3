# SPDX-License-Identifier: Apache-2.0
"""The six cases that the wish for a store began with, by their numbers, with the official loader as judge: in a plain file, and,
as root, on loop devices with sectors of 512 and of 4096 bytes."""
import json
import os
import shutil
import struct
import subprocess

import checkpoints
import headrace
import numpy as np
import pytest
import safetensors

COMMAND = os.environ.get("HR_COMMAND", "headrace")
DTYPES = ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"]


def command(*args, status=0):
    done = subprocess.run([COMMAND, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == status, (args, done.stderr)
    return done


def error_of(name):
    with pytest.raises(headrace.Error) as caught:
        headrace.load(name)
    return caught.value


@pytest.fixture(params=["file", 512, 4096])
def region(request, tmp_path):
    """An empty store of 64 MiB."""
    path = str(tmp_path / "store.img")
    if request.param == "file":
        command("store", "init", path, "--size", "64M")
        yield path
        return
    if os.geteuid() or not shutil.which("losetup"):
        pytest.skip("loop devices need root and losetup")
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(["losetup", "-f", "--show", "--sector-size", str(request.param), path], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device to be had: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        command("store", "init", device)
        yield device
    finally:
        subprocess.run(["losetup", "-d", device], check=False)


def same_as_official(name, paths):
    """Bytes, dtype and shape of every tensor are those that the official loader gives."""
    n = 0
    with headrace.safe_open(name, framework="np") as ours:
        keys = set(ours.keys())
        for path in paths:
            with safetensors.safe_open(path, framework="np") as official:
                for key in official.keys():
                    expected, got = official.get_tensor(key), ours.get_tensor(key)
                    assert got.dtype == expected.dtype and got.shape == expected.shape, key
                    assert got.tobytes() == expected.tobytes(), key
                    keys.remove(key)
                    n += 1
    assert not keys
    return n


def test_1_one_shard_with_representative_dtypes(region, tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoints.write(path, [checkpoints.tensor(dtype.lower(), dtype, [3, 5], i) for i, dtype in enumerate(DTYPES)])
    command("store", "import", region, path, "--as", "m")
    assert same_as_official(f"store:{region}#m", [path]) == len(DTYPES)


def test_2_two_shards_with_an_index(region, tmp_path):
    shards = {name: [item for item in tensors if item[1] != "BF16"] for name, tensors in checkpoints.two_shards().items()}
    checkpoints.write_sharded(str(tmp_path / "two"), shards)
    command("store", "import", region, tmp_path / "two", "--as", "m")
    loaded = headrace.load(f"store:{region}#m")
    for tensors in shards.values():
        for name, _, _, data in tensors:
            assert bytes(memoryview(loaded[name]).cast("B")) == data if data else True, name
    assert len(loaded) == 5


def test_3_unaligned_tensors_come_out_of_the_aligned_envelope(region, tmp_path):
    """Offsets and lengths at, before and behind every boundary that matters: sector, page, digest block, slot."""
    tensors, sizes = [], [1, 510, 3, 511, 512, 513, 4095, 4097, 65535, 65537, 1, 131071, 5, 2097153, 7]
    for i, size in enumerate(sizes):
        tensors.append(checkpoints.tensor(f"t{i}", "U8", [size], i))
    path = tmp_path / "model.safetensors"
    checkpoints.write(path, tensors)
    command("store", "import", region, path, "--as", "m")
    name = f"store:{region}#m"
    assert same_as_official(name, [path]) == len(sizes)
    for staging, slot in (("128K", "64K"), ("1M", "256K"), ("64M", "2M")):
        for engine in ("pread", "auto"):
            command("load", name, "--device", "cpu", "--verify", "--engine", engine, "--staging", staging, "--slot", slot)


def test_4_an_invalid_header_or_range_is_refused_before_and_after(region, tmp_path):
    header = {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    faults = {"range": {"t": {**header["t"], "data_offsets": [0, 1 << 40]}}, "size": {"t": {**header["t"], "shape": [5]}},
              "overlap": {**header, "u": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}, "dtype": {"t": {**header["t"], "dtype": "F33"}}}
    for name, table in faults.items():
        text = json.dumps(table).encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        assert command("store", "import", region, path, status=1).stderr.startswith("headrace: "), name
    assert json.loads(command("store", "ls", region, "--json").stdout)["models"] == []
    path = tmp_path / "good.safetensors"
    checkpoints.write(path, [checkpoints.tensor("t", "F32", [4], 1)])
    command("store", "import", region, path)
    content = json.loads(command("store", "ls", region, "good", "--json").stdout)["content"][0]
    with open(region, "r+b", buffering=0) as file:  # a sector at a time: it may be a device
        at = content["offset"] // 4096 * 4096
        file.seek(at)
        sector = bytearray(file.read(4096))
        place = sector.index(b'"F32"')
        sector[place + 2] = ord("6")
        file.seek(at)
        file.write(sector)
        os.fsync(file.fileno())
    assert error_of(f"store:{region}#good").name == "HR_E_DIGEST"


def test_5_a_stale_manifest_and_another_store_are_told_apart(region, tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoints.write(path, [checkpoints.tensor("t", "F32", [4], 1)])
    command("store", "import", region, path, "--as", "m")
    side = tmp_path / "side.json"
    side.write_text(command("store", "export", region).stdout)
    assert len(headrace.load(f"store:{side}#m")) == 1
    checkpoints.write(path, [checkpoints.tensor("t", "F32", [4], 2)])
    command("store", "import", region, path, "--as", "m", "--replace")
    assert bytes(memoryview(headrace.load(f"store:{side}#m")["t"]).cast("B")) == checkpoints.pattern(16, 1)  # its own generation
    assert bytes(memoryview(headrace.load(f"store:{region}#m")["t"]).cast("B")) == checkpoints.pattern(16, 2)
    command("store", "reclaim", region)
    assert error_of(f"store:{side}#m").name == "HR_E_STALE"
    command("store", "init", region, "--force")
    command("store", "import", region, path, "--as", "m")
    assert error_of(f"store:{side}#m").name == "HR_E_PIN"
    if not region.startswith("/dev/"):
        os.truncate(region, 60 << 20)
        assert error_of(f"store:{region}#m").name == "HR_E_GEOMETRY"


def test_6_the_official_loader_gives_the_same_of_a_real_checkpoint(region, tmp_path):
    real = os.environ.get("HR_CHECKPOINT")
    if not real:
        pytest.skip("HR_CHECKPOINT names no checkpoint")
    shard = os.path.join(real, "model.safetensors")
    if os.path.getsize(shard) > 48 << 20:  # a part of it that fits
        with safetensors.safe_open(shard, framework="np") as file:
            from safetensors.numpy import save_file
            part = {key: file.get_tensor(key) for key in list(file.keys())[-60:]}
            shard = str(tmp_path / "part.safetensors")
            save_file({key: np.ascontiguousarray(value) for key, value in part.items()}, shard)
    command("store", "import", region, shard, "--as", "m")
    assert same_as_official(f"store:{region}#m", [shard]) > 30
