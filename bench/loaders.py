#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One load by one peer, in a process of its own: loaders.py PEER DEVICE FOLDER [all]. Started by peers.py.

Before the clock starts: imports, the CUDA context, one allocation. Then "ready" is said and "go" waited for. Timed is
everything from there until every tensor of the checkpoint is on the device and kept: opening, headers, the loader's own
set-up and buffers. After that the bytes of some tensors ("all": of each) are compared with a plain read of the file.

Each peer is used as its own documentation says is fast, with its defaults otherwise; nothing of the garbage collector
or of torch is tuned for anybody. Answers are lines of JSON on the descriptor that was standard output; what the
libraries print goes to standard error.
"""
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time

import model_files

CHECKED_TENSORS = 64


class Clock:
    """When the load began and when its first tensor was there, on the device's own time line where it has one."""

    def __init__(self, torch, device):
        self.torch = torch
        self.device = device
        self.on_cuda = device.startswith("cuda")
        self.start_event = self._event()
        self.first_event = None
        self.first_seconds = None
        self.start = time.perf_counter()

    def _event(self):
        if not self.on_cuda:
            return None
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def tensor(self):
        """Called with each tensor that is handed out (or once with the first batch of them)."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.start
            self.first_event = self._event()

    def synchronize(self):
        if self.on_cuda:
            self.torch.cuda.synchronize()

    def first(self):
        """Handing out may come before the copy is done; the event then says when it was."""
        if self.first_seconds is None or not self.on_cuda:
            return self.first_seconds
        return max(self.first_seconds, self.start_event.elapsed_time(self.first_event) / 1000)


# ---- the peers: each returns {name: tensor}, and whatever else must live as long as the tensors do ----

def load_file(paths, device, clock):
    from safetensors.torch import load_file as load
    tensors = {}
    for path in paths:
        part = load(path, device=device)
        if device == "cpu":  # these are views of a mapping, nothing was read yet
            part = {name: tensor.clone() for name, tensor in part.items()}
        clock.tensor()
        tensors.update(part)
    return tensors, None


def open_and_to(paths, device, clock):
    from safetensors import safe_open
    tensors = {}
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                host = file.get_tensor(name)
                tensors[name] = host.clone() if device == "cpu" else host.to(device)
                clock.tensor()
    return tensors, None


def prefetch(paths, device, clock):
    from safetensors import safe_open
    tensors = {}
    for path in paths:
        with safe_open(path, framework="pt", device=device) as file, file.prefetch() as loader:
            for name, tensor in loader:
                clock.tensor()
                tensors[name] = tensor
    return tensors, None


def prefetch_all(paths, device, clock):
    from safetensors import safe_open
    tensors = {}
    files = [safe_open(path, framework="pt", device=device) for path in paths]
    loaders = [file.prefetch() for file in files]
    for loader in loaders:
        for name, tensor in loader:
            clock.tensor()
            tensors[name] = tensor
        loader.close()
    return tensors, None


def fast(paths, device, clock):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: list(paths)})
    buffers = loader.copy_files_to_device()
    tensors = {}
    for name in buffers.key_to_rank_lidx:
        tensors[name] = buffers.get_tensor(name)
        clock.tensor()
    return tensors, (loader, buffers)


def fast_parallel(paths, device, clock):
    from fastsafetensors import ParallelLoader
    loader = ParallelLoader(None, list(paths), use_tqdm_on_load=False, device=device, nogds=True)
    tensors = {}
    for name, tensor in loader.iterate_weights():
        clock.tensor()
        tensors[name] = tensor
    return tensors, loader


def _instant(paths, device, clock, **options):
    from instanttensor import safe_open
    tensors = {}
    with safe_open(list(paths), framework="pt", device=device, copy=True, **options) as file:
        for name, tensor in file.tensors():
            clock.tensor()
            tensors[name] = tensor
    return tensors, None


def instant_buffered(paths, device, clock):
    from instanttensor import BackendPolicy
    return _instant(paths, device, clock, backend=BackendPolicy.BUFFERED)


def instant(paths, device, clock):
    return _instant(paths, device, clock)


def runai(paths, device, clock):
    from runai_model_streamer import SafetensorsStreamer
    tensors = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths), device=device)
        for name, tensor in streamer.get_tensors():
            clock.tensor()
            tensors[name] = tensor
    return tensors, None


# ---- headrace, as its own documentation says ----

def headrace_load(paths, device, clock, **options):
    from headrace.torch import load_file as load
    tensors = load(list(paths), device=device, **options)
    clock.tensor()
    return tensors, None


def headrace_own(paths, device, clock):
    return headrace_load(paths, device, clock, share_blocks=False)


def headrace_bypass(paths, device, clock):
    return headrace_load(paths, device, clock, caching="bypass")


def headrace_feed(paths, device, clock):
    import headrace
    tensors = {}
    for name, tensor in headrace.feed(list(paths), device, framework="torch"):
        clock.tensor()
        tensors[name] = tensor
    return tensors, None


# name: (how, distribution, modules that are imported before the clock starts, what the table says)
PEERS = {
    "headrace-torch": (headrace_load, "headrace", ["headrace.torch", "headrace._on_gpu"], "headrace.torch.load_file"),
    "headrace-torch-bypass": (headrace_bypass, "headrace", ["headrace.torch", "headrace._on_gpu"], "load_file(caching=bypass)"),
    "headrace-torch-feed": (headrace_feed, "headrace", ["headrace._load", "headrace._on_gpu"], "headrace.feed, all kept"),
    "headrace-torch-own": (headrace_own, "headrace", ["headrace.torch", "headrace._on_gpu"], "load_file(share_blocks=False)"),
    "safetensors": (load_file, "safetensors", ["safetensors.torch"], "load_file(device)"),
    "safetensors-to": (open_and_to, "safetensors", ["safetensors"], "safe_open, then .to(device)"),
    "safetensors-prefetch": (prefetch, "safetensors", ["safetensors"], "prefetch, file by file"),
    "safetensors-prefetch-all": (prefetch_all, "safetensors", ["safetensors"], "prefetch, all files at once"),
    "fastsafetensors": (fast, "fastsafetensors", ["fastsafetensors"], "loader, no GDS"),
    "fastsafetensors-parallel": (fast_parallel, "fastsafetensors", ["fastsafetensors"], "ParallelLoader, no GDS"),
    "instanttensor-buffered": (instant_buffered, "instanttensor", ["instanttensor"], "buffered, copy=True"),
    "instanttensor": (instant, "instanttensor", ["instanttensor"], "default (direct), copy=True"),
    "runai": (runai, "runai-model-streamer", ["runai_model_streamer"], "SafetensorsStreamer"),
}
WANT_CUDA = {"safetensors-prefetch", "safetensors-prefetch-all", "instanttensor-buffered", "instanttensor"}


# ---- accounting ----

def status_bytes(field):
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak():
    """Sets VmHWM back to what is resident now; without the right to, it stays and the figure is a lower bound."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass
    return status_bytes("VmHWM")


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def device_free(torch, device):
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else None


