# SPDX-License-Identifier: Apache-2.0
"""The binding itself: models, loaders, jobs, feeds, arrays; who owns which memory; what is refused, and how it is told."""
import asyncio
import ctypes
import gc
import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import checkpoints
import headrace
import numpy
import pytest
from headrace import _native

PLAIN = {
    "BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q", "F16": "e", "F32": "f",
    "F64": "d",
}  # fmt: skip


@pytest.fixture
def loader():
    with headrace.Loader("cpu", staging_bytes="1MiB") as loader:
        yield loader


def in_process(code, *args, status=0):
    """Runs code in a Python of its own; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


# ---- models


def test_a_model_tells_what_its_headers_say(root, two):
    with headrace.open(root / "two") as model:
        assert len(model) == len(two) == len(model.names)
        assert sorted(model.names) == sorted(two) and list(model) == model.names
        assert "scale" in model and "nothing" not in model and 3 not in model and "\ud800" not in model
        for info in model.tensors:
            name, dtype, shape, data = two[info.name]
            assert (info.dtype, list(info.shape), info.nbytes, info.listed) == (dtype, shape, len(data), True)
            assert model.tensor(name) == model.tensor(info.index) == info
            assert model.read_shard(info.shard, info.offset, info.nbytes) == data
            at = len(data) // 3
            assert model.read_part(name, at, len(data) - at) == model.read_part(info.index, 0, len(data))[at:] == data[at:]
            for wrong in ((at, len(data) - at + 1), (len(data) + 1, 0), (2**64 - 1, 1), (0, -1)):
                with pytest.raises(ValueError):
                    model.read_part(name, *wrong)
        assert [os.path.basename(shard.path) for shard in model.shards] == sorted(checkpoints.two_shards())
        assert [shard.nbytes for shard in model.shards] == [os.path.getsize(shard.path) for shard in model.shards]
        assert model.metadata(1) == {"format": "pt"} and model.warnings == []
        with open(model.shards[1].path, "rb") as file:
            assert model.digest(1) == hashlib.sha256(file.read()).hexdigest()
    assert model.closed


def test_a_model_is_opened_by_file_index_folder_or_list(root):
    files = sorted((root / "two").glob("*.safetensors"))
    for source in (root / "two", str(root / "two"), root / "two" / "model.safetensors.index.json", files, tuple(map(str, files))):
        assert len(headrace.open(source)) == 6
    assert headrace.open(root / "one.safetensors").metadata() == {"format": "pt", "made by": "a test"}
    assert headrace.open(root / "none.safetensors").metadata() == {}


def test_tensors_that_the_index_does_not_name_are_told(root):
    model = headrace.open(root / "unlisted")
    assert sorted(info.name for info in model.tensors if not info.listed) == ["empty", "scale"]
    assert len(model.warnings) >= 1


def test_odd_names_are_names(root):
    model = headrace.open(root / "names.safetensors")
    assert sorted(model.names) == sorted(checkpoints.ODD_NAMES)
    for name in checkpoints.ODD_NAMES:
        assert model.tensor(name).name == name


def test_symbolic_links_can_be_refused(root, tmp_path):
    (tmp_path / "link.safetensors").symlink_to(root / "one.safetensors")
    assert len(headrace.open(tmp_path / "link.safetensors")) == 2
    with pytest.raises(headrace.Error):
        headrace.open(tmp_path / "link.safetensors", no_symlinks=True)


# ---- errors


@pytest.mark.parametrize(
    "file, name, has_offset",
    [
        ("short", "HR_E_COVER", False), ("long", "HR_E_COVER", False), ("json", "HR_E_JSON", True), ("dtype", "HR_E_DTYPE", True),
        ("tiny", "HR_E_SMALL", False),
    ],
)  # fmt: skip
def test_a_broken_file_is_an_error_with_file_and_place(root, file, name, has_offset):
    path = str(root / f"{file}.safetensors")
    with pytest.raises(headrace.Error) as caught:
        headrace.open(path)
    error = caught.value
    assert (error.name, error.path, error.filename) == (name, path, path)
    assert error.code < 0 and error.message == str(error) and path in str(error) and error.stage
    if has_offset:
        assert 0 < error.offset < os.path.getsize(path)
    assert isinstance(error, OSError) and error.errno


def test_what_is_not_there_is_file_not_found(root, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        headrace.open(tmp_path / "none")
    assert isinstance(caught.value, headrace.Error) and caught.value.errno == 2
    with pytest.raises(headrace.Error, match="model-00002-of-00002.safetensors") as caught:
        headrace.open(root / "missing")
    assert caught.value.name == "HR_E_INDEX"


def test_a_tensor_that_is_not_there_is_a_key_error(root, loader):
    model = headrace.open(root / "two")
    for call in (lambda: model.tensor("w"), lambda: loader.get(model, "w"), lambda: loader.feed(model, ["w"])):
        with pytest.raises(KeyError) as caught:
            call()
        assert isinstance(caught.value, headrace.Error) and caught.value.tensor == "w"
        assert str(caught.value).startswith("there is no tensor")


def test_a_file_that_is_replaced_or_cut_is_not_read(root, tmp_path, loader):
    path = tmp_path / "w.safetensors"
    checkpoints.write(path, [checkpoints.tensor("w", "U8", [3000000], 1)])
    model = headrace.open(path)
    assert len(loader.get(model, "w").tobytes()) == 3000000
    os.truncate(path, 2000000)
    with pytest.raises(headrace.Error) as caught:
        loader.get(model, "w")
    assert caught.value.name in ("HR_E_CHANGED", "HR_E_SHORT") and caught.value.path == str(path)


def test_an_error_can_be_pickled(root):
    import pickle

    with pytest.raises(headrace.Error) as caught:
        headrace.open(root / "json.safetensors")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, again.path, again.offset, str(again)) == (
        caught.value.code, caught.value.path, caught.value.offset, str(caught.value))  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"device": "tpu"}, {"staging_bytes": "7"}, {"engine": "magic"}, {"device": "cuda:999"}]
)
def test_a_loader_that_cannot_be_is_an_error(options):
    with pytest.raises(headrace.Error):
        headrace.Loader(**options)


@pytest.mark.parametrize("options", [{"caching": "yes"}, {"readers": 0}, {"staging_bytes": "64 pounds"}, {"slot_bytes": -1}])
def test_a_value_that_is_none_is_a_value_error(options):
    with pytest.raises(ValueError):
        headrace.Loader(**options)


def test_sizes_are_understood():
    good = {"0": 0, "4096": 4096, "64MiB": 64 << 20, "64 MiB": 64 << 20, "1GB": 10**9, "2K": 2048, "3kB": 3000, "1TiB": 1 << 40, 7: 7}
    assert {text: headrace.parse_size(text) for text in good} == good
    for bad in ("", "MiB", "-1", "1.5GiB", "64mib", "1 2", "18446744073709551616", "17179869184GiB", "1\0", -1, 2**64):
        with pytest.raises(ValueError):
            headrace.parse_size(bad)
    for bad in (None, 1.5, True, b"1"):
        with pytest.raises(TypeError):
            headrace.parse_size(bad)


# ---- loading


def test_every_way_of_loading_gives_the_bytes_of_the_file(root, two, loader):
    model = headrace.open(root / "two")
    for name, (_, dtype, shape, data) in two.items():
        array = loader.get(model, name)
        assert (array.dtype, list(array.shape), array.nbytes, array.device) == (dtype, shape, len(data), "cpu")
        assert array.tobytes() == bytes(memoryview(array).cast("B") if data else b"") == data
        room = bytearray(len(data) + 1)
        loader.read_into(model, name, ctypes.addressof(ctypes.c_char.from_buffer(room)), len(data))
        assert room[:-1] == data and room[-1] == 0
    fed = list(loader.feed(model))
    assert [info.name for info, _ in fed] == model.names
    assert all(array.tobytes() == two[info.name][3] for info, array in fed)


def test_a_feed_keeps_an_order_that_is_asked_for(root, loader):
    model = headrace.open(root / "two")
    order = ["scale", "big", "embed.weight", "layer.1.weight"]
    assert [info.name for info, _ in loader.feed(model, order, given_order=True)] == order
    assert [info.name for info, _ in loader.feed(model, order)] == [name for name in model.names if name in order]
    assert list(loader.feed(model, [])) == []
    with pytest.raises(TypeError):
        loader.feed(model, "scale")


def test_a_feed_that_is_left_early_is_closed(root, loader):
    model = headrace.open(root / "two")
    feed = loader.feed(model)
    first = next(feed)
    feed.close()
    assert list(feed) == [] and first[1].nbytes > 0 and feed.stats()["total_tensors"] == 6
    with loader.feed(model) as feed:
        next(feed)
    for _ in loader.feed(model):
        break


def test_a_job_reads_ranges_and_keeps_what_it_writes_to(root, two, loader):
    model = headrace.open(root / "two")
    data = two["big"][3]
    room = numpy.zeros(5000, "u1")
    with loader.start(model, [("big", 1000, 3000, room.ctypes.data, 5000), ("big", 8999001, None, room.ctypes.data + 3000, 1000)],
                      keep=room) as job:  # fmt: skip
        before = sys.getrefcount(room)
        job.wait()
        job.wait(0)
        assert job.stats()["done_bytes"] == 4000 and job.fileno() >= 0
    assert sys.getrefcount(room) == before - 1
    assert bytes(room) == data[1000:4000] + data[-1000:] + bytes(1000)
    with pytest.raises(ValueError):
        job.wait()


def test_a_read_that_cannot_be_is_refused_before_anything_starts(root, loader):
    model = headrace.open(root / "two")
    room = numpy.zeros(64, "u1")
    at = room.ctypes.data
    for read, name in ((("scale", 0, 8, at, 7), "HR_E_SPACE"), (("scale", 0, 9, at, 64), "HR_E_OPTS"), ((99, 0, 1, at, 64), "HR_E_OPTS")):
        with pytest.raises(headrace.Error) as caught:
            loader.start(model, [("scale", 0, 8, at, 64), read])
        assert caught.value.name == name
    for read in (("scale", 0, 8), ["scale", 0, 8, at, 8], ("scale", "0", 8, at, 8), (1.5, 0, 8, at, 8)):
        with pytest.raises(TypeError):
            loader.start(model, [read])
    with pytest.raises(ValueError):
        loader.start(model, [("scale", 0, -7, at, 8)])
    assert not room.any()


def test_streams_are_refused_on_cpu(root, loader):
    model = headrace.open(root / "two")
    with pytest.raises(headrace.Error):
        loader.feed(model, signal_stream=1)


def test_what_is_closed_says_so(root):
    model, loader = headrace.open(root / "two"), headrace.Loader()
    other = headrace.open(root / "two")
    model.close()
    model.close()
    for call in (lambda: model.names, lambda: model.tensors, lambda: len(model), lambda: "a" in model, lambda: model.tensor("a"),
                 lambda: loader.get(model, "scale"), lambda: loader.feed(model), lambda: headrace.probe(model)):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            call()
    loader.close()
    loader.close()
    for call in (lambda: loader.get(other, "scale"), lambda: loader.feed(other), lambda: loader.stats(),
                 lambda: loader.start(other, [])):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            call()


def test_statistics_are_told(root, loader):
    model = headrace.open(root / "two")
    list(loader.feed(model))
    stats = loader.stats()
    assert stats["done_bytes"] == sum(info.nbytes for info in model.tensors)
    assert stats["staging_bytes"] == 1 << 20 and 0 < stats["n_slots"] and isinstance(stats["note"], str)
    assert sum(stats["cached_bytes"].values()) + sum(stats["direct_bytes"].values()) == stats["read_bytes"]


def test_feed_and_load_give_numpy_arrays(root, two, capfd):
    for source in (root / "two", headrace.open(root / "two")):
        got = headrace.load(source, names=["scale", "layer.0.weight", "empty"], staging_bytes="1MiB", progress=True)
        assert got["scale"].shape == () and got["empty"].shape == (0, 4)
        assert got["layer.0.weight"].dtype == numpy.float32 and got["layer.0.weight"].tobytes() == two["layer.0.weight"][3]
    assert "100 %" in capfd.readouterr().err
    assert {name: array.tobytes() for name, array in headrace.feed(root / "two", framework=None)} == {
        name: item[3] for name, item in two.items()}  # fmt: skip
    with pytest.raises(ValueError):
        headrace.feed(root / "two", "cuda:0")
    with pytest.raises(ValueError):
        headrace.load(root / "two", framework="abacus")
    with pytest.raises(TypeError):
        headrace.load(root / "two", stagging_bytes=1)


# ---- arrays


def test_the_buffer_protocol_shows_what_python_knows_and_bytes_otherwise(root, loader):
    model = headrace.open(root / "odd.safetensors")
    for info in model.tensors:
        view = memoryview(loader.get(model, info.name))
        assert not view.readonly and view.nbytes == info.nbytes
        if info.dtype in PLAIN:
            assert (view.format, view.shape, view.ndim) == (PLAIN[info.dtype], (2, 4), 2)
        elif info.dtype == "C64":
            assert (view.format, view.shape) == ("Zf", (2, 4))
        else:
            assert (view.format, view.shape) == ("B", (info.nbytes,))
        assert numpy.frombuffer(view, "u1").tobytes() == model.read_shard(0, info.offset, info.nbytes)


def test_numpy_shares_the_memory(root, loader):
    model = headrace.open(root / "odd.safetensors")
    for info in model.tensors:
        if info.dtype not in PLAIN:
            continue
        array = loader.get(model, info.name)
        for made in (array.numpy(), numpy.from_dlpack(array), numpy.asarray(array)):
            assert made.shape == (2, 4) and made.dtype == numpy.dtype(PLAIN[info.dtype])
            assert made.ctypes.data == array.address
    array = loader.get(model, "t.f32")
    array.numpy()[0, 0] = 7
    assert numpy.from_dlpack(array)[0, 0] == 7


def test_a_dtype_that_numpy_lacks_is_a_type_error_with_a_way_out(root, loader):
    model = headrace.open(root / "odd.safetensors")
    with pytest.raises(TypeError, match="tobytes"):
        loader.get(model, "t.f6_e2m3").numpy()
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        with pytest.raises(TypeError, match="ml_dtypes"):
            loader.get(model, "t.bf16").numpy()
    else:
        assert loader.get(model, "t.bf16").numpy().dtype.name == "bfloat16"


class _Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("dtype", _Dtype), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


def inside(capsule):
    """The DLTensor in a capsule, and the flags of a versioned one."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    if '"dltensor_versioned"' in repr(capsule):
        managed = _Versioned.from_address(pointer(capsule, b"dltensor_versioned"))
        assert managed.major == 1
        tensor, flags = managed.tensor, managed.flags
    else:
        tensor, flags = _Tensor.from_address(pointer(capsule, b"dltensor")), None
    tensor.capsule = capsule  # kept: it owns what the tensor shows
    return tensor, flags


