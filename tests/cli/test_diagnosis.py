# SPDX-License-Identifier: Apache-2.0
"""headrace doctor, from outside: what it prints and how it ends, on this machine and over the look-alike GPU."""
import json
import os
import re
import resource
import subprocess

import checkpoints
from harness import Skip, test
from test_json import conforms

CHECKS = [
    "kernel", "io_uring", "memlock", "files", "cpus", "cgroup", "huge_pages", "container", "gpu", "cuda", "link", "numa", "bar1",
    "gds", "ugds", "model", "memory", "file_system", "direct", "disk", "page_cache"]


def verdicts(found):
    return {check["id"]: check["verdict"] for check in found["checks"]}


@test("doctor judges the machine, and with a name the model, by every check and for every engine")
def doctor_judges(context):
    found = conforms(context.json("doctor", "--device", "cpu"), "doctor")
    assert [check["id"] for check in found["checks"]] == CHECKS and found["ok"] and "best" not in found
    assert all(verdicts(found)[name] == "n/a" for name in CHECKS[-6:]), found
    assert all(check["reason"] for check in found["checks"])
    found = conforms(context.json("doctor", "two", "--device", "cpu"), "doctor")
    assert verdicts(found)["model"] == verdicts(found)["memory"] == "ok", found
    engines = context.json("engines", "two")
    assert [(e["name"], e["usable"]) for e in found["engines"]] == [(e["name"], e["usable"]) for e in engines["engines"]]
    pread = [e for e in found["engines"] if e["name"] == "pread"][0]
    assert pread["fill"]["works"] and "bypass" in pread
    assert found["best"]["command"] == "headrace load two --device cpu" and found["best"]["vllm_extra_config"] == "{}"
    text = context.run("doctor", "two", "--device", "cpu").stdout.decode()
    assert all(re.search(rf"^(ok|warn|n/a) +{name} ", text, re.MULTILINE) for name in CHECKS), text
    assert max(len(line) for line in text.splitlines()) <= 120, text
    assert "vllm serve two --load-format headrace" in text


@test("doctor says why a caching cannot be used where O_DIRECT is refused")
def doctor_explains_ramfs(context):
    os.makedirs(context.path("ram"), exist_ok=True)
    script = 'mount -t ramfs none ram || exit 99; cp one.safetensors ram/; exec "$0" doctor ram --device cpu --json'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, context.headrace], cwd=context.work, env=context.environment,
                          stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 99 or done.stderr.startswith(b"unshare"):
        raise Skip("a file system that refuses O_DIRECT cannot be mounted here")
    found = conforms(json.loads(done.stdout), "doctor")
    assert verdicts(found)["direct"] == "n/a" and verdicts(found)["file_system"] == "ok", found
    for engine in found["engines"]:
        if engine["usable"] and engine["name"] in ("pread", "uring"):
            assert engine["fill"]["works"] and not engine["bypass"]["works"] and "O_DIRECT" in engine["bypass"]["reason"], engine


@test("doctor ends with 1 if something will not work, and says what")
def doctor_fails(context):
    bad = conforms(context.json("doctor", "short.safetensors", "--device", "cpu", rc=1), "doctor")
    assert not bad["ok"] and verdicts(bad)["model"] == "fail", bad
    assert [c["reason"] for c in bad["checks"] if c["id"] == "model"][0].find("short.safetensors") >= 0
    if not any(d["usable"] and d["name"].startswith("cuda") for d in context.json("engines")["devices"]):
        bad = conforms(context.json("doctor", "two", "--device", "cuda:0", rc=1), "doctor")
        assert verdicts(bad)["gpu"] == "fail", bad
    for args in (["--trial"], ["two", "--sample", "1M"], ["two", "--device", "gpu"], ["two", "--trial", "--seconds", "x"]):
        conforms(context.json("doctor", *args, rc=2), "error")


