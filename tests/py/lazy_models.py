# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, written to folders, for the tests of LazyModel and attach()."""
import os

import torch
import transformers

DEVICE = os.environ.get("HEADRACE_TEST_DEVICE", "cpu")
TOKENS = torch.tensor([[1, 17, 5, 42, 9, 30, 2, 11, 60, 23, 8, 55]], device=DEVICE)

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, bf16": lambda: transformers.LlamaConfig(**SMALL, dtype="bfloat16"),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL),
    "gemma": lambda: transformers.GemmaConfig(**SMALL),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3, experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64),
    "bert": lambda: transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
    ),
}  # fmt: skip


EXPERTS = ("mixtral", "qwen3, experts")


def make(kind, folder, seed=1, **save):
    """Writes a model with random weights; returns it, in memory, as transformers loads it from there."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).to(config.dtype or torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder, **save)
    return aligned(auto.from_pretrained(folder).eval().to(DEVICE))


def aligned(model):
    """The same in memory of its own. A library of linear algebra may add up in another order over memory that is aligned otherwise,
    and what safetensors maps lies where the file has it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def outputs(model, tokens=TOKENS):
    """Logits, or the last hidden states of a model without a head."""
    with torch.no_grad():
        found = model(tokens)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def weights_bytes(folder):
    """Bytes of all the weights in a folder."""
    import headrace

    with headrace.open(folder) as model:
        return sum(tensor.nbytes for tensor in model.tensors)


SENTENCE = [1, 7, 23, 5, 40, 11, 3, 60, 33, 14, 8, 52, 9, 27, 45, 6, 19, 38, 2]


def memorise(folder):
    """Trains a Llama of transformers until it says one sentence by heart, and writes it."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 2}, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sentence = torch.tensor([SENTENCE])
    for _ in range(400):
        loss = model(sentence, labels=sentence).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < 1e-3:
            break
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    return aligned(transformers.LlamaForCausalLM.from_pretrained(folder).eval().to(DEVICE))


def page_out(folder):
    """Nothing of the folder stays in the page cache."""
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
