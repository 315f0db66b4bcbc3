# SPDX-License-Identifier: Apache-2.0
"""The binding on a GPU, or on the look-alike driver of tests/fakes, whose device memory the CPU cannot read: so bytes are compared
through Array.tobytes()."""
import gc

import headrace
import pytest


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


def test_torch_gets_its_own_memory_in_windows(root, two, loader, monkeypatch):
    """What headrace.feed() does for torch on a GPU, with a torch that only allocates."""
    import sys
    import types

    from headrace import _convert, _load

    model = headrace.open(root / "two")

    class Tensor:
        def __init__(self, shape, dtype, device):
            assert device == "cuda:0"
            self.shape, self.dtype, self.room = shape, dtype, loader.get(model, "big")

        def data_ptr(self):
            return self.room.address

    names = {name: name for name in ("uint8", "bfloat16", "float32", "float64")}
    torch = types.SimpleNamespace(empty=Tensor, device=str, cuda=types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=0)), **names)  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_convert, "_torch_dtypes", {})
    for window in (1, 300, 64 << 20):
        monkeypatch.setattr(_load, "_WINDOW_BYTES", window)
        for wanted in (None, ["scale", "embed.weight", "empty"]):
            got = list(headrace.feed(model, "cuda:0", framework="torch", names=wanted, staging_bytes="1MiB"))
            assert [name for name, _ in got] == [name for name in model.names if wanted is None or name in wanted]
            for name, tensor in got:
                assert list(tensor.shape) == two[name][2]
                assert tensor.room.tobytes()[: len(two[name][3])] == two[name][3]
