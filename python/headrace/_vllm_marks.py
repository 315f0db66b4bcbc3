# SPDX-License-Identifier: Apache-2.0
"""Whether a load gave values to the weights of a vLLM model.

vLLM itself does not notice when a Linear, an embedding or an expert gets nothing from the checkpoint, or a fused weight only a part (the
q of its qkv), and then serves what was left in that memory. So some elements of such weights are marked before the load, and looked at
afterwards. These weights are born without values: nothing is lost by marking them. What always holds:

- A weight is told to lack values only if marks are still there that no checkpoint would give: NaN, or hundreds of bytes unchanged.
- Of experts only the first elements of each part are marked: the ends may be padding, which nothing fills.
- Quantised weights, and those of draft models, may come by ways that are not known here: they are looked at, and are a warning.
"""
from __future__ import annotations

import typing

import torch

MARKS = 1 << 16
# The tensor that a quantised Linear keeps its values in, by the many quantisations' names for it.
QUANTIZED = ("weight", "qweight", "weight_packed")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Mark(typing.NamedTuple):
    """Elements that were marked."""

    name: str
    view: torch.Tensor
    written: typing.Optional[torch.Tensor]  #: None: NaN

    def left(self) -> bool:
        """Whether what was written is still there: of NaN any, of bytes all."""
        if self.written is None:
            return bool(torch.isnan(self.view).any())
        return bool(torch.equal(self.view, self.written))


def set_marks(model: torch.nn.Module, is_draft: bool = False) -> typing.List[Mark]:
    """Marks the weights of a model that was just made. A draft model may get its embeddings from the main one later: not these."""
    marks: typing.List[Mark] = []
    seen: typing.Set[int] = set()
    kinds = _kinds()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        for key, ways in kinds:
            if not ways or not isinstance(method, ways) or (is_draft and key == "embedding"):
                continue
            for parameter, weight in _weights(module, key):
                if id(weight) not in seen:
                    seen.add(id(weight))
                    marks.append(_marked(f"{name}.{parameter}", weight, key))
            break
    return marks


def lacking(marks: typing.List[Mark]) -> typing.List[str]:
    """Names of those that got no values, or not all of them."""
    return [mark.name for mark in marks if mark.left()]


def _kinds() -> typing.List[typing.Tuple[str, typing.Tuple[type, ...]]]:
    """What vLLM calls the ways in which layers hold their weights; the first that fits counts. Empty if this version has none."""

    def found(module: str, *names: str) -> typing.Tuple[type, ...]:
        try:
            there = __import__(f"vllm.model_executor.layers.{module}", fromlist=["_"])
        except ImportError:
            return ()
        return tuple(getattr(there, name) for name in names if hasattr(there, name))

    return [
        ("plain", found("linear", "UnquantizedLinearMethod")),
        ("embedding", found("vocab_parallel_embedding", "UnquantizedEmbeddingMethod")),
        ("experts", found("fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod")),
        ("quantized", found("linear", "LinearMethodBase")),
    ]


def _weights(module: torch.nn.Module, key: str) -> typing.Iterator[typing.Tuple[str, torch.Tensor]]:
    names = {"experts": ("w13_weight", "w2_weight"), "quantized": QUANTIZED}.get(key, ("weight",))
    for name in names:
        weight = getattr(module, name, None)
        if not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.is_contiguous() or not weight.numel():
            continue
        if key == "quantized" or weight.dtype in FLOATS and (key != "experts" or weight.dim() == 3):
            yield name, weight


def _marked(name: str, weight: torch.Tensor, key: str) -> Mark:
    values = weight.data
    if key == "quantized":
        raw = values.view(-1).view(torch.uint8)
        view = raw[:: (raw.numel() // MARKS) | 1]
        written = (torch.arange(view.numel(), device=view.device) * 89 % 251).to(torch.uint8)
        view.copy_(written)
        return Mark(name, view, written)
    if key == "experts":  # of gate and up, which share a weight, and of down: a first element each
        view = values[:, :: max(1, values.shape[1] // 2), 0]
    else:
        view = values.view(-1)[:: (values.numel() // MARKS) | 1]
    view.fill_(float("nan"))
    return Mark(name, view, None)
