# SPDX-License-Identifier: Apache-2.0
"""What the tests of the drop-in share: files of every dtype, a way to compare two answers, and random indexes."""
import json
import math
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
import make_corpus  # noqa: E402

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16, "BF16": 16, "F32": 32,
    "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip
NUMPY = [d for d in BITS if BITS[d] >= 8 and not d.startswith("F8") and d != "BF16"]
TORCH = [d for d in BITS if not d.startswith("F6_")]


def write(path, tensors, metadata=None):
    """Writes a file: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def content(rng, dtype, shape):
    """Random bytes that are a tensor of this dtype."""
    n = math.prod(shape) * BITS[dtype] // 8
    return bytes(rng.randrange(2) for _ in range(n)) if dtype == "BOOL" else rng.randbytes(n)


def many(path, rng, dtypes=None, shapes=((), (7,), (0, 3), (3, 4, 6), (2, 0), (1, 2, 3, 4))):
    """A file with a tensor of each dtype in each shape."""
    tensors = {}
    for dtype in dtypes or BITS:
        for shape in shapes:
            if math.prod(shape) * BITS[dtype] % 8 == 0 and (dtype != "F4" or shape and shape[-1] % 2 == 0):
                tensors["%s.%s" % (dtype, "x".join(map(str, shape)))] = (dtype, shape, content(rng, dtype, shape))
    return write(path, tensors, {"format": "pt"})


def answer(call):
    """What a call gives: ("good", value) or ("bad", exception)."""
    try:
        return "good", call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the official package is no Exception
        return "bad", error


def bytes_of(tensor):
    """A tensor's bytes in row-major order, of either framework."""
    if hasattr(tensor, "tobytes"):
        return tensor.tobytes()
    import torch

    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same_tensor(ours, theirs):
    """'' if two tensors are of one type, dtype and shape, and equal in every bit."""
    if type(ours) is not type(theirs):
        return "type %s, official %s" % (type(ours), type(theirs))
    if ours.dtype != theirs.dtype or tuple(ours.shape) != tuple(theirs.shape):
        return "%s %s, official %s %s" % (ours.dtype, tuple(ours.shape), theirs.dtype, tuple(theirs.shape))
    return "" if bytes_of(ours) == bytes_of(theirs) else "other bytes"


def same_answer(ours, theirs, also=()):
    """'' if both are good and equal, or both are bad and of one class. `also`: pairs (official's class, ours) that may differ."""
    if ours[0] != theirs[0]:
        return "ours %r, official %r" % (ours, theirs)
    if ours[0] == "good":
        return same_tensor(ours[1], theirs[1])
    if isinstance(ours[1], type(theirs[1])) or not isinstance(theirs[1], Exception):
        return ""  # the same class, or the official package panicked
    if any(type(theirs[1]) is official and isinstance(ours[1], mine) for official, mine in also):
        return ""
    return "ours raised %r, official %r" % (ours[1], theirs[1])


def random_bound(rng, size):
    return rng.choice([None, None, 0, 1, size, size - 1, size + 1, -1, rng.randint(-size - 2, size + 2), rng.randint(0, size)])


def random_index(rng, shape):
    """An index that is more often good than not, of ints, slices, Ellipsis and, rarely, of what is refused."""
    items = []
    for size in shape[: rng.randint(0, len(shape))]:
        kind = rng.random()
        if kind < 0.35:
            items.append(rng.randint(-size, max(size - 1, 0)) if rng.random() < 0.9 else rng.randint(-size - 2, size + 2))
        elif kind < 0.7:
            start = rng.randint(0, max(size - 1, 0))
            items.append(slice(start, rng.randint(start, size), rng.choice([None, None, 1, 2, 3])))
        elif kind < 0.97:
            items.append(slice(random_bound(rng, size), random_bound(rng, size), rng.choice([None, None, None, 1, 2, 5, 0, -1])))
        else:
            items.append(rng.choice([None, True, 1.5, [0], "x", 2**40]))
    if rng.random() < 0.4:
        items.insert(rng.randint(0, len(items)), Ellipsis)
    if rng.random() < 0.05:
        items.append(rng.choice([Ellipsis, 0, slice(None)]))
    return items[0] if len(items) == 1 and rng.random() < 0.5 else tuple(items)