DLPACK = {
    "BOOL": (6, 8), "U8": (1, 8), "I8": (0, 8), "U16": (1, 16), "I16": (0, 16), "U32": (1, 32), "I32": (0, 32), "U64": (1, 64),
    "I64": (0, 64), "F16": (2, 16), "BF16": (4, 16), "F32": (2, 32), "F64": (2, 64), "C64": (5, 64), "F8_E5M2": (12, 8),
    "F8_E4M3": (10, 8), "F8_E8M0": (14, 8), "F8_E4M3FNUZ": (11, 8), "F8_E5M2FNUZ": (13, 8),
}  # fmt: skip


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_dlpack_has_both_forms_and_all_dtypes(root, loader, version):
    model = headrace.open(root / "odd.safetensors")
    for info in model.tensors:
        array = loader.get(model, info.name)
        assert array.__dlpack_device__() == (1, 0)
        if info.dtype.startswith("F6_"):
            with pytest.raises(BufferError, match=info.dtype):
                array.__dlpack__(max_version=version)
            continue
        tensor, flags = inside(array.__dlpack__(max_version=version))
        assert (flags is not None) == (version is not None and version >= (1, 0))
        assert tensor.data == array.address and tensor.ndim == 2 and tensor.byte_offset == 0
        if info.dtype == "F4":
            assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (17, 4, 2)
            assert tensor.shape[:2] == [2, 2] and tensor.strides[:2] == [2, 1]
        else:
            assert (tensor.dtype.code, tensor.dtype.bits) == DLPACK[info.dtype] and tensor.dtype.lanes == 1
            assert tensor.shape[:2] == [2, 4] and tensor.strides[:2] == [4, 1]


