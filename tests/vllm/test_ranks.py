# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism, with the stock loader and with headrace: what each rank holds must be equal.

The workers are processes of their own. A plug-in for vLLM that this test brings along (rank_digests) writes what each of them
has loaded into a folder: by load format and rank, the SHA-256 of each parameter.
"""
import json
import os
import subprocess
import sys

import harness

if __name__ == "__main__" and os.environ.get("HR_VLLM_TEST") != "1":
    with harness.scratch_folder() as made:
        plugin = os.path.join(made, "plugin")
        info = os.path.join(plugin, "rank_digests-1.dist-info")
        os.makedirs(info)
        with open(os.path.join(info, "METADATA"), "w") as file:
            file.write("Metadata-Version: 2.1\nName: rank_digests\nVersion: 1\n")
        with open(os.path.join(info, "entry_points.txt"), "w") as file:
            file.write("[vllm.general_plugins]\nrank_digests = test_ranks:write_digests\n")
        paths = [plugin, os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
        environment = {
            **harness.quiet_environment(made),
            "HR_VLLM_TEST": "1",
            "HR_VLLM_SCRATCH": made,
            "VLLM_PLUGINS": "headrace,rank_digests",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)

N_RANKS = 2


def write_digests():
    """In each process of vLLM."""
    from vllm.model_executor.model_loader import default_loader

    original = default_loader.DefaultModelLoader.load_weights
    if getattr(original, "writes_digests", False):
        return

    def load_weights(self, model, model_config):
        from vllm.distributed import get_tensor_model_parallel_rank

        original(self, model, model_config)
        rank = get_tensor_model_parallel_rank()
        name = f"{type(self).__name__}-{rank}.json"
        with open(os.path.join(os.environ["HR_VLLM_SCRATCH"], name), "w") as file:
            json.dump(harness.digest_of(model), file)

    load_weights.writes_digests = True
    default_loader.DefaultModelLoader.load_weights = load_weights


def found(loader):
    result = []
    for rank in range(N_RANKS):
        with open(os.path.join(os.environ["HR_VLLM_SCRATCH"], f"{loader}-{rank}.json")) as file:
            result.append(json.load(file))
    return result


def test_each_of_two_ranks_holds_what_it_holds_with_the_stock_loader():
    import checkpoints as ck

    folder = ck.write(os.path.join(os.environ["HR_VLLM_SCRATCH"], "model"), ck.spread(ck.train(ck.SENTENCE)))
    for load_format in ("auto", "headrace"):
        with harness.engine(folder, load_format, tensor_parallel_size=N_RANKS) as llm:
            assert harness.say(llm, ck.SENTENCE[:3], len(ck.SENTENCE) - 3) == ck.SENTENCE
    stock, ours = found("DefaultModelLoader"), found("HeadraceModelLoader")
    assert ours == stock
    assert ours[0] != ours[1]


if __name__ == "__main__":
    sys.exit(harness.run([test_each_of_two_ranks_holds_what_it_holds_with_the_stock_loader], sys.argv[1:]))