@test("doctor counts open files against shards")
def doctor_counts_files(context):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    found = conforms(context.json("doctor", "two", "--device", "cpu", rc=1, preexec_fn=few), "doctor")
    assert verdicts(found)["files"] == "fail", found


@test("doctor knows a (look-alike) GPU, and what it lacks")
def doctor_on_a_gpu(context):
    if not context.options.fake_cuda:
        raise Skip("no look-alike driver was built")
    driver = {"LD_LIBRARY_PATH": os.path.abspath(context.options.fake_cuda)}
    found = conforms(context.json("doctor", "two", environment=driver), "doctor")
    assert verdicts(found)["gpu"] == "ok" and "--device cuda:0" in found["best"]["command"], found
    old = conforms(context.json("doctor", "two", environment={**driver, "HR_FAKE_CUDA": "version=12040"}), "doctor")
    assert verdicts(old)["cuda"] == "warn", old
    small = conforms(context.json("doctor", "two", rc=1, environment={**driver, "HR_FAKE_CUDA": "memory_mib=4"}), "doctor")
    assert verdicts(small)["memory"] == "fail", small
    none = conforms(context.json("doctor", "two", "--device", "cuda:7", rc=1, environment=driver), "doctor")
    assert verdicts(none)["gpu"] == "fail", none


@test("doctor --trial measures every setting that works, cold and warm, and names one as best")
def doctor_tries(context):
    checkpoints.make_sparse(context.path("tried"), 2, 24 << 20)
    environments = [({}, ["--device", "cpu"])]
    if context.options.fake_cuda:
        environments.append(({"LD_LIBRARY_PATH": os.path.abspath(context.options.fake_cuda)}, []))
    for environment, more in environments:
        found = conforms(context.json("doctor", "tried", *more, "--trial", "--sample", "33M", "--seconds", "1", environment=environment),
                         "doctor")
        trial = found["trial"]
        assert trial["sample_bytes"] in (32 << 20, 33 << 20), trial
        tried = {(s["state"], s["engine"], s["caching"]) for s in trial["series"]}
        assert {("cold", "auto", "auto"), ("warm", "auto", "auto"), ("cold", "pread", "fill"), ("warm", "pread", "fill")} <= tried
        assert len(tried) == len(trial["series"])
        for series in trial["series"]:
            assert series["rounds"] >= 1 or series["error"], series
            if series["rounds"]:
                assert series["gb_per_second"]["min"] > 0 and series["peak_pinned_bytes"] == (0 if more else 64 << 20), series
        best = found["best"]
        config = json.loads(best["vllm_extra_config"])
        assert config.get("engine", "auto") == best["engine"] and config.get("caching", "auto") == best["caching"], best
        text = context.run("doctor", "tried", *more, "--trial", "--sample", "1M", "--seconds", "1", environment=environment).stdout
        assert b"\nTrial: 1.00 MiB of the model" in text and b"\nbest " in text and b"--load-format headrace" in text, text
        context.run(*best["command"].split()[1:], environment=environment)


@test("doctor tries (look-alike) GPUDirect Storage like any engine, and compat only if that is allowed")
def doctor_tries_gds(context):
    found = conforms(context.json("doctor", "two", environment=context.gds()), "doctor")
    cufile = [e for e in found["engines"] if e["name"] == "cufile"][0]
    assert cufile["usable"] and cufile["reason"], cufile
    found = context.json("doctor", "two", "--cufile", "compat", "--trial", "--seconds", "1", environment=context.gds())
    tried = [s for s in conforms(found, "doctor")["trial"]["series"] if s["engine"] == "cufile"]
    assert tried and all(s["rounds"] and not s["error"] for s in tried), found["trial"]


@test("doctor quotes a name for a shell")
def doctor_quotes(context):
    name = "it's a $(name).safetensors"
    checkpoints.write(context.path(name), [checkpoints.tensor("w", "U8", [3], 1)])
    best = context.json("doctor", name, "--device", "cpu")["best"]
    assert best["command"] == "headrace load 'it'\\''s a $(name).safetensors' --device cpu", best