def test_dlpack_of_scalars_and_empty_tensors(root, loader):
    model = headrace.open(root / "two")
    scalar, _ = inside(loader.get(model, "scale").__dlpack__())
    assert scalar.ndim == 0
    empty = loader.get(model, "empty")
    tensor, _ = inside(empty.__dlpack__())
    assert not tensor.data and tensor.shape[:2] == [0, 4] and tensor.strides
    assert numpy.from_dlpack(empty).shape == (0, 4) and empty.numpy().shape == (0, 4) and empty.address == 0


def test_dlpack_arguments_are_honoured(root, loader):
    array = loader.get(headrace.open(root / "one.safetensors"), "w")
    tensor, flags = inside(array.__dlpack__(max_version=(1, 0), copy=True))
    assert tensor.data != array.address and flags & 2
    assert ctypes.string_at(tensor.data, array.nbytes) == array.tobytes()
    assert inside(array.__dlpack__(copy=False, dl_device=(1, 0), stream=None))[0].data == array.address
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ValueError):
        array.__dlpack__(stream=1)
    for wrong in ({"dl_device": 1}, {"max_version": "1.0"}, {"stream": "x"}):
        with pytest.raises(TypeError):
            array.__dlpack__(**wrong)
    with pytest.raises(TypeError):
        array.__dlpack__(None)


