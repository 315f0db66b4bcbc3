# SPDX-License-Identifier: Apache-2.0
"""Device memory for a Cache or Loader from torch's own allocator, so that torch.cuda.memory_allocated() tells of it too."""
from __future__ import annotations

from typing import Any

import torch

_LARGE = 256 << 20  #: from this budget on, groups are rounded up as torch rounds large blocks


class TorchMemory:
    """alloc and release of a Loader, over torch's caching allocator.

    Each piece is a tensor that is kept here. Dropping it after record_stream() is torch's own way of saying that work queued on a
    stream still uses it.
    """

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self._pieces: dict[int, torch.Tensor] = {}

    def alloc(self, nbytes: int, align: int, stream: int) -> int | None:
        """New memory, first used on `stream`."""
        del align  # torch gives multiples of 512
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(stream)), torch.inference_mode(False):
            piece = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        address = int(piece.data_ptr())
        self._pieces[address] = piece
        return address

    def release(self, address: int, nbytes: int, stream: int) -> None:
        """Takes memory back that is last used on `stream`."""
        del nbytes
        piece = self._pieces.pop(address)
        if stream:
            piece.record_stream(self._stream(stream))

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

    budget: if it is known, small caches are not rounded up as large ones are.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return {}
    memory = TorchMemory(device)
    return {"alloc": memory.alloc, "release": memory.release, "granularity": granularity_of(device, budget)}


def granularity_of(device: Any, budget: int | None = None) -> int | None:
    """What a group's memory is rounded up to; None on cpu, where headrace's own pool says it."""
    if torch.device(device).type == "cpu":
        return None
    return 512 if budget is not None and budget < _LARGE else 2 << 20
