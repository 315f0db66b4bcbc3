#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A store on an emulated NVMe drive, under a kernel of Debian's, in qemu.

run.py --exe HEADRACE --cache DIR: for logical blocks of 512 and of 4096 bytes, boots a minimal guest (Debian's cloud kernel, busybox
and the command itself in a file system in memory that is made here) and lets guest.sh init a store, import, check, load and get
back; then kills the machine in mid-import, boots again, checks, and imports to the end; then boots with the drive's contents
on another drive, which must be refused. The kernel and busybox are fetched once, as packages that are not installed.
Emulation throughout: it boots in a few seconds, everywhere alike, and KVM inside of another machine often does not work.
Ends with 77 (skip) where qemu or the packages cannot be had.
"""
import argparse
import glob
import gzip
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

QEMU = "qemu-system-x86_64"
STORE_BYTES = 768 << 20
BOOT_SECONDS = 120


def skip(why):
    print(why)
    sys.exit(77)


# ---- what the guest is made of ----

def fetch_packages(cache):
    """The kernel and busybox, unpacked in `cache`."""
    done = os.path.join(cache, ".complete")
    if not os.path.exists(done):
        shutil.rmtree(cache, ignore_errors=True)
        os.makedirs(cache)
        depends = subprocess.run(["apt-cache", "depends", "linux-image-cloud-amd64"], capture_output=True, text=True)
        kernel = re.findall(r"Depends: (linux-image-\S+)", depends.stdout)
        if not kernel:
            skip("no package linux-image-cloud-amd64 here to take a kernel from")
        got = subprocess.run(["apt-get", "download", kernel[0], "busybox-static"], cwd=cache, capture_output=True, text=True)
        if got.returncode:
            skip("the packages of a kernel and of busybox cannot be had: " + got.stderr.strip().split("\n")[-1])
        for package in glob.glob(os.path.join(cache, "*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, os.path.join(cache, "root")], check=True)
        open(done, "w").close()
    kernels = glob.glob(os.path.join(cache, "root/boot/vmlinuz-*"))
    return kernels[0], os.path.join(cache, "root/bin/busybox")


def libraries(exe):
    """What the command is linked with, the loader included."""
    out = subprocess.run(["ldd", exe], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(?:=> )?(/\S+) \(0x", out)


class Archive:
    """A cpio archive as the kernel takes it for its first file system."""

    def __init__(self):
        self.parts = []
        self.number = 0

    def add(self, name, mode, data=b""):
        self.number += 1
        head = "070701" + "".join(f"{value:08x}" for value in (
            self.number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0))
        for part in (head.encode() + name.encode() + b"\0", data):
            self.parts.append(part + b"\0" * (-len(part) % 4))

    def write(self, path):
        self.add("TRAILER!!!", 0)
        with gzip.open(path, "wb", 1) as file:
            file.write(b"".join(self.parts))


def make_initramfs(path, exe, busybox):
    archive = Archive()
    for directory in ("bin", "lib", "lib64", "proc", "sys", "dev", "tmp"):
        archive.add(directory, 0o040755)
    here = os.path.dirname(os.path.abspath(__file__))
    files = [("init", os.path.join(here, "guest.sh")), ("bin/busybox", busybox), ("bin/headrace", exe)]
    for library in libraries(exe):
        name = os.path.basename(library)
        files.append(("lib64/" + name if name.startswith("ld-") else "lib/" + name, library))
    for name, source in files:
        with open(source, "rb") as file:
            archive.add(name, 0o100755, file.read())
    archive.write(path)


def make_shard(path, names, seed):
    """Tensors of odd sizes, so that nothing is aligned."""
    rng, tensors, at = random.Random(seed), {}, 0
    for i, name in enumerate(names):
        size = rng.randrange(1, 3 << 20) if i % 5 else rng.randrange(0, 9)
        tensors[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(tensors).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + rng.randbytes(at))


def make_model(directory, n_tensors, seed):
    os.makedirs(directory)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weights = {f"t.{i}": shards[i * 2 // n_tensors] for i in range(n_tensors)}
    for shard in shards:
        make_shard(os.path.join(directory, shard), [t for t in weights if weights[t] == shard], seed)
        seed += 1
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as file:
        json.dump({"weight_map": weights}, file)
    with open(os.path.join(directory, "config.json"), "w") as file:
        file.write('{"model_type": "none"}\n')


def make_data(path, work):
    make_model(os.path.join(work, "one"), 12, 1)
    make_model(os.path.join(work, "two"), 50, 2)
    with tarfile.open(path, "w") as tar:
        for name in ("one", "two"):
            tar.add(os.path.join(work, name), arcname=name)
    with open(path, "ab") as file:
        file.truncate((os.path.getsize(path) + 4095) // 4096 * 4096)


# ---- one boot ----

class Machine:
    def __init__(self, kernel, work, lba, step, serial="hr0001"):
        store, data = os.path.join(work, f"store-{lba}.img"), os.path.join(work, "data.img")
        self.lines, self.seen = [], threading.Condition()
        self.over = False
        self.process = subprocess.Popen(
            [QEMU, "-accel", "tcg", "-cpu", "max", "-machine", "q35", "-m", "1024", "-smp", "2", "-nodefaults", "-nographic", "-no-reboot", "-serial", "stdio",
             "-kernel", kernel, "-initrd", os.path.join(work, "initramfs"),
             "-append", f"console=ttyS0 quiet panic=-1 hr.step={step}",
             "-drive", f"file={store},if=none,id=d0,format=raw", "-device", f"nvme,id=n0,serial={serial}",
             "-device", f"nvme-ns,drive=d0,bus=n0,logical_block_size={lba},physical_block_size={lba}",
             "-drive", f"file={data},if=none,id=d1,format=raw,readonly=on", "-device", "nvme,id=n1,serial=hrdata",
             "-device", "nvme-ns,drive=d1,bus=n1,logical_block_size=512"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            with self.seen:
                self.lines.append(line.rstrip())
                self.seen.notify_all()
        with self.seen:
            self.over = True
            self.seen.notify_all()

    def wait_for(self, text, seconds=BOOT_SECONDS):
        """Waits for a line of the guest's with this text."""
        with self.seen:
            self.seen.wait_for(lambda: self.over or any("HR: " in line and text in line for line in self.lines), seconds)
            return any("HR: " in line and text in line for line in self.lines)

    def end(self, seconds=BOOT_SECONDS):
        """Waits for the machine to turn itself off; gives what it said last."""
        with self.seen:
            self.seen.wait_for(lambda: self.over, seconds)
        if self.process.poll() is None:
            self.kill()
        return any("HR: passed" in line for line in self.lines)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def show(self):
        for line in self.lines:
            if "HR: " in line:
                print("   ", line[line.index("HR: ") + 4:])


