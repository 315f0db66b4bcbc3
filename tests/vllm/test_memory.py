# SPDX-License-Identifier: Apache-2.0
"""How much memory a load takes beside the parameters, on a checkpoint of 962 MiB in six shards: test_memory.py

Measured inside load_weights only: what comes before and after is vLLM's own and larger. The parameters are written once first,
since fresh ones are not resident; then RssAnon and RssFile of this process are sampled until the load returns.
"""
import os
import subprocess
import sys

import harness

if __name__ == "__main__" and os.environ.get("HR_VLLM_TEST") != "1":
    with harness.scratch_folder() as made:
        environment = {**harness.quiet_environment(made), "HR_VLLM_TEST": "1", "HR_VLLM_SCRATCH": made}
        del environment["MALLOC_PERTURB_"]  # it writes, and so makes resident, what nobody uses
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)

import shutil
import threading
import time

import checkpoints as ck
import torch

MIB = 1 << 20
STAGING = 16 * MIB
SLACK = 2 * MIB
measured = {}


def resident():
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("RssAnon", "RssFile")):
                key, value, _ = line.split()
                found[key[:-1]] = int(value) * 1024
    return found


def measure_loads():
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights

    def load_weights(self, model, model_config):
        for value in model.parameters():
            value.data.zero_()
        before = resident()
        peak = dict(before)
        done = threading.Event()

        def sample():
            while not done.is_set():
                for key, value in resident().items():
                    peak[key] = max(peak[key], value)
                time.sleep(0.002)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            original(self, model, model_config)
        finally:
            done.set()
            sampler.join()
        measured.update({key: peak[key] - before[key] for key in peak})

    DefaultModelLoader.load_weights = load_weights


def big_weights():
    """Names and shapes of a Llama of 11 layers; all values come from one small block, so this takes a second."""
    block = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(3)) * 0.02).to(torch.bfloat16)
    made = {}

    def add(name, *shape):
        count = torch.Size(shape).numel()
        made[name] = block.repeat(-(-count // block.numel()))[:count].reshape(shape).contiguous()

    add("model.embed_tokens.weight", 2048, 2048)
    for layer in range(11):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 2048), ("k", 512), ("v", 512), ("o", 2048)):
            add(f"{at}self_attn.{name}_proj.weight", rows, 2048)
        for name in ("gate", "up"):
            add(f"{at}mlp.{name}_proj.weight", 5632, 2048)
        add(at + "mlp.down_proj.weight", 2048, 5632)
        add(at + "input_layernorm.weight", 2048)
        add(at + "post_attention_layernorm.weight", 2048)
    add("model.norm.weight", 2048)
    add("lm_head.weight", 2048, 2048)
    return made


def big_config():
    return ck.config(
        vocab_size=2048, hidden_size=2048, intermediate_size=5632, num_hidden_layers=11, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64,
    )


def by_layers(weights):
    """Two layers in each shard. vLLM's Llama holds the tensor at hand and the last one that went into a fused weight; where a
    layer is torn apart, these may be two large ones beside the next."""
    shards = [{} for _ in range(6)]
    for name, value in weights.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else 10
        shards[layer // 2][name] = value
    return shards


def two_largest_neighbours(shards):
    order = [shard[name].nbytes for shard in shards for name in sorted(shard)]
    return max(a + b for a, b in zip(order, order[1:]))


def test_a_load_takes_its_staging_and_two_tensors_beside_the_parameters():
    folder = os.path.join(os.environ["HR_VLLM_SCRATCH"], "big")
    if shutil.disk_usage(os.environ["HR_VLLM_SCRATCH"]).free < 3 << 30:
        raise harness.Skip("less than 3 GiB of disk are free")
    shards = by_layers(big_weights())
    total = sum(value.nbytes for shard in shards for value in shard.values())
    limit = STAGING + two_largest_neighbours(shards) + SLACK
    ck.write(folder, shards, model_config=big_config())
    del shards
    with harness.engine(folder, extra={"staging_bytes": STAGING}):
        pass
    print(f"# {total >> 20} MiB loaded; beside the parameters at most {measured['RssAnon'] / MIB:.1f} MiB of anonymous memory, "
          f"{measured['RssFile'] / MIB:.1f} MiB of files; the limit is {limit / MIB:.1f} MiB")
    assert measured["RssAnon"] <= limit, (measured, limit)
    assert measured["RssFile"] <= SLACK, measured


if __name__ == "__main__":
    measure_loads()
    sys.exit(harness.run([test_a_load_takes_its_staging_and_two_tensors_beside_the_parameters], sys.argv[1:]))
