# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, read in the plainest way: the files, their headers, and the bytes of single tensors.

It is what the bytes on the device are compared with, so it shares no code with any loader.
"""
import json
import os
import struct


def names(folder):
    """Paths of the checkpoint's files: those that the index names, else all of them, in the order of their names."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            found = set(json.load(file)["weight_map"].values())
    else:
        found = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    if not found:
        raise FileNotFoundError(f"{folder}: no .safetensors files; give a directory that holds a checkpoint")
    return [os.path.join(folder, name) for name in sorted(found)]


def tensors(path):
    """Each tensor of a file as (name, offset in the file, bytes), in the order of the data."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ranges = [(name, *entry["data_offsets"]) for name, entry in header.items()]
    return [(name, 8 + length + begin, end - begin) for name, begin, end in sorted(ranges, key=lambda r: r[1:])]


def sample(entries, count):
    """Some tensors of a file: the first, the last, the largest, and others at even steps between."""
    if not entries:
        return []
    step = max(1, len(entries) // count)
    chosen = entries[::step] + [entries[-1], max(entries, key=lambda entry: entry[2])]
    return list(dict.fromkeys(chosen))


def write_tiny(folder):
    """A checkpoint of one tensor of 16 bytes: loading it costs what loading anything costs."""
    os.makedirs(folder, exist_ok=True)
    header = json.dumps({"t": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes(range(16)))
