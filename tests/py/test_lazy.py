# SPDX-License-Identifier: Apache-2.0
"""Cache, Lease, LazyModelLoader and LazyModel without a framework."""
import gc
import json
import os
import signal
import threading
import time

import checkpoints
import headrace
import pytest


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """A checkpoint of an embedding, 6 layers of 2 tensors, a norm and a head; what is in it by name."""
    folder = tmp_path_factory.mktemp("layers") / "model"
    tensors = [checkpoints.tensor("model.embed_tokens.weight", "F32", [64, 16], 1)]
    for n in range(6):
        tensors.append(checkpoints.tensor(f"model.layers.{n}.self_attn.q_proj.weight", "F32", [32, 33], 2 * n + 2))
        tensors.append(checkpoints.tensor(f"model.layers.{n}.mlp.up.weight", "F16", [10], 2 * n + 3))
    tensors.append(checkpoints.tensor("model.norm.weight", "F32", [16], 20))
    tensors.append(checkpoints.tensor("lm_head.weight", "F32", [64, 16], 21))
    checkpoints.write_sharded(str(folder), {"a.safetensors": tensors[:8], "b.safetensors": tensors[8:]})
    return folder, {name: data for name, _, _, data in tensors}


LAYER = [f"model.layers.{{}}.{part}.weight" for part in ("self_attn.q_proj", "mlp.up")]


def layer(n):
    return [name.format(n) for name in LAYER]


def device_of_tests():
    """Meson runs these tests once on cpu, and once over the look-alike of CUDA's driver."""
    return os.environ.get("HEADRACE_TEST_DEVICE", "cpu")


@pytest.fixture()
def opened(layers):
    with headrace.open(layers[0]) as model:
        yield model, layers[1]


def cache(budget, **options):
    return headrace.Cache(device_of_tests(), budget=budget, **options)


# ------------------------------------------------------------------------------------------------------------------- cache and lease


def test_a_lease_has_the_tensors_and_their_bytes(opened):
    model, expected = opened
    with cache("1MiB") as kept:
        group = kept.group(model, layer(3))
        assert group.names == tuple(layer(3)) and len(group.offsets) == 2 and all(at % 256 == 0 for at in group.offsets)
        with kept.get(group) as lease:
            assert list(lease.tensors) == layer(3) and lease.group is group
            for name, array in lease.tensors.items():
                assert array.tobytes() == expected[name] and array.shape == model.tensor(name).shape
            assert lease.memory.nbytes == group.nbytes
            assert kept.pinned > 0
        del array
        gc.collect()
        assert (kept.pinned, kept.stats()["n_misses"]) == (0, 1)
        with pytest.raises(ValueError, match="released"):
            lease.tensors
        lease.release()
        kept.get(model, layer(3)).release()
        kept.get(model, names=tuple(layer(3)), stream=0, timeout=1).release()
        assert kept.stats()["n_hits"] == 2 and kept.group(model, layer(3)) is group
        kept.get(model, "lm_head.weight").release()
        kept.get(model, model.tensor("lm_head.weight").index).release()


def test_the_budget_holds_and_what_is_evicted_comes_back(opened):
    model, expected = opened
    with cache("1MiB") as kept:
        one = kept.charge(model, layer(0))
    with cache(2 * one) as kept:
        for n in [0, 1, 2, 3, 4, 5] * 3:
            with kept.get(model, layer(n)) as lease:
                assert all(array.tobytes() == expected[name] for name, array in lease.tensors.items())
                del lease
            assert kept.used <= kept.budget == 2 * one
        found = kept.stats()
        assert found["n_hits"] == 0 and found["n_evictions"] >= 16 and found["peak_bytes"] <= 2 * one
    with cache(4 * one, policy="loop") as kept:
        for n in [0, 1, 2, 3, 4, 5] * 3:
            kept.get(model, layer(n)).release()
        assert kept.stats()["n_hits"] > 0


def test_an_array_keeps_its_group_in_memory(opened):
    model, expected = opened
    with cache("1MiB") as kept:
        one = kept.charge(model, layer(0))
    with cache(one) as kept:
        array = kept.get(model, layer(0)).tensors[layer(0)[0]]
        gc.collect()
        assert kept.pinned == one
        with pytest.raises(headrace.Error, match=layer(0)[0]) as raised:
            kept.get(model, layer(1), timeout=0.05)
        assert raised.value.name == "HR_E_FULL"
        with pytest.raises(headrace.Error) as raised:
            kept.evict(model, layer(0))
        assert raised.value.name == "HR_E_BUSY"
        with pytest.raises(headrace.Error):
            kept.close(timeout=0)
        assert array.tobytes() == expected[layer(0)[0]]
        del array
        kept.get(model, layer(1), timeout=1).release()


