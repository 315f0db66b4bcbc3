# SPDX-License-Identifier: Apache-2.0
"""What part of a tensor an index means, and which byte ranges hold it. Pure: no file, no framework.

A part is described as torch and numpy describe a view: the first element, and for each dimension a size and a stride, counted in
elements of the row-major tensor. Strides are never negative and fall from the outermost dimension to the innermost, so that walking
through a view walks forwards through the file.
"""
from __future__ import annotations

import math
import operator
from typing import Any, Iterator, NamedTuple, Sequence

from headrace._safetensor_error import refuse

HOLE_BYTES = 64 << 10  #: what lies between two parts is read along if it is smaller than this
RUN_BYTES = 256 << 10  #: parts from this size on are read on their own
BLOCK_BYTES = 16 << 20  #: most that is read into scratch memory at once


class View(NamedTuple):
    """A strided part of a tensor."""

    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """How many elements."""
        return math.prod(self.sizes)

    @property
    def reach(self) -> int:
        """Elements from the first to the last, both included."""
        last = 0
        for size, stride in zip(self.sizes, self.strides):
            if not size:
                return 0
            last += (size - 1) * stride
        return last + 1

    @property
    def is_dense(self) -> bool:
        """Whether it is one run of elements."""
        return self.n_elements == self.reach


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _bound(value: Any) -> int | None:
    if value is None:
        return None
    number = operator.index(value)
    if number < 0:
        raise OverflowError("a slice of this framework cannot begin or end with a negative number: count from the start")
    if number >= 2**64:
        raise OverflowError("int too big to convert")
    return number


def _items_of(index: Any, rank: int, tensor: str) -> list[Any]:
    """The index as a list without Ellipsis, which stands for as many full slices as are missing."""
    if isinstance(index, list):
        if index:
            raise refuse("Non empty lists are not implemented", tensor=tensor)
        return [slice(0, 0)]
    items = list(index) if isinstance(index, tuple) else [index]
    places = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(places) > 1:
        raise refuse("Only one ellipsis (...) is allowed in slice index", tensor=tensor)
    for at in places:
        items[at : at + 1] = [slice(None)] * max(0, rank - len(items) + 1)
    return items