def test_torch_shares_the_memory(root, loader):
    torch = pytest.importorskip("torch")
    model = headrace.open(root / "odd.safetensors")
    for info in model.tensors:
        array = loader.get(model, info.name)
        try:
            made = headrace._convert.to_torch(array)
        except TypeError:
            assert info.dtype.startswith(("F6_", "F4"))
            continue
        assert made.data_ptr() == array.address and list(made.shape) == [2, 2 if info.dtype == "F4" else 4]
        if info.dtype in DLPACK and "F8" not in info.dtype:
            other = torch.from_dlpack(array)
            assert other.dtype == made.dtype and other.data_ptr() == array.address
    got = headrace.load(root / "two", framework="torch")
    assert got["scale"].dtype == torch.float64 and got["empty"].shape == (0, 4)


def test_tensors_stay_right_when_everything_else_is_gone(root, two):
    model, loader = headrace.open(root / "two"), headrace.Loader(staging_bytes="128KiB")
    arrays = [(info.name, array) for info, array in loader.feed(model)]
    kept = [(name, [numpy.frombuffer(array, "u1"), memoryview(array).cast("B")]) for name, array in arrays if array.nbytes]
    kept += [(name, [numpy.from_dlpack(array).reshape(-1).view("u1")]) for name, array in arrays if two[name][1] in PLAIN.keys() and array.nbytes]
    del arrays
    for _ in range(3):
        for info, array in loader.feed(model):  # memory that was wrongly given back would be used again here
            if array.nbytes:
                numpy.frombuffer(array, "u1")[:] = 0xEE
    loader.close()
    model.close()
    del model, loader
    gc.collect()
    assert len(kept) >= 9
    for name, views in kept:
        for view in views:
            assert bytes(view) == two[name][3], name