@pytest.mark.skipif(device_of_tests() != "cpu", reason="numpy sees host memory")
def test_what_others_share_cannot_be_written(opened):
    pytest.importorskip("numpy")
    model, expected = opened
    with cache("1MiB") as kept, kept.get(model, layer(0)) as lease:
        array = lease.tensors[layer(0)[0]].numpy()
        assert array.tobytes() == expected[layer(0)[0]] and not array.flags.writeable
        with pytest.raises(ValueError):
            array[0] = 1
        with pytest.raises(ValueError):
            array.setflags(write=True)
        with pytest.raises(TypeError):
            memoryview(lease.tensors[layer(0)[0]]).cast("B")[0] = 1
        del array


def test_waiting_for_room_ends_when_there_is_some(opened):
    model, _ = opened
    with cache("1MiB") as kept:
        one = kept.charge(model, layer(0))
    with cache(one) as kept:
        lease = kept.get(model, layer(0))
        threading.Timer(0.2, lease.release).start()
        kept.get(model, layer(1)).release()
        assert kept.stats()["room_wait_ns"] > 0


def test_what_is_wrong_is_said(opened):
    model, _ = opened
    with cache(4096) as kept:
        with pytest.raises(headrace.Error, match="budget") as raised:
            kept.get(model, layer(0) + layer(1))
        assert raised.value.name == "HR_E_BUDGET"
        with pytest.raises(headrace.TensorNotFound):
            kept.get(model, "no such tensor")
        for wrong in (
            lambda: kept.get(), lambda: kept.get(model), lambda: kept.get(model, layer(0), 0, None, 1), lambda: kept.get(model, name="x"),
            lambda: kept.get("model"), lambda: kept.group(model), lambda: kept.get(model, names=layer(0), stream="x"),
        ):  # fmt: skip
            with pytest.raises(TypeError):
                wrong()
        with pytest.raises(ValueError, match="time-out"):
            kept.get(model, layer(0), timeout=-1)
        with pytest.raises(headrace.Error):
            kept.group(model, [])
        with pytest.raises(headrace.Error, match="twice"):
            kept.group(model, layer(0) * 2)
        with pytest.raises(headrace.Error):
            kept.loader.close()
    assert kept.closed and "closed" in repr(kept)
    for call in (lambda: kept.get(model, layer(0)), lambda: kept.used, lambda: kept.prefetch(model, layer(0))):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="policy"):
        cache(4096, policy="fifo")
    with pytest.raises(ValueError, match="size"):
        cache("much")
    with pytest.raises(headrace.Error):
        cache(0)


def test_prefetch_evict_trim_and_the_budget(opened):
    model, _ = opened
    with cache("1MiB") as kept:
        group = kept.group(model, layer(2))
        kept.prefetch(group)
        kept.get(group).release()
        found = kept.stats()
        assert found["n_prefetches"] == 1 and found["n_misses"] == 0
        assert kept.evict(group) == kept.charge(group) and kept.evict(group) == 0
        kept.get(group).release()
        assert kept.trim() == kept.charge(group) and kept.used == 0
        kept.budget = 4096
        assert kept.budget == 4096
        assert kept.stats(model)["n_misses"] == 1
        with kept.get(model, "model.norm.weight"), pytest.raises(headrace.Error):
            kept.budget = 1


def test_a_cache_that_is_dropped_in_use_is_closed_later(opened):
    model, expected = opened
    kept = cache("1MiB")
    lease = kept.get(model, layer(0))
    array = lease.tensors[layer(0)[0]]
    del kept, lease
    gc.collect()
    assert headrace._native._n_parked() == 1
    assert array.tobytes() == expected[layer(0)[0]]
    del array
    gc.collect()
    assert headrace._native._n_parked() == 0


