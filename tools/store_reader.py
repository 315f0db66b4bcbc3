#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a headrace store; written from docs/store-format.md alone, to prove that page and as a second opinion in tests.

store_reader.py REGION             lists models and files: model, file, bytes, SHA-256 (of the bytes as read), separated by tabs
store_reader.py REGION MODEL DIR   also writes the files of a model below DIR

Everything is checked on the way. Ends with a sentence and status 1 if anything is wrong.
"""
import hashlib
import os
import struct
import sys

RECORD = 4096
EXTENT = 65536
MIB = 1 << 20


def crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return table


TABLE = crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Wrong(Exception):
    """What is wrong with the store."""


def need(condition, sentence):
    if not condition:
        raise Wrong(sentence)


def u(data, at, size):
    return int.from_bytes(data[at:at + size], "little")


class Region:
    def __init__(self, path):
        self.file = open(path, "rb")
        self.size = self.file.seek(0, os.SEEK_END)

    def read(self, at, size):
        self.file.seek(at)
        data = self.file.read(size)
        need(len(data) == size, f"the region ends before {at + size}")
        return data


def sound(record, magic, uuid=None):
    """Whether a record may be believed; refuses what is of another format."""
    if record[:8] != magic or crc32c(record[:8] + bytes(4) + record[12:]) != u(record, 8, 4):
        return False
    need(u(record, 12, 2) == 1, f"{magic.decode()} has major version {u(record, 12, 2)}")
    return uuid is None or record[16:32] == uuid


def rest_is_zero(record, at):
    return u(record, 14, 2) > 0 or not any(record[at:])


def read_label(region):
    size = region.size // MIB * MIB
    for at in (EXTENT, size - MIB):
        record = region.read(at, RECORD)
        if sound(record, b"HRLABEL1") and u(record, 56, 8) == at and rest_is_zero(record, 404):
            need(u(record, 48, 8) == 0, "the label has an unknown feature")
            need(u(record, 72, 8) <= region.size, "the region is smaller than the store")
            need(record[96] == 16 and record[97] == 12 and not any(record[98:104]), "the label is damaged")
            return record
    raise Wrong("no label is sound")


def read_roots(region, label):
    """The two roots as {generation: record}, newest generation first."""
    tail = u(label, 72, 8) - MIB
    found = {}
    for slot in range(2):
        for at in (131072 + EXTENT * slot, tail + EXTENT * (slot + 1)):
            record = region.read(at, RECORD)
            if not sound(record, b"HRROOT01", label[16:32]) or u(record, 40, 8) != at or not rest_is_zero(record, 168):
                continue
            need(u(record, 160, 8) == 0, "a root has an unknown feature")
            generation = u(record, 32, 8)
            meaning = record[12:40] + record[48:]
            need(found.setdefault(generation, (meaning, record))[0] == meaning, f"two roots of generation {generation} differ")
    need(found, "no root is sound")
    return [found[generation][1] for generation in sorted(found, reverse=True)]


def read_manifest(region, label, root):
    length = u(root, 64, 8)
    for at in (u(root, 72, 8), u(root, 80, 8)):
        body = region.read(at, length)
        if hashlib.sha256(body).digest() == root[88:120]:
            break
    else:
        raise Wrong("both copies of the manifest are damaged")
    need(body[:8] == b"HRMANIF1" and u(body, 8, 4) == 0 and u(body, 12, 2) == 1 and body[16:32] == label[16:32], "no manifest")
    need(u(body, 32, 8) == u(root, 32, 8) and u(body, 40, 8) == length, "the manifest is of another generation")
    return body


def table(body, at, smallest):
    position, count, size = u(body, at, 8), u(body, at + 8, 4), u(body, at + 12, 4)
    need(size >= smallest and size % 8 == 0 and position + count * size <= len(body), "a table does not fit")
    return [body[position + i * size:position + (i + 1) * size] for i in range(count)]


def check_extents(label, root, objects, retired):
    length = (u(root, 64, 8) + EXTENT - 1) // EXTENT * EXTENT
    extents = [(u(o, 16, 8), u(o, 24, 8)) for o in objects] + [(u(r, 0, 8), u(r, 8, 8)) for r in retired]
    extents += [(u(root, 72, 8), length), (u(root, 80, 8), length)]
    end = u(label, 104, 8)
    for position, size in sorted(extents):
        need(position >= end and position % EXTENT == 0 and size % EXTENT == 0, f"the extent at {position} overlaps or is odd")
        end = position + size
    need(end <= u(root, 56, 8), "an extent lies behind the data area")


def read_object(region, label, record):
    """The payload of an object, with everything about it checked."""
    extent, payload_off, length = u(record, 16, 8), u(record, 32, 4), u(record, 40, 8)
    meta = region.read(extent + u(record, 120, 8), u(record, 128, 8))
    need(hashlib.sha256(meta).digest() == record[136:168], f"the footer of the object at {extent} is damaged")
    need(sound(meta[:RECORD], b"HROBJFT1", label[16:32]), f"the object at {extent} has no footer")
    need(meta[32:48] == record[:16] and meta[48:64] == record[16:32] and u(meta, 64, 8) == length, f"another footer at {extent}")
    need(meta[96:160] == record[56:120] and meta[160:176] == record[120:136], f"another footer at {extent}")
    data = region.read(extent + payload_off, length)
    need(hashlib.sha256(data).digest() == record[56:88], f"the object at {extent} does not have its SHA-256")
    block = 1 << record[37]
    need(len(meta) == RECORD + 4 * -(-length // block), f"the object at {extent} has a wrong number of digests")
    for number in range(-(-length // block) if length <= MIB else 1):  # Python is slow at this; SHA-256 has said the rest
        need(crc32c(data[number * block:(number + 1) * block]) == u(meta, RECORD + 4 * number, 4), f"digest {number} at {extent}")
    if record[36] == 1:
        header = 8 + u(record, 48, 8)
        need(u(data, 0, 8) + 8 == header and hashlib.sha256(data[:header]).digest() == record[88:120], f"the header at {extent}")
    return data


def read_store(path):
    """Yields (model, file, payload)."""
    region = Region(path)
    label = read_label(region)
    root = read_roots(region, label)[0]
    body = read_manifest(region, label, root)
    objects, models = table(body, 48, 256), table(body, 64, 64)
    members, retired = table(body, 80, 16), table(body, 96, 24)
    need(len(objects) == u(root, 120, 4) and len(models) == u(root, 124, 4), "the root counts otherwise")
    need(objects == sorted(objects, key=lambda o: o[:16]), "objects are not in order")
    check_extents(label, root, objects, retired)
    strings = body[u(body, 112, 8):u(body, 112, 8) + u(body, 120, 8)]
    for model in models:
        name = strings[u(model, 0, 8):u(model, 0, 8) + u(model, 8, 4)].decode()
        for member in members[u(model, 16, 4):u(model, 16, 4) + u(model, 12, 4)]:
            file = strings[u(member, 0, 8):u(member, 0, 8) + u(member, 12, 4)].decode()
            need(all(part not in ("", ".", "..") for part in file.split("/")), f"{file!r} is no name")
            yield name, file, read_object(region, label, objects[u(member, 8, 4)])


def main(arguments):
    if len(arguments) not in (1, 3):
        print(__doc__, file=sys.stderr)
        return 2
    for model, file, data in read_store(arguments[0]):
        print(model, file, len(data), hashlib.sha256(data).hexdigest(), sep="\t")
        if arguments[1:] and model == arguments[1]:
            path = os.path.join(arguments[2], file)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as out:
                out.write(data)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Wrong, OSError, struct.error) as error:
        print(f"store_reader: {error}", file=sys.stderr)
        sys.exit(1)
