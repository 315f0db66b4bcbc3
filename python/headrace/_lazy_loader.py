# SPDX-License-Identifier: Apache-2.0
"""LazyModelLoader: tensors of several files by name, on one device under a memory budget, moved in and out by the caller."""
from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Iterator, Sequence

from headrace import _native as native
from headrace._cache import Cache
from headrace._native import Array, Group, Model, parse_size

Source = str | os.PathLike[str]


class LazyModelLoader:
    """Tensors of several files, each loaded at its first use; what was used longest ago leaves when the budget needs the room.

        loader = headrace.LazyModelLoader(["a.safetensors", "b.safetensors"], memory_budget="8GiB", device="cuda:0")
        array = loader.to_gpu("model.layers.0.mlp.up_proj.weight", stream)

    files: each a file, an index or a folder, as for headrace.open(); each is a model of its own. A name that several of them have
    needs `model`, the number of the file in the list. memory_budget: in bytes or as "8GiB". device: where tensors go; None: "cuda:0"
    if there is a GPU, else "cpu". policy and further options are those of Cache. Good in any thread.
    """

    def __init__(
        self,
        files: Source | Sequence[Source],
        memory_budget: int | str,
        *,
        device: str | None = None,
        policy: str = "lru",
        **options: Any,
    ) -> None:
        self.models: list[Model] = []
        try:
            for source in [files] if isinstance(files, (str, os.PathLike)) else files:
                self.models.append(native.open(source))
            self.cache = Cache(device or _best_device(), parse_size(memory_budget), policy, **options)
        except BaseException:
            for model in self.models:
                model.close()
            raise
        self._holders: dict[str, list[int]] = {}
        for number, model in enumerate(self.models):
            for name in model.names:
                self._holders.setdefault(name, []).append(number)

    def _group(self, name: str, model: int | None) -> Group:
        holders = self._holders.get(name, [])
        if model is None:
            if len(holders) > 1:
                raise ValueError(f"{name!r} is in {len(holders)} of the files: say which by model={holders[0]} or another of {holders}")
            if not holders:
                raise KeyError(name)
            model = holders[0]
        elif model not in holders:
            raise KeyError(f"{name!r} is not in file {model}")
        return self.cache.group(self.models[model], name)

    def get(self, name: str, *, model: int | None = None) -> Array:
        """The tensor, loaded if need be. Waits. It stays in memory as long as the Array, or what shares its memory, lives."""
        return self._array(self._group(name, model), 0)

    def to_gpu(self, name: str, stream: int = 0, *, model: int | None = None) -> Array:
        """get(), such that work queued on a CUDA stream (as int; 1 is the default stream) from now on sees the tensor."""
        if self.cache.device == "cpu":
            raise ValueError('this loader brings tensors to "cpu": make it with device="cuda:0", or use get()')
        return self._array(self._group(name, model), stream)

    def _array(self, group: Group, stream: int) -> Array:
        with self.cache.get(group, None, stream) as lease:
            return lease.tensors[group.names[0]]

    def prefetch(self, name: str, *, model: int | None = None) -> None:
        """Begins to load a tensor, if there is room."""
        self.cache.prefetch(self._group(name, model))

    def evict(self, name: str, *, model: int | None = None) -> int:
        """Lets a tensor go; answers with the bytes that are free by that, 0 if it was not loaded. Error (HR_E_BUSY) if it is in use."""
        return self.cache.evict(self._group(name, model))

    def ensure_memory(self, nbytes: int | str) -> None:
        """Lets tensors go until so much of the budget is free: what was used longest ago first. MemoryError if the rest is in use."""
        wanted, budget = parse_size(nbytes), self.budget
        if wanted > budget:
            raise MemoryError(f"{wanted:,} bytes were asked for, and the whole budget is {budget:,}")
        lacking = wanted - (budget - self.used)
        if lacking > 0:
            self.cache.trim(lacking)
            if self.used > budget - wanted:
                found = self.cache.stats()
                raise MemoryError(f"{wanted:,} bytes cannot be free: {found['pinned_bytes']:,} of {budget:,} are in use")

    @property
    def used(self) -> int:
        """Bytes that the tensors take."""
        return self.cache.used

    @property
    def budget(self) -> int:
        """The most that they may take."""
        return self.cache.budget

    def stats(self, model: int | None = None) -> dict[str, int]:
        """Hits, misses, evictions, bytes and waits, of all or of one of the files."""
        return self.cache.stats(None if model is None else self.models[model])

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    def close(self) -> None:
        """Gives the memory back, but for that of Arrays that are still in use: that, when they are gone."""
        self.cache.let_go()
        for model in self.models:
            model.close()

    def __enter__(self) -> LazyModelLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<headrace.LazyModelLoader: {len(self)} tensors of {len(self.models)} files, {self.cache!r}>"


def _best_device() -> str:
    usable = {name for kind, name, is_usable, _ in native.probe(None) if kind == "device" and is_usable}
    return "cuda:0" if "cuda:0" in usable else "cpu"
