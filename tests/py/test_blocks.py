# SPDX-License-Identifier: Apache-2.0
"""Model.blocks(): where small tensors go that share memory, against what must hold; and that they arrive there."""
import ctypes
import math
import random
import struct

import checkpoints
import headrace
import pytest

ITEMS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


def model_of(folder, seed):
    """Tensors in runs, alternating kinds, and at random; among them empty ones, scalars and odd sizes."""
    choose = random.Random(seed)
    kinds = [(choose.choice(list(ITEMS)), choose.choice([[], [0, 3], [choose.randrange(1, 40)], [8, choose.randrange(1, 30)]])) for _ in range(5)]
    shards, n = {}, 0
    for shard in range(2):
        tensors, order = [], []
        for _ in range(choose.randrange(1, 6)):
            few = choose.sample(kinds, choose.randrange(1, 4))
            order += few * choose.randrange(1, 9)
        order += [choose.choice(kinds) for _ in range(choose.randrange(6))]
        for dtype, shape in order:
            size = ITEMS[dtype] * math.prod(shape)
            tensors.append((f"t{n}", dtype, shape, choose.randbytes(size)))
            n += 1
        shards[f"model-{shard + 1:05}-of-00002.safetensors"] = tensors
    checkpoints.write_sharded(str(folder), shards)
    return headrace.open(folder), {item[0]: item for tensors in shards.values() for item in tensors}


def cut(block):
    """name -> (dtype, shape, byte) of a block, by its runs; each name once."""
    n_bytes, names, places, runs = block
    found = {}
    for dtype, shape, first, step, at, stride, count in runs:
        for i in range(count):
            assert at + i * stride not in found
            found[at + i * stride] = (dtype, list(shape), first + i * step)
    assert sorted(found) == list(range(len(names)))
    return {i: (name, *found[i]) for i, name in enumerate(names)}


@pytest.mark.parametrize("seed", range(40))
def test_every_tensor_has_a_place_of_its_own_and_arrives_there(tmp_path, seed):
    model, content = model_of(tmp_path / "model", seed)
    choose = random.Random(seed)
    wanted = None
    if seed % 3 == 1:
        wanted = sorted(model.names)
    elif seed % 3 == 2:
        wanted = choose.choices(model.names, k=choose.randrange(2 * len(model)))
    small, limit = choose.choice([(1 << 20, 16 << 20), (200, 2048), (0, 1), (1 << 20, 1)])
    blocks = model.blocks(wanted, small_bytes=small, block_bytes=limit)
    assert [name for _, names, _, _ in blocks for name in names] == (model.names if wanted is None else wanted)

    rooms = [ctypes.create_string_buffer(b"\xaa" * (n_bytes + 16), n_bytes + 16) for n_bytes, *_ in blocks]
    with headrace.Loader("cpu", staging_bytes="1MiB") as loader:
        reads = [(block[2], ctypes.addressof(room), block[0]) for block, room in zip(blocks, rooms)]
        with loader.start(model, reads, keep=rooms) as job:
            job.wait()
    for block, room in zip(blocks, rooms):
        n_bytes, names, places, _ = block
        assert len(names) == 1 or n_bytes <= limit and all(len(content[name][3]) < small for name in names)
        assert n_bytes % 256 == 0 and room.raw[n_bytes:] == b"\xaa" * 16
        numbers = [number for number, _ in struct.iter_unpack("=QQ", places)]
        assert numbers == sorted(numbers), "in file order, so that neighbours are copied in one go"
        taken = []
        for name, dtype, shape, start in cut(block).values():
            assert (dtype, shape) == tuple(content[name][1:3])
            data = content[name][3]
            assert room.raw[start : start + len(data)] == data
            assert start % 256 == 0
            taken += [(start, start + len(data))] * bool(data)
        taken.sort()
        assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:]))


def test_equal_tensors_are_one_run_and_alternating_ones_few(tmp_path):
    kinds = [("BF16", [128, 8]), ("BF16", [8, 128]), ("F32", [4])]
    tensors = [checkpoints.tensor(f"t{i:03}", *kinds[i % 3], i) for i in range(90)]
    checkpoints.write(tmp_path / "a.safetensors", tensors)
    with headrace.open(tmp_path / "a.safetensors") as model:
        ((n_bytes, names, _, runs),) = model.blocks()
        assert (n_bytes, len(names)) == (30 * (2048 + 2048 + 256), 90)
        assert [run[2:] for run in runs] == [(i * 2048, 4352, i, 3, 30) for i in range(3)]
        assert [len(block[3]) for block in model.blocks(range(0, 90, 3))] == [1]


def test_a_block_is_checked_before_anything_is_read(root):
    with headrace.open(root / "two") as model, headrace.Loader("cpu", staging_bytes="1MiB") as loader:
        n_bytes, _, places, _ = model.blocks()[0]
        room = ctypes.create_string_buffer(n_bytes)
        for wrong, kind in (((places, ctypes.addressof(room), 8), ValueError), ((places, ctypes.addressof(room), n_bytes - 256), headrace.Error),
                            ((struct.pack("=QQ", 99, 0), ctypes.addressof(room), n_bytes), headrace.Error),
                            (("text", 0, 0), TypeError), ((places, -1.5, 0), TypeError)):  # fmt: skip
            with pytest.raises(kind):
                loader.start(model, [wrong])
        assert room.raw == bytes(n_bytes)
        with loader.start(model, [(b"", 0, 0)]) as job:
            job.wait()
        for wrong in ("scale", [99], ["nothing"], 5):
            with pytest.raises((TypeError, headrace.Error)):
                model.blocks(wrong)
        assert model.blocks([]) == []
