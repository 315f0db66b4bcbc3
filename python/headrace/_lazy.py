# SPDX-License-Identifier: Apache-2.0
"""LazyModel: a checkpoint whose weights come into memory when they are used, and leave when the budget needs the room.

With torch, transformers and a config.json it is the checkpoint's model (_lazy_torch); otherwise it is the tree of its tensors.
"""
from __future__ import annotations

import importlib.util
import os
from types import TracebackType
from typing import Any

from headrace import _native as native
from headrace._cache import Cache
from headrace._native import Model, parse_size
from headrace._tree import Node, tree_of


class LazyModel:
    """A model larger than memory: weights stay on disk until they are used.

        model = headrace.LazyModel.from_safetensors("path/to/model", lazy=True, budget="8GiB")
        embeddings = model.embed_tokens(input_ids)      # loads the embedding only
        hidden = model.blocks[0](embeddings)            # loads layer 0

    Made by from_safetensors(). Whatever it does not have itself is looked up in the model: its submodules by their own names, and
    embed_tokens, blocks, norm and lm_head, whatever they are called there.
    """

    cache: Cache  #: that holds the weights
    source: Model  #: the checkpoint

    @staticmethod
    def from_safetensors(
        path: str | os.PathLike[str],
        lazy: bool = True,
        *,
        device: str | None = None,
        budget: int | str | None = None,
        cache: Cache | None = None,
        policy: str = "loop",
        prefetch: int = 1,
        trace: str | os.PathLike[str] | None = None,
        framework: str | None = "auto",
        dtype: Any = None,
        **loader_options: Any,
    ) -> LazyModel:
        """Opens a checkpoint: a folder, an index or a file. Reads headers only.

        lazy=False: brings all weights in at once, as far as the budget goes. device: "cpu", "cuda", "cuda:N"; None: a GPU that torch
        can use, else cpu. budget: device memory for weights, in bytes or as "8GiB"; None: no bound. cache: a Cache that several
        models share, in place of device, budget, policy, trace and loader options. policy: "loop" or "lru", as for Cache. prefetch:
        how many units ahead are loaded. trace: a file for Perfetto. dtype: of the model's weights; None: what config.json says.

        framework: "torch" runs the model of config.json (needs torch and transformers); None gives the tree of tensors as Arrays;
        "auto" the first where it can be had, else the second.
        """
        if framework not in ("auto", "torch", None):
            raise ValueError(f'framework is {framework!r}: use "torch", None, or "auto"')
        if cache is not None and (budget is not None or device is not None or trace is not None or loader_options):
            raise ValueError("with `cache`, budget, device, trace and loader options are the cache's: do not give them here")
        options: dict[str, Any] = {"device": device, "budget": budget, "cache": cache, "policy": policy, "trace": trace, **loader_options}
        if framework == "torch" or framework == "auto" and _can_run(path):
            from headrace._lazy_torch import TorchModel

            made: LazyModel = TorchModel(path, prefetch, dtype, options)
        else:
            if dtype is not None:
                raise ValueError("dtype is for a model that runs (framework='torch'): tensors have the dtype that they are stored in")
            made = TensorTree(path, options)
        if not lazy:
            try:
                made.load()
            except BaseException:
                made.close()
                raise
        return made

    def load(self) -> None:
        """Brings all weights in, as far as the budget goes."""
        raise NotImplementedError

    @property
    def used(self) -> int:
        """Bytes of device memory that the cache has now."""
        return self.cache.used

    @property
    def budget(self) -> int:
        """The most that it will have."""
        return self.cache.budget

    def stats(self) -> dict[str, int]:
        """The cache's statistics. Of a cache that models share: this model's part."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives the memory back, but for what is still in use: that, when nobody uses it any more. The model cannot be used after it."""
        raise NotImplementedError

    def __enter__(self) -> LazyModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class TensorTree(LazyModel):
    """A LazyModel without a framework: attributes and indices lead to tensors, which are loaded when they are reached.

    What is reached is an Array; its group stays in memory as long as the Array, or what shares its memory, lives.
    """

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._owns_cache = options["cache"] is None
        self.source = native.open(path)
        try:
            self.cache = options.pop("cache") or _cache_for(self.source, options)
        except BaseException:
            self.source.close()
            raise
        self._root = tree_of(self.source.names, lambda name: self.cache.get(self.source, name).tensors[name])

    def load(self) -> None:
        for name in self.source.names:
            self.cache.get(self.source, name).release()

    def stats(self) -> dict[str, int]:
        return self.cache.stats(None if self._owns_cache else self.source)

    def close(self) -> None:
        if self._owns_cache:
            self.cache.let_go()
        self.source.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_root" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._root, name)

    def __getitem__(self, name: str) -> Any:
        return self._root[name]

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._root)})

    def __repr__(self) -> str:
        return f"<headrace.LazyModel of {len(self.source)} tensors on {self.cache.device}: {', '.join(self._root.names())}>"


def _cache_for(model: Model, options: dict[str, Any]) -> Cache:
    """A cache for one model's tensors, one by one."""
    budget = options.pop("budget")
    if budget is None:
        budget = sum(-(-tensor.nbytes // 4096) * 4096 for tensor in model.tensors) + 4096
    return Cache(options.pop("device") or "cpu", parse_size(budget), options.pop("policy"), **options)


def _can_run(path: str | os.PathLike[str]) -> bool:
    """Whether there is a config.json beside the weights, and what runs the model."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.fspath(path))
    found = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
    return found and os.path.exists(os.path.join(folder, "config.json"))


__all__ = ["LazyModel", "Node"]
