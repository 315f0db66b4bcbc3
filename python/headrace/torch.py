# SPDX-License-Identifier: Apache-2.0
"""A drop-in for safetensors.torch, as far as it loads: `from headrace.torch import load_file`. To save, use safetensors itself.

And attach() and detach(): any module with its weights in memory only around the forwards that need them.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace._attach import attach, detach
from headrace._pager import Attachment
from headrace._safe_open import safe_open
from headrace._torch_memory import allocator
from headrace._weights import LazyWeight
from headrace.numpy import in_memory

if TYPE_CHECKING:
    from headrace._safe_open import Name

__all__ = ["Attachment", "LazyWeight", "allocator", "attach", "detach", "load", "load_file", "load_model", "safe_open"]


def load_file(filename: Name, device: Any = "cpu", *, backend: str | None = None, **loader_options: Any) -> dict[str, Any]:
    """Loads a file, a directory or an index: a dict of tensors on the device, in file order."""
    with safe_open(filename, "pt", device, backend=backend, **loader_options) as opened:
        return opened.get_tensors()


def load(data: bytes) -> dict[str, Any]:
    """Loads what is in memory as a file would be: a dict of tensors on cpu. The same checks hold."""
    with in_memory(data) as path, safe_open(path, "pt") as opened:
        return opened.get_tensors()


def load_model(
    model: torch.nn.Module,
    filename: Name,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str | None = None,
    **loader_options: Any,
) -> tuple[Any, list[str]]:
    """Loads a file into a module. Returns (missing, unexpected): names that the file does not have, and that the module does not.

    Names that share memory, such as tied weights, need to be in the file once. strict: RuntimeError if a name is missing or
    unexpected.
    """
    tensors = load_file(filename, device=device, backend=backend, **loader_options)
    aliases = [other for others in _aliases(model.state_dict(), set(tensors)).values() for other in others]
    incompatible = model.load_state_dict(tensors, strict=False)
    missing, unexpected = set(incompatible.missing_keys), list(incompatible.unexpected_keys)
    for alias in aliases:
        if alias in missing:
            missing.remove(alias)
        else:
            unexpected.append(alias)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"    {what} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in sorted(names)))
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _aliases(tensors: dict[str, torch.Tensor], preferred: set[str]) -> dict[str, list[str]]:
    """Names that share memory: the one that stands for it, and the others."""
    by_storage: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or not storage.data_ptr() or not storage.nbytes():
            continue
        start = tensor.data_ptr()
        end = start + (tensor.element_size() * _reach(tensor) if tensor.numel() else 0)
        by_storage.setdefault((tensor.device, storage.data_ptr(), storage.nbytes()), []).append((start, end, name))
    found: dict[str, list[str]] = {}
    for areas in by_storage.values():
        for group in _overlapping(sorted(areas)):
            whole = [name for name in group if _is_whole(tensors[name])]
            if not whole:
                raise RuntimeError(
                    f"{sorted(group)} share memory of which none of them is the whole: such a module cannot be loaded by names"
                )
            kept = min([name for name in whole if name in preferred] or whole)
            if len(group) > 1:
                found[kept] = sorted(set(group) - {kept})
    return found


def _reach(tensor: torch.Tensor) -> int:
    return 1 + int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())))


def _overlapping(areas: list[tuple[int, int, str]]) -> list[list[str]]:
    groups: list[list[str]] = []
    last = -1
    for start, end, name in areas:
        if groups and start < last:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = end
    return groups


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return bool(tensor.data_ptr() == storage.data_ptr() and tensor.numel() * tensor.element_size() == storage.nbytes())
