# SPDX-License-Identifier: Apache-2.0
"""transformers' own models, loaded by headrace: each parameter and buffer equals what transformers loads by itself."""
import json
import os

import pytest

pytest.importorskip("headrace")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import headrace.transformers as hr  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama in several shards, with a copy of a tensor that the index does not name."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(path, max_shard_size="30KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return path


def state(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.dtype, tuple(t.shape), t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize("cls", ["LlamaForCausalLM", "AutoModelForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("keywords", [{}, {"dtype": torch.float32}, {"dtype": "auto"}])
def test_a_model_equals_what_transformers_loads(folder, cls, keywords):
    cls = getattr(transformers, cls)
    expected = cls.from_pretrained(folder, **({"dtype": torch.bfloat16} | keywords))
    got = hr.from_pretrained(cls, folder, **keywords)
    assert type(got) is type(expected) and state(got) == state(expected)
    if hasattr(got, "lm_head"):
        assert got.generation_config.to_dict() == expected.generation_config.to_dict()
        assert got.generation_config.eos_token_id == [7, 9]
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            assert torch.equal(got(tokens).logits, expected(tokens).logits)


def test_a_stale_copy_in_a_shard_does_not_win(folder, tmp_path):
    for name in os.listdir(folder):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    last = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})[-1]
    with __import__("headrace").safe_open(tmp_path / last, "pt") as opened:
        tensors = opened.get_tensors()
    save_file({**tensors, name: torch.full((64, 32), 7.0, dtype=torch.bfloat16)}, tmp_path / last, {"format": "pt"})
    assert state(hr.from_pretrained(transformers.LlamaForCausalLM, tmp_path)) == state(
        transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    )


def test_what_chooses_other_files_is_refused(folder):
    with pytest.raises(ValueError, match="state_dict"):
        hr.from_pretrained(transformers.LlamaForCausalLM, folder, state_dict={})


def test_a_damaged_shard_is_an_error_before_any_weight_is_set(folder, tmp_path):
    for name in os.listdir(folder):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    shard = sorted(p for p in os.listdir(tmp_path) if p.endswith(".safetensors"))[1]
    os.truncate(tmp_path / shard, os.path.getsize(tmp_path / shard) - 1)
    with pytest.raises(__import__("headrace").SafetensorError, match=shard):
        hr.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
