# SPDX-License-Identifier: Apache-2.0
"""The real vLLM, on the CPU, with --load-format headrace, against its own loader: test_engine.py [TEST...]

All engines live one after another in this process. The oracle is the SHA-256 of each parameter and buffer right after the
weights were loaded; the sentence alone is a weak one (vLLM serves memory that nobody filled, and it may hold the right bytes).
"""
import os
import subprocess
import sys

import harness

if __name__ == "__main__" and os.environ.get("HR_VLLM_TEST") != "1":
    with harness.scratch_folder() as made:
        environment = {**harness.quiet_environment(made), "HR_VLLM_TEST": "1", "HR_VLLM_SCRATCH": made}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)

import shutil

import checkpoints as ck
import torch
from harness import Log, Skip, digests, engine, error_of, loaded_digest, say

scratch = os.environ.get("HR_VLLM_SCRATCH", "/var/tmp")
LENGTH = len(ck.SENTENCE) - ck.PROMPT_WORDS
Q = "model.layers.0.self_attn.q_proj.weight"
_cache = {}


def at(name):
    return os.path.join(scratch, name)


def weights():
    if "weights" not in _cache:
        _cache["weights"] = ck.train(ck.SENTENCE)
    return dict(_cache["weights"])


def plain():
    """The checkpoint that is all right: five shards and their index."""
    if "plain" not in _cache:
        _cache["plain"] = ck.write(at("plain"), ck.spread(weights()))
    return _cache["plain"]


def right():
    """What the stock loader makes of it."""
    if "right" not in _cache:
        _cache["right"] = loaded_digest(plain(), "auto")
    return _cache["right"]


def test_five_shards_say_the_sentence_and_equal_the_stock_loader():
    expected = right()
    with Log() as lines, engine(plain()) as llm:
        assert digests[-1] == expected
        assert say(llm, ck.SENTENCE[: ck.PROMPT_WORDS], LENGTH) == ck.SENTENCE
    report = [line for line in lines if "GB/s" in line]
    assert len(report) == 1 and "staging peak" in report[0] and "pread" in report[0], lines


def test_stale_copies_in_other_shards_do_not_win():
    shards = ck.spread(weights())
    index = {name: number for number, shard in enumerate(shards) for name in shard}
    for name in (Q, "model.norm.weight"):
        shards[(index[name] + 1) % ck.N_SHARDS][name] = torch.zeros_like(weights()[name])
        shards[(index[name] + 4) % ck.N_SHARDS][name] = torch.ones_like(weights()[name])
    assert loaded_digest(ck.write(at("stale"), shards, index)) == right()


def test_two_copies_and_no_index_are_an_error_that_names_both_files():
    shards = ck.spread(weights())
    shards[4][next(iter(shards[0]))] = torch.zeros(3)
    folder = ck.write(at("two"), shards, None)
    error = error_of(lambda: loaded_digest(folder))
    for part in (next(iter(shards[0])), ck.shard_name(0), ck.shard_name(4)):
        assert part in str(error), error


def test_a_tensor_that_the_index_does_not_name_is_loaded():
    shards = ck.spread(weights())
    index = {name: number for number, shard in enumerate(shards) for name in shard if name != Q}
    assert loaded_digest(ck.write(at("unlisted"), shards, index)) == right()


def test_a_tensor_that_only_the_index_names_is_an_error():
    shards = ck.spread(weights())
    index = {name: number for number, shard in enumerate(shards) for name in shard}
    del shards[index["lm_head.weight"]]["lm_head.weight"]
    if not shards[index["lm_head.weight"]]:
        shards[index["lm_head.weight"]]["model.norm.weight"] = shards[index["model.norm.weight"]].pop("model.norm.weight")
        index["model.norm.weight"] = index["lm_head.weight"]
    folder = ck.write(at("promised"), shards, index)
    error = error_of(lambda: loaded_digest(folder))
    assert "lm_head.weight" in str(error), error
    with Log() as lines:
        loaded_digest(folder, extra={"enable_weights_track": False})
    assert any("without the index" in line and "lm_head.weight" in line for line in lines), lines


def without(*names):
    kept = {name: value for name, value in weights().items() if name not in names}
    return ck.write(at("without"), ck.spread(kept))


def test_a_missing_head_is_an_error_although_vllm_does_not_notice():
    folder = without("lm_head.weight")
    loaded_digest(folder, "auto")
    error = error_of(lambda: loaded_digest(folder))
    assert "lm_head.weight" in str(error) and folder in str(error), error


def test_a_missing_part_of_a_fused_weight_is_an_error():
    folder = without(Q)
    error = error_of(lambda: loaded_digest(folder))
    assert "model.layers.0.self_attn.qkv_proj.weight" in str(error), error
    assert "enable_weights_track" in str(error), error


