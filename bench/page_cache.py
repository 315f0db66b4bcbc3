# SPDX-License-Identifier: Apache-2.0
"""Puts files into the page cache or out of it, and asks the kernel whether that succeeded.

Nobody's word is taken for it: cachestat (Linux 6.5) counts a file's pages in the cache, mincore does on older kernels.
"""
import ctypes
import mmap
import os

SYS_CACHESTAT = 451  # the same number on every architecture
PAGE = mmap.PAGESIZE
TRIES = 5
TOLERATED = 0.001  # of all pages: what other processes may do to a file in between

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Cachestat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def _by_cachestat(fd):
    whole = _Range(0, 0)
    stat = _Cachestat()
    if _libc.syscall(SYS_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(stat), 0):
        return None
    return stat.cached


def _by_mincore(fd, size):
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as area:
        flags = (ctypes.c_ubyte * (-(-size // PAGE)))()
        first = ctypes.c_char.from_buffer(area)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), flags)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(flag & 1 for flag in bytes(flags))


def way():
    """Which call is asked on this machine."""
    with open(__file__, "rb") as file:
        return "cachestat" if _by_cachestat(file.fileno()) is not None else "mincore"


def resident(paths):
    """The share of these files' pages that is in the page cache."""
    there = pages = 0
    for path in paths:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            cached = _by_cachestat(file.fileno())
            there += _by_mincore(file.fileno(), size) if cached is None else cached
            pages += -(-size // PAGE)
    return there / pages


def _drop(paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read(paths):
    block = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def prepare(paths, state):
    """Makes files "cold" or "warm"; returns the share that is resident and whether that is what was wanted."""
    for tries_left in reversed(range(TRIES)):
        share = resident(paths)
        good = share <= TOLERATED if state == "cold" else share >= 1 - TOLERATED
        if good or not tries_left:
            return share, good
        (_drop if state == "cold" else _read)(paths)


def file_system(path):
    """Type of the file system that a path is on."""
    best = ("", "unknown")
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, where, kind = line.split()[:3]
            inside = os.path.realpath(path) == where or os.path.realpath(path).startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best[0]):
                best = (where, kind)
    return best[1]