# ---- what is dropped, leaks, threads, processes


def rss():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def test_ten_thousand_opens_leak_nothing(root, loader):
    path = str(root / "one.safetensors")

    def once():
        model = headrace.open(path)
        array = loader.get(model, "w")
        array.__dlpack__(max_version=(1, 0))
        numpy.from_dlpack(array)
        assert len(model.tensors) == 2 and model.metadata()
        try:
            model.tensor("nope")
        except headrace.Error:
            pass
        return list(loader.feed(model))

    kinds = (headrace.Model, headrace.Array, headrace.TensorInfo, headrace.Feed, headrace.Loader)
    for _ in range(500):
        once()
    gc.collect()
    descriptors, counts = len(os.listdir("/proc/self/fd")), [sys.getrefcount(kind) for kind in kinds]
    growth = []
    for _ in range(3):
        before = rss()
        for _ in range(5000):
            once()
        gc.collect()
        growth.append(rss() - before)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [sys.getrefcount(kind) for kind in kinds] == counts
    # A leak grows each time; the interpreter's own tables, which grow too, do not. 400 KiB are 80 bytes an opening.
    assert min(growth) < 400, growth


def test_loaders_that_come_and_go_leak_nothing(root):
    model = headrace.open(root / "one.safetensors")
    for i in range(120):
        if i == 20:
            before, descriptors = rss(), len(os.listdir("/proc/self/fd"))
        loader = headrace.Loader(staging_bytes="128KiB", readers=1)
        feed = loader.feed(model)
        next(feed)
        if i % 2:
            loader.close()
        del loader, feed
    _native._n_parked()
    assert len(os.listdir("/proc/self/fd")) <= descriptors and rss() - before < 3000