def test_what_is_missing_can_be_allowed():
    assert loaded_digest(without(Q), extra={"enable_weights_track": False}).keys() == right().keys()


def test_a_tensor_that_the_model_does_not_know_is_the_models_own_error():
    folder = ck.write(at("extra"), ck.spread({**weights(), "model.layers.0.surprise.weight": torch.zeros(2, 2)}))
    ours, theirs = error_of(lambda: loaded_digest(folder)), error_of(lambda: loaded_digest(folder, "auto"))
    assert type(ours) is type(theirs) and str(ours) == str(theirs), (ours, theirs)


def test_one_file_without_an_index():
    assert loaded_digest(ck.write(at("one"), [weights()])) == right()


def test_shards_without_an_index():
    assert loaded_digest(ck.write(at("bare"), ck.spread(weights()), None)) == right()


def test_shards_behind_symbolic_links():
    folder = ck.write(at("linked"), ck.spread(weights()))
    os.makedirs(at("blobs"), exist_ok=True)
    for number in range(ck.N_SHARDS):
        blob = os.path.join(at("blobs"), f"{number:064x}")
        shutil.move(os.path.join(folder, ck.shard_name(number)), blob)
        os.symlink(blob, os.path.join(folder, ck.shard_name(number)))
    assert loaded_digest(folder) == right()


def test_a_wrong_whole_file_beside_indexed_shards_is_ignored():
    folder = ck.write(at("beside"), ck.spread(weights()))
    ck.save_file({name: torch.zeros_like(value) for name, value in weights().items()}, folder + "/model.safetensors")
    assert loaded_digest(folder) == right()


def test_a_consolidated_file_wins_as_with_the_stock_loader():
    folder = ck.write(at("consolidated"), ck.spread(weights()))
    ck.save_file({name: value + 1 for name, value in weights().items()}, folder + "/consolidated.safetensors")
    expected = loaded_digest(folder, "auto")
    assert expected != right()
    assert loaded_digest(folder) == expected


def test_weights_in_a_sub_folder_are_refused_in_the_stock_loaders_words():
    consolidated = ck.write(at("deep-consolidated"), ck.spread(weights()))
    os.makedirs(consolidated + "/original")
    ck.save_file(weights(), consolidated + "/original/consolidated.safetensors")
    shards = ck.write(at("deep-shards"), ck.spread(weights()))
    os.makedirs(shards + "/deep")
    for number in range(ck.N_SHARDS):
        shutil.move(os.path.join(shards, ck.shard_name(number)), shards + "/deep")
    for folder in (consolidated, shards):
        ours, theirs = error_of(lambda: loaded_digest(folder)), error_of(lambda: loaded_digest(folder, "auto"))
        assert type(ours) is type(theirs) and str(ours) == str(theirs), (ours, theirs)


def test_float32_files_become_bfloat16_parameters():
    folder = ck.write(at("wide"), ck.spread({name: value.float() for name, value in weights().items()}))
    assert loaded_digest(folder) == right()


def test_tied_embeddings():
    tied = ck.train(ck.SENTENCE, tie_word_embeddings=True)
    folder = ck.write(at("tied"), ck.spread(tied), model_config=ck.config(tie_word_embeddings=True))
    expected = loaded_digest(folder, "auto")
    with engine(folder) as llm:
        assert digests[-1] == expected
        assert say(llm, ck.SENTENCE[: ck.PROMPT_WORDS], LENGTH) == ck.SENTENCE


def test_experts_of_a_mixtral():
    folder = ck.write(at("moe"), ck.spread(ck.moe_weights()), model_config=ck.moe_config())
    assert loaded_digest(folder) == loaded_digest(folder, "auto")


def test_a_missing_expert_or_a_part_of_one_is_an_error_although_vllm_does_not_notice():
    for number, part in enumerate(("w1", "w2", "w3")):
        name = f"model.layers.1.block_sparse_moe.experts.{3 - number}.{part}.weight"
        kept = {key: value for key, value in ck.moe_weights().items() if key != name}
        folder = ck.write(at(f"moe-{part}"), ck.spread(kept), model_config=ck.moe_config())
        if part == "w1":
            loaded_digest(folder, "auto")
        error = error_of(lambda: loaded_digest(folder))
        assert "layers.1." in str(error) and ("w2_weight" if part == "w2" else "w13_weight") in str(error), error
        assert "layers.0." not in str(error), error


