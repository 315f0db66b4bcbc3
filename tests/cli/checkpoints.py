# SPDX-License-Identifier: Apache-2.0
"""The small checkpoints that the tests of the command use, good and broken. The same bytes every time."""
import json
import os
import struct

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16, "BF16": 16,
    "F32": 32, "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}
ODD_NAMES = ["new\nline", "tab\tand\x1b[31mred", "nul\0inside", "quote\"and\\slash", "\u202eright to left", "\u540d\u524d", "-dash", ""]


def pattern(n, seed):
    """Bytes that differ from place to place, so that a shifted range shows."""
    block = bytes((i * 7 + (i >> 8) * 13 + seed * 31) & 255 for i in range(min(n, 65536)))
    return (block * (n // 65536 + 1))[:n] if n else b""


def tensor(name, dtype, shape, seed):
    n = 1
    for dim in shape:
        n *= dim
    return name, dtype, shape, pattern(n * BITS[dtype] // 8, seed)


def header(tensors, metadata=None):
    table = {}
    if metadata is not None:
        table["__metadata__"] = metadata
    at = 0
    for name, dtype, shape, data in tensors:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path, tensors, metadata=None):
    with open(path, "wb") as file:
        file.write(header(tensors, metadata))
        for item in tensors:
            file.write(item[3])


def write_index(directory, shards, total=None, drop=()):
    weights = {item[0]: name for name, tensors in shards.items() for item in tensors if item[0] not in drop}
    size = sum(len(item[3]) for tensors in shards.values() for item in tensors)
    with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": size if total is None else total}, "weight_map": weights}, file)


def write_sharded(directory, shards, **options):
    os.makedirs(directory)
    for name, tensors in shards.items():
        write(os.path.join(directory, name), tensors, {"format": "pt"})
    write_index(directory, shards, **options)


def two_shards():
    return {
        "model-00001-of-00002.safetensors": [
            tensor("embed.weight", "BF16", [16, 8], 1), tensor("layer.0.weight", "F32", [4, 4], 2)],
        "model-00002-of-00002.safetensors": [
            tensor("layer.1.weight", "F32", [4, 4], 3), tensor("empty", "F32", [0, 4], 4), tensor("scale", "F64", [], 5),
            tensor("big", "U8", [9000001], 6)],
    }


def damage(source, target, change):
    with open(source, "rb") as file:
        content = bytearray(file.read())
    with open(target, "wb") as file:
        file.write(change(content))


def make_all(root):
    """Everything, in `root`, which is empty."""
    here = lambda *parts: os.path.join(root, *parts)
    write_sharded(here("two"), two_shards())
    write(here("one.safetensors"), [tensor("w", "F32", [2, 3], 1), tensor("b", "F32", [3], 2)], {"format": "pt", "made by": "a test"})
    write(here("odd.safetensors"), [tensor(f"t.{name.lower()}", name, [2, 4], i) for i, name in enumerate(BITS)])
    write(here("names.safetensors"), [tensor(name, "U8", [i + 1], i) for i, name in enumerate(ODD_NAMES)])
    write(here("none.safetensors"), [])
    write_sharded(here("unlisted"), two_shards(), drop=("scale", "empty"))
    os.makedirs(here("ambiguous"))
    write(here("ambiguous", "a.safetensors"), [tensor("a", "U8", [4], 1)])
    write(here("ambiguous", "b.safetensors"), [tensor("b", "U8", [4], 2)])
    os.makedirs(here("nothing"))
    damage(here("one.safetensors"), here("short.safetensors"), lambda c: c[:-5])
    damage(here("one.safetensors"), here("long.safetensors"), lambda c: c + b"12345")
    damage(here("one.safetensors"), here("json.safetensors"), lambda c: c.replace(b'"dtype"', b'"dtype\'', 1))
    damage(here("one.safetensors"), here("dtype.safetensors"), lambda c: c.replace(b'"F32"', b'"F33"', 1))
    with open(here("tiny.safetensors"), "wb") as file:
        file.write(b"1234")
    write_sharded(here("broken"), two_shards())
    for number, change in ((1, lambda c: c[:-1]), (2, lambda c: c.replace(b'"F64"', b'"F65"', 1))):
        path = here("broken", f"model-0000{number}-of-00002.safetensors")
        damage(path, path, change)
    write_sharded(here("missing"), two_shards())
    os.unlink(here("missing", "model-00002-of-00002.safetensors"))


def make_sparse(directory, shards, shard_bytes):
    """Shards that are one hole each, with an index."""
    os.makedirs(directory)
    table = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        text = json.dumps({f"hole.{i}": {"dtype": "U8", "shape": [shard_bytes], "data_offsets": [0, shard_bytes]}}).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(directory, name), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + shard_bytes)
        table[f"hole.{i}"] = name
    with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": table}, file)
