# SPDX-License-Identifier: Apache-2.0
"""Watches memory from outside of the process that is measured, the same for every peer.

Device memory is what NVML says is in use on the whole GPU; host memory is what the whole machine has in use beside the
page cache, which also sees pages that a driver pinned and that no process's resident set shows. Both are the whole
machine's: other work on it shows up in them.
"""
import ctypes
import os
import threading
import time

PERIOD_SECONDS = 0.004


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpu:
    """One GPU through NVML; without NVML, or for the device "cpu", it has no figures and says so in `why`."""

    def __init__(self, device):
        self.handle = None
        self.why = "not a CUDA device"
        if not device.startswith("cuda"):
            return
        try:
            self._open(int(device.partition(":")[2] or 0))
        except OSError as error:
            self.why = str(error)

    def _open(self, number):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        visible = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
        if number < len(visible):
            number = visible[number]
        handle = ctypes.c_void_p()
        status = self.nvml.nvmlInit_v2()
        if status == 0 and str(number).isdigit():
            status = self.nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(number)), ctypes.byref(handle))
        elif status == 0:
            status = self.nvml.nvmlDeviceGetHandleByUUID(str(number).encode(), ctypes.byref(handle))
        if status:
            raise OSError(f"NVML gave error {status}")
        self.handle = handle
        self.used()

    def used(self):
        if self.handle is None:
            return None
        info = _MemoryInfo()
        status = self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(info))
        if status:
            self.handle = None
            raise OSError(f"NVML gave error {status}")
        return info.used

    def _text(self, call, *args):
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if call(*args, text, ctypes.c_uint(96)) == 0 else "unknown"

    def facts(self):
        if self.handle is None:
            return {"gpu": "none", "driver": "none", "gpu_memory_seen_by": self.why}
        return {"gpu": self._text(self.nvml.nvmlDeviceGetName, self.handle),
                "driver": self._text(self.nvml.nvmlSystemGetDriverVersion), "gpu_memory_seen_by": "NVML"}


def host_used():
    """Memory in use on this machine without what can be dropped: caches, but not shared memory, are left out."""
    kib = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, value = line.split(":")
            kib[name] = int(value.split()[0])
    free = kib["MemFree"] + kib["Buffers"] + kib["Cached"] + kib["SReclaimable"] - kib["Shmem"]
    return (kib["MemTotal"] - free) * 1024


class Sampler:
    """Peaks of both memories between start() and stop(), as bytes above what was in use at start()."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.thread = None

    def start(self):
        self.base_gpu = self.peak_gpu = self.gpu.used()
        self.base_host = self.peak_host = host_used()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _look(self):
        used = self.gpu.used()
        if used is not None and self.peak_gpu is not None:
            self.peak_gpu = max(self.peak_gpu, used)
        self.peak_host = max(self.peak_host, host_used())

    def _watch(self):
        while not self.stopping.is_set():
            try:
                self._look()
            except OSError:
                self.peak_gpu = None
            time.sleep(PERIOD_SECONDS)

    def stop(self):
        """(device bytes or None, host bytes)"""
        if self.thread is None:
            return None, 0
        self.stopping.set()
        self.thread.join()
        self.thread = None
        gpu = None if self.peak_gpu is None or self.base_gpu is None else self.peak_gpu - self.base_gpu
        return gpu, self.peak_host - self.base_host
