# SPDX-License-Identifier: Apache-2.0
"""What the drop-in needs of numpy and of torch: memory, its address, views, and copies out of scratch memory.

Memory is always asked for on a device by name, since a caller may be inside `with torch.device("meta")`.
"""
from __future__ import annotations

from typing import Any, Protocol

from headrace import _convert
from headrace._native import Array
from headrace._safetensor_error import refuse
from headrace._slices import View, strict_view

NAMES = {"np": "numpy", "numpy": "numpy", "pt": "torch", "torch": "torch", "pytorch": "torch"}
KNOWN_ELSEWHERE = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle")
ITEM_BYTES = {"64": 8, "32": 4, "16": 2}  #: by the end of the dtype's name; all others have 1


def item_bytes(dtype: str) -> int:
    """Bytes of one element; 0 if it has less than one."""
    if dtype == "F4" or dtype.startswith("F6_"):
        return 0
    return ITEM_BYTES.get(dtype[-2:], 1)


class Framework(Protocol):
    """numpy or torch."""

    name: str
    device: str  #: of the loader

    @property
    def stream(self) -> int:
        """What reads are ordered with; 0: nothing."""

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises what the framework cannot hold."""

    def tensor(self, array: Array) -> Any:
        """An Array's memory as a tensor."""

    def empty(self, count: int) -> Any:
        """`count` bytes of new memory."""

    def address(self, memory: Any) -> int:
        """Where it begins."""

    def shaped(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Memory as a tensor of the format's dtype and shape."""

    def pick(self, memory: Any, at: int, scratch: Any, view: View, item: int) -> None:
        """Copies the view's elements out of scratch, which begins with the view's first one, to element `at` of memory."""

    def small(self, raw: bytearray, dtype: str, view: View, item: int) -> Any:
        """A tensor of the view's elements out of raw, which begins with the first one and is the tensor's from now on."""

    def view(self, shape: tuple[int, ...], index: Any, tensor: str) -> View | None:
        """What an index means; None: something that only the framework itself can do."""


def understood(dtype: str, tensor: str) -> None:
    """Refuses what no framework has."""
    if dtype.startswith("F6_"):
        raise refuse(f"Dtype not understood: {dtype} (tensor '{tensor}'); its bytes are to be had by headrace.Loader.get", tensor=tensor)


class Numpy:
    """Tensors as numpy arrays, on cpu."""

    name, device, stream = "numpy", "cpu", 0

    def __init__(self) -> None:
        import numpy

        self.np = numpy

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        if dtype not in _convert._numpy_dtypes:
            _convert.numpy_dtype(dtype)

    def tensor(self, array: Array) -> Any:
        return _convert.to_numpy(array)

    def empty(self, count: int) -> Any:
        return self.np.empty(count, self.np.uint8)

    def address(self, memory: Any) -> int:
        return int(memory.ctypes.data)

    def shaped(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return memory.view(_convert.numpy_dtype(dtype)).reshape(shape)

    def pick(self, memory: Any, at: int, scratch: Any, view: View, item: int) -> None:
        kind = self.np.dtype(f"u{item}")
        strides = tuple(stride * item for stride in view.strides)
        source = self.np.lib.stride_tricks.as_strided(scratch.view(kind), view.sizes, strides)
        memory.view(kind)[at : at + view.n_elements].reshape(view.sizes)[...] = source

    def small(self, raw: bytearray, dtype: str, view: View, item: int) -> Any:
        kind = _convert.numpy_dtype(dtype)
        if len(raw) == view.n_elements * item:
            return self.np.ndarray(view.sizes, kind, raw)
        return self.np.ndarray(view.sizes, kind, raw, 0, tuple(stride * item for stride in view.strides)).copy()

    def view(self, shape: tuple[int, ...], index: Any, tensor: str) -> View | None:
        return strict_view(shape, index, tensor)


class Torch:
    """Tensors of torch, on cpu or on one of CUDA's devices."""

    name = "torch"

    def __init__(self, device: str) -> None:
        import torch

        self.torch = torch
        self.device = device

    @property
    def stream(self) -> int:
        if self.device == "cpu":
            return 0
        return int(self.torch.cuda.current_stream(self.device).cuda_stream) or 1

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        if dtype == "F4" and (not shape or shape[-1] % 2):
            raise refuse(f"torch packs two F4 into one element of the last dimension, so that must be even: the shape is {list(shape)}")
        _convert.torch_dtype_and_shape(dtype, shape)

    def tensor(self, array: Array) -> Any:
        if not array.nbytes:
            dtype, shape = _convert.torch_dtype_and_shape(array.dtype, array.shape)
            return self.torch.empty(shape, dtype=dtype, device=self.device)
        return _convert.to_torch(array)

    def empty(self, count: int) -> Any:
        return self.torch.empty(count, dtype=self.torch.uint8, device=self.device)

    def address(self, memory: Any) -> int:
        return int(memory.data_ptr())

    def shaped(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        ours, _ = _convert.torch_dtype_and_shape(dtype, (2,))
        return memory.view(ours).view(shape) if memory.numel() else self.torch.empty(shape, dtype=ours, device=self.device)

    def pick(self, memory: Any, at: int, scratch: Any, view: View, item: int) -> None:
        kind = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32, 8: self.torch.int64}[item]
        source = scratch.view(kind).as_strided(view.sizes, view.strides)
        memory.view(kind)[at : at + view.n_elements].view(view.sizes).copy_(source)

    def small(self, raw: bytearray, dtype: str, view: View, item: int) -> Any:
        ours, _ = _convert.torch_dtype_and_shape(dtype, (2,))
        flat = self.torch.frombuffer(raw, dtype=ours)
        if len(raw) == view.n_elements * item:
            return flat.view(view.sizes)
        return flat.as_strided(view.sizes, view.strides).clone(memory_format=self.torch.contiguous_format)

    def view(self, shape: tuple[int, ...], index: Any, tensor: str) -> View | None:
        items = index if isinstance(index, tuple) else (index,)
        for item in items:
            if not (item is None or item is Ellipsis or isinstance(item, slice) or self._is_int(item)):
                return None
        # torch itself says what it is, or why it cannot be: a tensor on meta has no memory.
        found = self.torch.empty(shape, dtype=self.torch.uint8, device="meta")[index]
        return View(found.storage_offset(), tuple(found.shape), tuple(found.stride()))

    def _is_int(self, item: Any) -> bool:
        if isinstance(item, (bool, self.torch.Tensor)) or not hasattr(type(item), "__index__"):
            return False
        return isinstance(item, int) or not hasattr(item, "__array__") or getattr(item, "ndim", 1) == 0 and not hasattr(item, "__len__")
