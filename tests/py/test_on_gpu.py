# SPDX-License-Identifier: Apache-2.0
"""What torch on a GPU gets, with the real torch: the same code over memory of the CPU, which needs no stream. The way to a GPU's memory
is in test_cuda_arrays.py."""
import gc
import os

import checkpoints
import headrace
import pytest
import test_blocks
import torch
from headrace import _on_gpu


@pytest.fixture
def loader():
    with headrace.Loader("cpu", staging_bytes="1MiB") as loader:
        yield loader


def bytes_of(tensor):
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("share_blocks", (True, False))
@pytest.mark.parametrize("seed", range(12))
def test_all_tensors_are_right_and_stay_so(tmp_path, monkeypatch, seed, share_blocks):
    monkeypatch.setattr(_on_gpu, "WINDOW_BYTES", (1, 700, 1 << 20)[seed % 3])
    monkeypatch.setattr(_on_gpu, "CUTTERS_FROM", (0, 4096)[seed % 2])
    model, content = test_blocks.model_of(tmp_path / "model", seed)
    with torch.device("meta"), headrace.Loader("cpu", staging_bytes="1MiB") as loader:
        found = _on_gpu.gathered(model, loader, share_blocks=share_blocks, block_bytes=4096)
        pairs = list(_on_gpu.tensors(model, loader, model.names[::-1], share_blocks=share_blocks, block_bytes=4096))
    model.close()
    gc.collect()
    assert list(found) == list(content) and [name for name, _ in pairs] == list(content)[::-1]
    for name, tensor in list(found.items()) + pairs:
        _, dtype, shape, data = content[name]
        assert list(tensor.shape) == shape and tensor.is_contiguous() and tensor.device.type == "cpu", name
        assert {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}[dtype] == tensor.dtype
        assert bytes_of(tensor) == data, name
        assert tensor.is_leaf and not tensor.requires_grad
        assert share_blocks or tensor.untyped_storage().nbytes() == len(data)
    starts = {tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}
    assert share_blocks is False or len(starts) < sum(1 for tensor in found.values() if tensor.numel())


def test_a_tensor_can_be_written_and_trained_without_a_trace_in_its_neighbours(loader, tmp_path):
    tensors = [checkpoints.tensor(f"t{i}", "U8", [64], i) for i in range(8)]
    checkpoints.write(tmp_path / "a.safetensors", [(name, "F32", [16], b"\0\0\x80?" * 16) for name, *_ in tensors])
    with headrace.open(tmp_path / "a.safetensors") as model:
        found = _on_gpu.gathered(model, loader)
    found["t1"].mul_(2)
    weight = torch.nn.Parameter(found["t2"])
    (weight * found["t0"]).sum().backward()
    with torch.no_grad():
        weight -= weight.grad
        found["t3"].requires_grad_().add_(5)
    assert [float(found[f"t{i}"].sum()) for i in range(6)] == [16, 32, 0, 96, 16, 16]


def test_the_collector_is_held_back_only_while_a_dict_is_filled(loader, tmp_path):
    checkpoints.write(tmp_path / "a.safetensors", [checkpoints.tensor(f"t{i}", "U8", [16], i % 250) for i in range(4000)])
    seen = []
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    try:
        with headrace.open(tmp_path / "a.safetensors") as model:
            del seen[:]
            found = _on_gpu.gathered(model, loader)
            during = len(seen)
            assert gc.isenabled() and len(found) == 4000
            pairs = _on_gpu.tensors(model, loader)
            assert next(pairs) and gc.isenabled()
            pairs.close()
            gc.disable()
            _on_gpu.gathered(model, loader)
            assert not gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.pop()
    assert during <= 4


def test_the_collector_gets_its_turn_in_a_long_load(loader, tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "a.safetensors", [checkpoints.tensor(f"t{i}", "U8", [16], i % 250) for i in range(4000)])
    monkeypatch.setattr(_on_gpu, "NO_COLLECTION_SECONDS", 0)
    monkeypatch.setattr(_on_gpu, "KEPT_AHEAD_BYTES", 1)
    seen = []
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    try:
        with headrace.open(tmp_path / "a.safetensors") as model:
            _on_gpu.gathered(model, loader, block_bytes=256 * 1000, window_bytes=256 * 1000)
    finally:
        gc.callbacks.pop()
    assert len(seen) >= 4  # two rounds, each told twice


def test_an_error_is_told_with_its_tensor_and_leaves_nothing_behind(loader, tmp_path):
    path = tmp_path / "a.safetensors"
    checkpoints.write(path, [checkpoints.tensor(f"t{i}", "U8", [1 << 19], i) for i in range(6)])
    with headrace.open(path) as model:
        os.truncate(path, 3 << 19)
        with pytest.raises(headrace.Error, match="a.safetensors") as told:
            _on_gpu.gathered(model, loader, block_bytes=1 << 20)
        assert told.value.tensor in ("t2", "t3") and gc.isenabled()
    assert loader.stats()["staging_bytes"] == 1 << 20


def test_what_torch_lacks_is_told_before_anything_is_read(loader, tmp_path):
    odd = [checkpoints.tensor("good", "U8", [4], 1), checkpoints.tensor("bad", "F6_E2M3", [4], 2)]
    checkpoints.write(tmp_path / "a.safetensors", odd)
    with headrace.open(tmp_path / "a.safetensors") as model:
        with pytest.raises(TypeError, match="F6_E2M3"):
            _on_gpu.gathered(model, loader)
        with pytest.raises(headrace.SafetensorError, match="bad"):
            from headrace._frameworks import understood

            _on_gpu.gathered(model, loader, check=lambda dtype, shape, name: understood(dtype, name))
    assert loader.stats()["read_bytes"] == 0
