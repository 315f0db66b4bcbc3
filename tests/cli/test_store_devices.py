# SPDX-License-Identifier: Apache-2.0
"""Stores where the kernel's own paths matter: over a file system that this test serves (fuse_disk.py), as a plain file and as a loop
device over it, which fails or hangs where it is told to; and on partitions and files that end on an odd 2 KiB. What is there
afterwards must be the old model or the new one, whole, and every error must say where it was. As root; every wait has its end."""
import contextlib
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time

from harness import Skip, test
from test_store import CPU, fails, partition_table, round_trip, same_tree
import checkpoints

SIZE = 44 << 20
LABEL, ROOT_A, ROOT_B, DATA = 64 << 10, 128 << 10, 192 << 10, 4 << 20
RECORD = 4096
NEW_BYTES = 12 << 20
IN_NEW = 17 << 20 | 123  # a byte of the model "new": the one before it ends below, and space is taken first fit
LIMIT = 20  # seconds that a program outside may take


def tool(*words):
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{words} did not end") from error


class Served:
    """The file system, as a process of its own: this one would hang with it. Its end is the end of all that hangs."""

    def __init__(self, context, size):
        self.folder = context.path("served")
        os.makedirs(self.folder, exist_ok=True)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fuse_disk.py")
        self.process = subprocess.Popen([sys.executable, script, self.folder, str(size)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.path = os.path.join(self.folder, "disk")
        answer = self.process.stdout.readline().strip()
        if answer != "serving":
            self.end()
            raise Skip(f"no file system can be served here: {answer or 'it ended at once'}")

    def ask(self, **words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def fault(self, kind, begin, end=None, **more):
        self.ask(fault=kind, **{"from": begin, "to": begin + 1 if end is None else end, **more})

    def struck(self):
        return self.ask(count=True)

    def clear(self):
        self.ask(clear=True)

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            tool("umount", "-l", self.folder)
        self.process.stdout.close()


@contextlib.contextmanager
def served(context, as_loop):
    """Gives the file system, and a region in it: its file, or a loop device over that."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        raise Skip("serving a file system needs root and /dev/fuse")
    disk = Served(context, SIZE)
    device = None
    try:
        if as_loop:
            if not shutil.which("losetup"):
                raise Skip("a loop device needs losetup")
            made = tool("losetup", "-f", "--show", disk.path)
            if made.returncode:
                raise Skip(f"no loop device to be had: {made.stderr.strip()}")
            device = made.stdout.strip()
        region = device or disk.path
        if tool("dd", f"if={region}", "of=/dev/null", "bs=64K", "count=1", "iflag=direct").returncode:
            raise Skip(f"this kernel does not read {region} over FUSE")
        yield disk, region
    finally:
        with contextlib.suppress(OSError, ValueError):
            disk.clear()
        if device:
            tool("losetup", "-d", device)
        disk.end()


def both(function):
    """Two tests of one: on a file of the served file system, and on a loop device over it."""
    def mark(title):
        for as_loop, where in ((False, "in a file"), (True, "on a loop device over a file")):
            def run(context, as_loop=as_loop):
                with served(context, as_loop) as (disk, region):
                    function(context, disk, region)
            test(f"{title}, {where} whose disk fails", suite="store")(run)
    return mark


def new_model(context):
    folder = context.path("new")
    if not os.path.exists(folder):
        os.makedirs(folder)
        checkpoints.write(os.path.join(folder, "a.safetensors"), [checkpoints.tensor("wide", "U8", [NEW_BYTES], 9)])
    return folder


def make(context, region):
    context.run("store", "init", region, "--force")
    context.run("store", "import", region, "two", "--as", "m")


def what_is_there(context, region, verdict="clean"):
    """"old" or "new": the model is one of them, byte for byte, and the store is sound, or is after a repair of a torn mirror."""
    out = context.path("out")
    shutil.rmtree(out, ignore_errors=True)
    context.run("load", f"store:{region}#m", *CPU, "--verify")
    context.run("store", "get", region, "m", out)
    is_old = same_tree(context.path("two"), out)
    assert is_old or same_tree(new_model(context), out), "neither the old nor the new model"
    checked = context.json("store", "check", region, "--repair", "--digests")
    assert checked["verdict"] == verdict, checked
    return "old" if is_old else "new"


def second_shard(context, region):
    """Where the shard with the tensor "big" lies."""
    content = context.json("store", "ls", region, "m")["content"]
    return next(item for item in content if item["name"] == "model-00002-of-00002.safetensors")


def on_one_handle(context, *words, after=None, then=None):
    """[(what, error, offset, sentence)] of with_handle; after so many of them, then() is called."""
    calls = []
    with subprocess.Popen([os.path.abspath(context.options.with_handle), *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:  # it has an alarm
            what, name, offset, text = line.rstrip("\n").split("\t")
            calls.append((what, name, int(offset), text))
            if len(calls) == after:
                then()
        assert process.wait(LIMIT) == 0, calls
    return calls


# ---- errors ----

def failing_reads(context, disk, region):
    make(context, region)
    file = second_shard(context, region)
    big = [item for item in context.json("ls", f"store:{region}#m")["tensors"] if item["name"] == "big"][0]
    bad = big["offset"] + 5 * 1000 * 1000
    disk.fault("read", file["offset"] + bad, errno=errno.EIO)
    for engine in ("pread", "uring"):
        done = context.run("load", f"store:{region}#m", *CPU, "--engine", engine, "--json", rc=1)
        error = json.loads(done.stdout)["error"]
        if engine == "uring" and error["name"] == "HR_E_UNSUPPORTED":
            continue
        assert (error["name"], error["tensor"]) == ("HR_E_IO", "big"), error
        assert error["path"].endswith("#m/model-00002-of-00002.safetensors") and region in error["message"], error
        assert big["offset"] <= error["offset"] <= bad, (error, bad)
    shutil.rmtree(context.path("not-whole"), ignore_errors=True)
    error = fails(context, "HR_E_IO", "store", "get", region, "m", context.path("not-whole"))
    assert error["offset"] <= file["offset"] + bad, error
    assert not os.path.exists(context.path("not-whole", "model-00002-of-00002.safetensors"))
    context.run("cat", f"store:{region}#m", "embed.weight")  # what is elsewhere can still be read
    assert disk.struck() >= 2
    disk.clear()
    assert what_is_there(context, region) == "old"


def failing_writes(context, disk, region):
    make(context, region)
    disk.fault("write", IN_NEW, errno=errno.EIO)
    error = fails(context, "HR_E_IO", "store", "import", region, new_model(context), "--as", "m", "--replace")
    assert error["path"] == region and IN_NEW - (8 << 20) < error["offset"] <= IN_NEW, error
    assert disk.struck()
    disk.clear()
    assert what_is_there(context, region) == "old"
    # The first import was generation 2, in root B; the next goes to root A. Its first copy fails: then the second is not written.
    disk.fault("write", ROOT_A, errno=errno.EIO)
    error = fails(context, "HR_E_COMMIT_UNKNOWN", "store", "import", region, new_model(context), "--as", "m", "--replace")
    assert region in error["message"] and str(ROOT_A) in error["message"], error
    disk.clear()
    assert what_is_there(context, region) == "old"
    tail = SIZE - (1 << 20) + ROOT_A - LABEL
    disk.fault("write", tail, errno=errno.EIO)
    error = fails(context, "HR_E_COMMIT_UNKNOWN", "store", "import", region, new_model(context), "--as", "m", "--replace")
    assert region in error["message"] and str(tail) in error["message"], error
    disk.clear()
    assert what_is_there(context, region, "repaired") == "new"


def failing_flushes(context, disk, region):
    for place in (ROOT_A, LABEL):
        disk.fault("flush", place, errno=errno.EIO, times=1, lose=True)
        error = fails(context, "HR_E_IO", "store", "init", region)
        assert error["path"] == region and disk.struck() == 1, error
        disk.clear()
        fails(context, "HR_E_NOT_A_STORE", "store", "ls", region)
    make(context, region)
    disk.fault("flush", DATA, SIZE - DATA, errno=errno.EIO, times=1, lose=True)
    error = fails(context, "HR_E_IO", "store", "import", region, new_model(context), "--as", "m", "--replace")
    assert error["path"] == region and disk.struck() == 1, error
    disk.clear()
    assert what_is_there(context, region) == "old"
    for lose, outcome in ((True, "old"), (False, "new")):
        out = context.path("by-handle")
        shutil.rmtree(out, ignore_errors=True)
        disk.fault("flush", ROOT_A, ROOT_A + RECORD, errno=errno.EIO, times=1, lose=lose)
        calls = on_one_handle(context, "writes", region, "m", new_model(context), out)
        assert [call[:2] for call in calls] == [("open", "HR_OK"), ("import", "HR_E_COMMIT_UNKNOWN"), ("import", "HR_E_POISONED"),
                                                ("get", "HR_OK")], calls
        assert region in calls[1][3] and region in calls[2][3], calls
        assert same_tree(context.path("two"), out), "the old model is not what the poisoned handle reads"
        assert disk.struck() == 1
        disk.clear()
        assert what_is_there(context, region) == outcome


both(failing_reads)("a read that fails says in which tensor and where, and nothing else is lost")
both(failing_writes)("a write that fails leaves the model that was there, or, in a root, says that nobody knows")
both(failing_flushes)("a flush that fails makes nothing visible, poisons the handle, and opening again decides")


# ---- hangs ----

FOR_LONG = 12  # seconds; let go long before


def deadline(context, disk, region, engine):
    """A job gives up at its deadline; the loader stays until what hangs has come back, and works before and after that."""
    tensors = context.json("ls", f"store:{region}#m")["tensors"]
    number = [item["name"] for item in tensors].index("big")
    shard = second_shard(context, region)
    at = tensors[number]["offset"] + (5 << 20)
    disk.fault("read", shard["offset"] + at, seconds=FOR_LONG, times=1)
    # All reads may wait for the one that hangs, on a loop device, which has one thread, and in io_uring, since FUSE blocks the call
    # that submits: a second read needs it let go then, or finds all staging memory lost.
    is_queue = region != disk.path or engine == "uring"
    calls = on_one_handle(context, "reads", f"store:{region}#m", str(number), engine, "400", after=7 if is_queue else 9,
                          then=disk.clear)
    disk.clear()
    if engine == "uring" and calls[-1][:2] == ("loader", "HR_E_UNSUPPORTED"):
        return
    one = [("start", "HR_OK"), ("wait", "HR_OK"), ("close job", "HR_OK")]
    second = [("start", "HR_OK"), ("wait", "HR_E_LOST"), ("close job", "HR_OK")] if is_queue and calls[8][1] == "HR_E_LOST" else one
    assert [call[:2] for call in calls[3:]] == [("start", "HR_OK"), ("wait", "HR_E_TIMEDOUT"), ("close job", "HR_OK"),
                                                ("close", "HR_E_BUSY"), *second, *one, ("close", "HR_OK")], calls
    assert region in calls[4][3] and (is_queue or at - (64 << 10) <= calls[4][2] <= at), calls


def hanging(context, disk, region):
    make(context, region)
    name = f"store:{region}#m"
    for engine in ("pread", "uring"):
        deadline(context, disk, region, engine)
    at = second_shard(context, region)["offset"] + (5 << 20)
    # Without a deadline it waits, and the bytes are right; killed while it waits, it harms nobody.
    disk.fault("read", at, seconds=0.3, times=1)
    began = time.monotonic()
    context.run("load", name, *CPU, "--verify", timeout=LIMIT)
    assert time.monotonic() - began >= 0.3
    disk.clear()
    disk.fault("read", at, seconds=FOR_LONG, times=1)
    with context.start("load", name, *CPU, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: disk.struck() == 1)
        process.send_signal(signal.SIGKILL)
        disk.clear()
        process.wait(LIMIT)
    # An import that hangs holds the lock; another one is told so at once, and a reader gets one of the two.
    disk.fault("write", IN_NEW, seconds=FOR_LONG, times=1)
    with context.start("store", "import", region, new_model(context), "--as", "m", "--replace", stdout=subprocess.DEVNULL,
                       stderr=subprocess.PIPE) as process:
        wait_for(lambda: disk.struck() == 1)
        fails(context, "HR_E_LOCKED", "store", "import", region, "two", "--as", "other", timeout=LIMIT)
        with context.start("load", name, *CPU, "--verify", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
            time.sleep(0.1)
            disk.clear()
            out, error = reader.communicate(timeout=LIMIT)
            assert reader.returncode == 0 and b"every byte verified" in out, error
        error = process.communicate(timeout=LIMIT)[1]
        assert process.returncode == 0, error
    assert what_is_there(context, region) == "new"


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


both(hanging)("what hangs is given up at its deadline or waited for, and nothing is read wrong")


# ---- odd ends ----

ODD_END = (40 << 20) + 2048
PARTITION_AT = 1 << 20


@contextlib.contextmanager
def partitioned(context, *more):
    """A loop device over a disk with one partition that ends on an odd 2 KiB."""
    if os.geteuid() or not shutil.which("losetup"):
        raise Skip("loop devices need root and losetup")
    path = context.path("disk.img")
    with open(path, "wb") as file:
        file.truncate(PARTITION_AT + ODD_END + (1 << 20))
    partition_table(path, PARTITION_AT, ODD_END)
    made = tool("losetup", "-f", "--show", *more, path)
    try:
        if made.returncode:
            raise Skip(f"no loop device to be had: {made.stderr.strip()}")
        yield made.stdout.strip()
    finally:
        if made.returncode == 0:
            tool("losetup", "-d", made.stdout.strip())
        os.unlink(path)


@contextlib.contextmanager
def partitions(device):
    """The first partition; partx, since not every kernel reads the tables of partitions by itself."""
    if not shutil.which("partx"):
        raise Skip("partitions need partx")
    tool("partx", "-a", device)
    try:
        if not os.path.exists(device + "p1"):
            raise Skip(f"no {device}p1 came to be")
        yield device + "p1"
    finally:
        tool("partx", "-d", device)


def odd(context, region, size=ODD_END):
    context.run("store", "init", region)
    facts = context.json("store", "ls", region)
    assert facts["region_bytes"] == size >> 20 << 20, facts
    round_trip(context, region, context.path("two"))


@test("a plain file that ends on an odd 2 KiB", suite="store")
def odd_file(context):
    path = context.path("odd.img")
    with open(path, "wb") as file:
        file.truncate(ODD_END)
    odd(context, path)


@test("a part of a disk that ends on an odd 2 KiB", suite="store")
def odd_part(context):
    with partitioned(context, "--offset", str(PARTITION_AT), "--sizelimit", str(ODD_END)) as device:
        odd(context, device)


@test("a partition that ends on an odd 2 KiB, and the disk around it", suite="store")
def odd_partition(context):
    with partitioned(context) as device, partitions(device) as partition:
        odd(context, partition)
        found = context.json("store", "init", device, "--plan")
        assert found["refused"] and any(os.path.basename(partition) in what for what in found["destroys"]), found
        message = fails(context, "HR_E_FOREIGN", "store", "init", device)["message"]
        assert os.path.basename(partition) in message and "--force" in message, message
        context.run("load", f"store:{partition}#m", *CPU, "--verify")


@test("init of a file that does not fit leaves its file system as it was", suite="store")
def too_large(context):
    place = context.path("small")
    os.mkdir(place)
    done = tool("mount", "-t", "tmpfs", "-o", "size=40M", "none", place)
    if done.returncode:
        raise Skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        free = os.statvfs(place).f_bfree
        said = fails(context, "HR_E_IO", "store", "init", os.path.join(place, "w.img"), "--size", "64M")["message"]
        assert "no room for 67108864 bytes" in said, said
        assert os.statvfs(place).f_bfree == free and os.listdir(place) == []
        context.run("store", "init", os.path.join(place, "w.img"), "--size", "20M")
    finally:
        tool("umount", place)


@test("init refuses the disk around a partition that is mounted, and the partition", suite="store")
def mounted_partition(context):
    if not shutil.which("mkfs.ext4"):
        raise Skip("needs mkfs.ext4")
    with partitioned(context) as device, partitions(device) as partition:
        assert tool("mkfs.ext4", "-q", partition).returncode == 0
        place = context.path("mounted")
        os.makedirs(place, exist_ok=True)
        done = tool("mount", partition, place)
        if done.returncode:
            raise Skip(f"nothing can be mounted here: {done.stderr.strip()}")
        try:
            for region in (device, partition):
                for more in ([], ["--force"]):
                    assert "is mounted at" in fails(context, "HR_E_LOCKED", "store", "init", region, *more)["message"], region
        finally:
            tool("umount", place)
