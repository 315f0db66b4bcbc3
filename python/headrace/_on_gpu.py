# SPDX-License-Identifier: Apache-2.0
"""Whole tensors into memory of torch's own allocator, on a GPU, ordered with torch's current stream.

Making a tensor costs torch some microseconds, and with many small ones that would be most of the time. So small tensors that follow
one another are views of shared blocks, cut by as few calls as there are kinds of them. What always holds:

- What torch cannot hold is told before anything is read.
- Nothing but the job writes a block, and it is kept alive by the job and by each of its tensors.
- Some windows of tensors are on their way while one is handed out.
- Memory is taken and jobs are started on the caller's thread, since torch's current device and stream belong to a thread. To cut a
  block needs neither: torch does most of it without the interpreter's lock, so where there are many tensors threads help.
"""
from __future__ import annotations

import gc
import time
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Iterator, Sequence

from headrace import _convert
from headrace import _native as native

SMALL_BYTES = 1 << 20  #: from here on a tensor has memory of its own
BLOCK_BYTES = 16 << 20  #: what small ones share at most
WINDOW_BYTES = 64 << 20  #: what one job fetches, or one large tensor
AHEAD_BYTES = 128 << 20  #: on their way at most, unless two windows are more
KEPT_AHEAD_BYTES = 384 << 20  #: ... where all are kept: so that taking memory does not keep the link waiting
CUTTERS = 2  #: threads that cut blocks, from so many tensors on
CUTTERS_FROM = 4096

Made = tuple[list[str], "Future[list[Any]] | list[Any]"]  #: names and tensors of one block, cut or being cut
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
        for block_names, cut in cuts(model, loader, names, ahead_bytes=KEPT_AHEAD_BYTES, **how):
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
    ahead_bytes: int = 0,
    check: Check | None = None,
) -> Iterator[Cut]:
    """The tensors block by block. check(dtype, shape, name): raises what cannot be held, before anything is read."""
    blocks = model.blocks(names, small_bytes=SMALL_BYTES if share_blocks else 0, block_bytes=block_bytes)
    for _, block_names, _, runs in blocks:
        for dtype, shape, _, _, at, _, _ in runs:
            if check:
                check(dtype, shape, block_names[at])
            _convert.torch_dtype_and_shape(dtype, shape)
    many = sum(len(block[1]) for block in blocks) >= CUTTERS_FROM
    windows = _windows(blocks, window_bytes or WINDOW_BYTES)
    return _arriving(model, loader, windows, ahead_bytes or AHEAD_BYTES, CUTTERS if many else 0)


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


def _arriving(
    model: native.Model, loader: native.Loader, windows: Iterator[list[native.Block]], most_bytes: int, n_cutters: int
) -> Iterator[Cut]:
    ahead: deque[tuple[int, deque[Made], native.Job | None]] = deque()
    ahead_bytes = 0
    cutters: ContextManager[Executor | None] = ThreadPoolExecutor(n_cutters) if n_cutters else nullcontext()
    with cutters as pool:
        try:
            for window in windows:
                n_bytes = sum(block[0] for block in window)
                while len(ahead) > 1 and ahead_bytes + n_bytes > most_bytes:
                    ahead_bytes -= ahead[0][0]
                    yield from _arrived(*ahead.popleft()[1:])
                ahead.append((n_bytes, *_start(model, loader, window, pool)))
                ahead_bytes += n_bytes
            while ahead:
                yield from _arrived(*ahead.popleft()[1:])
        finally:
            for _, _, job in ahead:
                if job is not None:
                    job.close()


def _start(
    model: native.Model, loader: native.Loader, window: list[native.Block], pool: Executor | None
) -> tuple[deque[Made], native.Job | None]:
    """Starts the window's reads first: cutting its blocks need not keep the link waiting."""
    import torch

    device = torch.device(loader.device)
    memory = [_memory(torch, n_bytes, names, runs, device) for n_bytes, names, _, runs in window]
    reads = [(places, whole.data_ptr(), n_bytes) for (n_bytes, _, places, _), whole in zip(window, memory) if places]
    job = None
    if reads:
        stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream or 1
        job = loader.start(model, reads, keep=memory, wait_stream=stream, signal_stream=stream)
    made: deque[Made] = deque()
    for (_, names, _, runs), whole in zip(window, memory):
        if len(names) == 1:
            made.append((names, [whole]))
        else:
            made.append((names, pool.submit(_cut, whole, len(names), runs) if pool else _cut(whole, len(names), runs)))
    return made, job


def _memory(torch: Any, n_bytes: int, names: list[str], runs: list[native.Run], device: Any) -> Any:
    """New memory for a block: the tensor itself where there is only one."""
    if len(names) > 1:
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    dtype, shape = _convert.torch_dtype_and_shape(*runs[0][:2])
    return torch.empty(shape, dtype=dtype, device=device)


def _cut(memory: Any, n: int, runs: list[native.Run]) -> list[Any]:
    cut: list[Any] = [None] * n
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
    return cut


def _arrived(made: deque[Made], job: native.Job | None) -> Iterator[Cut]:
    if job is not None:
        try:
            job.wait()
        finally:
            job.close()
    job = None  # it keeps the memory alive
    while made:
        names, cut = made.popleft()
        yield names, cut.result() if isinstance(cut, Future) else cut
        del cut
