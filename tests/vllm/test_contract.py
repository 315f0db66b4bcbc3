# SPDX-License-Identifier: Apache-2.0
"""What the loader expects of vLLM, without an engine: test_contract.py. It runs in seconds, and with versions of vLLM of which only the
Python files are here (run.sh --contract VERSION): HR_VLLM_VERSION says which one it must be.

The stock loader and headrace's load the same folders for the same model; what they hand over is compared.
"""
import os
import subprocess
import sys

import harness

if __name__ == "__main__" and os.environ.get("HR_VLLM_TEST") != "1":
    with harness.scratch_folder() as made:
        environment = {**harness.quiet_environment(made), "HR_VLLM_TEST": "1", "HR_VLLM_SCRATCH": made, "VLLM_TARGET_DEVICE": "cpu"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)

import json
import types

import torch
from safetensors.torch import save_file

N_SHARDS = 12  # in the order of their numbers, which is not that of their names


def at(name):
    return os.path.join(os.environ["HR_VLLM_SCRATCH"], name)


def write(folder, shards, index=True, names=None):
    os.makedirs(folder)
    table = {}
    for number, shard in enumerate(shards):
        name = names[number] if names else f"model-{number + 1}-of-{len(shards)}.safetensors"
        save_file(shard, os.path.join(folder, name))
        table.update(dict.fromkeys(shard, name))
    if index:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {}, "weight_map": table}, file)
    return folder


def some_shards(seed=0):
    random = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        {f"layers.{i}.{name}": torch.randn(3 + i, 8, generator=random).to(dtypes[i % 3]) for name in ("q", "k", "norm", "a")}
        for i in range(N_SHARDS)
    ]


class Model(torch.nn.Module):
    """Takes whatever comes."""

    def __init__(self, **fields):
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)

    def load_weights(self, weights):
        self.got = [(name, value.clone()) for name, value in weights]
        return {name for name, _ in self.got}


def loaded(folder, load_format, extra=None, **fields):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    config = types.SimpleNamespace(
        model=folder, revision=None, quantization=None, runner_type="generate", hf_config=None, multimodal_config=None, dtype=torch.float32
    )
    loader = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}, use_tqdm_on_load=False))
    model = Model(**fields)
    model.got = list((name, value.clone()) for name, value in loader.get_all_weights(config, model))
    return loader, model.got


def same(mine, stock):
    assert [name for name, _ in mine] == [name for name, _ in stock]
    for (name, a), (_, b) in zip(mine, stock):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    return True


def test_it_is_the_version_that_was_asked_for():
    import vllm

    wanted = os.environ.get("HR_VLLM_VERSION")
    print(f"# vLLM {vllm.__version__}, torch {torch.__version__}")
    assert wanted is None or vllm.__version__.split("+")[0] == wanted, vllm.__version__


def test_the_plug_in_adds_a_load_format_whose_loader_is_a_stock_one():
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    loader, _ = loaded(write(at("one"), some_shards()[:1]), "headrace")
    assert isinstance(loader, DefaultModelLoader) and type(loader) is not DefaultModelLoader


def test_all_that_is_overridden_is_there_and_takes_the_same():
    import inspect

    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from headrace._vllm import SOURCE_FIELDS, HeadraceModelLoader

    for name in ("get_all_weights", "load_weights", "_get_weights_iterator"):
        mine, stock = (inspect.signature(getattr(kind, name)).parameters for kind in (HeadraceModelLoader, DefaultModelLoader))
        assert list(mine) == list(stock), (name, list(mine), list(stock))
    for name in ("model_name_or_path", "revision", "fall_back_to_pt", "allow_patterns_overrides"):
        assert name in inspect.signature(DefaultModelLoader._prepare_weights).parameters, name
    fields = {field for field in DefaultModelLoader.Source.__dataclass_fields__ if not field.startswith("_")}
    assert fields <= SOURCE_FIELDS, f"fields of Source that headrace does not know: {fields - SOURCE_FIELDS}"


def test_the_same_tensors_come_in_the_same_order():
    folder = write(at("shards"), some_shards())
    assert same(loaded(folder, "headrace")[1], loaded(folder, "auto")[1])
    folder = write(at("without-index"), some_shards()[:3], index=False)
    assert same(loaded(folder, "headrace")[1], loaded(folder, "auto")[1])


def test_what_a_model_asks_for_is_honoured():
    folder = write(at("asks"), some_shards())
    other = write(at("second"), [{f"second.{i}": torch.full((4,), float(i)) for i in range(3)}], index=False)
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    unused = lambda name: name.endswith("norm")  # noqa: E731
    more = {"secondary_weights": [DefaultModelLoader.Source(other, None, prefix="other.")]}
    if "is_unused_weight" in DefaultModelLoader.Source.__dataclass_fields__:
        more["is_unused_checkpoint_weight"] = unused
    mine, stock = loaded(folder, "headrace", **more)[1], loaded(folder, "auto", **more)[1]
    # The stock loader leaves out whole files, headrace single tensors.
    kept = [pair for pair in stock if len(more) == 1 or not unused(pair[0])]
    assert same(mine, kept) and mine[-1][0] == "other.second.2"


def test_only_the_experts_of_a_rank_are_read_where_vllm_says_so():
    from vllm.model_executor.model_loader import ep_weight_filter

    shards = [{f"model.layers.0.mlp.experts.{i}.{part}.weight": torch.full((2, 2), float(i)) for part in ("up_proj", "down_proj")} for i in range(6)]
    shards[0]["model.norm.weight"] = torch.ones(2)
    folder = write(at("experts"), shards)
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    config = types.SimpleNamespace(model=folder, revision=None, quantization=None, runner_type="generate")
    got = {}
    for load_format in ("headrace", "auto"):
        loader = get_model_loader(LoadConfig(load_format=load_format, use_tqdm_on_load=False))
        loader.local_expert_ids = {1, 4}
        got[load_format] = [(name, value.clone()) for name, value in loader.get_all_weights(config, Model())]
    assert same(got["headrace"], got["auto"])
    assert len(got["headrace"]) == 5 and ep_weight_filter.should_skip_weight("model.layers.0.mlp.experts.0.up_proj.weight", {1})


def test_what_is_wrong_with_files_is_told_before_the_first_tensor():
    folder = write(at("cut"), some_shards())
    path = os.path.join(folder, f"model-{N_SHARDS}-of-{N_SHARDS}.safetensors")
    os.truncate(path, os.path.getsize(path) - 1)
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    config = types.SimpleNamespace(model=folder, revision=None, quantization=None, runner_type="generate")
    error = harness.error_of(lambda: get_model_loader(LoadConfig(load_format="headrace")).get_all_weights(config, Model()))
    assert os.path.basename(path) in str(error), error


def test_what_headrace_does_not_know_is_left_to_the_stock_loader():
    folder = at("pt")
    os.makedirs(folder)
    torch.save({"a": torch.ones(3)}, os.path.join(folder, "pytorch_model.bin"))
    assert same(loaded(folder, "headrace")[1], loaded(folder, "auto")[1])
    error = harness.error_of(lambda: loaded(folder, "headrace", {"fallback": False}))
    assert "fallback" in str(error)


if __name__ == "__main__":
    sys.exit(harness.run([value for name, value in list(globals().items()) if name.startswith("test_")], sys.argv[1:]))
