# SPDX-License-Identifier: Apache-2.0
"""Whole tensors into memory of torch's own allocator, on a GPU, ordered with torch's current stream.

Making a tensor costs torch some microseconds, and with many small ones that would be most of the time. So small tensors that follow
one another are views of shared blocks, cut by as few calls as there are kinds of them. What always holds:

- What torch cannot hold is told before anything is read.
- Nothing but the job writes a block, and it is kept alive by the job and by each of its tensors.
- Some windows of tensors are on their way while one is handed out.
"""
from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any, Callable, Iterator, Sequence

from headrace import _convert
from headrace import _native as native

SMALL_BYTES = 1 << 20  #: from here on a tensor has memory of its own
BLOCK_BYTES = 16 << 20  #: what small ones share at most
WINDOW_BYTES = 32 << 20  #: what one job fetches, or one large tensor
WINDOWS_AHEAD = 2

Cut = tuple[list[str], list[Any]]  #: names and tensors of one block
Pairs = Iterator[tuple[str, Any]]
Check = Callable[[str, tuple[int, ...], str], None]

NO_COLLECTION_SECONDS = 0.25


def tensors(
    model: native.Model, loader: native.Loader, names: Sequence[str | int] | None = None, **how: Any
) -> Pairs:
    """Pairs (name, tensor) in the order of `names`, or in file order. The rest as for cuts()."""
    return _flat(cuts(model, loader, names, **how))


def gathered(
    model: native.Model, loader: native.Loader, names: Sequence[str | int] | None = None, **how: Any
) -> dict[str, Any]:
    """All of them as a dict.

    Nothing here is garbage, but thousands of new tensors would have the collector search all that torch ever made, which takes as
    long as loading them. So it is held back, for a quarter of a second at most.
    """
    found: dict[str, Any] = {}
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        since = time.monotonic()
        for block_names, cut in cuts(model, loader, names, **how):
            found.update(zip(block_names, cut))
            if was_enabled and time.monotonic() - since > NO_COLLECTION_SECONDS:
                gc.enable()
                since = _moment()
                gc.disable()
    finally:
        if was_enabled:
            gc.enable()
    return found


def _moment() -> float:
    """Now. Making a function is counted by the collector, and calling it is where it does what is due."""

    def now() -> float:
        return time.monotonic()

    return now()


def cuts(
    model: native.Model,
    loader: native.Loader,
    names: Sequence[str | int] | None = None,
    *,
    share_blocks: bool = True,
    block_bytes: int = BLOCK_BYTES,
    window_bytes: int = 0,
    check: Check | None = None,
) -> Iterator[Cut]:
    """The tensors block by block. check(dtype, shape, name): raises what cannot be held, before anything is read."""
    blocks = model.blocks(names, small_bytes=SMALL_BYTES if share_blocks else 0, block_bytes=block_bytes)
    for _, block_names, _, runs in blocks:
        for dtype, shape, _, _, at, _, _ in runs:
            if check:
                check(dtype, shape, block_names[at])
            _convert.torch_dtype_and_shape(dtype, shape)
    return _arriving(model, loader, _windows(blocks, window_bytes or WINDOW_BYTES))


def _flat(blocks: Iterator[Cut]) -> Pairs:
    for names, cut in blocks:
        yield from zip(names, cut)
        del names, cut


def _windows(blocks: list[native.Block], window_bytes: int) -> Iterator[list[native.Block]]:
    """The same blocks in groups: as many as fit into a window, at least one."""
    group: list[native.Block] = []
    room = window_bytes
    for block in blocks:
        if group and block[0] > room:
            yield group
            group, room = [], window_bytes
        group.append(block)
        room -= block[0]
    if group:
        yield group


def _arriving(model: native.Model, loader: native.Loader, windows: Iterator[list[native.Block]]) -> Iterator[Cut]:
    ahead: deque[tuple[deque[Cut], native.Job | None]] = deque()
    try:
        for window in windows:
            ahead.append(_start(model, loader, window))
            if len(ahead) > WINDOWS_AHEAD:
                yield from _arrived(*ahead.popleft())
        while ahead:
            yield from _arrived(*ahead.popleft())
    finally:
        for _, job in ahead:
            if job is not None:
                job.close()


def _start(model: native.Model, loader: native.Loader, window: list[native.Block]) -> tuple[deque[Cut], native.Job | None]:
    import torch

    device = torch.device(loader.device)
    made: deque[Cut] = deque()
    reads: list[tuple[bytes, int, int]] = []
    for n_bytes, names, places, runs in window:
        address, cut = _made(torch, n_bytes, names, runs, device)
        made.append((names, cut))
        if places:
            reads.append((places, address, n_bytes))
    if not reads:
        return made, None
    stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream or 1
    return made, loader.start(model, reads, keep=list(made), wait_stream=stream, signal_stream=stream)


def _made(torch: Any, n_bytes: int, names: list[str], runs: list[native.Run], device: Any) -> tuple[int, list[Any]]:
    """New memory for a block: its address, and the tensors there."""
    if len(names) == 1:
        dtype, shape = _convert.torch_dtype_and_shape(*runs[0][:2])
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.data_ptr(), [tensor]
    memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    cut: list[Any] = [None] * len(names)
    typed: dict[str, Any] = {}
    for kind, full_shape, first, step, at, stride, count in runs:
        dtype, shape = _convert.torch_dtype_and_shape(kind, full_shape)
        flat = typed.get(kind)
        if flat is None:
            flat = typed[kind] = memory.view(dtype)
        item = flat.element_size()
        strides, reach = [], 1
        for size in reversed(shape):
            strides.append(reach)
            reach *= size
        every = flat.as_strided((count, *shape), (step // item, *reversed(strides)), first // item)
        cut[at : at + (count - 1) * stride + 1 : stride] = every.unbind(0)
    return memory.data_ptr(), cut


def _arrived(made: deque[Cut], job: native.Job | None) -> Iterator[Cut]:
    if job is not None:
        try:
            job.wait()
        finally:
            job.close()
    job = None  # it keeps the tensors alive
    while made:
        yield made.popleft()
