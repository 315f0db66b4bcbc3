# SPDX-License-Identifier: Apache-2.0
"""What cannot be told from printed lines alone: signals, pipes, terminals, memory, and a device that lies."""
import hashlib
import os
import pty
import random
import re
import select
import signal
import subprocess
import time

import checkpoints
from harness import Skip, test
from test_json import all_files, parsed

SLOW = ["--device", "cpu", "--engine", "pread", "--readers", "1", "--staging", "128K", "--slot", "64K"]


def sparse(context):
    if not os.path.exists(context.path("sparse")):
        checkpoints.make_sparse(context.path("sparse"), 2, 512 << 20)
    return "sparse"


@test("cat writes exactly the bytes of every tensor")
def cat_is_exact(context):
    for names, paths in all_files(context):
        for path in paths:
            for name, _, _, _, expected in parsed(path):
                if "\0" not in name:
                    assert context.run("cat", *names, "--", name).stdout == expected, name
    assert hashlib.sha256(context.run("cat", "two", "big").stdout).digest() == hashlib.sha256(checkpoints.pattern(9000001, 6)).digest()


@test("cat ends quietly with 141 when its reader goes away")
def cat_survives_a_closed_pipe(context):
    with context.start("cat", "two", "big", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(30) == 141 and complaint == b"", complaint


@test("ls ends quietly with 141 when its reader goes away")
def ls_survives_a_closed_pipe(context):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([context.headrace, "ls", "two", "--json"], cwd=context.work, stdout=write_end, stderr=subprocess.PIPE,
                          check=False)
    os.close(write_end)
    assert done.returncode == 141 and done.stderr == b"", done


@test("a full disk under standard output is an error")
def full_output_is_an_error(context):
    for args in (["ls", "two"], ["ls", "two", "--json"], ["cat", "two", "big"], ["digest", "two"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([context.headrace, *args], cwd=context.work, stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1 and b"cannot write to standard output: No space left on device" in done.stderr, args


@test("Ctrl-C ends cat with 130, and SIGTERM with 143")
def cat_is_interrupted(context):
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with context.start("cat", "two", "big", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.read(10)  # from here on it waits in write(2)
            time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(30) == status
            process.stdout.close()


def interrupt_load(context, number, more):
    """Status and stderr; the delay shrinks until the signal comes before the end."""
    for delay in (0.25, 0.15, 0.1, 0.06, 0.03):
        with context.start("load", sparse(context), *SLOW, *more, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            time.sleep(delay)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        if process.returncode not in (0, -number):
            return process.returncode, out, err
    raise Skip("loading was over before the signal came")


@test("Ctrl-C cancels load, which ends with 130; SIGTERM with 143")
def load_is_interrupted(context):
    status, out, err = interrupt_load(context, signal.SIGINT, [])
    assert (status, out) == (130, b"") and b"interrupted" in err and b"\r" not in err, (status, out, err)
    status, out, err = interrupt_load(context, signal.SIGTERM, ["--json"])
    assert status == 143 and b'"HR_E_CANCELLED"' in out, (status, out, err)


@test("Ctrl-C while a synthetic checkpoint is written removes it")
def bench_is_interrupted(context):
    with context.start("bench", "--synthetic", "one:4GiB", "--dir", context.work, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE) as process:
        line = process.stderr.readline()
        if b"writing" not in line:
            raise Skip(line.decode())
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert not [name for name in os.listdir(context.work) if name.startswith("headrace-bench-")]


def run_on_terminal(context, args, which):
    """The command with one of its outputs on a terminal; what came out there."""
    master, slave = pty.openpty()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, which: slave}
    with context.start(*args, **streams) as process:
        os.close(slave)
        seen = b""
        while select.select([master], [], [], 60)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        process.communicate(timeout=60)
    os.close(master)
    return process.returncode, seen


@test("load draws a bar with rate and time left on a terminal, and never in a pipe")
def bar_is_drawn(context):
    status, seen = run_on_terminal(context, ["load", sparse(context), *SLOW], "stderr")
    assert status == 0
    if b"\r" not in seen:
        raise Skip("loading was over too soon")
    assert re.search(rb"loading .*\d+ %.*GB/s", seen), seen[:300]
    assert seen.endswith(b"\r\x1b[K"), seen[-100:]
    assert context.run("load", sparse(context), *SLOW).stderr == b""


@test("cat refuses a terminal, unless forced")
def cat_refuses_a_terminal(context):
    assert run_on_terminal(context, ["cat", "one.safetensors", "w"], "stdout") == (2, b"")
    status, seen = run_on_terminal(context, ["cat", "one.safetensors", "w", "--force"], "stdout")
    assert status == 0 and seen


@test("what digest prints satisfies check and sha256sum; one changed byte satisfies neither")
def digests_round_trip(context):
    for name in ("two", "names.safetensors", "odd.safetensors"):
        listing = context.run("digest", name).stdout
        path = context.path("digests.txt")
        with open(path, "wb") as file:
            file.write(listing)
        verified = context.json("check", name, "--digests", "digests.txt")
        assert verified["verified_shards"] == len(verified and context.json("ls", name)["shards"])
        assert verified["verified_tensors"] == verified["tensors"], name
        subprocess.run(["sha256sum", "--quiet", "-c", "digests.txt"], cwd=context.work, check=True)
    target = context.path("two", "model-00002-of-00002.safetensors")
    with open(path, "wb") as file:
        file.write(context.run("digest", "two").stdout)
    with open(target, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        old = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([old[0] ^ 1]))
    try:
        bad = context.json("check", "two", "--digests", "digests.txt", rc=1)
        assert sorted(f["tensor"] for f in bad["faults"]) == ["", "big"], bad
        assert all(f["name"] == "HR_E_DIGEST" and f["path"].endswith("model-00002-of-00002.safetensors") for f in bad["faults"])
    finally:
        with open(target, "r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(old)


@test("digests of odd paths are escaped as sha256sum does it")
def odd_paths_round_trip(context):
    for name in ("back\\slash\nand newline.safetensors", "carriage\rreturn.safetensors"):
        checkpoints.write(context.path(name), [checkpoints.tensor("w", "U8", [3], 1)])
        listing = context.run("digest", name, "--shards").stdout
        theirs = subprocess.run(["sha256sum", name], cwd=context.work, capture_output=True, check=True).stdout
        assert listing.startswith(b"\\") and listing.count(b"\n") == 1
        if theirs.startswith(b"\\"):  # an older one leaves the carriage return as it is
            assert listing == theirs
        with open(context.path("digests.txt"), "wb") as file:
            file.write(listing)
        assert context.json("check", name, "--digests", "digests.txt")["verified_shards"] == 1


@test("load --verify finds one wrong byte and says which")
def verify_finds_a_wrong_byte(context):
    if not context.options.redirect or context.options.sanitized:
        raise Skip("needs the library that shows --verify another file, and no sanitizer")
    original = context.path("one.safetensors")
    offset = parsed(original)[1][3] + 5
    checkpoints.damage(original, original + ".other", lambda c: c[:offset] + bytes([c[offset] ^ 0x40]) + c[offset + 1:])
    done = context.run("load", "one.safetensors", "--device", "cpu", "--verify", rc=1,
                       environment={"LD_PRELOAD": os.path.abspath(context.options.redirect)})
    os.unlink(original + ".other")
    name = parsed(original)[1][0]
    assert f"tensor '{name}' differs from its file at byte 5 ".encode() in done.stderr, done.stderr
    assert f"byte {offset})".encode() in done.stderr and b"verified" not in done.stdout, done.stderr


@test("load to a (look-alike) GPU verifies, stays in its pool, and pins nothing else")
def load_to_a_gpu(context):
    if not context.options.fake_cuda:
        raise Skip("no look-alike driver was built")
    environment = {"LD_LIBRARY_PATH": os.path.abspath(context.options.fake_cuda)}
    loaded = context.json("load", "two", "--verify", "--staging", "1M", "--slot", "64K", environment=environment)
    assert loaded["device"]["spec"] == "cuda:0" and loaded["verified"] is True
    assert loaded["memory"]["peak_pinned_bytes"] == loaded["memory"]["staging_bytes"] == 1 << 20
    assert loaded["copy_calls"] > 0
    text = context.run("load", "two", "--verify", environment=environment).stdout.decode()
    assert "every byte verified" in text and "pinned" in text
    found = context.json("bench", "two", "--rounds", "1", "--feed", environment=environment)
    assert {"link", "cached", "storage"} <= set(found["ceilings"])
    # Neighbours in neighbouring slots, many times over: staging memory is registered in parts, which no copy may cross.
    found = context.json("bench", "--synthetic", "llama:64MiB", "--dir", context.work, "--warm", "--rounds", "4", "--feed",
                         environment=environment)
    assert [r["what"] for r in found["results"]] == ["load", "feed"]
    assert all(s["device_taken_bytes"] >= s["bytes"] for r in found["results"] for s in r["samples"]), found


@test("random command lines end with 0, 1 or 2 and never crash")
def random_lines_are_survived(context):
    seed = int(os.environ.get("HR_SEED") or 20260101)
    print(f"# SEED={seed}")
    dice = random.Random(seed)
    words = [
        "--json", "--long", "-l", "--only", "--only=*", "--only=[", "--only=\\", "--only=[!a-", "*", "--digests", "--digests=two",
        "--digests=one.safetensors", "--staging=1M", "--staging=128K", "--staging", "--slot=64K", "--slot=1G", "--readers=1",
        "--readers=999999999999", "--engine=pread", "--engine=uring", "--engine=", "--caching=fill", "--caching=bypass", "--verify",
        "--shards", "--open", "--rounds=1", "--against=two", "--against=one.safetensors", "--window=64K", "--force", "--", "-", "", "--device=cpu", "--device=cuda:99999999999", "-h", "-hl", "two",
        "one.safetensors", "odd.safetensors", "names.safetensors", "short.safetensors", "nothing", "w", "/dev/null", "/dev/zero",
        "/", ".", "--nonsense", "--json=1", "\xff\xfe".encode("latin-1").decode("utf-8", "surrogateescape"), "x" * 5000]
    for _ in range(250):
        command = dice.choice(["ls", "check", "load", "cat", "digest", "plan", "engines", "help", "version", "bench", "verify", "doctor"])
        line = [command] + [dice.choice(words) for _ in range(dice.randrange(5))]
        if command == "bench" and "--open" not in line:
            line.append("--open")
        done = context.run(*line, rc=None, timeout=60)
        assert done.returncode in (0, 1, 2), (line, done.returncode, done.stderr)
        assert done.returncode == 0 or done.stderr.startswith(b"headrace: "), (line, done.stderr)


@test("digest of 6 GiB stays below 128 MiB", suite="slow")
def digest_is_small(context):
    if context.options.sanitized:
        raise Skip("a sanitizer has memory of its own")
    checkpoints.make_sparse(context.path("holes"), 3, 2 << 30)
    process = context.start("digest", "holes", stdout=subprocess.PIPE)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 0
    assert usage.ru_maxrss < 128 * 1024, f"{usage.ru_maxrss} KiB"
    zeros = hashlib.sha256()
    for _ in range(2048):
        zeros.update(bytes(1 << 20))
    assert out.decode().count(zeros.hexdigest()) == 3, out


@test("load of a tensor larger than its pool by a hundred times verifies", suite="slow")
def large_tensor_passes(context):
    checkpoints.make_sparse(context.path("large"), 1, 1 << 30)
    for more in ([], ["--caching", "bypass"]):
        assert context.json("load", "large", "--device", "cpu", "--verify", "--staging", "8M", *more)["verified"]


@test("cat of a tensor of 2 GiB stays below 64 MiB", suite="slow")
def cat_is_small(context):
    if context.options.sanitized:
        raise Skip("a sanitizer has memory of its own")
    checkpoints.make_sparse(context.path("wide"), 1, 2 << 30)
    process = context.start("cat", "wide", "hole.0", stdout=subprocess.PIPE)
    total = 0
    while True:
        piece = process.stdout.read(1 << 20)
        if not piece:
            break
        assert not any(piece[:4096])
        total += len(piece)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 0 and total == 2 << 30
    assert usage.ru_maxrss < 64 * 1024, f"{usage.ru_maxrss} KiB"
