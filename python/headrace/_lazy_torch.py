# SPDX-License-Identifier: Apache-2.0
"""LazyModel with torch and transformers: the model that config.json describes, made without memory and attached to its checkpoint.

What no file holds, the buffers that transformers computes (rotary frequencies and the like), transformers computes here too; each is
computed twice over different garbage, so that one that nobody computes is found and refused.
"""
from __future__ import annotations

import inspect
import os
from typing import Any, Iterator

import torch
from torch import nn

from headrace import _convert
from headrace import _native as native
from headrace._attach import attach
from headrace._lazy import LazyModel
from headrace._native import Model
from headrace._pager import Attachment
from headrace._weight_groups import Joined


class TorchModel(LazyModel):
    """A LazyModel that runs: model(ids), model.generate(…), and its parts one by one."""

    module: nn.Module  #: the model of transformers
    attachment: Attachment

    def __init__(self, path: str | os.PathLike[str], prefetch: int, dtype: Any, options: dict[str, Any]) -> None:
        folder = os.fspath(path) if os.path.isdir(path) else os.path.dirname(os.fspath(path)) or "."
        self.source = native.open(path)
        try:
            if options["cache"] is None and options["device"] is None:
                options["device"] = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
            device = torch.device(options["device"] if options["cache"] is None else options["cache"].device)
            self.module = _on_meta(folder, self.source, dtype)
            _compute_buffers(self.module, device)
            names = _names_in(self.module, self.source)
            self.attachment = attach(self.module, self.source, prefetch=prefetch, names=names, **options)
        except BaseException:
            self.source.close()
            raise
        self.cache = self.attachment.cache

    def load(self) -> None:
        self.attachment.load()

    def stats(self) -> dict[str, int]:
        return self.attachment.stats()

    @property
    def units(self) -> list[tuple[str, int]]:
        """Names and bytes of what comes and goes together."""
        return self.attachment.units

    def close(self) -> None:
        self.attachment.detach(load=False)
        self.source.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in self.__dict__:
            raise AttributeError(name)
        alias = _ALIASES.get(name)
        if alias is not None and not hasattr(self.module, name):
            found = alias(self.module)
            if found is None:
                raise AttributeError(f"{type(self.module).__name__} has nothing that would be {name!r}")
            return found
        return getattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module), *_ALIASES})

    def __repr__(self) -> str:
        return f"<headrace.LazyModel of {type(self.module).__name__} on {self.cache.device}: {len(self.attachment.units)} units>"


# --------------------------------------------------------------------------------------------------------------- making the module


def _on_meta(folder: str, source: Model, dtype: Any) -> nn.Module:
    """The module of config.json with parameters and buffers on meta, and ties as transformers makes them."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the checkpoint is quantised, and its weights are not those of the model's modules: LazyModel cannot run it")
    if dtype is None or dtype == "auto":
        dtype = config.dtype or _dtype_of(source)
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    cls = _class_of(config, transformers)
    with torch.device("meta"):
        module: nn.Module = cls._from_config(config, dtype=dtype) if hasattr(cls, "_from_config") else cls.from_config(config, dtype=dtype)
    module.tie_weights()
    module.eval()
    if getattr(module, "can_generate", lambda: False)() and os.path.exists(os.path.join(folder, "generation_config.json")):
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module


def _class_of(config: Any, transformers: Any) -> Any:
    """The class that the checkpoint was saved from, or the one that transformers would choose."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _dtype_of(source: Model) -> torch.dtype:
    for tensor in source.tensors:
        found = _convert.torch_dtypes().get(tensor.dtype)
        if found is not None and found.is_floating_point:
            return found
    return torch.get_default_dtype()


def _compute_buffers(root: Any, device: torch.device) -> None:
    for prefix, module in root.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        rounds = []
        for garbage in (0x00, 0x5A):
            for name in names:
                like = module._buffers[name]
                memory = torch.full((like.numel() * like.element_size(),), garbage, dtype=torch.uint8, device=device)
                module._buffers[name] = memory.view(like.dtype).view(like.shape)
            with torch.no_grad():
                root._init_weights(module)
            rounds.append({name: module._buffers[name] for name in names})
        for name in names:
            first, second = (found[name].reshape(-1).view(torch.uint8) for found in rounds)
            if name in module._non_persistent_buffers_set and not torch.equal(first, second):
                label = f"{prefix}.{name}" if prefix else name
                raise ValueError(f"buffer {label} is in no file, and transformers does not compute it: LazyModel cannot run this model")


