# SPDX-License-Identifier: Apache-2.0
"""headrace verify: it passes what is right, in bounded memory, and finds one wrong byte wherever it is, by every engine."""
import os
import shutil
import subprocess

import checkpoints
from harness import Skip, test
from test_json import all_files, conforms, parsed

CPU = ["--device", "cpu"]


def usable_engines(context, environment=None):
    return [e["name"] for e in context.json("engines", environment=environment)["engines"] if e["usable"]]


def with_redirect(context):
    if not context.options.redirect or context.options.sanitized:
        raise Skip("needs the library that shows one side another file, and no sanitizer")
    return {"LD_PRELOAD": os.path.abspath(context.options.redirect), "HR_REDIRECT": "openat"}


def flip(content, offset):
    return content[:offset] + bytes([content[offset] ^ 0x40]) + content[offset + 1:]


def copy_of(context, name, target):
    shutil.rmtree(context.path(target), ignore_errors=True)
    shutil.copytree(context.path(name), context.path(target))
    return target


@test("verify passes every kind of checkpoint, in large windows and small ones, by every engine")
def verify_passes(context):
    for names, paths in all_files(context):
        for more in ([], ["--window", "64K"], ["--caching", "bypass", "--window", "1M", "--staging", "256K", "--slot", "64K"]):
            found = conforms(context.json("verify", *names, *CPU, *more), "verify")
            assert found["ok"] and found["bytes"] == sum(len(t[4]) for path in paths for t in parsed(path)), found
            assert found["window_bytes"] <= 128 << 20 and (found["windows"] > 0) == (found["bytes"] > 0), found
    for engine in usable_engines(context):
        done = context.run("verify", "two", *CPU, "--engine", engine, "--window", "1M", rc=None)
        passed = done.returncode == 0 and b"every byte is right" in done.stdout
        assert passed or (engine not in ("pread", "uring") and done.stderr.startswith(b"headrace: ")), (engine, done)


@test("verify finds one wrong byte, the first and the last included, by every engine and from every window")
def verify_finds_every_byte(context):
    environment = with_redirect(context)
    folder = copy_of(context, "two", "wrong")
    path = context.path(folder, "model-00002-of-00002.safetensors")
    tensors = parsed(path)
    first, last = tensors[0], tensors[-1]
    places = [(first, 0), (last, len(last[4]) - 1), (last, 65535), (last, 65536), (last, 4 << 20)]
    n_found = 0
    for engine in ["auto"] + usable_engines(context, environment):
        for caching in ("fill", "bypass"):
            for (name, _, _, begin, _), at in places:
                checkpoints.damage(path, path + ".other", lambda c, at=begin + at: flip(c, at))
                for more in ([], ["--window", "64K"]):
                    done = context.run("verify", folder, *CPU, "--engine", engine, "--caching", caching, *more, rc=1,
                                       environment=environment)
                    if b"cannot be" in done.stderr:
                        continue  # this engine or caching is not for this machine, and says so
                    assert f"tensor '{name}' differs from its file at byte {at} ".encode() in done.stderr, (engine, done.stderr)
                    assert f"byte {begin + at})".encode() in done.stderr and not done.stdout, done
                    n_found += 1
    assert n_found >= 2 * len(places), n_found
    error = conforms(context.json("verify", folder, *CPU, rc=1, environment=environment), "error")["error"]
    assert (error["name"], error["stage"], error["offset"]) == ("HR_E_DIGEST", "verify", last[3] + (4 << 20)), error
    assert error["path"].endswith("model-00002-of-00002.safetensors") and error["tensor"] == last[0]
    os.unlink(path + ".other")
    context.run("verify", folder, *CPU, environment=environment)


@test("verify reads back from a (look-alike) GPU, finds a wrong byte there, and needs less memory than the model")
def verify_on_a_gpu(context):
    if not context.options.fake_cuda:
        raise Skip("no look-alike driver was built")
    driver = {"LD_LIBRARY_PATH": os.path.abspath(context.options.fake_cuda)}
    checkpoints.make_sparse(context.path("gpu"), 3, 40 << 20)
    small = {**driver, "HR_FAKE_CUDA": "memory_mib=16"}
    found = conforms(context.json("verify", "gpu", "--window", "4M", environment=small), "verify")
    assert found["device"]["spec"] == "cuda:0" and found["bytes"] == 120 << 20 and found["windows"] == 30, found
    error = conforms(context.json("load", "gpu", rc=1, environment=small), "error")["error"]
    assert error["name"] == "HR_E_DEVICE_MEMORY", error
    shutil.rmtree(context.path("gpu"))
    path = context.path("one.safetensors")
    name, _, _, begin, _ = parsed(path)[1]
    environment = {**driver, **with_redirect(context)}
    checkpoints.damage(path, path + ".other", lambda c: flip(c, begin + 11))
    done = context.run("verify", "one.safetensors", "--device", "cuda:0", rc=1, environment=environment)
    os.unlink(path + ".other")
    assert f"tensor '{name}' differs from its file at byte 11 ".encode() in done.stderr, done.stderr