def test_many_threads_get_the_right_bytes(opened):
    model, expected = opened
    wrong = []
    with cache("1MiB") as kept:
        one = kept.charge(model, layer(0))
    with cache(4 * one) as kept:

        def work(seed):
            for i in range(60):
                n = (i * 7 + seed * 5) % 6
                with kept.get(model, layer(n)) as lease:
                    for name, array in lease.tensors.items():
                        if array.tobytes() != expected[name]:
                            wrong.append((n, name))
                    array = None
                if i % 10 == seed:
                    kept.prefetch(model, layer((n + 1) % 6))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and kept.pinned == 0


def test_ctrl_c_ends_a_wait_for_room(opened):
    model, _ = opened
    with cache("1MiB") as kept:
        one = kept.charge(model, layer(0))
    with cache(one) as kept:
        lease = kept.get(model, layer(0))
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            kept.get(model, layer(1))
        assert time.monotonic() - start < 5
        lease.release()
        kept.get(model, layer(1)).release()


def test_a_file_that_was_changed_is_an_error_and_leaves_nothing(layers, tmp_path):
    folder, _ = layers
    path = tmp_path / "one.safetensors"
    path.write_bytes((folder / "a.safetensors").read_bytes())
    with headrace.open(path) as model, cache("1MiB") as kept:
        kept.get(model, layer(0)).release()
        os.truncate(path, os.path.getsize(path) - 4)
        with pytest.raises(headrace.Error):
            kept.get(model, layer(1))
        assert kept.pinned == 0 and kept.stats()["n_groups"] == 1


def test_a_forked_child_is_told(opened):
    model, _ = opened
    with cache("1MiB") as kept:
        group = kept.group(model, layer(0))
        kept.get(group).release()
        child = os.fork()
        if not child:
            code = 1
            try:
                kept.get(group)
            except headrace.Error as error:
                code = 0 if error.name == "HR_E_FORKED" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_trace_is_json_that_perfetto_reads(opened, tmp_path):
    model, _ = opened
    with cache("1MiB", trace=tmp_path / "trace.json") as kept:
        group = kept.group(model, layer(0), label="layer 0")
        kept.get(group).release()
        kept.get(group).release()
        kept.evict(group)
        kept.flush_trace()
        assert json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event.get("cat") in ("hit", "evict")] == ["hit: layer 0", "evict: layer 0"]
    load = next(event for event in events if event.get("cat") == "load")
    assert load["ph"] == "X" and load["dur"] > 0 and load["args"]["bytes"] == group.nbytes


@pytest.mark.skipif(device_of_tests() == "cpu", reason="a caller's allocator gives device memory")
def test_device_memory_can_come_from_python(opened):
    model, expected = opened
    pool = headrace.Cache(device_of_tests(), budget="1MiB")  # lends real device memory
    given = {}

    def alloc(nbytes, align, stream):
        lease = pool.get(model, "lm_head.weight")
        array = lease.tensors["lm_head.weight"]
        assert nbytes <= array.nbytes and array.address % align == 0
        given[array.address] = array
        return array.address

    def release(address, nbytes, stream):
        del given[address]

    with headrace.Cache(device_of_tests(), budget="1MiB", alloc=alloc, release=release) as kept:
        with kept.get(model, "model.norm.weight") as lease:
            assert lease.tensors["model.norm.weight"].address in given
            assert lease.tensors["model.norm.weight"].tobytes() == expected["model.norm.weight"]
        assert len(given) == 1
    gc.collect()
    assert not given
    pool.close()


@pytest.mark.skipif(device_of_tests() == "cpu", reason="a caller's allocator gives device memory")
def test_what_an_allocator_raises_is_the_cause(opened):
    model, _ = opened

    def alloc(nbytes, align, stream):
        raise RuntimeError("no more")

    with headrace.Cache(device_of_tests(), budget="1MiB", alloc=alloc, release=lambda *_: None) as kept:
        with pytest.raises(headrace.Error) as raised:
            kept.get(model, "model.norm.weight")
        assert raised.value.name == "HR_E_DEVICE_MEMORY" and str(raised.value.__cause__) == "no more"
    with pytest.raises(TypeError, match="both or neither"):
        headrace.Loader(device_of_tests(), alloc=alloc)


# ------------------------------------------------------------------------------------------------------------------- LazyModelLoader


