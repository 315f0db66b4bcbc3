# SPDX-License-Identifier: Apache-2.0
"""Arrays as tensors of frameworks. Nothing here copies, and each result keeps the memory that it shares."""
from __future__ import annotations

from typing import Any

from headrace._native import Array

# The format's dtype: numpy's name of it; those with a dot are in ml_dtypes, which numpy itself does not bring.
NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64", "BF16": "ml_dtypes.bfloat16",
    "F8_E5M2": "ml_dtypes.float8_e5m2", "F8_E4M3": "ml_dtypes.float8_e4m3fn", "F8_E8M0": "ml_dtypes.float8_e8m0fnu",
    "F8_E4M3FNUZ": "ml_dtypes.float8_e4m3fnuz", "F8_E5M2FNUZ": "ml_dtypes.float8_e5m2fnuz",
}  # fmt: skip
_numpy_dtypes: dict[str, Any] = {}


def numpy_dtype(dtype: str) -> Any:
    """numpy's dtype for one of the format's. TypeError if there is none."""
    import numpy

    found = _numpy_dtypes.get(dtype)
    if found is not None:
        return found
    name = NUMPY.get(dtype)
    if name is None:
        raise TypeError(f"numpy has no dtype for {dtype}: use the bytes (Array.tobytes(), memoryview(array))")
    if name.startswith("ml_dtypes."):
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(f"numpy has no dtype for {dtype} of its own: install the package ml_dtypes") from None
        found = numpy.dtype(getattr(ml_dtypes, name.partition(".")[2]))
    else:
        found = numpy.dtype(name)
    _numpy_dtypes[dtype] = found
    return found


def to_numpy(array: Array) -> Any:
    """The same memory as a numpy array."""
    import numpy

    dtype = numpy_dtype(array.dtype)
    if array.device != "cpu":
        raise TypeError(f"numpy cannot use memory on {array.device}: load to cpu, or take a copy with Array.tobytes()")
    if not array.nbytes:
        return numpy.empty(array.shape, dtype)
    return numpy.ndarray(array.shape, dtype, memoryview(array))


def torch_dtypes() -> dict[str, Any]:
    """The format's dtypes that this torch has."""
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
        "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
        "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
    }  # fmt: skip
    return {ours: getattr(torch, name) for ours, name in names.items() if hasattr(torch, name)}


_torch_dtypes: dict[str, Any] = {}


def torch_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """torch's dtype for one of the format's, and the shape it has then: torch packs two F4 into one element."""
    if not _torch_dtypes:
        _torch_dtypes.update(torch_dtypes())
    found = _torch_dtypes.get(dtype)
    if found is None:
        raise TypeError(f"torch has no dtype for {dtype}: use the bytes (Array.tobytes(), memoryview(array))")
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise TypeError(f"torch packs pairs of F4 along the last dimension, and the shape is {shape}")
        shape = (*shape[:-1], shape[-1] // 2)
    return found, shape


def to_torch(array: Array) -> Any:
    """The same memory as a torch tensor, on cpu by the buffer protocol, elsewhere by DLPack."""
    import torch

    dtype, shape = torch_dtype_and_shape(array.dtype, array.shape)
    if array.device != "cpu":
        return torch.from_dlpack(array)
    if not array.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever torch.device() the caller is inside
    return torch.frombuffer(memoryview(array).cast("B"), dtype=torch.uint8).view(dtype).view(shape)
