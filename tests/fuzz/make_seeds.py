#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz targets.

    make_seeds.py TARGET FOLDER            writes them
    make_seeds.py TARGET --run PROGRAM     writes them to a temporary folder and runs PROGRAM (replay.c) over them

The first two bytes of a seed choose the allocation that fails (fuzz.h). Inputs that once made a target fail are kept in
regressions/TARGET/ beside this file, if there are any, and belong to the seeds.
"""
import os
import random
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


def contents(target):
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
