#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz targets.

    make_seeds.py TARGET FOLDER            writes them
    make_seeds.py TARGET --run PROGRAM     writes them to a temporary folder and runs PROGRAM (replay.c) over them

The first two bytes of a seed choose the allocation that fails (fuzz.h). Inputs that once made a target fail are kept in
regressions/TARGET/ beside this file, if there are any, and belong to the seeds.
"""
import glob
import os
import random
import re
import shlex
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "data"))
import make_corpus  # noqa: E402

INDEXES = [
    '{"metadata":{"total_size":12},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}',
    '{"weight_map":{"a":"m.safetensors"}}', '{"weight_map":{"a":"../m.safetensors"}}', '{"weight_map":{"a":"/m.safetensors"}}',
    '{"weight_map":{"a":"a/m.safetensors"}}', '{"weight_map":{"a":"c:m.safetensors"}}', '{"weight_map":{"a":"m.bin"}}',
    '{"weight_map":{}}', '{"weight_map":null}', '{"weight_map":[]}', "{}", "[]", '{"weight_map":{"a":1}}',
    '{"weight_map":{"a":"m.safetensors","a":"m.safetensors"}}', '{"metadata":null,"weight_map":{"\\u0000":"m.safetensors"}}',
    '{"weight_map":{"a":"m.safetensors"},"weight_map":{}}', '{"x":[[[{}]]],"weight_map":{"\\ud83d\\ude00":"\\u006d.safetensors"}}',
    '{"metadata":{"total_size":1.5e3},"weight_map":{"a":"m.safetensors"}}', '\ufeff{"weight_map":{"a":"m.safetensors"}}',
    '{\n  "metadata": {\n    "total_size": "7"\n  },\n  "weight_map": {\n    "a": "m.safetensors"\n  }\n}\n',
]

LINES = [
    [], ["--help"], ["-h", "load"], ["-V"], ["--version"], ["help", "lode"], ["lod"], ["load"], ["load", "-h"], ["ls", "--help", "x"],
    ["ls", "m", "--only", "a.[0-9]*", "--only=*.w?[!abc]", "--json"], ["ls", "--", "--long", "-"],
    ["ls", "m", "--lnog"], ["ls", "m", "--json=1"], ["ls", "m", "--only"], ["cat", "a", "b", "--", "-c-"], ["cat", "a", "--json"],
    ["check", "m", "--digests=SHA256SUMS", "--json"], ["digest", "m", "--shards"], ["engines", "--json", "a", "b"],
    ["load", "m", "--staging=1MiB", "--slot=64K", "--readers", "3", "--engine", "pread", "--caching=bypass", "--device", "cpu"],
    ["load", "m", "--staging", "2T"], ["load", "m", "--slot", "65537"], ["load", "m", "--readers=65"], ["load", "m", "--readers=0"],
    ["load", "m", "--engine=mmap", "--staging=256K"], ["load", "m", "--caching", ""],
    ["load", "m", "--device", "cuda:01"], ["load", "m", "--device=cuda:9999"], ["load", "m", "--device", "cpu:0"],
    ["load", "m", "--device", "\x1b[2J"], ["\x1b[31m"], ["ls", "m", "--on\u202ely"], ["plan", "m", "--json", ""],
    ["bench"], ["bench", "m", "--rounds", "3", "--cold", "--sweep-slots"], ["bench", "--synthetic", "llama:4MiB", "--dir", "/x"],
    ["bench", "--synthetic=small:100x64/7", "--open"], ["bench", "--synthetic", "one:4GB", "--keep"],
    ["bench", "--synthetic", "small:4000001x2"], ["bench", "--synthetic", "small:5x3/2"], ["bench", "--synthetic", "big:5", "--json"],
    ["0"], ["18446744073709551615"], ["18446744073709551616B"], ["16777215TiB", "17TB", "4kB", "4KiB", "1G", "007M", "1Bi"],
    ["*[[[[[", "[[[[[["], ["[]-a]*", "]"], ["[!]", "[!]"], ["\\*\\", "*\\"], ["a*b*c", "aXbYbZc"], ["[z-a]", "m"], ["[^a-]", "-"],
]

HEX = "00ff9a0B" * 8
DIGESTS = [
    "", "#", "# a comment", "\n", "\r\n", HEX, HEX + "  ", HEX + "  m.safetensors\n", HEX + " *m.safetensors\r\n", "\\" + HEX + "  a\\nb\\\\c\n",
    "\\" + HEX + "  a\\", "\\" + HEX + "  a\\r", "#tensor " + HEX + "  w", "#tensor " + HEX + "  a\\x1b\\xff\\n\\\\\n", "#tensor " + HEX + "  \\x4",
    "#tensor " + HEX + "  \\xg0", "#tensor " + HEX[1:] + "  w", HEX[:-1] + "g  m", HEX + "\tm", "\u202e\x1b[2J\0b", "sha256:" + HEX, "\\", "#tensor ",
]


def command_lines():
    """The examples of every command's help, without what a shell would do with the output; then the lines above."""
    lines = []
    for path in sorted(glob.glob(os.path.join(HERE, "..", "..", "cli", "*.c"))):
        with open(path, encoding="utf-8") as file:
            for example in re.findall(r'"  headrace ([^"]*)\\n"', file.read()):
                lines.append(shlex.split(re.split(r"  +| \|| > ", example)[0]))
    return lines + LINES


