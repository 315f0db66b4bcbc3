# SPDX-License-Identifier: Apache-2.0
"""headrace.torch against safetensors.torch: files, bytes, modules; tensors in odd places; devices."""
import os
import random

import pytest

pytest.importorskip("headrace")
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="the official package is the judge")
import drop_in  # noqa: E402
import headrace  # noqa: E402
import headrace.torch as ours  # noqa: E402
import safetensors.torch as official  # noqa: E402

SEED = int(os.environ.get("HR_SEED", random.SystemRandom().randrange(2**32)))


@pytest.fixture
def rng():
    print("SEED=%d" % SEED)
    return random.Random(SEED)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("n", torch.arange(3))


class Views(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.all = torch.nn.Parameter(torch.zeros(8))
        self.part = torch.nn.Parameter(self.all.data[:4])


class OnlyViews(torch.nn.Module):
    def __init__(self):
        super().__init__()
        memory = torch.zeros(8)
        self.left = torch.nn.Parameter(memory[:5])
        self.right = torch.nn.Parameter(memory[3:])


def test_a_file_and_bytes_load_as_in_the_official_package(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, [d for d in drop_in.TORCH if d not in ("F4", "F8_E8M0")])
    data = open(path, "rb").read()
    expected = official.load_file(path)
    for got in (ours.load_file(path), ours.load_file(path, "cpu", backend="pread"), ours.load(data), ours.load_file(path, slot_bytes="64KiB")):
        assert list(got) == list(expected) and not any(drop_in.same_tensor(got[n], expected[n]) for n in expected)
    for bad in (b"", data[:-1], bytearray(data), None):
        assert not drop_in.same_answer(drop_in.answer(lambda: ours.load(bad)), drop_in.answer(lambda: official.load(bad)))


@pytest.mark.parametrize("module", [Tied, Views, OnlyViews])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["none", "missing", "unexpected", "shape", "other name", "both names"])
def test_a_module_loads_as_in_the_official_package(tmp_path, module, strict, change):
    torch.manual_seed(3)
    tensors = {n: torch.rand(t.shape).to(t.dtype) for n, t in module().state_dict().items() if n not in ("b.weight", "part")}
    first = next(iter(tensors))
    if change == "missing":
        del tensors[first]
    elif change == "unexpected":
        tensors["zzz"] = torch.zeros(2)
    elif change == "shape":
        tensors[first] = torch.zeros(1)
    elif change == "other name" and module is Tied:
        tensors["b.weight"] = tensors.pop("a.weight")
    elif change == "both names" and module is Tied:
        tensors["b.weight"] = tensors["a.weight"] + 1
    path = str(tmp_path / "a.safetensors")
    official.save_file(tensors, path)
    mine, other = module(), module()
    a = drop_in.answer(lambda: ours.load_model(mine, path, strict=strict))
    b = drop_in.answer(lambda: official.load_model(other, path, strict=strict))
    assert a[0] == b[0], (a, b)
    if a[0] == "bad":
        assert type(a[1]) is type(b[1])
        assert module is OnlyViews or str(a[1]) == str(b[1])
    else:
        assert (set(a[1][0]), sorted(a[1][1])) == (set(b[1][0]), sorted(b[1][1]))
    for name, tensor in other.state_dict().items():
        if change not in ("missing", "shape"):
            assert module is OnlyViews or torch.equal(mine.state_dict()[name], tensor), name


def test_tensors_are_on_the_device_asked_for_inside_any_context(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["F32", "BF16", "I64"])
    expected = ours.load_file(path)
    with torch.device("meta"), torch.inference_mode(), headrace.safe_open(path, "pt") as opened:
        tensors = opened.get_tensors()
        singles = {n: opened.get_tensor(n) for n in opened.keys()}
        slices = {n: opened.get_slice(n)[...] for n in opened.keys()}
        column = opened.get_slice("F32.3x4x6")[:, :, 2]
    for got in (tensors, singles, slices):
        assert not any(drop_in.same_tensor(got[n], expected[n]) for n in expected)
    assert not drop_in.same_tensor(column.contiguous(), expected["F32.3x4x6"][:, :, 2].contiguous())  # noise: it may be NaN


def test_a_device_may_be_given_as_torch_has_it(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["F32"])
    assert headrace.safe_open(path, "pt", torch.device("cpu")).get_tensor("F32.7").device.type == "cpu"
    assert headrace.safe_open(path, "pt", None).get_tensor("F32.7").device.type == "cpu"
    for device in (torch.device("meta"), "meta", "x", "", -1, 1.5, "cpu:0", "cuda:x"):
        answers = [drop_in.answer(lambda: package(path, "pt", device)) for package in (headrace.safe_open, official.safe_open)]
        assert not drop_in.same_answer(*answers), device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told_by_torch(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["F32"])
    for call in ("get_tensor", "get_slice"):
        def use(package):
            got = getattr(package(path, "pt", "cuda:0"), call)("F32.7")
            return got[...] if call == "get_slice" else got
        assert not drop_in.same_answer(*[drop_in.answer(lambda: use(p)) for p in (headrace.safe_open, official.safe_open)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_and_slices_on_a_gpu_are_right_and_ordered_with_the_current_stream(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, [d for d in drop_in.TORCH if d != "F4"], [(), (7,), (0, 3), (30, 40, 50)])
    expected = ours.load_file(path)
    for device in ("cuda", 0, torch.device("cuda", 0)):
        with headrace.safe_open(path, "pt", device) as opened, torch.cuda.stream(torch.cuda.Stream()):
            for name, tensor in opened.get_tensors().items():
                assert tensor.is_cuda and not drop_in.same_tensor(tensor.cpu(), expected[name]), name
            for name, tensor in expected.items():
                assert not drop_in.same_tensor(opened.get_tensor(name).cpu(), tensor), name
            for index in [slice(3, 9), (slice(None), 7), (..., slice(0, 25)), (slice(0, 30, 7), slice(3, 39, 3)), 5, (..., -1)]:
                for dtype in ("F32", "BF16", "U8", "I64"):
                    name = dtype + ".30x40x50"
                    assert not drop_in.same_tensor(opened.get_slice(name)[index].cpu(), expected[name][index].contiguous()), index