def _names_in(module: Any, source: Model) -> dict[str, str | Joined]:
    """From the module's names to the checkpoint's, as transformers' own loading has it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = {
        name: tensor for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }
    steps = get_model_conversion_mapping(module)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    found: dict[str, str | Joined] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name in sorted(source.names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], module.base_model_prefix, state)
        if renamed in state and pattern is None:
            found[renamed] = name
        elif renamed in state:
            parts.setdefault(renamed, {}).setdefault(pattern, []).append(name)
    for renamed, names in parts.items():
        found[renamed] = _joined(renamed, names, by_pattern[next(iter(names))])
    return found


def _joined(renamed: str, names: dict[str, list[str]], converter: Any) -> Joined:
    """What transformers makes of several tensors: experts on top of one another, gate and up beside each other."""
    steps = [(type(step).__name__, getattr(step, "dim", 0)) for step in converter.operations]
    kinds = [kind for kind, _ in steps]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]) or len(converter.target_patterns) != 1:
        some = next(iter(names.values()))[0]
        raise ValueError(
            f"transformers builds {renamed} of {some!r} and others in a way that LazyModel does not know ({', '.join(kinds)}); save the "
            "model in the form that transformers has in memory"
        )
    lists = [names[pattern] for pattern in converter.source_patterns if pattern in names]
    lengths = [len(some) for some in lists]

    def join(tensors: list[torch.Tensor]) -> torch.Tensor:
        rest = iter(tensors)
        groups = [[next(rest) for _ in range(n)] for n in lengths]
        if kinds == ["Concatenate"]:
            return torch.cat([tensor for group in groups for tensor in group], dim=steps[0][1])
        stacked = [torch.stack(group, dim=steps[0][1]) for group in groups]
        return torch.cat(stacked, dim=steps[1][1]) if len(steps) > 1 else stacked[0]

    return Joined([name for some in lists for name in some], join)


# ------------------------------------------------------------------------------------------------------------------ general names


class Blocks:
    """The model's layers. Each can be called with hidden states alone: what else it needs, positions say."""

    def __init__(self, layers: nn.ModuleList, parent: nn.Module) -> None:
        self._layers, self._parent = layers, parent

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Block:
        return Block(self._layers[index], self._parent)

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} blocks of {type(self._layers[0]).__name__}>"


class Block:
    """One layer: the module itself, but for calls, which compute rotary positions if they are not given."""

    def __init__(self, module: nn.Module, parent: nn.Module) -> None:
        self.module, self._parent = module, parent

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = inspect.signature(self.module.forward).parameters
        if (
            "position_embeddings" in wanted
            and len(args) < list(wanted).index("position_embeddings")
            and kwargs.get("position_embeddings") is None
        ):
            rotary = next((child for child in self._parent.children() if "Rotary" in type(child).__name__), None)
            if rotary is not None:
                kwargs["position_embeddings"] = self._positions(rotary, hidden_states, kwargs)
        return self.module(hidden_states, *args, **kwargs)

    def _positions(self, rotary: nn.Module, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        past = kwargs.get("past_key_values")
        start = past.get_seq_length() if past is not None else 0
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(start, start + hidden_states.shape[1], device=hidden_states.device)[None]
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kind = getattr(self.module, "attention_type", None) or getattr(getattr(self.module, "self_attn", None), "layer_type", None)
            return rotary(hidden_states, positions, kind)
        return rotary(hidden_states, positions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __repr__(self) -> str:
        return repr(self.module)


def _layers(root: nn.Module) -> tuple[nn.ModuleList, nn.Module] | None:
    """The list with the most weights, and the module that has it."""
    found = [
        (sum(parameter.numel() for parameter in child.parameters()), child, parent)
        for parent in root.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    if not found:
        return None
    _, layers, parent = max(found, key=lambda item: item[0])
    return layers, parent


def _blocks(root: nn.Module) -> Blocks | None:
    found = _layers(root)
    return Blocks(*found) if found else None


def _embed_tokens(root: Any) -> nn.Module | None:
    if hasattr(root, "get_input_embeddings"):
        return root.get_input_embeddings()
    return next((module for module in root.modules() if isinstance(module, nn.Embedding)), None)


def _norm(root: nn.Module) -> nn.Module | None:
    """The norm that follows the layers."""
    found = _layers(root)
    if found is None:
        return None
    layers, parent = found
    children = list(parent.children())
    after = children[children.index(layers) + 1 :]
    return next((child for child in after if "Norm" in type(child).__name__), None)


def _lm_head(root: Any) -> nn.Module | None:
    return root.get_output_embeddings() if hasattr(root, "get_output_embeddings") else None


_ALIASES = {"embed_tokens": _embed_tokens, "blocks": _blocks, "norm": _norm, "lm_head": _lm_head}
