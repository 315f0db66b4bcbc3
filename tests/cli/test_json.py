# SPDX-License-Identifier: Apache-2.0
"""Every --json output: one object, of the documented form, and true: compared with what Python makes of the files."""
import hashlib
import json
import os
import struct

import checkpoints
from harness import test
from schemas import SCHEMAS, matches


def conforms(value, name):
    wrong = matches(value, SCHEMAS[name])
    assert wrong is None, f"{name}: {wrong}"
    return value


def parsed(path):
    """[(name, dtype, shape, absolute offset, bytes of data)] as Python's own JSON reads them."""
    with open(path, "rb") as file:
        content = file.read()
    size = struct.unpack("<Q", content[:8])[0]
    table = json.loads(content[8:8 + size])
    table.pop("__metadata__", None)
    found = []
    for name, about in table.items():
        begin, end = about["data_offsets"]
        found.append((name, about["dtype"], about["shape"], 8 + size + begin, content[8 + size + begin:8 + size + end]))
    return sorted(found, key=lambda t: (t[3], len(t[4])))


def all_files(context):
    yield ["two"], [context.path("two", f"model-0000{i}-of-00002.safetensors") for i in (1, 2)]
    for name in ("one", "odd", "names", "none"):
        yield [f"{name}.safetensors"], [context.path(f"{name}.safetensors")]


@test("ls --json says what Python reads from the same headers")
def ls_is_true(context):
    for names, paths in all_files(context):
        listed = conforms(context.json("ls", *names), "ls")
        expected = [(t[0], t[1], t[2], t[3], len(t[4]), os.path.basename(path)) for path in paths for t in parsed(path)]
        got = [(t["name"], t["dtype"], t["shape"], t["offset"], t["bytes"], os.path.basename(t["shard"])) for t in listed["tensors"]]
        assert sorted(got) == sorted(expected), names
        assert [s["bytes"] for s in listed["shards"]] == [os.path.getsize(path) for path in paths]
        assert all(t["listed"] for t in listed["tensors"])


@test("ls --json flags tensors that the index does not list")
def ls_flags_unlisted(context):
    listed = conforms(context.json("ls", "unlisted"), "ls")
    assert {t["name"] for t in listed["tensors"] if not t["listed"]} == {"scale", "empty"}
    assert listed["warnings"]
    assert b"warning" in context.run("ls", "unlisted").stderr


@test("ls --json gives the metadata of shards and of the model")
def ls_gives_metadata(context):
    listed = conforms(context.json("ls", "one.safetensors"), "ls")
    assert listed["metadata"] == listed["shards"][0]["metadata"] == {"format": "pt", "made by": "a test"}


@test("digest --json says what hashlib computes of shards and tensors")
def digest_is_true(context):
    for names, paths in all_files(context):
        found = conforms(context.json("digest", *names), "digest")
        for shard, path in zip(found["shards"], paths):
            with open(path, "rb") as file:
                assert shard["sha256"] == hashlib.sha256(file.read()).hexdigest(), path
        expected = {t[0]: hashlib.sha256(t[4]).hexdigest() for path in paths for t in parsed(path)}
        assert {t["name"]: t["sha256"] for t in found["tensors"]} == expected, names
    assert conforms(context.json("digest", "two", "--shards"), "digest")["tensors"] == []


@test("check --json tells good from bad, and names every broken file")
def check_is_true(context):
    good = conforms(context.json("check", "two"), "check")
    assert good["ok"] and not good["faults"] and "error" not in good
    for name in ("short", "long", "json", "dtype", "tiny"):
        bad = conforms(context.json("check", f"{name}.safetensors", rc=1), "check")
        assert not bad["ok"] and len(bad["faults"]) == 1 and bad["error"] == bad["faults"][0], name
        assert bad["error"]["path"].endswith(f"{name}.safetensors"), bad
    both = conforms(context.json("check", "broken", rc=1), "check")
    assert {os.path.basename(f["path"]) for f in both["faults"]} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}, both
    conforms(context.json("check", "missing", rc=1), "check")
    conforms(context.json("check", "ambiguous", rc=1), "check")


