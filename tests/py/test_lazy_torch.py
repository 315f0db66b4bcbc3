# SPDX-License-Identifier: Apache-2.0
"""LazyModel and attach() with the real torch and transformers: what a model says does not depend on the memory that it was given.
HEADRACE_TEST_DEVICE=cuda:0 runs them on a GPU."""
import contextlib
import gc
import json
import os
import threading
import weakref

import pytest

headrace = pytest.importorskip("headrace")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import headrace.torch  # noqa: E402
import lazy_models as lm  # noqa: E402
from headrace import LazyModel  # noqa: E402
from headrace._torch_memory import TorchMemory  # noqa: E402
from headrace.torch import LazyWeight, attach, detach  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (folder, the model in memory), made when first asked for."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("model")
            made[kind] = folder, lm.make(kind, folder, max_shard_size="60KB")
        return made[kind]

    return get


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memorised")
    return folder, lm.memorise(folder)


def largest_unit(folder):
    """Bytes of the largest unit of the model, when its layers are whole."""
    with LazyModel.from_safetensors(folder, device=lm.DEVICE) as model:
        return max(nbytes for _, nbytes in model.attachment.units)


# ------------------------------------------------------------------------------------------------------------------- the same answers


# Experts are joined in memory as transformers wants them, and those of one layer are one module: they need room.
SHARES = [(kind, share) for kind in lm.CONFIGS for share in ((1.0, 0.8) if kind in lm.EXPERTS else (1.0, 0.4, 0.25))]


@pytest.mark.parametrize("kind, share", SHARES)
def test_what_a_model_answers_is_equal_bit_for_bit(folders, kind, share):
    folder, whole = folders(kind)
    budget = int(lm.weights_bytes(folder) * share) + (4096 if share == 1 else 0)
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=budget, prefetch=2) as model:
        for _ in range(3):
            assert torch.equal(lm.outputs(model), lm.outputs(whole))
            assert torch.equal(lm.outputs(model, lm.TOKENS[:, :1]), lm.outputs(whole, lm.TOKENS[:, :1]))
        found = model.cache.stats()
        assert found["peak_bytes"] <= budget and found["pinned_bytes"] == 0
        if share < 1:
            assert found["n_evictions"] > 0


@pytest.mark.parametrize("how", ["25 %", "largest unit + 1 byte"])
def test_a_memorised_sentence_is_said_by_heart(memorised, how):
    folder, whole = memorised
    budget = lm.weights_bytes(folder) // 4 if how == "25 %" else largest_unit(folder) + 1
    start = torch.tensor([lm.SENTENCE[:2]], device=lm.DEVICE)
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=budget) as model:
        said = model.generate(start, max_new_tokens=30, do_sample=False)
        assert said.tolist() == [lm.SENTENCE]
        assert torch.equal(said, whole.generate(start, max_new_tokens=30, do_sample=False))
        assert torch.equal(lm.outputs(model, torch.tensor([lm.SENTENCE], device=lm.DEVICE)), lm.outputs(whole, torch.tensor([lm.SENTENCE], device=lm.DEVICE)))
        assert model.cache.stats()["peak_bytes"] <= budget
        with torch.inference_mode():
            assert model.generate(start, max_new_tokens=30, do_sample=False, num_beams=2).tolist()[0][:4] == lm.SENTENCE[:4]


def test_two_models_take_turns_under_one_budget(folders):
    (one, whole_one), (two, whole_two) = folders("llama"), folders("gpt2")
    budget = max(largest_unit(one), largest_unit(two)) * 2
    with headrace.Cache(lm.DEVICE, budget=budget, policy="loop", **headrace.torch.allocator(lm.DEVICE, budget)) as cache:
        first, second = (LazyModel.from_safetensors(folder, cache=cache) for folder in (one, two))
        for _ in range(3):
            assert torch.equal(lm.outputs(first), lm.outputs(whole_one))
            assert torch.equal(lm.outputs(second), lm.outputs(whole_two))
        assert cache.stats()["peak_bytes"] <= budget
        assert first.stats()["n_misses"] > 0 and second.stats()["n_misses"] > 0
        first.close()
        assert torch.equal(lm.outputs(second), lm.outputs(whole_two))
        second.close()