def must_pass(machine, what):
    passed = machine.end()
    machine.show()
    if not passed:
        print("\n".join(machine.lines[-40:]))
        sys.exit(f"{what}: failed")


def run(kernel, work, lba):
    def boot(step, **more):
        return Machine(kernel, work, lba, step, **more)

    with open(os.path.join(work, f"store-{lba}.img"), "wb") as file:
        file.truncate(STORE_BYTES)
    start = time.monotonic()
    print(f"logical blocks of {lba} bytes")
    must_pass(boot("first"), "init, import, check, load")
    machine = boot("killed")
    if not machine.wait_for("importing"):
        machine.kill()
        sys.exit("the import did not begin:\n" + "\n".join(machine.lines[-40:]))
    time.sleep(random.Random(lba).uniform(0.02, 0.12))
    machine.kill()
    print("    killed in mid-import" if not machine.wait_for("imported", 0) else "    killed after the import")
    must_pass(boot("after"), "check and import after a kill")
    must_pass(boot("replaced", serial="hr0002"), "the store on another drive")
    print(f"    {time.monotonic() - start:.0f} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--exe", required=True)
    parser.add_argument("--cache", required=True)
    args = parser.parse_args()
    if not shutil.which(QEMU):
        skip(f"{QEMU} is not here (Debian: qemu-system-x86)")
    kernel, busybox = fetch_packages(args.cache)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as work:
        make_initramfs(os.path.join(work, "initramfs"), args.exe, busybox)
        make_data(os.path.join(work, "data.img"), work)
        for lba in (512, 4096):
            run(kernel, work, lba)
    print("both passed")


if __name__ == "__main__":
    main()
