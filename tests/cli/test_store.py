# SPDX-License-Identifier: Apache-2.0
"""headrace store, and models in stores by every command: in plain files, and, as root, on loop devices with sectors of 512 and
of 4096 bytes. What is read is compared with the folder that was imported; what is damaged, replaced, cut or gone must be told
apart, each with its own error."""
import contextlib
import filecmp
import json
import os
import shutil
import signal
import struct
import subprocess
import time

from harness import Skip, test
from test_json import conforms

CPU = ["--device", "cpu"]
SIZE = 64 << 20


def fails(context, code, *args, **more):
    """The command fails with this error, told in JSON too. Gives the error."""
    done = context.run(*args, "--json", rc=1, **more)
    error = json.loads(done.stdout)["error"]
    assert error["name"] == code, (args, error)
    assert done.stderr.decode().startswith("headrace: "), done.stderr
    return error


def make(context, name="store.img", size=SIZE, model="two", more=()):
    """A store in a plain file, with one model unless that is None."""
    path = context.path(name)
    if os.path.exists(path):
        os.unlink(path)
    context.run("store", "init", path, "--size", str(size), *more)
    if model:
        context.run("store", "import", path, model, "--as", "m")
    return path


@contextlib.contextmanager
def loop(context, sector, size=SIZE, name="loop.img"):
    """A loop device; it goes with the block."""
    if os.geteuid() or not shutil.which("losetup"):
        raise Skip("loop devices need root and losetup")
    path = context.path(name)
    with open(path, "wb") as file:
        file.truncate(size)
    made = subprocess.run(["losetup", "-f", "--show", "--sector-size", str(sector), path], capture_output=True, text=True, check=False)
    if made.returncode:
        raise Skip(f"no loop device to be had: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "-d", device], check=False)
        os.unlink(path)


def same_tree(a, b):
    compared = filecmp.dircmp(a, b)
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and not compared.left_only and not compared.right_only and all(
        filecmp.cmp(os.path.join(a, name), os.path.join(b, name), shallow=False) if os.path.isfile(os.path.join(a, name))
        else same_tree(os.path.join(a, name), os.path.join(b, name)) for name in names)


def round_trip(context, path, folder, out="got"):
    """From a folder through a store and back."""
    shutil.rmtree(context.path(out), ignore_errors=True)
    context.run("store", "import", path, folder, "--as", "m")
    context.run("check", f"store:{path}#m", "--digests")
    assert context.json("store", "check", path, "--digests")["verdict"] == "clean"
    for engine in ("auto", "pread", "uring"):
        done = context.run("load", f"store:{path}#m", *CPU, "--verify", "--engine", engine, rc=None)
        assert done.returncode == 0 or (engine == "uring" and b"io_uring" in done.stderr), done.stderr
        assert done.returncode or b"every byte verified" in done.stdout
    context.run("store", "get", path, "m", out)
    assert same_tree(folder, context.path(out)), folder


def folders(context):
    """The two-shard directory, with files and a folder beside the shards, and the real checkpoint."""
    folder = context.path("whole")
    if not os.path.exists(folder):
        shutil.copytree(context.path("two"), folder)
        os.makedirs(os.path.join(folder, "tokenizer"))
        for name, content in (("config.json", b"{}\n"), ("empty", b""), ("tokenizer/vocab.txt", b"a\nb\n" * 40000)):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
    yield folder
    if os.environ.get("HR_CHECKPOINT"):
        real = context.path("real")
        if not os.path.exists(real):
            shutil.copytree(os.environ["HR_CHECKPOINT"], real, ignore=shutil.ignore_patterns(".*"))
        yield real


@test("init, import, check, load, get: the whole directory comes back byte for byte, from a plain file", suite="store")
def from_a_file(context):
    for folder in folders(context):
        round_trip(context, make(context, size=256 << 20, model=None), folder)


def from_a_loop_device(context, sector):
    for folder in folders(context):
        with loop(context, sector, 256 << 20) as device:
            context.run("store", "init", device, "--name", "loop")
            round_trip(context, device, folder)


@test("the same from a loop device with sectors of 512 bytes", suite="store")
def from_512(context):
    from_a_loop_device(context, 512)


@test("the same from a loop device with sectors of 4096 bytes", suite="store")
def from_4096(context):
    from_a_loop_device(context, 4096)


def without_paths(value):
    """JSON with the names of files reduced to their last part."""
    if isinstance(value, dict):
        return {key: os.path.basename(item) if key in ("shard", "path") else without_paths(item) for key, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


@test("every command that reads models reads them from a store as from their folder", suite="store")
def as_a_folder(context):
    name = f"store:{make(context)}#m"
    for command in ("ls", "digest", "check"):
        assert without_paths(context.json(command, name)) == without_paths(context.json(command, "two")), command
    for tensor in ("big", "scale", "empty", "embed.weight"):
        assert context.run("cat", name, tensor).stdout == context.run("cat", "two", tensor).stdout, tensor
    shard = f"{name}/model-00001-of-00002.safetensors"
    assert len(context.json("ls", shard)["tensors"]) == 2
    assert len(context.json("ls", shard, f"{name}/model-00002-of-00002.safetensors")["tensors"]) == 6
    assert context.json("ls", f"{name}/model.safetensors.index.json")["tensors"] == context.json("ls", name)["tensors"]
    assert context.json("plan", name, *CPU)["payload_bytes"] == context.json("plan", "two", *CPU)["payload_bytes"]
    assert context.json("verify", name, *CPU)["ok"] and context.json("verify", "two", *CPU, "--against", name)["ok"]
    conforms(context.json("bench", name, *CPU, "--rounds", "1", "--feed"), "bench")
    conforms(context.json("bench", name, "--open", "--rounds", "1"), "bench-open")
    conforms(context.json("load", name, *CPU, "--only", "layer*", "--verify"), "load")


@test("a block device is read around the page cache only", suite="store")
def around_the_cache(context):
    with loop(context, 512) as device:
        context.run("store", "init", device)
        context.run("store", "import", device, "two", "--as", "m")
        name = f"store:{device}#m"
        for caching in ("auto", "fill", "bypass"):
            engines = context.json("load", name, *CPU, "--caching", caching)["engines"]
            assert engines and all(engine["way"] != "page cache" for engine in engines), engines
        conforms(context.json("bench", name, *CPU, "--rounds", "1"), "bench")
        assert b"page cache" in context.run("bench", name, *CPU, "--warm", rc=2).stderr


# ---- names ----

@test("a store's models are found by their names, and what is not there is told", suite="store")
def names(context):
    path = make(context, model=None)
    assert "import" in fails(context, "HR_E_NOTFOUND", "ls", f"store:{path}")["message"]
    context.run("store", "import", path, "two", "--as", "org/model")
    context.run("ls", f"store:{path}")
    context.run("ls", f"store:{path}#")
    context.run("ls", f"store:{path}#org/model")
    context.run("ls", f"store:{path}#org/model/model-00002-of-00002.safetensors")
    context.run("store", "import", path, "one.safetensors")
    assert "org/model" in fails(context, "HR_E_AMBIGUOUS", "ls", f"store:{path}")["message"]
    assert "org/model" in fails(context, "HR_E_NOTFOUND", "ls", f"store:{path}#other")["message"]
    assert len(context.json("ls", f"store:{path}#one")["tensors"]) == 2
    fails(context, "HR_E_NOTFOUND", "ls", f"store:{path}#one/nothing.safetensors")
    fails(context, "HR_E_NOTFOUND", "ls", "store:nowhere.img#m")
    fails(context, "HR_E_NOT_A_STORE", "ls", "store:one.safetensors#m")
    assert context.run("ls", "store:#m", rc=None).returncode
    with_hash = context.path("a#b.img")
    shutil.copy(path, with_hash)
    context.run("ls", f"store:{with_hash}#org/model")
    for bad in ("a@1", "a#b"):
        assert context.run("store", "import", path, "two", "--as", bad, rc=2).stderr


@test("a generation is opened by its number while it is kept", suite="store")
def generations(context):
    path = make(context)
    first = context.json("store", "ls", path)["generation"]
    context.run("store", "import", path, "unlisted", "--as", "m", "--replace")
    second = context.json("store", "ls", path)["generation"]
    assert second > first and context.json("ls", f"store:{path}#m")["warnings"]
    assert not context.json("ls", f"store:{path}#m@{second - 1}")["warnings"]
    assert context.json("ls", f"store:{path}#m@{second - 1}/model-00001-of-00002.safetensors")["tensors"]
    assert "yet" in context.run("ls", f"store:{path}#m@{second + 1}", rc=1).stderr.decode()
    context.run("store", "reclaim", path)
    fails(context, "HR_E_STALE", "ls", f"store:{path}#m@{first}")


@test("an exported manifest is a way to its generation, and pins it", suite="store")
def pins(context):
    path = make(context)
    with open(context.path("side.json"), "wb") as file:
        file.write(context.run("store", "export", path).stdout)
    side = json.loads(context.run("store", "export", path).stdout)
    assert side["models"][0]["name"] == "m" and len(side["models"][0]["files"]) == 3 and len(side["objects"]) == 3
    context.run("load", "store:side.json#m", *CPU, "--verify")
    context.run("load", f"store:{path}#m", *CPU, "--expect", "side.json")
    for command, more in (("ls", []), ("check", []), ("digest", []), ("plan", CPU), ("verify", CPU)):
        context.run(command, f"store:{path}#m", *more, "--expect", "side.json")
    assert context.run("cat", f"store:{path}#m", "scale", "--expect", "side.json").stdout
    assert context.run("ls", "two", "--expect", "side.json", rc=1).stderr
    context.run("store", "import", path, "one.safetensors")  # the store goes on: the pinned generation is still there
    context.run("load", "store:side.json#m", *CPU, "--verify")
    fails(context, "HR_E_NOTFOUND", "ls", "store:side.json#one")
    context.run("store", "reclaim", path)
    fails(context, "HR_E_STALE", "load", "store:side.json#m", *CPU)
    fails(context, "HR_E_STALE", "load", f"store:{path}#m", *CPU, "--expect", "side.json")
    make(context)  # another store in its place
    fails(context, "HR_E_PIN", "load", "store:side.json#m", *CPU)
    side["body_sha256"] = "0" * 64
    for change in ({"generation": 2}, {}):
        now = json.loads(context.run("store", "export", path).stdout)
        with open(context.path("lie.json"), "w", encoding="utf-8") as file:
            json.dump({**now, "body_sha256": "0" * 64, **change}, file)
        fails(context, "HR_E_PIN", "load", "store:lie.json#m", *CPU)
    for broken in ("", "[]", "{}", '{"format": "other"}', '{"format": "headrace-store-manifest", "version": 2}'):
        with open(context.path("lie.json"), "w", encoding="utf-8") as file:
            file.write(broken)
        assert context.run("ls", "store:lie.json#m", rc=1).stderr.startswith(b"headrace: lie.json"), broken


# ---- what is wrong ----

def region(path, change):
    with open(path, "r+b") as file:
        change(file)


def flip(file, at):
    file.seek(at)
    byte = file.read(1)
    file.seek(at)
    file.write(bytes([byte[0] ^ 0x20]))


def contents(context, path):
    return {item["name"]: item for item in context.json("store", "ls", path, "m")["content"]}


@test("a flipped byte is found: in a header and an index when they are opened, in a tensor before it arrives", suite="store")
def rot(context):
    path = make(context)
    files = contents(context, path)
    shard = files["model-00002-of-00002.safetensors"]
    tensors = {t["name"]: t for t in context.json("ls", f"store:{path}#m")["tensors"]}
    for where, name in ((files["model.safetensors.index.json"]["offset"] + 5, "index"), (shard["offset"] + 20, "header"),
                        (shard["offset"] + 3, "length")):
        region(path, lambda file, at=where: flip(file, at))
        assert fails(context, "HR_E_DIGEST", "ls", f"store:{path}#m")["path"].startswith(f"store:{path}#m/"), name
        region(path, lambda file, at=where: flip(file, at))
    big = tensors["big"]
    for at in (0, 1, 65535, 65536, big["bytes"] // 2, big["bytes"] - 1):
        where = shard["offset"] + big["offset"] + at
        region(path, lambda file, at=where: flip(file, at))
        context.run("load", f"store:{path}#m", *CPU)
        error = fails(context, "HR_E_DIGEST", "load", f"store:{path}#m", *CPU, "--verify")
        assert error["tensor"] in tensors and error["offset"] == (big["offset"] + at) // 65536 * 65536, (error, at)
        assert context.run("check", f"store:{path}#m", "--digests", rc=1).stderr
        assert context.json("store", "check", path, "--digests", rc=1)["damaged"] == 1
        context.run("store", "get", path, "m", f"never-{at}", rc=1)
        assert not os.path.exists(context.path(f"never-{at}", "model-00002-of-00002.safetensors"))
        region(path, lambda file, at=where: flip(file, at))
    context.run("load", f"store:{path}#m", *CPU, "--verify")


@test("a region that was cut, wiped, or given other sectors is told apart", suite="store")
def geometry(context):
    path = make(context)
    os.truncate(path, SIZE - (1 << 20))
    fails(context, "HR_E_GEOMETRY", "ls", f"store:{path}#m")
    path = make(context)
    region(path, lambda file: (file.write(b"\0" * (5 << 20)), file.seek(SIZE - (4 << 20)), file.write(b"\0" * (4 << 20))))
    fails(context, "HR_E_NOT_A_STORE", "ls", f"store:{path}#m")
    path = make(context, model=None)
    shutil.copy(path, context.path("copy.img"))
    with loop(context, 4096) as device:
        subprocess.run(["dd", f"if={path}", f"of={device}", "bs=1M", "conv=notrunc,fsync"], capture_output=True, check=True)
        fails(context, "HR_E_GEOMETRY", "store", "ls", device)


@test("a store in a plain file may be copied anywhere: its UUID is all the identity it has", suite="store")
def identity(context):
    path = make(context)
    shutil.copy(path, context.path("copy.img"))
    context.run("load", f"store:{context.path('copy.img')}#m", *CPU, "--verify")
    with loop(context, 512) as device:
        subprocess.run(["dd", f"if={path}", f"of={device}", "bs=1M", "conv=notrunc,fsync"], capture_output=True, check=True)
        context.run("load", f"store:{device}#m", *CPU, "--verify")
        assert context.json("store", "ls", device, "--moved")["uuid"] == context.json("store", "ls", path)["uuid"]


@test("a reader that holds a generation reads on while models are replaced, or is told", suite="store")
def readers_and_writers(context):
    path = make(context)
    slow = ["--engine", "pread", "--readers", "1", "--staging", "128K", "--slot", "64K"]
    for _ in range(3):
        with context.start("load", f"store:{path}#m", *CPU, *slow, "--verify", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            context.run("store", "import", path, "unlisted", "--as", "m", "--replace")
            context.run("store", "reclaim", path)
            context.run("store", "import", path, "two", "--as", "m", "--replace")
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0 or b"gave up generation" in err or b"open the model again" in err, err
            assert process.returncode or b"every byte verified" in out
    context.run("check", f"store:{path}#m", "--digests")


# ---- init, import ----

@test("init refuses what is in use or not empty, says what it is, and destroys it only when told to", suite="store")
def refusals(context):
    path = make(context)
    assert "headrace store" in fails(context, "HR_E_FOREIGN", "store", "init", path)["message"]
    planned = context.run("store", "init", path, "--plan").stdout.decode()
    assert "destroys" in planned and "1 model" in planned, planned
    assert context.json("store", "init", path, "--plan")["refused"]
    context.run("ls", f"store:{path}#m")  # nothing has happened to it
    context.run("store", "init", path, "--force")
    assert context.json("store", "ls", path)["models"] == []
    assert b"--size" in context.run("store", "init", "new.img", rc=2).stderr
    assert b"at least" in context.run("store", "init", "small.img", "--size", "15M", rc=2).stderr
    assert not os.path.exists(context.path("small.img"))
    assert context.run("store", "init", context.work, rc=2).stderr
    if shutil.which("mkfs.ext4"):
        with open(context.path("ext4.img"), "wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-L", "precious", context.path("ext4.img")], check=True)
        message = fails(context, "HR_E_FOREIGN", "store", "init", "ext4.img")["message"]
        assert "--force" in message, message


@test("init refuses a device that is mounted", suite="store")
def refuses_mounted(context):
    if not shutil.which("mkfs.ext4"):
        raise Skip("needs mkfs.ext4")
    with loop(context, 512) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        os.makedirs(context.path("mounted"), exist_ok=True)
        done = subprocess.run(["mount", device, context.path("mounted")], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skip(f"nothing can be mounted here: {done.stderr.strip()}")
        try:
            for more in ([], ["--force"]):
                assert "is mounted at" in fails(context, "HR_E_LOCKED", "store", "init", device, *more)["message"]
        finally:
            subprocess.run(["umount", context.path("mounted")], check=True)


def partition_table(path, begin, size):
    """A master boot record with one partition, by hand: any program that could write it may be missing."""
    with open(path, "r+b", buffering=0) as file:
        record = bytearray(512)
        record[446:462] = struct.pack("<B3sB3sII", 0, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", begin // 512, size // 512)
        record[510:] = b"\x55\xaa"
        file.write(record)
        os.fsync(file.fileno())


@test("init refuses a device that has partitions", suite="store")
def refuses_partitions(context):
    with loop(context, 512) as device:
        partition_table(device, 1 << 20, 16 << 20)
        message = fails(context, "HR_E_FOREIGN", "store", "init", device)["message"]
        assert "partition table" in message or "not empty" in message, message
        context.run("store", "init", device, "--force")
        assert context.json("store", "ls", device)["models"] == []


@test("import says what it would do, shares what is there, and replaces only when told to", suite="store")
def importing(context):
    path = make(context, model=None)
    plan = context.json("store", "import", path, "two", "--plan")
    assert not plan["done"] and plan["files"] == 3 and plan["bytes"] > 9000000
    assert context.json("store", "ls", path)["models"] == []
    done = context.json("store", "import", path, "two")
    assert done["done"] and done["model"] == "two" and done["written_bytes"] == done["bytes"] and done["shards"] == 2
    fails(context, "HR_E_EXISTS", "store", "import", path, "two")
    again = context.json("store", "import", path, "two", "--as", "twin")
    assert again["written_bytes"] == 0 and again["shared_bytes"] == again["bytes"]
    context.run("store", "import", path, "two/model.safetensors.index.json", "--as", "by-index")
    context.run("store", "import", path, "two", "--replace", "--unverified")
    for broken in ("broken", "missing", "short.safetensors", "json.safetensors"):
        assert context.run("store", "import", path, broken, "--as", "broken", rc=1).stderr, broken
    fails(context, "HR_E_NOTFOUND", "store", "import", path, "not-there", "--as", "m")
    assert [m["name"] for m in context.json("store", "ls", path)["models"]] == ["by-index", "twin", "two"]
    fails(context, "HR_E_NOTFOUND", "store", "rm", path, "nothing")
    context.run("store", "rm", path, "twin")
    context.run("check", f"store:{path}#two", "--digests")


@test("a full store says so, and is as it was", suite="store")
def full(context):
    path = make(context, "little.img", 20 << 20)
    error = fails(context, "HR_E_NOSPACE", "store", "import", path, "sparse-32M.safetensors" if big_file(context) else "", "--as", "big")
    assert error["message"]
    context.run("check", f"store:{path}#m", "--digests")
    assert [m["name"] for m in context.json("store", "ls", path)["models"]] == ["m"]


def big_file(context, name="sparse-32M.safetensors", size=32 << 20):
    text = json.dumps({"hole": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(context.path(name), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return True


@test("Ctrl-C and SIGKILL in mid-import leave the store as it was, and the import goes on when it is started anew", suite="store")
def interrupted(context):
    big_file(context, "large.safetensors", 400 << 20)
    for number in (signal.SIGINT, signal.SIGKILL):
        path = make(context, "killed.img", 900 << 20)
        with context.start("store", "import", path, "large.safetensors", "--as", "large", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            time.sleep(0.15)
            process.send_signal(number)
            process.communicate(timeout=60)
            status = process.returncode
        assert status in (130, -9, 0), status
        assert status == 0 or [m["name"] for m in context.json("store", "ls", path)["models"]] == ["m"]
        assert context.json("store", "check", path, "--digests")["ok"]
        if status:
            context.run("store", "import", path, "large.safetensors", "--as", "large")
        context.run("load", f"store:{path}#large", *CPU, "--verify")
        os.unlink(path)


@test("check tells torn records, writes them anew when told to, and salvages what has no manifest", suite="store")
def checking(context):
    path = make(context)
    found = conforms(context.json("store", "check", path), "store-check")
    assert found["ok"] and found["verdict"] == "clean" and found["objects"] == 3, found
    region(path, lambda file: flip(file, (64 << 10) + 40))  # a label
    assert context.json("store", "check", path, rc=1)["damaged"]
    context.run("ls", f"store:{path}#m")  # the other copy does
    assert context.json("store", "check", path, "--repair")["verdict"] == "repaired"
    assert context.json("store", "check", path)["verdict"] == "clean"
    for root in (128, 192):
        region(path, lambda file, at=root: flip(file, (at << 10) + 40))
        region(path, lambda file, at=root: flip(file, SIZE - (1 << 20) + ((at - 64) << 10) + 40))
    fails(context, "HR_E_CORRUPT", "ls", f"store:{path}#m")
    salvaged = context.json("store", "check", path, "--salvage", "--to", context.path("rescued"), rc=None)
    assert salvaged["salvaged"] == 3, salvaged
    assert b"--salvage" in context.run("store", "check", path, "--to", "x", rc=2).stderr


@test("each action explains itself, and takes its own options only", suite="store")
def actions(context):
    overview = context.run("help", "store").stdout.decode()
    named = [line.split()[0] for line in overview.split("Actions:\n")[1].split("\n'")[0].splitlines()]
    for action in named:
        text = context.run("store", action, "--help").stdout.decode()
        assert text.startswith(f"headrace store {action}: ") and text == context.run("help", "store", action).stdout.decode(), action
    assert b"takes no --size" in context.run("store", "ls", "x", "--size", "1M", rc=2).stderr
    assert b"did you mean 'import'" in context.run("store", "imprt", "x", rc=2).stderr
    assert b"it is: headrace store rm PATH MODEL" in context.run("store", "rm", "x", rc=2).stderr
    assert context.run("help", "store", "nothing", rc=2).stderr
    page = context.read("docs", "man", "headrace-store.1.scd")
    assert all(f"*headrace store {action}*" in page and f"\n*{action}* _PATH_" in page for action in named), named


@test("store ls --json has its documented form", suite="store")
def listing(context):
    path = make(context, more=["--name", "a store"])
    conforms(context.json("store", "ls", path), "store-ls")
    conforms(context.json("store", "ls", path, "m"), "store-model")
    text = context.run("store", "ls", path).stdout.decode()
    assert "a store" in text and "generation" in text and "m " in text