def version(distribution):
    """headrace may be a folder that is only on the path."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return importlib.import_module(distribution).__version__


def check(torch, paths, tensors, check_all):
    """Names of all tensors, bytes of some, or of all. Returns what is wrong, in words."""
    wrong = []
    left = dict.fromkeys(tensors)
    for path in paths:
        entries = model_files.tensors(path)
        wrong += [f"{name} is missing" for name, _, _ in entries if name not in tensors]
        for name, _, _ in entries:
            left.pop(name, None)
        with open(path, "rb") as file:
            some = entries if check_all else model_files.sample(entries, CHECKED_TENSORS // len(paths) + 1)
            for name, offset, size in some:
                if name not in tensors or size == 0:
                    continue
                file.seek(offset)
                there = tensors[name].detach().flatten().view(torch.uint8).cpu().numpy().tobytes()
                if there != file.read(size):
                    wrong.append(f"{name} has other bytes than its file")
    return wrong + [f"{name} is in no file" for name in left]


def run(peer, device, paths, check_all, say):
    how, distribution, modules, _ = PEERS[peer]
    import torch
    if peer in WANT_CUDA and not device.startswith("cuda"):
        raise RuntimeError("loads to CUDA devices only")
    for module in modules:
        importlib.import_module(module)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    versions = {distribution: version(distribution), "torch": torch.__version__}
    before_peak = reset_peak()
    before_free = device_free(torch, device)
    say(event="ready", versions=versions)
    if sys.stdin.readline().strip() != "go":
        return
    before_cpu = cpu_seconds()
    clock = Clock(torch, device)
    tensors, kept = how(paths, device, clock)
    clock.synchronize()
    seconds = time.perf_counter() - clock.start
    cpu = cpu_seconds() - before_cpu
    peak = status_bytes("VmHWM")
    free = device_free(torch, device)
    say(event="loaded", seconds=seconds, cpu_seconds=cpu, first_tensor_seconds=clock.first(), tensors=len(tensors),
        host_peak_bytes=peak - before_peak, device_taken_bytes=None if free is None else before_free - free)
    say(event="checked", wrong=check(torch, paths, tensors, check_all))
    del kept


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**what):
        print(json.dumps(what), file=answers, flush=True)

    peer, device, folder, *more = sys.argv[1:]
    try:
        run(peer, device, model_files.names(folder), more == ["all"], say)
    except Exception as error:  # whatever a peer throws is its result
        say(event="failed", error=f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # a peer that hangs at exit, or takes long, has had its time taken already


if __name__ == "__main__":
    main()
