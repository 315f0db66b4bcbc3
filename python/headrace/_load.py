# SPDX-License-Identifier: Apache-2.0
"""headrace.feed() and headrace.load(): a whole checkpoint in one call."""
from __future__ import annotations

import os
import sys
from typing import Any, Callable, Iterator, Literal, Sequence, Union

from headrace import _convert
from headrace import _native as native
from headrace._native import Array, Loader, Model

Source = Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]], Model]
Framework = Literal["numpy", "torch", None]


def feed(
    source: Source,
    device: str = "cpu",
    *,
    names: Sequence[str] | None = None,
    framework: Framework = "numpy",
    share_blocks: bool = True,
    map: bool = False,
    ugds: str | None = None,
    **loader_options: Any,
) -> Iterator[tuple[str, Any]]:
    """Loads a checkpoint tensor after tensor: an iterator of (name, tensor), in file order.

    source: what open() takes, or a Model. device: "cpu", "cuda", "cuda:N". names: which; None: all.
    framework: "numpy" (cpu only), "torch", or None for headrace.Array. Further options are those of Loader.
    share_blocks: torch tensors on a GPU that are smaller than 1 MiB and follow one another are views of blocks of up to 16 MiB, which
    live as long as any of their tensors does; False: each has memory of its own, which takes longer with very many.
    map: on cpu, tensors in place, over the page cache's own pages, with nothing read or copied (Model.map). They may only be read: a
    write ends the process, and so does touching what somebody cut off the file.

    ugds: the node of a disk that belongs to uGDS ("/dev/ugds_drv0"), for a store's exported manifest ("store:FILE.json#MODEL"); to a
    GPU by engine "ugds" then, unless another is named.

    All headers are checked before the first tensor comes. Every tensor owns its memory, or shares memory that nothing else writes:
    keep it as long as you like. Raises headrace.Error with file, tensor and byte.
    """
    _check(device, framework)
    if map and (device != "cpu" or loader_options):
        raise ValueError("map=True gives tensors of files in place: on cpu, and without options of a loader")
    model = _opened(source, ugds)
    if map:
        return _mapped(model, names, framework, model is not source)
    try:
        loader = Loader(device, **_with_engine(device, ugds, loader_options))
    except BaseException:
        if model is not source:
            model.close()
        raise
    return _fed(model, loader, names, framework, model is not source, share_blocks)


def load(
    source: Source,
    device: str = "cpu",
    *,
    names: Sequence[str] | None = None,
    framework: Framework = "numpy",
    progress: bool = False,
    ugds: str | None = None,
    **loader_options: Any,
) -> dict[str, Any]:
    """Loads a checkpoint: a dict of its tensors, in file order. Arguments as for feed(); progress shows the bytes on stderr."""
    model = _opened(source, ugds)
    loader_options = _with_engine(device, ugds, loader_options)
    try:
        if framework == "torch" and device != "cpu" and not progress:
            return _gathered_on_gpu(model, device, names, **loader_options)
        pairs = feed(model, device, names=names, framework=framework, **loader_options)
        return dict(_shown(pairs, model, names) if progress else pairs)
    finally:
        if model is not source:
            model.close()


def _opened(source: Source, ugds: str | None) -> Model:
    if not isinstance(source, Model):
        return native.open(source, ugds=ugds)
    if ugds is not None:
        raise ValueError("the model is open already: give ugds to headrace.open()")
    return source


def _with_engine(device: str, ugds: str | None, loader_options: dict[str, Any]) -> dict[str, Any]:
    """What is read through uGDS goes straight to a GPU, unless another engine is named."""
    if ugds is None or device == "cpu" or loader_options.get("engine") is not None:
        return loader_options
    return {**loader_options, "engine": "ugds"}


def _check(device: str, framework: Framework) -> None:
    if framework not in ("numpy", "torch", None):
        raise ValueError(f'framework is {framework!r}: use "numpy", "torch", or None for headrace.Array')
    if framework == "numpy" and device != "cpu":
        raise ValueError(f'numpy cannot use memory on {device}: use framework="torch", or None for headrace.Array (DLPack)')


def _convert_to(framework: Framework) -> Callable[[Array], Any]:
    if framework is None:
        return lambda array: array
    return _convert.to_torch if framework == "torch" else _convert.to_numpy


def _mapped(model: Model, names: Sequence[str] | None, framework: Framework, owns_model: bool) -> Iterator[tuple[str, Any]]:
    convert = _convert_to(framework)
    try:
        infos = model.tensors if names is None else sorted((model.tensor(name) for name in names), key=lambda info: info.index)
        for info in infos:
            yield info.name, convert(model.map(info.index))
    finally:
        if owns_model:
            model.close()


def _fed(
    model: Model, loader: Loader, names: Sequence[str] | None, framework: Framework, owns_model: bool, share_blocks: bool
) -> Iterator[tuple[str, Any]]:
    try:
        if framework == "torch" and loader.device != "cpu":
            from headrace import _on_gpu

            yield from _on_gpu.tensors(model, loader, _in_file_order(model, names), share_blocks=share_blocks)
            return
        convert = _convert_to(framework)
        with loader.feed(model, names) as tensors:
            for info, array in tensors:
                yield info.name, convert(array)
    finally:
        loader.close()
        if owns_model:
            model.close()


def _gathered_on_gpu(
    model: Model, device: str, names: Sequence[str] | None, share_blocks: bool = True, **loader_options: Any
) -> dict[str, Any]:
    from headrace import _on_gpu

    with Loader(device, **loader_options) as loader:
        return _on_gpu.gathered(model, loader, _in_file_order(model, names), share_blocks=share_blocks)


def _in_file_order(model: Model, names: Sequence[str] | None) -> list[int] | None:
    return None if names is None else sorted(model.tensor(name).index for name in names)


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