def test_marks_of_quantised_and_draft_models_are_a_warning():
    import types

    from headrace import _vllm, _vllm_marks
    from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Int8(LinearMethodBase):
        def __init__(self):
            pass

        create_weights = apply = None

    Int8.__abstractmethods__ = frozenset()
    layers = {}
    for name, method, weight in (
        ("filled", Int8(), torch.zeros(64, 64, dtype=torch.int8)),
        ("bare", Int8(), torch.zeros(64, 64, dtype=torch.int8)),
        ("linear", UnquantizedLinearMethod(), torch.zeros(8, 8)),
        ("embedding", UnquantizedEmbeddingMethod(), torch.zeros(8, 8)),
    ):
        layers[name] = torch.nn.Module()
        layers[name].quant_method = method
        layers[name].weight = torch.nn.Parameter(weight, requires_grad=False)
    model = torch.nn.ModuleDict(layers)
    for is_draft in (False, True):
        marks = _vllm_marks.set_marks(model, is_draft)
        layers["filled"].weight.data.zero_()
        expected = ["bare.weight", "linear.weight"] + ([] if is_draft else ["embedding.weight"])
        assert _vllm_marks.lacking(marks) == expected, is_draft
        layers["linear"].weight.data.zero_()
        layers["embedding"].weight.data.zero_()
        assert _vllm_marks.lacking(marks) == ["bare.weight"]

    def load(self, model, config):
        layers["filled"].weight.data.zero_()

    stock = _vllm.stock.DefaultModelLoader.load_weights
    _vllm.stock.DefaultModelLoader.load_weights = load
    try:
        loader = _vllm.HeadraceModelLoader(types.SimpleNamespace(model_loader_extra_config={}, load_format="headrace"))
        config = types.SimpleNamespace(quantization="x", runner_type="generate", model="/some/where")
        with Log() as lines:
            loader.load_weights(model, config)
        assert len(lines) == 1 and "bare.weight" in lines[0] and "filled.weight" not in lines[0], lines
        config.quantization = None
        assert "bare.weight" in str(error_of(lambda: loader.load_weights(model, config)))
    finally:
        _vllm.stock.DefaultModelLoader.load_weights = stock


def test_a_cut_shard_is_an_error_with_its_name_before_the_first_tensor():
    folder = ck.write(at("cut"), ck.spread(weights()))
    path = os.path.join(folder, ck.shard_name(4))
    os.truncate(path, os.path.getsize(path) - 100)
    n_loads = len(digests)
    error = error_of(lambda: loaded_digest(folder))
    assert path in str(error), error
    assert len(str(error).splitlines()) == 1, error
    assert len(digests) == n_loads


def test_a_missing_shard_is_an_error_with_its_name():
    folder = ck.write(at("gone"), ck.spread(weights()))
    os.remove(os.path.join(folder, ck.shard_name(2)))
    error = error_of(lambda: loaded_digest(folder))
    assert isinstance(error, OSError) and ck.shard_name(2) in str(error), error