class Room:
    """Memory that a job writes, which tells when it is gone."""

    def __init__(self, size):
        self.memory = numpy.empty(size, "u1")


def test_a_job_that_is_dropped_keeps_its_memory_until_it_has_settled(holes):
    model, loader = headrace.open(holes), headrace.Loader(staging_bytes="128KiB", readers=1)
    room = Room(1 << 30)
    gone = weakref.ref(room)
    job = loader.start(model, [(0, 0, 1 << 30, room.memory.ctypes.data, 1 << 30)], keep=room)
    del room, job
    for _ in range(5000):
        if not _native._n_parked():
            break
        assert gone() is not None
        threading.Event().wait(0.001)
    assert gone() is None
    loader.close()


def test_threads_share_a_loader(root, two, loader):
    failures = []

    def work():
        try:
            model = headrace.open(root / "two")
            for _ in range(10):
                for info, array in loader.feed(model):
                    assert array.tobytes() == two[info.name][3]
                assert loader.get(model, "big").tobytes() == two["big"][3]
                model.tensors, model.names
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_loader_closes_while_others_use_it(holes):
    model, loader = headrace.open(holes), headrace.Loader(staging_bytes="128KiB", readers=1)
    job_room = Room(1 << 20)
    results = []

    def work(call):
        try:
            while True:
                call()
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    feed = loader.feed(model)
    read = [(0, 0, 1 << 20, job_room.memory.ctypes.data, 1 << 20)]
    calls = [lambda: loader.get(model, 0), lambda: next(feed), lambda: loader.start(model, read, keep=job_room).wait(), lambda: loader.stats()]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.05)
    loader.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(results) == 4
    for error in results:
        assert isinstance(error, ValueError) or error.name == "HR_E_CANCELLED", error


def test_one_feed_is_for_one_thread(holes):
    model, loader = headrace.open(holes), headrace.Loader(staging_bytes="128KiB", readers=1)
    feed = loader.feed(model)
    thread = threading.Thread(target=lambda: pytest.raises(headrace.Error, next, feed))
    thread.start()
    threading.Event().wait(0.1)
    with pytest.raises(ValueError, match="another thread"):
        next(feed)
    loader.close()
    thread.join()


def test_a_forked_child_reads_models_and_is_told_about_the_rest(root):
    in_process(
        """
        import gc, os, sys, headrace
        model, loader = headrace.open(sys.argv[1]), headrace.Loader()
        job, feed, array = loader.start(model, []), loader.feed(model), loader.get(model, "big")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert len(model.read_shard(0, 0, 8)) == 8 and len(headrace.open(sys.argv[1])) == 6
                for call in (lambda: loader.get(model, "big"), lambda: next(feed), lambda: loader.feed(model), job.wait, loader.close,
                             array.tobytes, lambda: loader.start(model, []), job.close):
                    try:
                        call()
                    except headrace.Error as error:
                        assert error.name == "HR_E_FORKED", error
                    else:
                        raise AssertionError("it worked in the child")
                del loader, job, feed, array, model
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert len(array.tobytes()) == 9000001 and len(list(feed)) == 6
        job.wait()
        """,
        root / "two",
    )


