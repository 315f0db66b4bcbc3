#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A file system of one file, "disk", whose reads, writes and flushes fail or hang when told to: fuse_disk.py FOLDER BYTES.

It speaks the kernel's protocol itself (linux/fuse.h), over /dev/fuse; the file lies in memory. Standard input is a line of JSON
per command, each answered by a line: {"fault": "read" | "write", "from": n, "to": n, "errno": e, "seconds": s, "times": k} for what
touches these bytes, {"fault": "flush", ...} for the first flush after a write there (with "lose": what that flush was to make
durable is undone), {"clear": true}, which also lets go what hangs, and {"count": true} for how often faults struck. At the end of
input it unmounts and ends, so that nothing is left hanging when who started it dies; and no hang is longer than 15 seconds.
"""
import ctypes
import errno
import json
import os
import struct
import sys
import threading
import time

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT = 1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26
OPENDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 27, 29, 36, 38, 42
MAX_WRITE = 1 << 20
FLAGS = 1 << 0 | 1 << 5 | 1 << 22  # FUSE_ASYNC_READ, FUSE_BIG_WRITES, FUSE_MAX_PAGES
DIRECT_IO = 1  # FOPEN_DIRECT_IO: each read and each write comes here, none is served by the page cache
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
ROOT, DISK = 1, 2
WORKERS = 6  # more than what hangs at once
LONGEST = 15  # seconds

libc = ctypes.CDLL(None, use_errno=True)


class Fault(Exception):
    pass


class Disk:
    def __init__(self, size):
        self.data = bytearray(size)
        self.lock = threading.Lock()
        self.undo = []  # (offset, what was there) of each write since the last flush
        self.faults = []
        self.struck = 0
        self.let_go = threading.Event()
        self.time = int(time.time())

    def strike(self, kind, pieces):
        """Does what is told for one of these pieces (offset, length), outside the lock; raises Fault if it is an error."""
        with self.lock:
            for fault in self.faults:
                if fault["fault"] == kind and fault["times"] and any(at < fault["to"] and at + n > fault["from"] for at, n in pieces):
                    fault["times"] -= 1
                    self.struck += 1
                    break
            else:
                return
            if fault.get("lose"):
                for at, old in reversed(self.undo):
                    self.data[at:at + len(old)] = old
                self.undo = []
            let_go = self.let_go
        let_go.wait(min(fault.get("seconds", 0), LONGEST))
        if fault.get("errno"):
            raise Fault(fault["errno"])

    def read(self, at, size):
        self.strike("read", [(at, size)])
        with self.lock:
            return bytes(self.data[at:at + size])

    def write(self, at, data):
        self.strike("write", [(at, len(data))])
        with self.lock:
            if at + len(data) > len(self.data):
                raise Fault(errno.ENOSPC)
            self.undo.append((at, bytes(self.data[at:at + len(data)])))
            self.data[at:at + len(data)] = data

    def flush(self):
        with self.lock:
            pieces = [(at, len(old)) for at, old in self.undo]
        self.strike("flush", pieces)
        with self.lock:
            self.undo = self.undo[len(pieces):]


def attributes(disk, node):
    size, mode = (0, 0o40755) if node == ROOT else (len(disk.data), 0o100600)
    return struct.pack("<6Q10I", node, size, size // 512, *[disk.time] * 3, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(disk, opcode, node, body):
    """What is sent back: bytes, or None for what has no answer. An error is a Fault."""
    if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
        return None
    if opcode == INIT:
        return struct.pack("<4IHHIIHHI7I", 7, 31, 1 << 20, FLAGS, 16, 12, MAX_WRITE, 1, MAX_WRITE // 4096, 0, *[0] * 8)
    if opcode == LOOKUP:
        if node != ROOT or body.rstrip(b"\0") != b"disk":
            raise Fault(errno.ENOENT)
        return struct.pack("<4Q2I", DISK, 1, 3600, 3600, 0, 0) + attributes(disk, DISK)
    if opcode in (GETATTR, SETATTR):
        return struct.pack("<Q2I", 3600, 0, 0) + attributes(disk, node)
    if opcode in (OPEN, OPENDIR):
        return struct.pack("<Q2I", 1, DIRECT_IO if opcode == OPEN else 0, 0)
    if opcode == READ:
        return disk.read(*struct.unpack_from("<QI", body, 8))
    if opcode == WRITE:
        at, size = struct.unpack_from("<QI", body, 8)
        disk.write(at, body[40:40 + size])
        return struct.pack("<2I", size, 0)
    if opcode == STATFS:
        return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1, 0, 4096, 255, 4096, 0, *[0] * 6)
    if opcode == FSYNC:
        disk.flush()
    elif opcode not in (FLUSH, RELEASE, RELEASEDIR, DESTROY):
        raise Fault(errno.ENOSYS)
    return b""


def serve(disk, fuse):
    while True:
        try:
            request = os.read(fuse, MAX_WRITE + 65536)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                continue
            return  # ENODEV: unmounted
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        try:
            code, back = 0, answer(disk, opcode, node, request[40:])
        except Fault as fault:
            code, back = -fault.args[0], b""
        if back is not None:
            try:
                os.write(fuse, struct.pack("<IiQ", 16 + len(back), code, unique) + back)
            except OSError:
                pass  # who asked was killed


def command(disk, words):
    with disk.lock:
        if "fault" in words:
            disk.faults.append({"from": 0, "to": 1 << 62, "times": -1, **words})
        elif "clear" in words:
            disk.faults, disk.struck = [], 0
            disk.let_go.set()
            disk.let_go = threading.Event()
        return disk.struck


def main():
    folder, size = sys.argv[1], int(sys.argv[2])
    disk = Disk(size)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        print(f"/dev/fuse: {error.strerror}", flush=True)
        return 1
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"headrace-test", folder.encode(), b"fuse", MS_NOSUID | MS_NODEV, options.encode()):
        print(f"mount of FUSE: {os.strerror(ctypes.get_errno())}", flush=True)
        return 1
    try:
        for _ in range(WORKERS):
            threading.Thread(target=serve, args=(disk, fuse), daemon=True).start()
        print("serving", flush=True)
        for line in sys.stdin:
            print(json.dumps(command(disk, json.loads(line))), flush=True)
    finally:
        libc.umount2(folder.encode(), MNT_DETACH)
        os._exit(0)  # with it the connection ends, and who still waits gets an error


if __name__ == "__main__":
    sys.exit(main())
