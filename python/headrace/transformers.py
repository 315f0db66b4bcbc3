# SPDX-License-Identifier: Apache-2.0
"""transformers' models with headrace's reads: from_pretrained(cls, source). Nothing of transformers is changed.

transformers takes weights as a mapping of names to things that give their tensor when asked for `[...]`: here the slices of a
safe_open, which read at that moment and not before. Its threads ask for several at once. Where an index and several shards have
different copies of a tensor, the index decides.
"""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from headrace import _convert
from headrace._safe_open import SafeSlice, safe_open

if TYPE_CHECKING:
    from headrace._safe_open import Name

__all__ = ["LazyStateDict", "LazyTensor", "from_pretrained"]


class LazyTensor:
    """A tensor that is read when it is indexed: lazy[...] is all of it, lazy[0:8] some rows."""

    def __init__(self, piece: SafeSlice) -> None:
        self._piece = piece
        self.dtype, self.shape = _convert.torch_dtype_and_shape(piece.get_dtype(), tuple(piece.get_shape()))

    def __getitem__(self, index: Any) -> Any:
        return self._piece[index]

    def get_shape(self) -> list[int]:
        """As in the file's header."""
        return self._piece.get_shape()

    def get_dtype(self) -> str:
        """As the format spells it."""
        return self._piece.get_dtype()

    def is_floating_point(self) -> bool:
        """Whether torch calls its dtype one of floating point."""
        return bool(self.dtype.is_floating_point)


class LazyStateDict(Mapping[str, LazyTensor]):
    """A checkpoint as a mapping of its names, in file order, to tensors that are read when they are asked for.

    source, device and further options as for headrace.safe_open. Good in several threads at once.
    """

    def __init__(self, source: Any, device: Any = "cpu", **loader_options: Any) -> None:
        self._opened = safe_open(source, "pt", device, **loader_options)
        self._names = dict.fromkeys(self._opened.offset_keys())

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._names:
            raise KeyError(name)
        return LazyTensor(self._opened.get_slice(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def metadata(self) -> dict[str, str] | None:
        """The files' free text."""
        return self._opened.metadata()

    def close(self) -> None:
        """Gives back what it holds; tensors that were read stay good."""
        self._opened.close()


def from_pretrained(
    cls: Any,
    source: Name,
    *,
    config: Any = None,
    loader_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """cls.from_pretrained(source, **keywords) with headrace reading the weights.

    cls: a class of transformers with from_pretrained: LlamaForCausalLM, AutoModelForCausalLM. source: a folder with config.json and
    the weights. config: instead of the folder's. loader_options: for headrace.Loader ({"staging_bytes": "16MiB"}). keywords: as
    transformers takes them (dtype, device_map ...), but for what names or chooses files.
    """
    from transformers import AutoConfig, GenerationConfig

    refused = {"state_dict", "gguf_file", "subfolder", "revision", "variant", "from_tf", "from_flax"} & set(keywords)
    if refused:
        raise ValueError(f"headrace reads the files of {os.fspath(source)!r} itself: {sorted(refused)[0]} cannot be given")
    weights = LazyStateDict(source, **dict(loader_options or {}))
    try:
        if config is None:
            config = AutoConfig.from_pretrained(source)
        keywords.setdefault("dtype", config.dtype or _dtype_of(weights))
        loaded = _class_for(cls, config).from_pretrained(None, config=config, state_dict=weights, **keywords)
    finally:
        weights.close()
    # With output_loading_info it is a pair. What transformers finds by a folder's name it does not find here: how to generate.
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if model.can_generate() and os.path.exists(os.path.join(source, "generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(source)
    return loaded


def _class_for(cls: Any, config: Any) -> Any:
    """The class itself, or what an Auto class stands for: those take a folder's name only, but tell by a model without memory."""
    if not hasattr(cls, "from_config"):
        return cls
    import torch

    with torch.device("meta"):
        return type(cls.from_config(config))


def _dtype_of(weights: LazyStateDict) -> Any:
    """What a file says that a configuration does not: the dtype of its first tensor of floating point."""
    for tensor in weights.values():
        if tensor.is_floating_point():
            return tensor.dtype
    return None
