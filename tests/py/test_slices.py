# SPDX-License-Identifier: Apache-2.0
"""The plan of slices, without any file: every view is covered by blocks, exactly, in file order, and within bounds."""
import math
import os
import random

import pytest

pytest.importorskip("headrace")
numpy = pytest.importorskip("numpy")
from headrace import _slices  # noqa: E402

SEED = int(os.environ.get("HR_SEED", random.SystemRandom().randrange(2**32)))


def gathered(shape, view, item):
    """The view's elements as the blocks give them."""
    flat = numpy.arange(math.prod(shape))
    result = numpy.full(view.n_elements, -1)
    last = -1
    for block, at in _slices.blocks(view, item):
        assert block.first > last, "blocks go forwards through the file"
        last = block.first + block.reach - 1
        part = flat[block.first : block.first + block.reach]
        assert len(part) == block.reach, "a block stays inside the tensor"
        if not block.is_dense:
            assert block.reach * item <= _slices.BLOCK_BYTES
            part = numpy.lib.stride_tricks.as_strided(part, block.sizes, [8 * s for s in block.strides]).reshape(-1)
        assert (result[at : at + block.n_elements] == -1).all(), "no element comes twice"
        result[at : at + block.n_elements] = part
    return result.reshape(view.sizes)


@pytest.mark.parametrize("limits", [(64 << 10, 256 << 10, 16 << 20), (8, 16, 64), (1, 1, 1), (64, 1 << 20, 128)])
def test_blocks_hold_each_element_of_a_random_view_once(limits, monkeypatch):
    rng = random.Random(SEED)
    print("SEED=%d" % SEED)
    for name, value in zip(("HOLE_BYTES", "RUN_BYTES", "BLOCK_BYTES"), limits):
        monkeypatch.setattr(_slices, name, value)
    for _ in range(600):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        index = []
        for size in shape[: rng.randint(0, len(shape))]:
            start = rng.randrange(size)
            index.append(rng.choice([start, slice(start, rng.randint(start, size), rng.choice([1, 1, 2, 3])), slice(None)]))
        view = _slices.strict_view(shape, tuple(index))
        expected = numpy.arange(math.prod(shape)).reshape(shape)[tuple(index)]
        assert view.sizes == expected.shape, (shape, index)
        if limits[2] < 8 * view.reach:
            monkeypatch.setattr(_slices, "BLOCK_BYTES", max(limits[2], 8))
        numpy.testing.assert_array_equal(gathered(shape, view, 1), expected, err_msg=str((shape, index)))


def test_the_quick_way_to_a_view_says_what_the_thorough_one_says():
    rng = random.Random(SEED)
    print("SEED=%d" % SEED)
    quick = 0
    for _ in range(4000):
        shape = tuple(rng.choice([0, 1, 2, 5]) for _ in range(rng.randint(0, 3)))
        bound = lambda: rng.choice([None, 0, 1, 2, 5, 6, -1, True, numpy.int64(1), 1.5])
        item = lambda: rng.choice([rng.randint(-6, 6), slice(bound(), bound(), rng.choice([None, 1, 2, 0, -1])), slice(bound()), ...])
        index = rng.choice([item(), tuple(item() for _ in range(rng.randint(0, 4)))])
        found = _slices._plain_view(shape, index if type(index) is tuple else (index,))
        if found is not None:
            assert found == _slices._view_of_any(shape, index, ""), (shape, index)
            quick += 1
    assert quick > 100


def test_rows_of_a_large_tensor_are_one_range():
    view = _slices.strict_view((1_000_000, 4096), slice(1000, 2000))
    assert [(b.first, b.reach, at) for b, at in _slices.blocks(view, 2)] == [(4_096_000, 4_096_000, 0)]


def test_half_of_each_long_row_is_read_without_the_other_half():
    view = _slices.strict_view((100, 1 << 20), (slice(None), slice(0, 1 << 19)))
    parts = list(_slices.blocks(view, 2))
    assert len(parts) == 100 and sum(b.reach for b, _ in parts) == view.n_elements


def test_a_narrow_column_is_read_in_blocks_of_bounded_size():
    view = _slices.strict_view((1_000_000, 64), (slice(None), 3))
    parts = list(_slices.blocks(view, 4))
    assert len(parts) < 20 and max(b.reach for b, _ in parts) * 4 <= _slices.BLOCK_BYTES


def test_a_column_of_very_long_rows_reads_no_rows():
    view = _slices.strict_view((1000, 1 << 20), (slice(None), 3))
    assert sum(b.reach for b, _ in _slices.blocks(view, 4)) == 1000
