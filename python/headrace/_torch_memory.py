# SPDX-License-Identifier: Apache-2.0
"""Device memory for a Cache or Loader from torch's own allocator, so that torch.cuda.memory_allocated() tells of it too."""
from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

_LARGE = 256 << 20  #: from this budget on, groups are rounded up as torch rounds large blocks


class TorchMemory:
    """alloc and release of a Loader, over torch's caching allocator.

    Each piece is a tensor that is kept here. Dropping it after record_stream() is torch's own way of saying that work queued on a
    stream still uses it. torch keeps what is dropped for the next piece of that size; where that and what is in use would together be
    more than the budget, it has to give it back to the driver first, so that no more than the budget is ever taken from the GPU.
    """

    def __init__(self, device: Any, budget: int | None = None) -> None:
        self.device, self.budget = torch.device(device), budget
        self._lock = threading.Lock()
        self._pieces: dict[int, torch.Tensor] = {}
        self._in_use = 0  # bytes
        self._kept: Counter[int] = Counter()  # by torch, as far as we know: how many pieces of which size

    def alloc(self, nbytes: int, align: int, stream: int) -> int | None:
        """New memory, first used on `stream`."""
        del align  # torch gives multiples of 512
        if self._is_too_much(nbytes):
            torch.cuda.empty_cache()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(stream)), torch.inference_mode(False):
            piece = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        address = int(piece.data_ptr())
        with self._lock:
            self._pieces[address] = piece
            self._in_use += nbytes
        return address

    def release(self, address: int, nbytes: int, stream: int) -> None:
        """Takes memory back that is last used on `stream`."""
        with self._lock:
            piece = self._pieces.pop(address)
            self._in_use -= nbytes
            self._kept[nbytes] += 1
        if stream:
            piece.record_stream(self._stream(stream))

    def _is_too_much(self, nbytes: int) -> bool:
        """Whether torch must give back what it keeps before it gives this; then nothing is kept any more."""
        with self._lock:
            if self._kept[nbytes] > 0:
                self._kept[nbytes] -= 1
                return False
            kept = sum(size * n for size, n in self._kept.items())
            if not kept or self.budget is None or self._in_use + kept + nbytes <= self.budget:
                return False
            self._kept.clear()
            return True

    def _stream(self, stream: int) -> Any:
        """torch's object for a stream as headrace numbers it: 1 is the legacy default stream, which torch calls 0."""
        if not stream:
            return torch.cuda.current_stream(self.device)
        if stream == 1:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)


def allocator(device: Any, budget: int | None = None) -> dict[str, Any]:
    """Options for headrace.Cache() with which torch's allocator gives the memory: none for cpu.

        headrace.Cache("cuda:0", budget="8GiB", **headrace.torch.allocator("cuda:0"))

    budget: the cache's, if it is known. Then what torch keeps of the cache's memory counts, and small caches are not rounded up as
    large ones are.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return {}
    memory = TorchMemory(device, budget)
    return {"alloc": memory.alloc, "release": memory.release, "granularity": granularity_of(device, budget)}


def granularity_of(device: Any, budget: int | None = None) -> int | None:
    """What a group's memory is rounded up to; None on cpu, where headrace's own pool says it."""
    if torch.device(device).type == "cpu":
        return None
    return 512 if budget is not None and budget < _LARGE else 2 << 20
