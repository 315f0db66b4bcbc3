# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for the tests with vLLM: a Llama that has learnt one sentence by heart, and ways to spoil it.

A checkpoint is a dict of torch tensors until write() makes a folder of it: shards, index, config and tokenizer. The sentence
is trained in a few seconds; the same seed gives the same weights on the same machine.
"""
import json
import os
import shutil

import torch
from safetensors.torch import save_file

SENTENCE = "the pool is small and never grows but every byte arrives where it belongs".split()
OTHER = "a reload brings other weights and so the model says something else from now".split()
PROMPT_WORDS = 3
N_SHARDS = 5


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *sorted(set(SENTENCE + OTHER))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def config(**changes):
    from transformers import LlamaConfig

    values = {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaConfig(**{**values, **changes})


def train(sentence, seed=0, **changes):
    """The weights of a Llama that goes on with the sentence, as a dict of bfloat16 tensors."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(**{**changes, "dtype": "float32"}))
    ids = torch.tensor([tokenizer().convert_tokens_to_ids(sentence)])
    step = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        loss = model(input_ids=ids, labels=ids).loss
        if loss.item() < 1e-3:
            break
        step.zero_grad()
        loss.backward()
        step.step()
    if loss.item() > 0.05:
        raise RuntimeError(f"the sentence was not learnt: loss {loss.item()}")
    tied = changes.get("tie_word_embeddings")
    return {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def moe_config():
    from transformers import MixtralConfig

    base = config().to_dict()
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return MixtralConfig(
        **{key: base[key] for key in keys},
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        dtype="bfloat16",
        architectures=["MixtralForCausalLM"],
    )


def moe_weights():
    """Random weights of a small Mixtral, under the names that its checkpoints have."""
    random = torch.Generator().manual_seed(7)
    made = {}

    def add(name, *shape):
        made[name] = (torch.randn(*shape, generator=random) * 0.05).to(torch.bfloat16)

    add("model.embed_tokens.weight", 64, 128)
    add("model.norm.weight", 128)
    add("lm_head.weight", 64, 128)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 128)):
            add(f"{at}self_attn.{name}_proj.weight", rows, 128)
        add(at + "input_layernorm.weight", 128)
        add(at + "post_attention_layernorm.weight", 128)
        add(at + "block_sparse_moe.gate.weight", 4, 128)
        for expert in range(4):
            for name in ("w1", "w2", "w3"):
                add(f"{at}block_sparse_moe.experts.{expert}.{name}.weight", 128, 128)
    return made


def shard_name(number, n_shards=N_SHARDS):
    return f"model-{number + 1:05d}-of-{n_shards:05d}.safetensors"


def spread(weights, n_shards=N_SHARDS):
    """The usual layout: [dict of one shard, ...]."""
    shards = [{} for _ in range(n_shards)]
    for number, name in enumerate(weights):
        shards[number * n_shards // len(weights)][name] = weights[name]
    return shards


def write(folder, shards, index="right", model_config=None):
    """Writes shards, an index (a dict name -> shard number, "right" for what the shards hold, or None) and the rest."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    names = ["model.safetensors"] if len(shards) == 1 else [shard_name(n, len(shards)) for n in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(shard, os.path.join(folder, name), metadata={"format": "pt"})
    if index == "right" and len(shards) > 1:
        index = {name: number for number, shard in enumerate(shards) for name in shard}
    if isinstance(index, dict):
        size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
        weight_map = {name: names[number] for name, number in index.items()}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": size}, "weight_map": weight_map}, file)
    (model_config or config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def beside_a_tokenizer(folder, source):
    """A real checkpoint of weights and config only, with a tokenizer that vLLM insists on; the test gives tokens itself."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    tokenizer().save_pretrained(folder)
    shutil.copy(os.path.join(source, "config.json"), folder)
    os.symlink(os.path.abspath(os.path.join(source, "model.safetensors")), os.path.join(folder, "model.safetensors"))
    return folder
