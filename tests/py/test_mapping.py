# SPDX-License-Identifier: Apache-2.0
"""Tensors in place (Model.map, map=True): right bytes, read-only by every way out, good after the model is closed, and what ends the
process as documented."""
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings

import headrace
import numpy
import pytest

PyCapsule_GetPointer = ctypes.pythonapi.PyCapsule_GetPointer
PyCapsule_GetPointer.restype = ctypes.c_void_p
PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def n_mappings(of):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(str(of) in line for line in maps)


def in_process(code, *args):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=100)
    return done


def test_maps_every_tensor_with_the_right_bytes(root, two):
    with headrace.open(root / "two") as model:
        for how in ({}, {"populate": True}, {"ahead": True}):
            for name, (_, dtype, shape, data) in two.items():
                array = model.map(name, **how)
                assert (array.dtype, list(array.shape), array.nbytes, array.device) == (dtype, shape, len(data), "cpu")
                assert array.read_only and array.tobytes() == bytes(memoryview(array).cast("B") if data else b"") == data
        assert model.map(0).dtype == model.tensors[0].dtype
    with pytest.raises(ValueError, match="closed"):
        model.map(0)


def test_stays_right_after_the_model_is_closed(root, two):
    model = headrace.open(root / "two")
    arrays = {name: model.map(name) for name in model.names}
    views = {name: memoryview(array) for name, array in arrays.items()}
    model.close()
    del model, arrays
    gc.collect()
    assert n_mappings(root / "two") > 0
    for name, view in views.items():
        assert view.tobytes() == two[name][3]
    del views, view
    gc.collect()
    assert n_mappings(root / "two") == 0


def test_may_only_be_read_whatever_the_way_out(root, two):
    with headrace.open(root / "two") as model, headrace.Loader("cpu") as loader:
        name = next(name for name, (_, dtype, _, data) in two.items() if dtype == "F32" and data)
        array = model.map(name)
        view = memoryview(array)
        assert view.readonly
        with pytest.raises(TypeError):
            view[...] = 0
        with pytest.raises((BufferError, TypeError)):
            ctypes.c_char.from_buffer(array)
        assert not array.numpy().flags.writeable
        with pytest.raises(BufferError, match="only be read"):
            array.__dlpack__()
        capsule = array.__dlpack__(max_version=(1, 0))
        flags = ctypes.c_uint64.from_address(PyCapsule_GetPointer(capsule, b"dltensor_versioned") + 24)
        assert flags.value == 1
        copy = array.__dlpack__(max_version=(1, 0), copy=True)
        assert ctypes.c_uint64.from_address(PyCapsule_GetPointer(copy, b"dltensor_versioned") + 24).value == 2
        assert array.__dlpack__(copy=True) is not None
        loaded = loader.get(model, name)
        assert not loaded.read_only and not memoryview(loaded).readonly


def test_numpy_takes_it_as_read_only(root, two):
    major, minor = (int(part) for part in numpy.__version__.split(".")[:2])
    with headrace.open(root / "two") as model:
        name = next(name for name, (_, dtype, _, data) in two.items() if dtype == "F32" and data)
        array = model.map(name)
        if (major, minor) >= (2, 1):
            taken = numpy.from_dlpack(array)
            assert not taken.flags.writeable and taken.tobytes() == two[name][3]
        else:
            with pytest.raises(BufferError, match="only be read"):
                numpy.from_dlpack(array)


def test_load_and_feed_map_on_request(root, two):
    got = headrace.load(root / "two", framework=None, map=True)
    assert {name: array.tobytes() for name, array in got.items()} == {name: data for name, (*_, data) in two.items()}
    assert all(array.read_only for array in got.values())
    names = list(two)[::-1]
    with headrace.open(root / "two") as model:
        assert [name for name, _ in headrace.feed(model, names=names[:3], framework=None, map=True)] == [
            name for name in model.names if name in names[:3]
        ]
        assert not model.closed
    for how in ({"device": "cuda:0"}, {"readers": 2}):
        with pytest.raises(ValueError, match="in place"):
            headrace.load(root / "two", framework=None, map=True, **how)


def test_safe_open_maps_on_request(tmp_path, root, two):
    name = next(name for name, (_, dtype, _, data) in two.items() if dtype == "F32" and data)
    with headrace.safe_open(root / "two", "np", map=True) as opened:
        whole = opened.get_tensor(name)
        assert not whole.flags.writeable and whole.tobytes() == two[name][3]
        assert opened.get_slice(name)[...].tobytes() == two[name][3]
    with pytest.raises(headrace.SafetensorError, match="in place"):
        headrace.safe_open(root / "two", "np", map=True, readers=2)


def test_torch_warns_that_it_may_only_be_read(root, two):
    torch = pytest.importorskip("torch")
    name = next(name for name, (_, dtype, _, data) in two.items() if dtype == "F32" and data)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tensor = headrace.load(root / "two", names=[name], framework="torch", map=True)[name]
    assert tensor.dtype == torch.float32 and tensor.numpy().tobytes() == two[name][3]
    assert any("not writable" in str(warning.message) for warning in seen)


def test_what_was_cut_off_ends_the_process_and_copies_raise(tmp_path, root, two):
    source = tmp_path / "cut"
    shutil.copytree(root / "two", source)
    code = """
        import os, resource, sys, headrace
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        model = headrace.open(sys.argv[1])
        name = max(model.tensors, key=lambda info: (info.nbytes, info.offset)).name
        array = model.map(name)
        os.truncate(model.shards[model.tensor(name).shard].path, 16)
        try:
            array.tobytes()
        except headrace.Error as error:
            assert error.name == "HR_E_CHANGED", error.name
            print("raised", flush=True)
        if sys.argv[2] == "touch":
            bytes(memoryview(array).cast("B")[-1:])
    """
    done = in_process(code, source, "copy")
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr
    shutil.rmtree(source)
    shutil.copytree(root / "two", source)
    done = in_process(code, source, "touch")
    assert done.returncode == -signal.SIGBUS, (done.stdout, done.stderr)
