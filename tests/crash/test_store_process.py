#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A store in a plain file, as processes make it: read by an independent reader, and killed at any moment.

test_store_process.py MAKE_STORE READER [--rounds N]: TAP on standard output. HR_SEED repeats a run.
"""
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time

make_store, reader = sys.argv[1:3]
rounds = int(sys.argv[4]) if "--rounds" in sys.argv else 10
seed = int(os.environ.get("HR_SEED") or 20260801)
dice = random.Random(seed)
work = tempfile.mkdtemp(prefix="hr-store-", dir=os.environ.get("TMPDIR") or "/var/tmp")
region = os.path.join(work, "region.img")
n_tests = 0


def test(name, problem=None):
    global n_tests
    n_tests += 1
    print("ok" if not problem else "not ok", n_tests, "-", name)
    if problem:
        print("# " + str(problem).replace("\n", "\n# "))
        failures.append(name)


failures = []


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def shard(n_bytes):
    data = dice.randbytes(n_bytes)
    header = json.dumps({"t": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def source(name, sizes, common=None):
    """A directory with shards of these sizes, a config, an empty file and one in a folder; gives its files."""
    files = {f"model-{i}.safetensors": shard(size) for i, size in enumerate(sizes)}
    files |= {"config.json": name.encode(), "empty": b"", "deep/er/tokenizer.json": dice.randbytes(70000), ".gitattributes": b"x"}
    files |= common or {}
    for file, data in files.items():
        write(os.path.join(work, name, file), data)
    return files


def run(*words, wait=True):
    process = subprocess.Popen([make_store, region, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if not wait:
        return process
    output = process.communicate()[0].decode()
    return process.returncode, output


def must(*words):
    code, output = run(*words)
    if code:
        raise RuntimeError(f"{words}: {output}")
    return output


def read():
    """What the independent reader sees, as {model: {file: (bytes, SHA-256)}}."""
    done = subprocess.run([sys.executable, reader, region], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    models = {}
    for line in done.stdout.splitlines():
        model, file, size, digest = line.split("\t")
        models.setdefault(model, {})[file] = (int(size), digest)
    return models


def told(files):
    return {file: (len(data), hashlib.sha256(data).hexdigest()) for file, data in files.items()}


def independent_reader():
    one = source("one", [100, 65536, 300001])
    two = source("two", [65535, 4 << 20], {"model-7.safetensors": one["model-2.safetensors"]})
    must("init", str(64 << 20))
    if read():
        return "an empty store is not empty"
    must("import", "one", os.path.join(work, "one"), "0", "import", "two", os.path.join(work, "two"), "1")
    if read() != {"one": told(one), "two": told(two)}:
        return "two models are read otherwise"
    must("replace", "one", os.path.join(work, "two"), "0", "remove", "two", "reclaim")
    if read() != {"one": told(two)}:
        return "after replace, remove and reclaim it is read otherwise"
    must("import", "again", os.path.join(work, "one", "model-1.safetensors"), "0", "check")
    if read() != {"one": told(two), "again": told({"model-1.safetensors": one["model-1.safetensors"]})}:
        return "a single file is read otherwise"
    return None


def reader_sees_damage():
    """The reader must be able to say no: a changed byte of the newest payload, and of both labels."""
    with open(region, "r+b") as file:
        data = file.read()
        payload = data.find(b'{"t": {"dtype"')
        for places in ([payload + 20], [65536 + 40, len(data) - (1 << 20) + 40]):
            for place in places:
                file.seek(place)
                file.write(bytes([data[place] ^ 1]))
            file.flush()
            done = subprocess.run([sys.executable, reader, region], capture_output=True, text=True)
            for place in places:
                file.seek(place)
                file.write(data[place:place + 1])
            if done.returncode == 0:
                return f"the reader believed changes at {places}"
    read()
    return None


def killed():
    """kill -9 in the middle of work, again and again: what is there afterwards is what was there or what was to come."""
    big = source("big", [3 << 20, 2 << 20, 1 << 20])
    small = source("small", [1000, 200000])
    os.unlink(region)
    must("init", str(64 << 20))
    n_killed = n_done = 0
    slowest = 0.02
    for number in range(rounds):
        before = read()
        which, files = dice.choice([("big", big), ("small", small)])
        write(os.path.join(work, which, "config.json"), f"{number}".encode())
        files["config.json"] = f"{number}".encode()
        start = time.monotonic()
        process = run("replace", "m", os.path.join(work, which), dice.choice(["0", "1"]), "reclaim", wait=False)
        try:
            process.wait(dice.uniform(0, slowest))
            n_done += 1
            slowest = 0.9 * (time.monotonic() - start)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            n_killed += 1
            slowest *= 1.02
        process.stdout.close()
        found = read()
        if found not in (before, {"m": told(files)}):
            return f"round {number}: neither the old nor the new model"
        code, output = run("check")
        if code:
            return f"round {number}: {output}"
    must("import", "last", os.path.join(work, "small"), "0", "reclaim", "check")
    print(f"# killed {n_killed} times, {n_done} came to their end first")
    return None if n_killed > rounds // 4 else f"only {n_killed} of {rounds} were killed in time"


print(f"# SEED={seed}")
try:
    for name, body in (("an independent reader agrees on every file", independent_reader),
                       ("the independent reader sees damage", reader_sees_damage),
                       ("a store survives kill -9 at any moment", killed)):
        try:
            test(name, body())
        except RuntimeError as error:
            test(name, error)
finally:
    shutil.rmtree(work)
print(f"1..{n_tests}")
sys.exit(bool(failures))
