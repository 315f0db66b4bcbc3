# SPDX-License-Identifier: Apache-2.0
"""What the tests with vLLM share: a quiet environment, engines in this process, digests of what was loaded, and a runner.

Tests are functions whose docstring is a sentence. run() prints TAP: one line for each, "# SKIP reason" for a Skip.
"""
import contextlib
import gc
import hashlib
import logging
import os
import sys
import tempfile
import time
import traceback

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_PLUGINS": "headrace",
    "TRANSFORMERS_VERBOSITY": "error",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    # A lost weight is then wrong in the same way in each run.
    "MALLOC_PERTURB_": "165",
}


class Skip(Exception):
    pass


def quiet_environment(scratch):
    """For a process that has not imported vLLM yet. VLLM_CPU_KVCACHE_SPACE would win over what engine() asks for."""
    environment = {**os.environ, **QUIET}
    environment["VLLM_CACHE_ROOT"] = os.path.join(scratch, "cache")
    environment["VLLM_CONFIG_ROOT"] = os.path.join(scratch, "config")
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return environment


def scratch_folder():
    return tempfile.TemporaryDirectory(prefix="headrace-vllm-", dir=os.environ.get("TMPDIR", "/var/tmp"))


digests = []


def digest_of(model):
    """{name: SHA-256} of all parameters and buffers."""
    import torch

    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found


def record_digests():
    """From now on each first load appends its digest, taken before vLLM repacks the weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights

    def load_weights(self, model, model_config):
        original(self, model, model_config)
        digests.append(digest_of(model))

    DefaultModelLoader.load_weights = load_weights


@contextlib.contextmanager
def engine(folder, load_format="headrace", extra=None, **arguments):
    from vllm import LLM

    values = {
        "model": str(folder),
        "load_format": load_format,
        "model_loader_extra_config": extra or {},
        "enforce_eager": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
        "seed": 0,
    }
    llm = LLM(**{**values, **arguments})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def loaded_digest(folder, load_format="headrace", extra=None, **arguments):
    """{name: SHA-256} of what a loader made of a folder."""
    with engine(folder, load_format, extra, **arguments):
        pass
    return digests[-1]


def say(llm, prompt, n_words):
    from vllm import SamplingParams

    answer = llm.generate([" ".join(prompt)], SamplingParams(temperature=0, max_tokens=n_words), use_tqdm=False)
    words = [llm.get_tokenizer().convert_ids_to_tokens(token) for token in answer[0].outputs[0].token_ids]
    return list(prompt) + words


def error_of(action):
    """The exception of an action that must fail."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - any is looked at by the caller
        return error
    raise AssertionError("no error was raised")


class Log(logging.Handler):
    """The lines that headrace logs while this is in force."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []
        self.logger = logging.getLogger("vllm.headrace")

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.level_before = self.logger.level
        self.logger.setLevel(logging.DEBUG)
        self.logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def run(tests, only=()):
    """Runs them in order and gives an exit status."""
    chosen = [test for test in tests if not only or test.__name__ in only]
    failed = 0
    for number, test in enumerate(chosen, 1):
        print(flush=True)  # a progress bar may have left its line open
        name = f"{number} - {test.__name__.removeprefix('test_')}"
        start = time.monotonic()
        try:
            test()
            print(f"ok {name}", flush=True)
        except Skip as reason:
            print(f"ok {name} # SKIP {reason}", flush=True)
        except BaseException as error:
            failed += 1
            print("".join(f"# {line}\n" for line in traceback.format_exc().splitlines()), end="")
            print(f"not ok {name}", flush=True)
            if isinstance(error, KeyboardInterrupt):
                break
        print(f"# {time.monotonic() - start:.1f} s", flush=True)
    print(f"1..{len(chosen)}")
    sys.stdout.flush()
    return 1 if failed else 0