def test_a_loader_of_several_files(layers, tmp_path):
    folder, expected = layers
    other = [checkpoints.tensor("other", "F32", [8], 77), checkpoints.tensor("lm_head.weight", "F32", [4], 78)]
    checkpoints.write(str(tmp_path / "other.safetensors"), other, None)
    files = [folder, tmp_path / "other.safetensors"]
    with headrace.LazyModelLoader(files, memory_budget=12288, device=device_of_tests()) as loader:
        assert len(loader) == len(expected) + 1 and "other" in loader and loader.budget == 12288
        for name in [*expected] * 2:
            if name != "lm_head.weight":
                array = loader.get(name)
                assert array.tobytes() == expected[name] and loader.used <= 12288
        assert loader.stats()["n_evictions"] > 0
        with pytest.raises(ValueError, match="2 of the files"):
            loader.get("lm_head.weight")
        assert loader.get("lm_head.weight", model=1).tobytes() == other[1][3]
        assert loader.get("other").tobytes() == other[0][3]
        del array
        gc.collect()
        for wrong in (lambda: loader.get("none"), lambda: loader.get("other", model=0)):
            with pytest.raises(KeyError):
                wrong()
        if device_of_tests() == "cpu":
            with pytest.raises(ValueError, match="cuda:0"):
                loader.to_gpu("other")
        else:
            assert loader.to_gpu("other", 1).tobytes() == other[0][3]
        assert loader.evict("other") > 0 and loader.evict("other") == 0
        loader.ensure_memory(12288)
        assert loader.used == 0
        array = loader.get(layer(0)[0])
        loader.ensure_memory(4096)
        with pytest.raises(MemoryError, match="in use"):
            loader.ensure_memory(12288)
        with pytest.raises(MemoryError, match="whole budget"):
            loader.ensure_memory(12289)
        loader.prefetch("other")
        del array


def test_what_is_still_in_use_outlives_close(layers):
    folder, expected = layers
    for make in (
        lambda: headrace.LazyModelLoader(folder, memory_budget="1MiB", device=device_of_tests()),
        lambda: headrace.LazyModel.from_safetensors(folder, device=device_of_tests(), framework=None),
    ):
        with make() as made:
            array = made.get("lm_head.weight") if isinstance(made, headrace.LazyModelLoader) else made.lm_head.weight
        made.close()
        made = None
        gc.collect()
        assert headrace._native._n_parked() == 1
        assert array.tobytes() == expected["lm_head.weight"]
        array = None
        gc.collect()
        assert headrace._native._n_parked() == 0


# ------------------------------------------------------------------------------------------------------------ LazyModel, as a tree


def test_the_tree_of_tensors_loads_what_is_reached(layers):
    folder, expected = layers
    with headrace.LazyModel.from_safetensors(folder, device=device_of_tests(), budget=16384) as model:
        assert model.stats()["n_groups"] == 0 and model.budget == 16384
        assert model.model.layers[2].mlp.up.weight.tobytes() == expected["model.layers.2.mlp.up.weight"]
        assert model.stats()["n_groups"] == 1
        assert model.blocks[0].attn.q_proj.weight.tobytes() == expected["model.layers.0.self_attn.q_proj.weight"]
        assert model.blocks[-1].mlp.up.weight.tobytes() == expected["model.layers.5.mlp.up.weight"]
        assert model["model.norm.weight"].tobytes() == model.norm.weight.tobytes() == expected["model.norm.weight"]
        assert model.embed_tokens.weight.shape == (64, 16) and model.lm_head.weight.shape == (64, 16)
        assert len(model.blocks) == 6 and [block.mlp.up.weight.shape for block in model.blocks] == [(10,)] * 6
        assert "layers" in dir(model.model) and "blocks" not in dir(model)
        with pytest.raises(AttributeError, match="it has q_proj"):
            model.blocks[0].attn.k_proj
        with pytest.raises(IndexError):
            model.blocks[6]
        assert model.stats()["used_bytes"] <= 16384
    with headrace.LazyModel.from_safetensors(folder, lazy=False, device=device_of_tests(), framework=None) as model:
        assert model.stats()["n_groups"] == len(expected)
    with headrace.Cache(device_of_tests(), budget="1MiB") as kept:
        first, second = (headrace.LazyModel.from_safetensors(folder, cache=kept, framework=None) for _ in range(2))
        assert first.norm.weight.tobytes() == second.norm.weight.tobytes()
        first.close()
        assert second.norm.weight.tobytes() == expected["model.norm.weight"]
        second.close()
    for wrong in ({"framework": "jax"}, {"cache": kept, "budget": 5}, {"dtype": "float16", "framework": None}):
        with pytest.raises(ValueError):
            headrace.LazyModel.from_safetensors(folder, **wrong)