@test("verify on a (look-alike) GPU finds a wrong byte by every engine, windows of GPU memory included")
def verify_on_a_gpu_by_every_engine(context):
    gds = context.gds()
    redirect = with_redirect(context)
    both = {**gds, **redirect, "LD_PRELOAD": f"{redirect['LD_PRELOAD']} {gds['LD_PRELOAD']}"}
    path = context.path("one.safetensors")
    name, _, _, begin, _ = parsed(path)[1]
    checkpoints.damage(path, path + ".other", lambda c: flip(c, begin + 7))
    found = []
    for engine in usable_engines(context, gds):
        more = ["--cufile", "compat"] if engine == "cufile" else []
        done = context.run("verify", "one.safetensors", "--device", "cuda:0", "--engine", engine, *more, rc=1, environment=both)
        if f"tensor '{name}' differs from its file at byte 7 ".encode() in done.stderr:
            found.append(engine)
        else:
            assert b"cannot be used" in done.stderr or b"was not opened through uGDS" in done.stderr, (engine, done.stderr)
        if found and found[-1] == engine:
            done = context.run("verify", "two", "--device", "cuda:0", "--engine", engine, *more, "--window", "1M", environment=gds)
            assert b"every byte is right" in done.stdout, (engine, done)
    os.unlink(path + ".other")
    assert {"pread", "uring", "mapped", "cufile"} <= set(found), found


@test("a store whose disk belongs to uGDS is listed, loaded and verified through it, and without it the error says so")
def verify_through_ugds(context):
    gds = context.gds()
    context.run("store", "init", "ugds.img", "--size", "64M")
    context.run("store", "import", "ugds.img", "two", "--as", "two")
    with open(context.path("ugds.json"), "wb") as file:
        file.write(context.run("store", "export", "ugds.img").stdout)
    os.rename(context.path("ugds.img"), context.path("ugds_drv0"))
    name, node = "store:ugds.json#two", ["--ugds", "ugds_drv0"]
    done = context.run("ls", name, rc=1, environment=gds)
    assert b"--ugds /dev/ugds_drv0" in done.stderr, done.stderr
    assert context.run("ls", name, *node, environment=gds).stdout
    done = context.run("load", name, *node, "--device", "cuda:0", "--verify", environment=gds)
    assert b"ugds" in done.stdout, done.stdout
    for device in "cuda:0", "cpu":
        done = context.run("verify", name, *node, "--device", device, "--window", "1M", environment=gds)
        assert b"every byte is right" in done.stdout, done
    done = context.run("load", name, *node, "--device", "cuda:0", "--engine", "uring", rc=1, environment=gds)
    assert b"use engine ugds" in done.stderr or b"cannot be used here" in done.stderr, done.stderr
    done = context.run("ls", "two", *node, rc=1, environment=gds)
    assert b"is not in a store" in done.stderr, done.stderr
    for file in "ugds.json", "ugds_drv0":
        os.unlink(context.path(file))


@test("verify compares with another copy, and says what the other one lacks")
def verify_against_a_copy(context):
    folder = copy_of(context, "two", "copy")
    found = conforms(context.json("verify", "two", *CPU, "--against", folder), "verify")
    assert found["ok"] and found["compared_with"] == folder
    one = context.path(folder, "model-00001-of-00002.safetensors")
    name, _, _, begin, _ = parsed(one)[1]
    checkpoints.damage(one, one, lambda c: flip(c, begin + 3))
    error = conforms(context.json("verify", "two", *CPU, "--against", folder, rc=1), "error")["error"]
    assert error["tensor"] == name and error["offset"] == begin + 3 and folder in error["path"], error
    # Other order, other shards: the same tensors all the same.
    tensors = sorted((t for shard in checkpoints.two_shards().values() for t in shard), key=lambda t: t[0], reverse=True)
    checkpoints.write(context.path("joined.safetensors"), tensors)
    assert context.json("verify", "two", *CPU, "--against", "joined.safetensors", "--window", "64K")["ok"]
    assert context.json("verify", "joined.safetensors", *CPU, "--against", "two")["ok"]
    checkpoints.write(context.path("fewer.safetensors"), tensors[1:])
    for names in (["two", "--against", "fewer.safetensors"], ["fewer.safetensors", "--against", "two"]):
        assert b"missing in " in context.run("verify", *names, *CPU, rc=1).stderr
    assert context.json("verify", "two", *CPU, "--against", "fewer.safetensors", "--only", "big")["ok"]
    other = [t if t[0] != "big" else (t[0], "I8", t[2], t[3]) for t in tensors]
    checkpoints.write(context.path("other.safetensors"), other)
    assert b"'big' of two has another dtype or shape" in context.run("verify", "two", *CPU, "--against", "other.safetensors", rc=1).stderr