def test_threads_share_a_budget_that_is_too_small_for_all_at_once(folders):
    folder, whole = folders("llama")
    budget = largest_unit(folder) + 4096
    expected = lm.outputs(whole)
    wrong = []
    with headrace.Cache(lm.DEVICE, budget=budget, **headrace.torch.allocator(lm.DEVICE, budget)) as cache:
        models = [LazyModel.from_safetensors(folder, cache=cache) for _ in range(2)]

        def work(model):
            for _ in range(5):
                if not torch.equal(lm.outputs(model), expected):
                    wrong.append(model)

        threads = [threading.Thread(target=work, args=(model,)) for model in models * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and cache.stats()["peak_bytes"] <= budget
        for model in models:
            model.close()


@pytest.mark.skipif("HR_CHECKPOINT" not in os.environ, reason="HR_CHECKPOINT names no real checkpoint")
def test_a_real_model_embeds_the_same_with_less_than_a_third_of_its_memory():
    folder = os.environ["HR_CHECKPOINT"]
    whole = lm.aligned(transformers.BertModel.from_pretrained(folder).eval().to(lm.DEVICE))
    tokens = torch.tensor([[101, 7592, 2088, 2003, 1037, 2204, 2173, 102], [101, 19387, 1010, 2300, 999, 102, 0, 0]], device=lm.DEVICE)
    mask = (tokens != 0).long()
    budget = lm.weights_bytes(folder) * 3 // 10
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=budget) as model, torch.no_grad():
        for _ in range(2):
            expected, got = whole(tokens, attention_mask=mask), model(tokens, attention_mask=mask)
            assert torch.equal(got.last_hidden_state, expected.last_hidden_state)
            assert torch.equal(got.pooler_output, expected.pooler_output)
        assert model.cache.stats()["peak_bytes"] <= budget
        with pytest.raises(IndexError, match="30522"):
            model.embed_tokens(torch.tensor([30522], device=lm.DEVICE))


# ------------------------------------------------------------------------------------------------------------------- the pieces of it


def test_parts_load_what_they_need_and_no_more(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, prefetch=0) as model:
        assert model.stats()["n_groups"] == 0
        embeddings = model.embed_tokens(lm.TOKENS)
        assert model.stats()["n_groups"] == 1
        hidden = model.blocks[0](embeddings)
        assert model.stats()["n_groups"] == 2
        with torch.no_grad():
            states = whole(lm.TOKENS, output_hidden_states=True).hidden_states
        assert torch.equal(embeddings, states[0]) and torch.equal(hidden, states[1])
        for block in list(model.blocks)[1:]:
            hidden = block(hidden)
        assert torch.equal(model.lm_head(model.norm(hidden)), lm.outputs(whole))


@pytest.mark.parametrize("kind", lm.CONFIGS)
def test_general_names_are_found(folders, kind):
    folder, whole = folders(kind)
    with LazyModel.from_safetensors(folder, device=lm.DEVICE) as model:
        assert len(model.blocks) == 4
        assert model.embed_tokens is model.module.get_input_embeddings()
        hidden = model.blocks[0](torch.ones(1, 3, 32, dtype=model.dtype, device=lm.DEVICE))
        assert (hidden[0] if isinstance(hidden, tuple) else hidden).shape == (1, 3, 32)
        if kind != "bert":
            assert model.lm_head is model.module.get_output_embeddings()
            assert model.norm is not None
        else:
            with pytest.raises(AttributeError, match="lm_head"):
                model.lm_head


def test_lazy_false_brings_everything_in(folders):
    folder, _ = folders("llama")
    with LazyModel.from_safetensors(folder, lazy=False, device=lm.DEVICE) as model:
        before = model.stats()
        assert before["n_groups"] == before["n_units"] and before["n_evictions"] == 0
        lm.outputs(model)
        assert model.stats()["n_misses"] == before["n_misses"]


def test_tied_weights_are_read_once(folders):
    folder, _ = folders("llama, tied")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, prefetch=0) as model:
        lm.outputs(model)
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
        assert model.stats()["loaded_bytes"] == lm.weights_bytes(folder)


def test_what_ran_after_what_is_loaded_ahead(folders):
    folder, _ = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=largest_unit(folder) * 3, prefetch=1) as model:
        for _ in range(3):
            lm.outputs(model)
        assert model.stats()["n_prefetches"] > 0


