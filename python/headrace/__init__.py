# SPDX-License-Identifier: Apache-2.0
"""headrace: safetensors weights from where they rest to where they are used, inside a small fixed pool of memory.

    import headrace

    for name, tensor in headrace.feed("Llama-3.1-8B", "cuda:0", framework="torch"):
        ...                                   # each tensor owns its memory: keep it, or not

    weights = headrace.load("model.safetensors", framework="numpy")

    with headrace.open("Llama-3.1-8B") as model, headrace.Loader("cpu") as loader:
        array = loader.get(model, "lm_head.weight")     # an Array: DLPack, buffer protocol, .numpy()

All headers are checked before any data is read; errors are headrace.Error, with code, file, tensor and byte. No framework is
imported unless it is asked for.
"""
from __future__ import annotations

from headrace._errors import Error, SourceNotFound, TensorNotFound, Unfinished
from headrace._native import Array, Feed, Group, Job, Lease, Loader, Model, ShardInfo, TensorInfo, open, parse_size, probe
from headrace._native import version as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace._cache import Cache
    from headrace._lazy import LazyModel
    from headrace._lazy_loader import LazyModelLoader
    from headrace._load import feed, load
    from headrace._safe_open import safe_open
    from headrace._safetensor_error import SafetensorError

__all__ = [
    "Array", "Cache", "Error", "Feed", "Group", "Job", "LazyModel", "LazyModelLoader", "Lease",
    "Loader", "Model", "SafetensorError", "ShardInfo", "SourceNotFound", "TensorInfo", "TensorNotFound",
    "Unfinished", "feed", "load", "open", "parse_size", "probe", "safe_open",
]  # fmt: skip

# What is imported when it is first used, so that `import headrace` stays quick.
_LATER = {
    "feed": "headrace._load", "load": "headrace._load", "safe_open": "headrace._safe_open",
    "SafetensorError": "headrace._safetensor_error", "Cache": "headrace._cache", "LazyModel": "headrace._lazy",
    "LazyModelLoader": "headrace._lazy_loader",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
