# SPDX-License-Identifier: Apache-2.0
"""headrace.feed() and headrace.load(): a whole checkpoint in one call."""
from __future__ import annotations

import os
import sys
from typing import Any, Callable, Iterator, Literal, Sequence, Union

from headrace import _convert
from headrace import _native as native
from headrace._native import Array, Loader, Model, TensorInfo

Source = Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]], Model]
Framework = Literal["numpy", "torch", None]

_WINDOW_BYTES = 64 << 20


def feed(
    source: Source,
    device: str = "cpu",
    *,
    names: Sequence[str] | None = None,
    framework: Framework = "numpy",
    **loader_options: Any,
) -> Iterator[tuple[str, Any]]:
    """Loads a checkpoint tensor after tensor: an iterator of (name, tensor), in file order.

    source: what open() takes, or a Model. device: "cpu", "cuda", "cuda:N". names: which; None: all.
    framework: "numpy" (cpu only), "torch", or None for headrace.Array. Further options are those of Loader.

    All headers are checked before the first tensor comes. Every tensor owns its memory, or shares memory that nothing else writes:
    keep it as long as you like. Raises headrace.Error with file, tensor and byte.
    """
    _check(device, framework)
    model = source if isinstance(source, Model) else native.open(source)
    try:
        loader = Loader(device, **loader_options)
    except BaseException:
        if model is not source:
            model.close()
        raise
    return _fed(model, loader, names, framework, model is not source)


def load(
    source: Source,
    device: str = "cpu",
    *,
    names: Sequence[str] | None = None,
    framework: Framework = "numpy",
    progress: bool = False,
    **loader_options: Any,
) -> dict[str, Any]:
    """Loads a checkpoint: a dict of its tensors, in file order. Arguments as for feed(); progress shows the bytes on stderr."""
    model = source if isinstance(source, Model) else native.open(source)
    try:
        pairs = feed(model, device, names=names, framework=framework, **loader_options)
        return dict(_shown(pairs, model, names) if progress else pairs)
    finally:
        if model is not source:
            model.close()


def _check(device: str, framework: Framework) -> None:
    if framework not in ("numpy", "torch", None):
        raise ValueError(f'framework is {framework!r}: use "numpy", "torch", or None for headrace.Array')
    if framework == "numpy" and device != "cpu":
        raise ValueError(f'numpy cannot use memory on {device}: use framework="torch", or None for headrace.Array (DLPack)')


def _fed(
    model: Model, loader: Loader, names: Sequence[str] | None, framework: Framework, owns_model: bool
) -> Iterator[tuple[str, Any]]:
    try:
        if framework == "torch" and loader.device != "cpu":
            yield from _torch_on_gpu(model, loader, names)
            return
        convert: Callable[[Array], Any] | None = None
        if framework is not None:
            convert = _convert.to_torch if framework == "torch" else _convert.to_numpy
        with loader.feed(model, names) as tensors:
            for info, array in tensors:
                yield info.name, convert(array) if convert else array
    finally:
        loader.close()
        if owns_model:
            model.close()


def _windows(tensors: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """The same tensors in groups: as many as fit into a window, at least one."""
    group: list[TensorInfo] = []
    room = _WINDOW_BYTES
    for tensor in tensors:
        if group and tensor.nbytes > room:
            yield group
            group, room = [], _WINDOW_BYTES
        group.append(tensor)
        room -= tensor.nbytes
    if group:
        yield group


def _torch_on_gpu(model: Model, loader: Loader, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Into memory of torch's own allocator, ordered with its current stream; the next window is on its way while one is handed out."""
    import torch

    infos = model.tensors if names is None else sorted((model.tensor(name) for name in names), key=lambda info: info.index)
    kinds = [_convert.torch_dtype_and_shape(info.dtype, info.shape) for info in infos]
    kind = iter(kinds)
    device = torch.device(loader.device)

    def begin(group: list[TensorInfo]) -> tuple[list[tuple[str, Any]], native.Job]:
        pairs = []
        for info in group:
            dtype, shape = next(kind)
            pairs.append((info.name, torch.empty(shape, dtype=dtype, device=device)))
        stream = torch.cuda.current_stream(device).cuda_stream or 1
        reads = [(info.index, 0, None, tensor.data_ptr(), info.nbytes) for info, (_, tensor) in zip(group, pairs)]
        return pairs, loader.start(model, reads, keep=pairs, wait_stream=stream, signal_stream=stream)

    waiting: tuple[list[tuple[str, Any]], native.Job] | None = None
    for group in _windows(infos):
        started = begin(group)
        if waiting:
            yield from _arrived(*waiting)
        waiting = started
    if waiting:
        yield from _arrived(*waiting)


def _arrived(pairs: list[tuple[str, Any]], job: native.Job) -> Iterator[tuple[str, Any]]:
    job.wait()
    job.close()
    yield from pairs


def _shown(pairs: Iterator[tuple[str, Any]], model: Model, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Passes tensors on, with a line on stderr that says how far it is."""
    sizes = {info.name: info.nbytes for info in model.tensors}
    total = sum(sizes.values()) if names is None else sum(sizes[name] for name in names)
    done = shown = 0
    for name, tensor in pairs:
        done += sizes[name]
        percent = 100 if done == total else 100 * done // total
        if percent != shown:
            shown = percent
            sys.stderr.write(f"\rheadrace: {percent:3d} % of {total / 1e9:.2f} GB")
            sys.stderr.flush()
        yield name, tensor
    if shown:
        sys.stderr.write("\n")