@pytest.fixture()
def no_gpu(monkeypatch):
    """TorchMemory over the memory of the CPU; a list that grows when torch is told to give back what it keeps."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(TorchMemory, "_stream", lambda self, stream: None)
    return emptied


def test_torch_gives_back_what_it_keeps_before_the_budget_is_exceeded(no_gpu):
    memory = TorchMemory("cpu", 1000)
    first, second = (memory.alloc(400, 1, 1) for _ in range(2))
    memory.release(first, 400, 0)
    first = memory.alloc(400, 1, 1)  # the same again
    assert not no_gpu
    memory.release(first, 400, 0)
    others = [memory.alloc(300, 1, 1) for _ in range(2)]
    assert len(no_gpu) == 1
    for other in others:
        memory.release(other, 300, 0)
    memory.alloc(300, 1, 1)
    assert len(no_gpu) == 1
    memory.alloc(200, 1, 1)
    assert len(no_gpu) == 2
    memory.release(second, 400, 0)
    memory.alloc(100, 1, 1)
    assert len(no_gpu) == 2  # all of it fits


@pytest.mark.skipif(lm.DEVICE == "cpu", reason="torch's allocator gives the memory of GPUs alone; HEADRACE_TEST_DEVICE=cuda:0")
def test_no_more_than_the_budget_is_taken_from_the_gpu(tmp_path):
    shape = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, vocab_size=20000)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, dtype="bfloat16")).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(lm.DEVICE)
    expected = lm.outputs(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # what the libraries of linear algebra keep for themselves
    budget = lm.weights_bytes(tmp_path) * 4 // 10
    torch.cuda.reset_peak_memory_stats()
    with LazyModel.from_safetensors(tmp_path, device=lm.DEVICE, budget=budget, prefetch=2) as model:
        for _ in range(6):
            assert torch.equal(lm.outputs(model), expected)
        assert model.stats()["n_evictions"] > 20
    assert torch.cuda.max_memory_reserved() - before <= budget + (24 << 20)  # and room for what forwards compute


def test_a_dtype_of_ones_own(folders):
    folder, _ = folders("llama")
    whole = lm.aligned(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(lm.DEVICE))
    budget = lm.weights_bytes(folder) // 2
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=budget, dtype=torch.bfloat16) as model:
        assert model.dtype == torch.bfloat16 and torch.equal(lm.outputs(model), lm.outputs(whole))
        assert model.cache.budget < budget  # the copies that are made are not the cache's


def test_a_trace_tells_of_loads_hits_and_evictions(folders, tmp_path):
    folder, _ = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=largest_unit(folder) * 2, trace=tmp_path / "trace.json") as model:
        for _ in range(3):
            lm.outputs(model)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {"load", "hit", "miss", "evict"} <= {event.get("cat") for event in events}
    assert any("model.layers.2" in event["name"] for event in events if event.get("cat") == "load")
    assert all(event["ph"] in "XiM" and event.get("dur", 0) >= 0 for event in events)


# ---------------------------------------------------------------------------------------------------------------- weights, looked at


def test_weights_can_be_looked_at_when_they_are_not_there(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=largest_unit(folder) + 1) as model:
        expected = dict(whole.named_parameters())
        assert list(dict(model.named_parameters())) == list(expected)
        for name, weight in model.named_parameters():
            assert isinstance(weight, LazyWeight) and isinstance(weight, nn.Parameter)
            assert (weight.shape, weight.dtype, weight.device) == (expected[name].shape, expected[name].dtype, torch.device(lm.DEVICE))
            assert torch.equal(weight, expected[name]) and torch.equal(expected[name].reshape(-1)[3:], weight.reshape(-1)[3:])
        assert (model.device, model.dtype) == (torch.device(lm.DEVICE), torch.float32)
        assert set(model.state_dict()) == set(whole.state_dict())
        for name, weight in model.state_dict().items():
            assert torch.equal(weight.clone(), whole.state_dict()[name])
        assert sum(weight.numel() for weight in model.parameters()) == sum(weight.numel() for weight in whole.parameters())
        weight = model.lm_head.weight
        assert weight.cpu().numpy().tobytes() == whole.lm_head.weight.detach().cpu().numpy().tobytes()
        assert "lm_head.weight" in repr(weight) and len(weight) == 64 and weight.to(lm.DEVICE) is weight
        with torch.no_grad():  # otherwise mm, not linear, computes it
            assert torch.equal(torch.nn.functional.linear(torch.ones(1, 32, device=lm.DEVICE), weight), whole.lm_head(torch.ones(1, 32, device=lm.DEVICE)))
        assert model.cache.stats()["pinned_bytes"] == 0


def test_a_view_of_a_weight_keeps_it_in_memory(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=largest_unit(folder) * 2) as model:
        row = model.lm_head.weight[3]
        assert model.cache.pinned > 0
        for _ in range(3):
            lm.outputs(model)
        assert torch.equal(row, whole.lm_head.weight[3])
        del row
        assert model.cache.pinned == 0


def test_a_view_of_a_weight_outlives_its_model(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE) as model:
        row = model.lm_head.weight[3]
    del model
    assert torch.equal(row, whole.lm_head.weight[3])


def test_a_model_that_is_dropped_takes_its_cache_along(folders):
    folder, _ = folders("llama")
    model = LazyModel.from_safetensors(folder, device=lm.DEVICE)
    lm.outputs(model)
    dropped = [weakref.ref(model.cache), weakref.ref(model.module)]
    del model
    gc.collect()
    assert [ref() for ref in dropped] == [None, None] and headrace._native._n_parked() == 0


def test_writing_a_weight_is_refused(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE) as model:
        weight = model.lm_head.weight
        with torch.no_grad():
            for write in (
                lambda: weight.zero_(), lambda: weight.data.fill_(1), lambda: weight.__setitem__(0, 1), lambda: weight.add_(1),
                lambda: nn.init.normal_(weight), lambda: torch.add(torch.ones(64, 32, device=lm.DEVICE), 1, out=weight), lambda: weight.copy_(torch.ones(64, 32, device=lm.DEVICE)),
                lambda: setattr(weight, "data", torch.ones(64, 32, device=lm.DEVICE)), lambda: model.module.load_state_dict(whole.state_dict()),
                lambda: weight[0].zero_(), lambda: weight.__iadd__(1), lambda: weight.T.mul_(2),
            ):  # fmt: skip
                with pytest.raises(RuntimeError, match="held by headrace|copying the param"):
                    write()
                assert torch.equal(weight, whole.lm_head.weight)
        with pytest.raises(RuntimeError, match="trained"):
            weight.requires_grad = True
        with pytest.raises(RuntimeError, match="its memory"):
            weight.data_ptr()
        for change in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
            with pytest.raises(RuntimeError, match="held by headrace"):
                change()
        assert model.module.to(lm.DEVICE) is model.module and model.module.float() is model.module and not model.module.eval().training
        assert torch.equal(lm.outputs(model), lm.outputs(whole))


def test_a_write_from_inside_forward_is_refused_too(folders):
    class Writes(nn.Linear):
        def forward(self, x):
            self.weight.mul_(2)
            return super().forward(x)

    folder, whole = folders("llama")
    module = nn.ModuleDict({"lm_head": Writes(32, 64, bias=False, device="meta")})
    with attach(module, folder, device=lm.DEVICE), torch.no_grad():
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            module["lm_head"](torch.ones(1, 32, device=lm.DEVICE))
        assert torch.equal(module["lm_head"].weight, whole.lm_head.weight)  # torch tells after the write: the memory was dropped


def test_autograd_is_refused_with_a_sentence(folders):
    folder, _ = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE) as model:
        with pytest.raises(RuntimeError, match="no_grad"):
            model.blocks[0](torch.ones(1, 3, 32, device=lm.DEVICE, requires_grad=True))
        with pytest.raises(RuntimeError, match="autograd"):
            torch.nn.functional.linear(torch.ones(1, 32, device=lm.DEVICE, requires_grad=True), model.lm_head.weight)
        assert model.cache.pinned == 0
        model.blocks[0](torch.ones(1, 3, 32, device=lm.DEVICE))


def test_an_error_in_forward_leaves_nothing_pinned(folders):
    folder, whole = folders("llama")
    with LazyModel.from_safetensors(folder, device=lm.DEVICE, budget=largest_unit(folder) + 1) as model:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                model.blocks[1](torch.ones(1, 3, 7, device=lm.DEVICE))
        assert model.cache.pinned == 0
        assert torch.equal(lm.outputs(model), lm.outputs(whole))


# ------------------------------------------------------------------------------------------------------------------------------ attach


class Net(nn.Module):
    """A module of a user's: parameters of its own, weights used past their module's forward, and a buffer."""

    def __init__(self, depth=3):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("steps", torch.arange(8.0), persistent=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)) for _ in range(depth)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = x * self.scale + self.shift + self.steps
        for layer in self.layers:
            x = layer(x) @ self.layers[0][0].weight.T
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.fixture()
def net(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(5)
    whole = Net().eval().to(lm.DEVICE)
    save_file(whole.state_dict(), tmp_path / "net.safetensors")
    return whole, tmp_path / "net.safetensors"


def test_any_module_can_be_attached_and_comes_back_whole(net):
    whole, path = net
    torch.manual_seed(6)
    module, x = Net().eval().to(lm.DEVICE), torch.randn(2, 3, 8, device=lm.DEVICE)
    with torch.no_grad():
        assert not torch.equal(module(x), whole(x))
        attachment = attach(module, path, budget=2048)
        for _ in range(3):
            assert torch.equal(module(x), whole(x))
        assert attachment.cache.stats()["peak_bytes"] <= 2048 and attachment.stats()["pinned_bytes"] == 0
        assert detach(module) is module
        assert torch.equal(module(x), whole(x))
    assert not any(isinstance(parameter, LazyWeight) for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert "forward" not in module.__dict__ and "_apply" not in module.layers[0][0].__dict__
    module(x).sum().backward()
    module.half().float().to(torch.float64)
    with pytest.raises(ValueError, match="not attached"):
        detach(module)
    attach(module.float(), path).detach(load=False)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_module_may_call_another_one_that_shares_its_cache(net):
    whole, path = net

    class Outer(Net):
        def forward(self, x):
            return super().forward(x) + self.__dict__["other"](x)

    torch.manual_seed(6)
    module, other, x = Outer().eval().to(lm.DEVICE), Net().eval().to(lm.DEVICE), torch.randn(2, 3, 8, device=lm.DEVICE)
    module.__dict__["other"] = other
    with headrace.Cache(lm.DEVICE, budget=3072, **headrace.torch.allocator(lm.DEVICE, 3072)) as cache, torch.no_grad():
        with attach(module, path, cache=cache) as outer, attach(other, path, cache=cache):
            assert 2 * max(page.need for page in outer.pages) > 3072  # both together were never promised
            for _ in range(3):
                assert torch.equal(module(x), whole(x) + whole(x))


def test_a_weight_that_the_user_replaces_is_the_users(net):
    whole, path = net
    module, x = Net().eval().to(lm.DEVICE), torch.randn(2, 3, 8, device=lm.DEVICE)
    with attach(module, path), torch.no_grad():
        module(x)
        module.scale = nn.Parameter(torch.ones(8, device=lm.DEVICE))
        whole.scale.data.fill_(1)
        assert torch.equal(module(x), whole(x))
        assert not isinstance(module.scale, LazyWeight)
    assert torch.equal(module.scale, torch.ones(8, device=lm.DEVICE))


def test_what_does_not_fit_together_is_refused_before_anything_is_changed(net, tmp_path):
    _, path = net
    module = Net().to(lm.DEVICE)
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    for wrong, match in (
        (lambda: attach(nn.Linear(8, 8), path), "lacks 2 of the module's weights"),
        (lambda: attach(module, path, budget=100), "larger budget"),
        (lambda: attach(module, path, names={}), "lacks"),
        (lambda: attach(module, path, names=lambda name: "shift"), "shape"),
        (lambda: attach(module.double(), path, names=lambda name: name, strict=False, cache=1, budget=3), "cache's"),
        (lambda: attach(module, tmp_path / "none.safetensors"), "none.safetensors"),
    ):
        with pytest.raises((ValueError, headrace.Error), match=match):
            wrong()
    assert before == {name: id(parameter) for name, parameter in module.named_parameters()}
    assert "forward" not in module.layers[0].__dict__
    with attach(module.float(), path), pytest.raises(ValueError, match="attached already"):
        attach(module, path)
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ValueError, match="steps"):
        attach(module, path)


def test_names_can_be_mapped_and_what_the_file_lacks_kept(net):
    whole, path = net
    module, x = nn.ModuleDict({"head": nn.Linear(8, 8), "new": nn.Linear(8, 2)}).to(lm.DEVICE), torch.randn(2, 8, device=lm.DEVICE)
    with attach(module, path, names={"head.weight": "layers.1.0.weight", "head.bias": "layers.1.0.bias"}, strict=False), torch.no_grad():
        assert torch.equal(module["head"](x), whole.layers[1][0](x))
        assert module["new"](x).shape == (2, 2) and not isinstance(module["new"].weight, LazyWeight)


def test_state_dict_can_be_saved(net, tmp_path):
    whole, path = net
    module = Net().to(lm.DEVICE)
    with attach(module, path, budget=2048):
        torch.save(module.state_dict(), tmp_path / "saved.pt")
        with pytest.raises(RuntimeError, match="clone"):
            __import__("copy").deepcopy(module)
    for name, tensor in torch.load(tmp_path / "saved.pt", weights_only=False).items():
        assert torch.equal(tensor, whole.state_dict()[name])


def test_a_quantised_model_is_refused(folders, tmp_path):
    folder, _ = folders("llama")
    for name in os.listdir(folder):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="quantised"):
        LazyModel.from_safetensors(tmp_path)