def test_a_sub_interpreter_is_refused():
    in_process(
        """
        try:
            import _interpreters as interpreters
            create = lambda: interpreters.create("legacy")
        except ImportError:
            import _xxsubinterpreters as interpreters
            create = lambda: interpreters.create(isolated=False)
        import sys, headrace
        code = '''if True:
            import sys
            sys.path[:] = %r
            try:
                import headrace
            except ImportError as error:
                assert "interpreter" in str(error), error
            else:
                raise AssertionError("headrace was imported")
            ''' % (sys.path,)
        problem = (interpreters.run_string if hasattr(interpreters, "run_string") else interpreters.exec)(create(), code)
        assert problem is None, problem
        """
    )


def test_importing_is_quick_and_brings_no_framework():
    best = min(
        float(
            in_process(
                """
                import time
                start = time.process_time()
                import headrace
                print(time.process_time() - start)
                import sys
                assert not {"numpy", "torch", "asyncio", "typing"} & set(sys.modules) - {"typing"}
                """
            )
        )
        for _ in range(8)
    )
    assert best < 0.015  # of CPU time: other work on the machine counts for little


def test_everything_may_be_open_at_exit(root):
    in_process(
        """
        import sys, headrace
        model, loader = headrace.open(sys.argv[1]), headrace.Loader()
        feed, array = loader.feed(model), loader.get(model, "big")
        next(feed)
        room = bytearray(9000001)
        import ctypes
        job = loader.start(model, [("big", 0, None, ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room))], keep=room)
        cycle = [model, loader, feed, array, job]
        cycle.append(cycle)
        """,
        root / "two",
    )


def test_a_job_can_be_awaited(root, two, loader):
    model = headrace.open(root / "two")

    async def one(name):
        room = numpy.empty(len(two[name][3]), "u1")
        with loader.start(model, [(name, 0, None, room.ctypes.data, room.nbytes)], keep=room) as job:
            await job
            await asyncio.gather(job, job)
        return room.tobytes()

    async def all_of_them():
        return await asyncio.gather(*map(one, two))

    assert asyncio.run(all_of_them()) == [item[3] for item in two.values()]


def test_a_task_that_is_cancelled_cancels_its_job(holes):
    model, loader = headrace.open(holes), headrace.Loader(staging_bytes="128KiB", readers=1)
    room = numpy.empty(1 << 30, "u1")

    async def work(job):
        await job

    async def main():
        job = loader.start(model, [(0, 0, room.nbytes, room.ctypes.data, room.nbytes)], keep=room)
        task = asyncio.create_task(work(job))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(headrace.Error) as caught:
            job.wait(0)
        assert caught.value.name == "HR_E_CANCELLED"

    asyncio.run(main())
    loader.close()


def test_a_wait_that_expires_leaves_the_job_running(holes):
    model, loader = headrace.open(holes), headrace.Loader(staging_bytes="128KiB", readers=1)
    room = numpy.empty(1 << 30, "u1")
    job = loader.start(model, [(0, 0, room.nbytes, room.ctypes.data, room.nbytes)], keep=room)
    with pytest.raises(TimeoutError) as caught:
        job.wait(0.001)
    assert caught.value.name == "HR_E_PENDING" and isinstance(caught.value, headrace.Error)
    job.cancel()
    with pytest.raises(headrace.Error) as caught:
        job.wait()
    assert caught.value.name == "HR_E_CANCELLED"
    for bad in (-1, float("nan"), "1"):
        with pytest.raises((ValueError, TypeError)):
            job.wait(bad)
    job.close()
    loader.close()


def test_the_stubs_say_what_is_there():
    import ast

    with open(os.path.join(os.path.dirname(headrace.__file__), "_native.pyi"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    told = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    there = {name for name in dir(_native) if not name.startswith("__")} - {"version"}
    assert set(told) == there
    for name, node in told.items():
        if isinstance(node, ast.ClassDef) and node.name not in ("TensorInfo", "ShardInfo"):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            public = {item for item in dir(getattr(_native, name)) if not item.startswith("__")}
            assert public == {item for item in methods if not item.startswith("__")}, name
            for item in public:
                assert getattr(getattr(_native, name), item).__doc__, (name, item)
