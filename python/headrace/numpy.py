# SPDX-License-Identifier: Apache-2.0
"""A drop-in for safetensors.numpy, as far as it loads: `from headrace.numpy import load_file`. To save, use safetensors itself.

BF16 and the float8 dtypes need the package ml_dtypes; with it numpy gets all of them, of which safetensors gives it BF16 alone.
"""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from headrace._safe_open import safe_open

if TYPE_CHECKING:
    from headrace._safe_open import Name

__all__ = ["load", "load_file", "safe_open"]


def load_file(filename: Name, *, backend: str | None = None, **loader_options: Any) -> dict[str, Any]:
    """Loads a file, a directory or an index: a dict of numpy arrays, in file order."""
    with safe_open(filename, "np", backend=backend, **loader_options) as opened:
        return opened.get_tensors()


def load(data: bytes) -> dict[str, Any]:
    """Loads what is in memory as a file would be: a dict of numpy arrays. The same checks hold."""
    with in_memory(data) as path, safe_open(path, "np") as opened:
        return opened.get_tensors()


class in_memory:
    """Bytes as a file without a name, which is gone when the block ends."""

    def __init__(self, data: bytes) -> None:
        if not isinstance(data, bytes):
            raise TypeError(f"what is loaded must be bytes, not {type(data).__name__}")
        self.data = data

    def __enter__(self) -> str:
        self.descriptor = os.memfd_create("safetensors", os.MFD_CLOEXEC)
        try:
            rest = memoryview(self.data)
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except BaseException:
            os.close(self.descriptor)
            raise
        return f"/proc/self/fd/{self.descriptor}"

    def __exit__(self, *exc: object) -> None:
        os.close(self.descriptor)
