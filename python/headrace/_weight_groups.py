# SPDX-License-Identifier: Apache-2.0
"""Weights of a module in a checkpoint, and the groups of them that a Cache holds, as torch tensors.

The tensors that this gives are torch's inference tensors over the cache's memory: outside torch.inference_mode() nothing can write
them, and autograd refuses them. Each keeps the memory that it shares.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

import torch
from torch import nn

from headrace import _convert
from headrace._native import Array, Group, Lease, Model, TensorInfo
from headrace._weights import LazyWeight

if TYPE_CHECKING:
    from headrace._cache import Cache

Place = tuple[torch.nn.Module, str]  #: a module and the name of one of its parameters


class Shelf:
    """A model's tensors in a cache: what weights and groups of weights need to be had."""

    cache: Cache

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.granularity: int | None = None

    def charge(self, weights: Iterable[Weight]) -> int:
        """What a group of them counts against a budget."""
        whole = sum(weight.padded_bytes for weight in weights)
        step = self.granularity or (256 if whole < 2 << 20 else 4096)
        return -(-whole // step) * step

    def stream(self) -> int:
        """The stream that the calling thread works on, as headrace numbers it."""
        if self.device.type == "cpu":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream) or 1

    def storage_of(self, memory: Array) -> Any:
        """A lease's memory as torch's storage."""
        if not memory.nbytes:
            return torch.empty((0,), dtype=torch.uint8, device=self.device).untyped_storage()
        if self.device.type == "cpu":
            return torch.frombuffer(memoryview(memory), dtype=torch.uint8).untyped_storage()
        return torch.from_dlpack(memory).untyped_storage()


@dataclass(frozen=True)
class Joined:
    """Tensors of the checkpoint that are one weight of the module, and how: join() gives the weight of them all."""

    names: Sequence[str]
    join: Callable[[list[torch.Tensor]], torch.Tensor]