def test_a_reload_and_one_from_a_bad_path_keep_the_model_right():
    other = ck.write(at("other"), ck.spread(ck.train(ck.OTHER, seed=1)))
    cut = ck.write(at("cut-reload"), ck.spread(weights()))
    path = os.path.join(cut, ck.shard_name(0))
    os.truncate(path, os.path.getsize(path) - 100)
    prompts = {"first": ck.SENTENCE[: ck.PROMPT_WORDS], "other": ck.OTHER[: ck.PROMPT_WORDS]}

    with engine(plain()) as llm:
        llm.collective_rpc("reload_weights")
        assert say(llm, prompts["first"], LENGTH) == ck.SENTENCE
        for bad in (at("nowhere"), cut):
            error_of(lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": bad}))
            assert say(llm, prompts["first"], LENGTH) == ck.SENTENCE
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        assert say(llm, prompts["other"], LENGTH) == ck.OTHER
        llm.collective_rpc("reload_weights", kwargs={"weights_path": plain()})
        assert say(llm, prompts["first"], LENGTH) == ck.SENTENCE


def test_minilm_gives_the_stock_loaders_embeddings():
    source = os.environ.get("HR_CHECKPOINT")
    if not source:
        raise Skip("HR_CHECKPOINT is not set")
    folder = ck.beside_a_tokenizer(at("minilm"), source)
    tokens = [{"prompt_token_ids": ids} for ids in ([101, 2023, 2003, 1037, 7953, 102], [101, 9005, 102])]
    found = []
    for load_format in ("auto", "headrace"):
        with engine(folder, load_format, runner="pooling") as llm:
            answers = llm.embed(tokens, use_tqdm=False)
            found.append(([torch.tensor(a.outputs.embedding) for a in answers], digests[-1]))
    (theirs, their_digest), (ours, our_digest) = found
    assert our_digest == their_digest
    assert all(torch.equal(a, b) and torch.isfinite(b).all() for a, b in zip(theirs, ours))
    assert not torch.equal(ours[0], ours[1])


def test_bin_files_are_left_to_the_stock_loader():
    folder = ck.write(at("bin"), [weights()])
    torch.save(weights(), os.path.join(folder, "pytorch_model.bin"))
    os.remove(os.path.join(folder, "model.safetensors"))
    with Log() as lines:
        assert loaded_digest(folder) == right()
    assert any("stock loader" in line for line in lines), lines
    error = error_of(lambda: loaded_digest(folder, extra={"fallback": False}))
    assert "fallback" in str(error) and folder in str(error), error


def test_all_options_at_once():
    extra = {
        "staging_bytes": "1MiB",
        "slot_bytes": 131072,
        "engine": "pread",
        "caching": "fill",
        "readers": 1,
        "verify": True,
        "fallback": False,
        "device": "cpu",
    }
    with Log() as lines:
        assert loaded_digest(plain(), extra=extra) == right()
    assert any("of 1.0 MiB" in line and "compared" in line for line in lines), lines


def test_verify_tells_a_tensor_that_differs_from_its_file():
    import headrace
    from headrace import _vllm

    with headrace.open(ck.write(at("differs"), [weights()])) as model:
        (info,) = [tensor for tensor in model.tensors if tensor.name == Q]
        _vllm._verify(model, info, weights()[Q])
        wrong = weights()[Q].clone()
        wrong[-1, -1] += 1
        error = error_of(lambda: _vllm._verify(model, info, wrong))
    assert Q in str(error) and "model.safetensors" in str(error), error


def test_options_that_make_no_sense_are_told():
    for extra, part in (
        ({"budget": 1}, "budget"),
        ({"staging_bytes": "many"}, "many"),
        ({"staging_bytes": True}, "True"),
        ({"slot_bytes": -1}, "-1"),
        ({"caching": "some"}, "auto, fill, bypass"),
        ({"readers": "two"}, "two"),
        ({"verify": "yes"}, "yes"),
        ({"engine": 3}, "engines"),
        ({"cufile": "maybe"}, "direct, compat"),
        ({"device": "tpu"}, "cuda:N"),
    ):
        error = error_of(lambda: loaded_digest(plain(), extra=extra))
        assert part in str(error) and "--model-loader-extra-config" in str(error), (extra, error)
    for extra, part in (({"staging_bytes": 1000}, "1000"), ({"engine": "warp"}, "warp")):
        error = error_of(lambda: loaded_digest(plain(), extra=extra))
        assert part in str(error), (extra, error)


def test_gds_bounded_is_engine_cufile_and_does_not_fall_back():
    error = error_of(lambda: loaded_digest(plain(), "gds_bounded"))
    assert "engine cufile" in str(error) and "the device is cpu" in str(error), error
    assert loaded_digest(plain(), "gds_bounded", extra={"engine": "pread"}) == right()


def test_what_waits_for_the_model_is_part_of_the_staging_memory():
    import types

    from headrace import _vllm

    mib = 1 << 20
    for asked, slot, cpu in ((None, None, 56 * mib), (16 * mib, None, 8 * mib), (15 * mib, None, 15 * mib), (24 * mib, 12 * mib, 24 * mib)):
        options = types.SimpleNamespace(staging_bytes=asked, slot_bytes=slot)
        assert _vllm._pool_bytes(options, torch.device("cpu")) == cpu, (asked, slot)
        assert _vllm._pool_bytes(options, torch.device("cuda", 0)) == asked


def test_the_way_to_a_gpu_delivers_the_same_tensors_in_order_and_ends_early_cleanly():
    """Without a GPU: the same jobs into memory of torch's, on the CPU and without streams."""
    import types

    import headrace
    from headrace import _vllm

    # Larger than a group, empty, scalar, and many that share a job.
    made = {f"t{n:02}": torch.randn(1 << (n % 12)) for n in range(40)}
    made.update({"large": torch.randn(3 << 20), "none": torch.zeros(0, 4), "one": torch.tensor(7, dtype=torch.int64)})
    folder = ck.write(at("gpu"), [made])
    stream_before = torch.cuda.current_stream
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
    try:
        with headrace.open(folder) as model, headrace.Loader("cpu", staging_bytes="1MiB") as loader:
            tensors = sorted(model.tensors, key=lambda tensor: tensor.name)
            kept = list(_vllm._deliver_on_gpu(loader, model, tensors, torch.device("cpu")))
            early = _vllm._deliver_on_gpu(loader, model, tensors, torch.device("cpu"))
            assert next(early)[0].name == tensors[0].name
            early.close()
    finally:
        torch.cuda.current_stream = stream_before
    assert [info.name for info, _ in kept] == sorted(made)
    assert all(torch.equal(tensor, made[info.name]) and tensor.shape == made[info.name].shape for info, tensor in kept)


def test_the_format_may_be_written_in_capitals():
    assert loaded_digest(plain(), "HeadRace") == right()


if __name__ == "__main__":
    harness.record_digests()
    everything = [value for name, value in list(globals().items()) if name.startswith("test_")]
    sys.exit(harness.run(everything, sys.argv[1:]))