@test("plan --json adds up and reads nothing")
def plan_adds_up(context):
    for names, paths in all_files(context):
        plan = conforms(context.json("plan", *names, "--device", "cpu"), "plan")
        assert plan["payload_bytes"] == sum(len(t[4]) for path in paths for t in parsed(path))
        assert plan["read_bytes"] >= plan["payload_bytes"]
        assert sum(e["bytes"] for e in plan["engines"]) == plan["read_bytes"], plan
        assert plan["resident_bytes"] <= plan["read_bytes"]
        assert plan["staging_bytes"] == 64 << 20
    assert conforms(context.json("plan", "two", "--device", "cpu", "--staging", "16M"), "plan")["staging_bytes"] == 16 << 20


@test("engines --json has the engines and cpu, with reasons")
def engines_are_told(context):
    for names in ([], ["two"]):
        found = conforms(context.json("engines", *names), "engines")
        assert {"pread", "uring"} <= {e["name"] for e in found["engines"]}
        assert all(e["reason"] for e in found["engines"] + found["devices"])
    found = context.json("engines")
    assert [d["usable"] for d in found["devices"] if d["name"] == "cpu"] == [True]


@test("load --json --verify loads every kind of checkpoint and adds up")
def load_is_true(context):
    for names, paths in all_files(context):
        for more in ([], ["--caching", "bypass"], ["--engine", "pread", "--staging", "128K", "--slot", "64K", "--readers", "1"]):
            loaded = conforms(context.json("load", *names, "--device", "cpu", "--verify", *more), "load")
            assert loaded["verified"] is True
            assert loaded["bytes"] == sum(len(t[4]) for path in paths for t in parsed(path))
            assert sum(e["bytes"] for e in loaded["engines"]) == loaded["read_bytes"], loaded
            assert loaded["memory"]["peak_staging_bytes"] <= loaded["memory"]["staging_bytes"]
            assert loaded["memory"]["peak_pinned_bytes"] == 0
    part = context.json("load", "two", "--device", "cpu", "--only", "layer.*", "--only", "sc?le")
    assert (part["tensors"], part["bytes"], part["verified"]) == (3, 136, False), part


@test("bench --json of a small synthetic checkpoint has every part")
def bench_is_complete(context):
    for spec, tensors, shards in (("llama:8MiB", None, 1), ("small:200x4KiB", 200, 4), ("small:30x64/7", 30, 7), ("one:1MiB", 1, 1)):
        found = conforms(context.json("bench", "--synthetic", spec, "--dir", context.work, "--rounds", "2", "--feed", "--device",
                                      "cpu"), "bench")
        assert found["model"]["shards"] == shards and tensors in (None, found["model"]["tensors"]), found["model"]
        assert [(r["what"], r["state"]) for r in found["results"]] == [
            ("load", "cold"), ("feed", "cold"), ("load", "warm"), ("feed", "warm")]
        assert {"storage", "cached", "memory"} <= set(found["ceilings"])
        for result in found["results"]:
            assert len(result["samples"]) == 2
            assert all(s["bytes"] == found["model"]["bytes"] for s in result["samples"]), result
            assert result["gb_per_second"]["min"] <= result["gb_per_second"]["median"] <= result["gb_per_second"]["max"]
    assert not [name for name in os.listdir(context.work) if name.startswith("headrace-bench-")]


@test("bench --json --sweep measures every pool from 4 MiB to 512 MiB")
def sweep_is_complete(context):
    found = conforms(context.json("bench", "two", "--sweep", "--rounds", "1", "--device", "cpu", timeout=300), "bench")
    assert [r["staging_bytes"] >> 20 for r in found["results"]] == [4, 8, 16, 32, 64, 128, 256, 512]


@test("bench --json --partly measures every share by auto and by each engine alone")
def partly_is_complete(context):
    checkpoints.make_sparse(context.path("parts"), 1, 64 << 20)
    found = conforms(context.json("bench", "parts", "--partly", "--rounds", "1", "--device", "cpu", timeout=300), "bench")
    tried = [(r["resident_percent"], r["engine"]) for r in found["results"]]
    engines = [engine for percent, engine in tried if percent == 0]
    assert engines[0] == "auto" and {"pread"} <= set(engines) and len(engines) >= 2, tried
    assert tried == [(percent, engine) for percent in (0, 25, 50, 75, 100) for engine in engines], tried
    for result in found["results"]:
        assert result["state"] == "partly" and result["samples"][0]["bytes"] == 64 << 20, result
    assert b" of the better engine alone" in context.run("bench", "parts", "--partly", "--rounds", "1", "--device", "cpu").stdout
    assert context.run("bench", "parts", "--partly", "--cold", rc=2).stderr.startswith(b"headrace: --partly")