class Weight:
    """One weight: where it belongs in the module, and where it is in the checkpoint. A Source of LazyWeight."""

    def __init__(self, shelf: Shelf, label: str, source: str | Joined, parameter: torch.Tensor) -> None:
        self.shelf, self.label = shelf, label
        self.join = source.join if isinstance(source, Joined) else None
        self.parts = [shelf.model.tensor(name) for name in (source.names if isinstance(source, Joined) else [source])]
        self.info = self.parts[0]
        found = [_convert.torch_dtype_and_shape(info.dtype, info.shape) for info in self.parts]
        self.stored, self.shape = found[0][0], found[0][1]
        if self.join is not None:
            self.shape = tuple(self.join([torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in found]).shape)
        if self.shape != tuple(parameter.shape):
            raise ValueError(f"{label} has the shape {tuple(parameter.shape)}, and {self.info.name!r} of the checkpoint {self.shape}")
        self.dtype: torch.dtype = parameter.dtype
        if self.dtype != self.stored and not (self.dtype.is_floating_point and self.stored.is_floating_point):
            raise ValueError(f"{label} is {self.dtype}, and {self.info.name!r} of the checkpoint {self.stored}: these are not converted")
        self.strides = torch.empty(self.shape, device="meta").stride()
        self.requires_grad = parameter.requires_grad
        self.device = shelf.device
        self.by_rows = False
        self.places: list[Place] = []
        self.group: WeightGroup | None = None
        self.stand_in = LazyWeight(self)

    @property
    def nbytes(self) -> int:
        """In the checkpoint and in the cache."""
        return sum(info.nbytes for info in self.parts)

    @property
    def padded_bytes(self) -> int:
        """In a group, where each tensor begins at a multiple of 256."""
        return sum(-(-info.nbytes // 256) * 256 for info in self.parts)

    @property
    def cast_bytes(self) -> int:
        """Of the copy that is made while it is used, if it has another dtype or is joined of several tensors; else 0."""
        return 0 if self.dtype == self.stored and self.join is None else math.prod(self.shape) * self.dtype.itemsize

    def borrow(self) -> _Borrowed:
        """The weight, as long as the context lasts."""
        if self.group is None:
            self.group = WeightGroup(self.shelf, [self], self.label)
        return _Borrowed(self)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """embedding(indices, weight), read row by row."""
        numbers, places = torch.unique(indices, return_inverse=True)
        wanted = numbers.tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.shape[0]:
            raise IndexError(f"{self.label} has {self.shape[0]} rows; asked for numbers from {wanted[0]} to {wanted[-1]}")
        found = torch.empty((len(wanted), *self.shape[1:]), dtype=self.stored, device=self.device)
        row_bytes = math.prod(self.shape[1:]) * self.stored.itemsize
        if found.numel():
            start, stream = found.data_ptr(), self.shelf.stream()
            reads = [(self.info.name, n * row_bytes, row_bytes, start + i * row_bytes, row_bytes) for i, n in enumerate(wanted)]
            job = self.shelf.cache.loader.start(self.shelf.model, reads, keep=found, wait_stream=stream, signal_stream=stream)
            try:
                job.wait()
            finally:
                job.close()
        if self.dtype != self.stored:
            found = found.to(self.dtype)
        return found[places]


class _Borrowed:
    """The context of Weight.borrow()."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __enter__(self) -> torch.Tensor:
        group = self.weight.group
        assert group is not None
        self.stream = group.shelf.stream()
        self.lease = group.get(self.stream)
        return group.tensors(self.lease, only=self.weight)[0]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.lease.release(self.stream)


class WeightGroup:
    """Weights that come and go together."""

    def __init__(self, shelf: Shelf, weights: Sequence[Weight], label: str) -> None:
        self.shelf, self.weights = shelf, list(weights)
        self.group: Group = shelf.cache.group(shelf.model, [info.name for weight in weights for info in weight.parts], label)
        self.charge = shelf.cache.charge(self.group)
        self.cast_bytes = sum(weight.cast_bytes for weight in weights)
        offsets = iter(self.group.offsets)
        self.where = {id(weight): [next(offsets) for _ in weight.parts] for weight in weights}
        for weight in weights:
            weight.group = self

    def get(self, stream: int) -> Lease:
        """Its memory, with the weights in it. Waits."""
        return self.shelf.cache.get(self.group, None, stream)

    def prefetch(self, stream: int) -> None:
        """Begins to bring it in."""
        self.shelf.cache.prefetch(self.group, None, stream)

    def tensors(self, lease: Lease, only: Weight | None = None) -> list[torch.Tensor]:
        """The weights, or only one of them."""
        with torch.inference_mode():
            storage = self.shelf.storage_of(lease.memory)
            return [self._tensor(storage, weight) for weight in ([only] if only else self.weights)]

    def _tensor(self, storage: Any, weight: Weight) -> torch.Tensor:
        parts = []
        for info, offset in zip(weight.parts, self.where[id(weight)]):
            # What is made in inference mode and given its memory is an inference tensor; a view of the storage's own tensor is not.
            dtype, shape = _convert.torch_dtype_and_shape(info.dtype, info.shape) if weight.join else (weight.stored, weight.shape)
            made = torch.empty((0,), dtype=dtype, device=weight.device)
            strides = made.new_empty(shape, device="meta").stride() if weight.join else weight.strides
            parts.append(made.set_(storage, offset // dtype.itemsize, shape, strides))
        whole = weight.join(parts) if weight.join else parts[0]
        return nn.Parameter(whole if whole.dtype == weight.dtype else whole.to(weight.dtype), requires_grad=False)


def buffer_from(shelf: Shelf, info: TensorInfo, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the checkpoint in ordinary memory of its own, with the dtype of another one."""
    stored, shape = _convert.torch_dtype_and_shape(info.dtype, info.shape)
    made = torch.empty(shape, dtype=stored, device=shelf.device)
    if made.numel():
        shelf.cache.loader.start(
            shelf.model,
            [(info.name, 0, None, made.data_ptr(), info.nbytes)],
            keep=made,
            wait_stream=shelf.stream(),
            signal_stream=shelf.stream(),
        ).wait()
    return made.to(like.dtype)


def lengths(tensors: Any) -> int:
    """Bytes of some tensors."""
    return sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in tensors)