@test("verify reads a model in a store, and compares it with the folder that it came from")
def verify_of_a_store(context):
    folder = copy_of(context, "two", "stored")
    context.run("store", "init", "verify.img", "--size", "64M")
    context.run("store", "import", "verify.img", folder, "--as", "two")
    name = "store:verify.img#two"
    for args in ([name], [name, "--against", folder], [folder, "--against", name]):
        for more in ([], ["--window", "64K", "--caching", "bypass"]):
            assert conforms(context.json("verify", *args, *CPU, *more), "verify")["ok"], args
    assert context.json("verify", name, *CPU)["compared_with"] == "a read of the same store without a loader"
    path = context.path(folder, "model-00002-of-00002.safetensors")
    tensor, _, _, begin, content = parsed(path)[-1]
    checkpoints.damage(path, path, lambda c: flip(c, begin + len(content) - 1))
    for args in ([name, "--against", folder], [folder, "--against", name]):
        error = conforms(context.json("verify", *args, *CPU, rc=1), "error")["error"]
        assert error["tensor"] == tensor and f"at byte {len(content) - 1} " in error["message"], error
    found = conforms(context.json("doctor", name, *CPU), "doctor")
    verdicts = {check["id"]: check["verdict"] for check in found["checks"]}
    assert verdicts["model"] == "ok" and verdicts["file_system"] != "fail" and found["best"]["vllm_command"] == "", found
    assert found["best"]["command"] == f"headrace load '{name}' --device cpu", found["best"]


@test("verify holds the files against a list of digests too")
def verify_against_digests(context):
    folder = copy_of(context, "two", "digested")
    with open(context.path("list.sha256"), "wb") as file:
        file.write(context.run("digest", folder).stdout)
    found = conforms(context.json("verify", folder, *CPU, "--against", "list.sha256"), "verify")
    assert (found["verified_shards"], found["verified_tensors"]) == (2, 6), found
    with open(context.path("sums"), "wb") as file:
        subprocess.run(["sha256sum"] + [f"{folder}/model-0000{i}-of-00002.safetensors" for i in (1, 2)], cwd=context.work, stdout=file,
                       check=True)
    assert context.json("verify", folder, *CPU, "--against", "sums")["verified_shards"] == 2
    path = context.path(folder, "model-00001-of-00002.safetensors")
    name, _, _, begin, _ = parsed(path)[0]
    checkpoints.damage(path, path, lambda c: flip(c, begin))
    bad = conforms(context.json("verify", folder, *CPU, "--against", "list.sha256", rc=1), "verify-digests")
    assert bad["error"]["name"] == "HR_E_DIGEST" and {f["tensor"] for f in bad["faults"]} == {"", name}, bad
    assert b"2 digests are wrong" in context.run("verify", folder, *CPU, "--against", "list.sha256", rc=1).stderr
    conforms(context.json("verify", folder, *CPU, "--against", "nowhere", rc=1), "error")
    conforms(context.json("verify", folder, *CPU, "--window", "1K", rc=2), "error")


@test("verify of 1 GiB takes less than its windows and 64 MiB", suite="slow")
def verify_is_small(context):
    if context.options.sanitized:
        raise Skip("a sanitizer has memory of its own")
    checkpoints.make_sparse(context.path("wide-verify"), 1, 1 << 30)
    for caching in ("fill", "bypass"):
        found = context.json("verify", "wide-verify", *CPU, "--window", "32M", "--caching", caching)
        assert found["ok"] and found["windows"] == 32, found
        assert found["peak_resident_bytes"] < (2 * 32 + 64 + 64) << 20, found
    shutil.rmtree(context.path("wide-verify"))