@test("bench --json --open counts tensors, shards and header bytes")
def bench_open_is_true(context):
    found = conforms(context.json("bench", "two", "--open", "--rounds", "3"), "bench-open")
    headers = sum(parsed(context.path("two", f"model-0000{i}-of-00002.safetensors"))[0][3] for i in (1, 2))
    assert (found["tensors"], found["shards"], found["header_bytes"], found["rounds"]) == (6, 2, headers, 3), found


@test("bench --json --loop keeps to its budget, and a walk that repeats hits under loop alone")
def bench_loop_is_complete(context):
    found = conforms(context.json("bench", "--synthetic", "llama:32MiB", "--dir", context.work, "--loop", "--rounds", "2", "--budget",
                                  "16MiB", "--device", "cpu"), "bench-loop")
    assert found["groups"] < found["tensors"] and found["budget_bytes"] == 16 << 20
    assert [(way["policy"], way["ahead"]) for way in found["loops"]] == [("lru", 2), ("loop", 0), ("loop", 1), ("loop", 2)]
    for way in found["loops"]:
        assert way["peak_bytes"] <= found["budget_bytes"] and way["peak_device_bytes"] == 0
        assert way["hits"] + way["joins"] + way["misses"] == found["groups"] * found["passes"], way
        assert all(s["bytes"] >= found["bytes"] * found["passes"] for s in way["samples"])
    assert found["loops"][1]["hits"] > 0 and found["loops"][1]["joins"] == 0
    done = context.run("bench", "two", "--loop", "--budget", "1KiB", "--device", "cpu", rc=1)
    assert b"more than the whole budget" in done.stderr, done.stderr


@test("a synthetic checkpoint that is kept is sound")
def synthetic_is_sound(context):
    for spec in ("llama:8MiB", "small:300x2KiB/3", "one:64KiB"):
        done = context.run("bench", "--synthetic", spec, "--dir", context.work, "--keep", "--open", "--rounds", "1")
        kept = done.stderr.decode().split("kept ")[1].strip()
        assert context.json("check", kept)["ok"], spec
        total = context.json("ls", kept)
        for shard in total["shards"]:
            listed = [t[0] for t in parsed(shard["path"])]
            assert len(listed) == shard["tensors"]
        for name in os.listdir(kept):
            os.unlink(os.path.join(kept, name))
        os.rmdir(kept)


@test("with --json every failure is an object too")
def failures_are_objects(context):
    bad = (
        (1, ["ls", "nowhere"]), (1, ["ls", "short.safetensors"]), (2, ["ls", "--nonsense"]), (2, ["ls"]),
        (1, ["digest", "ambiguous"]), (1, ["plan", "nothing"]), (1, ["load", "one.safetensors", "--only", "nope*"]),
        (2, ["load", "one.safetensors", "--staging", "1K"]), (2, ["load", "one.safetensors", "--engine", "magic"]),
        (2, ["load", "one.safetensors", "--device", "gpu"]), (2, ["bench"]), (2, ["bench", "--synthetic", "nonsense"]),
        (1, ["bench", "nowhere"]), (1, ["bench", "nowhere", "--open"]), (1, ["engines", "nowhere"]),
        (1, ["check", "two", "--digests", "nowhere"]),
    )
    for status, args in bad:
        error = conforms(context.json(*args, rc=status), "error")["error"]
        assert error["code"] < 0 and error["name"].startswith("HR_E_") and error["message"], args


@test("names in JSON are exact, whatever they hold")
def names_are_exact(context):
    listed = context.json("ls", "names.safetensors")
    assert {t["name"] for t in listed["tensors"]} == set(checkpoints.ODD_NAMES)
    assert b"\x1b" not in context.run("ls", "names.safetensors", "--json").stdout
