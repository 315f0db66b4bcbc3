# SPDX-License-Identifier: Apache-2.0
"""The binding on a GPU, or on the look-alike driver of tests/fakes, whose device memory the CPU cannot read: so bytes are compared
through Array.tobytes()."""
import gc
import math
import sys
import types

import checkpoints
import headrace
import pytest
from headrace import _convert, _on_gpu


@pytest.fixture(scope="module")
def loader():
    try:
        loader = headrace.Loader("cuda:0", staging_bytes="1MiB")
    except headrace.Error as error:
        pytest.skip(f"no GPU, and no look-alike: {error}")
    with loader:
        yield loader


def test_what_arrives_is_what_is_in_the_file(root, two, loader):
    model = headrace.open(root / "two")
    assert loader.device == "cuda:0"
    for info, array in list(loader.feed(model)) + [(model.tensor("big"), loader.get(model, "big"))]:
        assert (array.device, array.dtype, array.shape) == ("cuda:0", info.dtype, info.shape)
        assert array.tobytes() == two[info.name][3]


def test_the_cpu_gets_no_view(root, loader):
    array = loader.get(headrace.open(root / "two"), "big")
    with pytest.raises(BufferError):
        memoryview(array)
    with pytest.raises(TypeError, match="cuda:0"):
        array.numpy()


def test_dlpack_says_which_device_and_honours_streams(root, loader):
    array = loader.get(headrace.open(root / "two"), "big")
    assert array.__dlpack_device__() == (2, 0)
    for stream in (None, -1, 1, 2):
        for version in (None, (1, 0)):
            array.__dlpack__(stream=stream, max_version=version, dl_device=(2, 0))
    for stream in (0, -2):
        with pytest.raises(ValueError):
            array.__dlpack__(stream=stream)
    for wrong in ({"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}):
        with pytest.raises(BufferError):
            array.__dlpack__(**wrong)


def test_arrays_outlive_their_loader(root, two, loader):
    model, loader = headrace.open(root / "two"), headrace.Loader("cuda:0", staging_bytes="1MiB")
    kept = [(info.name, array, array.__dlpack__(max_version=(1, 0))) for info, array in loader.feed(model)]
    loader.close()
    del loader, model
    gc.collect()
    for name, array, _ in kept:
        assert array.tobytes() == two[name][3]
    address = kept[0][1].address
    assert address
    del kept, array
    gc.collect()


def test_a_job_writes_where_it_is_told_and_in_order_of_streams(root, two, loader):
    model = headrace.open(root / "two")
    room = loader.get(model, "big")
    data = two["big"][3]
    read = [("big", 5, 1000, room.address, 1000)]
    with loader.start(model, read, keep=room, wait_stream=1, signal_stream=1) as job:
        job.wait()
    assert room.tobytes() == data[5:1005] + data[1000:]


class Memory:
    """What torch makes on a GPU, as far as it is used: memory, seen as elements of some size at even distances."""

    rooms = []  # of the loader's device, one for each allocation

    def __init__(self, shape, item, address, step=0):
        self.shape, self.item, self.address, self.step = tuple(shape), item, address, step

    def data_ptr(self):
        return self.address

    def element_size(self):
        return self.item

    def view(self, item):
        return Memory((), item, self.address)

    def as_strided(self, shape, strides, first):
        inner, reach = [], 1
        for size in reversed(shape[1:]):
            inner.insert(0, reach)
            reach *= size
        assert list(strides[1:]) == inner, "elements of a tensor lie one after the other"
        return Memory(shape, self.item, self.address + first * self.item, strides[0] * self.item)

    def unbind(self, dim):
        assert dim == 0
        return [Memory(self.shape[1:], self.item, self.address + i * self.step) for i in range(self.shape[0])]

    def bytes(self):
        size = math.prod(self.shape) * self.item
        for room in self.rooms:
            if room.address <= self.address and self.address + size <= room.address + room.nbytes:
                at = self.address - room.address
                return room.tobytes()[at : at + size]
        return b"" if size == 0 else None


@pytest.fixture
def fake_torch(loader, tmp_path, monkeypatch):
    """A torch that only allocates. Its empty.calls counts."""
    checkpoints.make_sparse(str(tmp_path / "room"), 1, 10 << 20)
    source = headrace.open(tmp_path / "room")
    Memory.rooms = []

    def empty(shape, dtype, device):
        assert device == Device("cuda:0")
        Memory.rooms.append(loader.get(source, 0))
        return Memory((shape,) if isinstance(shape, int) else shape, dtype, Memory.rooms[-1].address)

    items = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}
    torch = types.SimpleNamespace(empty=empty, device=Device, cuda=types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=0)), **items)  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_convert, "_torch_dtypes", {})
    yield torch
    Memory.rooms = []


class Device(str):
    type = "cuda"


@pytest.mark.parametrize("share_blocks", (True, False))
@pytest.mark.parametrize("window", (1, 300, 64 << 20))
def test_torch_gets_its_own_memory_in_windows(root, two, fake_torch, monkeypatch, window, share_blocks):
    model = headrace.open(root / "two")
    monkeypatch.setattr(_on_gpu, "WINDOW_BYTES", window)
    for wanted in (None, ["scale", "embed.weight", "empty"]):
        del Memory.rooms[:]
        got = list(headrace.feed(model, "cuda:0", framework="torch", names=wanted, share_blocks=share_blocks, staging_bytes="1MiB"))
        assert [name for name, _ in got] == [name for name in model.names if wanted is None or name in wanted]
        for name, tensor in got:
            assert list(tensor.shape) == two[name][2]
            assert tensor.bytes() == two[name][3], name
            assert tensor.address % 256 == 0
        assert len(Memory.rooms) < len(got) or not share_blocks
        assert len(Memory.rooms) == len(got) or share_blocks