def _range_of(item: Any, dim: int, shape: Sequence[int], tensor: str) -> tuple[int, int | None, int, bool]:
    """(begin, end or None, step, whether it is an int) of one item of an index."""
    if isinstance(item, slice):
        start, stop = _bound(item.start), _bound(item.stop)
        step = 1 if item.step is None else operator.index(item.step)
        if step < 1:
            raise refuse(f"Slice step must be a positive integer, got {step}", tensor=tensor)
        return start or 0, stop, step, False
    try:
        number = operator.index(item)
    except TypeError:
        number = 2**31
    if not -(2**31) <= number < 2**31:
        raise refuse(f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis", tensor=tensor)
    size = shape[dim] if dim < len(shape) else 0
    if number < -size:
        raise refuse(f"Invalid index {number} for dimension {dim} of size {size}", tensor=tensor)
    begin = number + size if number < 0 else number
    return begin, begin + 1, 1, True


def _plain_view(shape: Sequence[int], items: tuple[Any, ...]) -> View | None:
    """What an index of plain ints and slices that lie inside the tensor means, or None: strict_view() then says what is wrong."""
    n_items, dim = len(items), len(shape)
    if n_items > dim:
        return None
    first, stride = 0, 1
    sizes, strides = [], []
    for size in reversed(shape):
        dim -= 1
        item = items[dim] if dim < n_items else None
        if item is None and dim >= n_items:
            sizes.append(size)
            strides.append(stride)
        elif type(item) is int:
            if not -size <= item < size:
                return None
            first += (item if item >= 0 else item + size) * stride
        elif type(item) is slice:
            begin = 0 if item.start is None else item.start
            end = size if item.stop is None else item.stop
            step = 1 if item.step is None else item.step
            if not (type(begin) is type(end) is type(step) is int) or not (0 <= begin <= end <= size and begin < size and step > 0):
                return None
            first += begin * stride
            sizes.append((end - begin + step - 1) // step)
            strides.append(stride * step)
        else:
            return None
        stride *= size
    return View(first, tuple(sizes[::-1]), tuple(strides[::-1]))


def strict_view(shape: Sequence[int], index: Any, tensor: str = "") -> View:
    """The part of a tensor that an index means by the rules of safetensors' numpy: ints (negative ones count from the end), slices
    with bounds inside the tensor and steps from 1 on, one Ellipsis. Raises what the official package raises."""
    plain = _plain_view(shape, index if type(index) is tuple else (index,))
    return plain if plain is not None else _view_of_any(shape, index, tensor)


def _view_of_any(shape: Sequence[int], index: Any, tensor: str) -> View:
    """strict_view() for every index, step by step."""
    ranges = [_range_of(item, dim, shape, tensor) for dim, item in enumerate(_items_of(index, len(shape), tensor))]
    what = f"Error during slicing of '{tensor}' with shape {list(shape)}: "
    if len(ranges) > len(shape):
        raise refuse(f"{what}more slicing indexes than dimensions in tensor", tensor=tensor)
    first, sizes, strides = 0, [], []
    for dim, (size, stride) in enumerate(zip(shape, dense_strides(shape))):
        begin, stop, step, is_int = ranges[dim] if dim < len(ranges) else (0, None, 1, False)
        end = size if stop is None else stop
        if dim < len(ranges) and (begin >= size or end > size):
            beyond = begin if begin >= size else end - 1
            raise refuse(f"{what}index {beyond} out of bounds for tensor dimension #{dim} of size {size}", tensor=tensor)
        if end < begin:
            raise refuse(f"{what}the slice {begin}:{end} of dimension #{dim} ends before it begins", tensor=tensor)
        first += begin * stride
        if not is_int:
            sizes.append(-(-(end - begin) // step))
            strides.append(stride * step)
    return View(first, tuple(sizes), tuple(strides))


def blocks(view: View, item_bytes: int) -> Iterator[tuple[View, int]]:
    """Cuts a view into blocks, in file order: (block, its first element in the dense result).

    A dense block is read straight to where it goes. Another one has only small holes and reaches over at most BLOCK_BYTES: it is
    read as a whole, and its elements are picked out afterwards.
    """
    if not view.n_elements:
        return
    pairs = [(size, stride) for size, stride in zip(view.sizes, view.strides) if size != 1]
    plain = View(view.first, tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs))
    yield from _cut(plain, item_bytes, 0)


def _cut(view: View, item_bytes: int, at: int) -> Iterator[tuple[View, int]]:
    """At most as deep as the tensor has dimensions."""
    if view.is_dense:
        yield view, at
        return
    size, stride = view.sizes[0], view.strides[0]
    row = View(view.first, view.sizes[1:], view.strides[1:])
    hole = (stride - row.reach) * item_bytes
    rows = 1
    if hole < HOLE_BYTES and not (row.is_dense and row.reach * item_bytes >= RUN_BYTES):
        rows = max(1, (BLOCK_BYTES // item_bytes - row.reach) // stride + 1)
        rows = rows if _has_small_holes(row, item_bytes) else 1
    for start in range(0, size, rows):
        n = min(rows, size - start)
        part = View(view.first + start * stride, (n, *row.sizes), view.strides)
        begin = at + start * row.n_elements
        if n > 1:
            yield part, begin
        else:
            yield from _cut(View(part.first, row.sizes, row.strides), item_bytes, begin)


def _has_small_holes(view: View, item_bytes: int) -> bool:
    """Whether all of it can be read as one range without reading much that is not asked for."""
    for dim in range(len(view.sizes)):
        inner = View(0, view.sizes[dim + 1 :], view.strides[dim + 1 :])
        if (view.strides[dim] - inner.reach) * item_bytes >= HOLE_BYTES:
            return False
    return True