STORE_UUID = b"0123456789abcde\0"


def store_records():
    """One sound record of each kind, and small manifests (fuzz_store.c puts checksums and heads right)."""
    mib = 1 << 20
    head = bytes(12) + struct.pack("<HH", 1, 0) + STORE_UUID
    label = head + struct.pack("<3Q4Q2I4BI2Q2I", 0, 0, 0, 65536, 0, 64 * mib, 64 * mib, 512, 4096, 16, 12, 0, 0, 0, 4 * mib, 1, 6, 0)
    root = head + struct.pack("<7Q", 3, 131072, 2, 60 * mib, 500, 4 * mib, 5 * mib) + bytes(32) + struct.pack("<2IQ", 1, 1, 131072)
    footer = head + bytes(16) + struct.pack("<3QIBBH2Q", 4 * mib, 131072, 1000, 0, 1, 16, 0, 3, 100) + bytes(64)
    footer += struct.pack("<2QI", 65536, 4100, 1)

    def manifest(names, n_objects, retired=()):
        objects = b"".join(
            bytes([i]) * 16 + struct.pack("<2QI2BH2Q", (4 + i) * mib, 131072, 0, 1, 16, 0, 1000, 100) + bytes(64) +
            struct.pack("<2Q", 65536, 4100) + bytes(32) + struct.pack("<2IQ", 1, 0, 2) + bytes(72) for i in range(n_objects))
        models, members, strings = b"", b"", b""
        for model, files in names:
            models += struct.pack("<Q4I", len(strings), len(model), len(files), len(members) // 16, 0)
            models += bytes(16) + struct.pack("<2Q2I", 2, len(strings), len(model), 0)
            strings += model
            for number, file in enumerate(files):
                members += struct.pack("<Q2I", len(strings), number % max(n_objects, 1), len(file))
                strings += file
        gone = b"".join(struct.pack("<3Q", *extent) for extent in retired)
        at, tables = 160, b""
        for table, size in ((objects, 256), (models, 64), (members, 16), (gone, 24)):
            tables += struct.pack("<Q2I", at, len(table) // size, size)
            at += len(table)
        body = objects + models + members + gone + strings
        return head + struct.pack("<2Q", 5, 160 + len(body)) + tables + struct.pack("<2Q", at, len(strings)) + bytes(32) + body

    manifests = [manifest([], 0), manifest([(b"m", [b"a"])], 1), manifest([(b"a", [b"b", b"c/d"]), (b"\xc3\xa4", [b"x"])], 3),
                 manifest([(b"m", [b"a"])], 2, [(30 * mib, 65536, 2), (40 * mib, 131072, 4)]), manifest([(b"m", [b"../a"])], 1),
                 manifest([(b"b", [b"x"]), (b"a", [b"x"])], 1), manifest([(b"m", [b"a", b"a"])], 1)]
    return [b"\0" + label, b"\1" + root, b"\2" + footer, b"\x80" + label] + [b"\3" + body for body in manifests]


def sidecars():
    good = ('{"format": "headrace-store-manifest", "version": 1, "path": "w.img", "store_uuid": "' + "0a" * 16 +
            '", "generation": 5, "body_sha256": "' + "1b" * 32 + '", "models": [{"name": "m", "files": []}]}')
    return [good, good.replace("w.img", "/x/y"), good.replace("w.img", "a\\u0000b"), good.replace('"version": 1', '"version": 2'),
            good.replace("5,", "-5,"), good.replace("0a0a", "0a0g"), good.replace('"path"', '"version"'), good[:-9], "{}", "[]"]


def contents(target):
    if target == "sidecar":
        return [text.encode() for text in sidecars()]
    if target == "store":
        return store_records()
    if target == "digests":
        return [text.encode() for text in DIGESTS]
    if target == "args":
        return ["\0".join(words).encode() + b"\0" for words in command_lines()]
    if target == "index":
        return [text.encode() for text in INDEXES]
    if target == "structured":
        rng = random.Random(1)
        return [bytes(rng.randrange(256) for _ in range(rng.choice((4, 20, 100, 300)))) for _ in range(60)]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for row in make_corpus.make(folder):
            with open(os.path.join(folder, row["file"]), "rb") as file:
                files.append(file.read())
    return [f for f in files if len(f) < 2000]


def write(target, folder):
    os.makedirs(folder, exist_ok=True)
    paths = []
    for i, content in enumerate(contents(target)):
        fault = i % 40 if i % 4 == 3 else 0
        paths.append(os.path.join(folder, "seed%03d" % i))
        with open(paths[-1], "wb") as out:
            out.write(bytes((fault, 0)) + content)
    kept = os.path.join(HERE, "regressions", target)
    names = sorted(os.listdir(kept)) if os.path.isdir(kept) else []
    return paths + [os.path.join(kept, name) for name in names]


def main(target, where, program=None):
    if where != "--run":
        write(target, where)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([program] + write(target, folder)).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
