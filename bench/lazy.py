#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model under a memory budget, one token after the other: headrace.LazyModel and attach() beside accelerate's disk offload.

    lazy.py make FOLDER [--layers N --hidden N --heads N --vocab N --dtype D --device D]   writes a Llama with random weights
    lazy.py run FOLDER [--device D] [--budget SHARE] [--tokens N] [--peers headrace,accelerate,whole] [--cold] [--prediction TEXT]
    lazy.py switch FOLDER [--device D] [--budget SHARE]                         model A, then B, then A again, in one cache
    lazy.py hit FOLDER [--device D]                                             nanoseconds of a get() that finds its group there

Each peer runs in a process of its own, over the same files, with the same weights, and decodes greedily from the same prompt; the
tokens must be the same. --cold drops the folder from the page cache before each token, as a machine would whose memory is no larger
than the budget; without it, what is read comes from the page cache after the first token. Told are: seconds to set up, seconds per token (the first apart), bytes read from storage per token
(/proc/self/io) and bytes read by calls (rchar; a mapping's are not among them), peak memory of the process and of the GPU (what the driver says is taken, above what a
context takes by itself, every 10 ms). --budget is the share of the weights that may be in memory. accelerate's offload has no cache: it keeps one
layer; it gets the layers that fit into the budget placed in memory by its device map, as its documentation says.
The answer is one JSON document.

Needs torch and transformers; accelerate for its peer. Without transformers a Llama written here in plain torch is measured
(headrace by attach(), and whole).
"""
import argparse
import gc
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))


# ---------------------------------------------------------------------------------------------------------------- a Llama in plain torch


def plain_llama(torch, config):
    """A Llama with the names of transformers' checkpoints, for where transformers is not there. No cache of keys: decoding is a
    forward over all tokens so far."""
    nn, functional = torch.nn, torch.nn.functional
    heads, hidden = config["num_attention_heads"], config["hidden_size"]

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden))

        def forward(self, x):
            return functional.rms_norm(x, (hidden,), self.weight, 1e-6)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(hidden, hidden, bias=False))

        def forward(self, x, turn):
            parts = [part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)]
            q, k = (turned(part, *turn) for part in parts[:2])
            found = functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
            return self.o_proj(found.transpose(1, 2).flatten(2))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in (("gate_proj", (hidden, config["intermediate_size"])), ("up_proj", (hidden, config["intermediate_size"]))):
                setattr(self, name, nn.Linear(*shape, bias=False))
            self.down_proj = nn.Linear(config["intermediate_size"], hidden, bias=False)

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm = Attention(), Mlp(), Norm(), Norm()

        def forward(self, x, turn):
            x = x + self.self_attn(self.input_layernorm(x), turn)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
            self.layers = nn.ModuleList([Layer() for _ in range(config["num_hidden_layers"])])
            self.norm = Norm()

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Body()
            self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)

        def forward(self, ids):
            x = self.model.embed_tokens(ids)
            at = torch.arange(ids.shape[1], device=x.device, dtype=torch.float32)
            rates = 1e4 ** (-torch.arange(0, hidden // heads, 2, device=x.device, dtype=torch.float32) / (hidden // heads))
            angles = torch.outer(at, rates).repeat(1, 2)
            turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            for layer in self.model.layers:
                x = layer(x, turn)
            return self.lm_head(self.model.norm(x[:, -1:]))

    def turned(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    with torch.device("meta"):
        return Llama().to(getattr(torch, config["dtype"])).eval()


def greedy(torch, forward, prompt, n, clock):
    ids = prompt
    for _ in range(n):
        ids = torch.cat((ids, forward(ids)[:, -1:].argmax(-1)), 1)
        clock.token()
    return ids


# ------------------------------------------------------------------------------------------------------------------------ measuring


def io_of(pid="self"):
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        return {key: int(value) for key, value in (line.split(": ") for line in file.read().splitlines())}


class Clock:
    """When each token came, and what had been read by then."""

    def __init__(self, torch, settings):
        self.torch, self.settings = torch, settings
        self.marks = []

    def token(self):
        if self.settings.device != "cpu":
            self.torch.cuda.synchronize()
        if self.settings.cold:
            drop_from_page_cache(self.settings.folder)
        found = io_of()
        self.marks.append((time.perf_counter(), found["read_bytes"], found["rchar"]))

    def told(self):
        (t0, disk0, read0), (t1, disk1, read1), (tn, diskn, readn) = self.marks[0], self.marks[1], self.marks[-1]
        n = len(self.marks) - 2
        each = [later[0] - earlier[0] for earlier, later in zip(self.marks, self.marks[1:])]
        return {
            "seconds_of_each_token": each, "median_s_per_token": statistics.median(each[1:]), "first_token_s": t1 - t0, "tokens": n, "s_per_token": (tn - t1) / n, "tokens_per_s": n / (tn - t1),
            "storage_bytes_per_token": (diskn - disk1) / n, "read_bytes_per_token": (readn - read1) / n,
            "first_token_storage_bytes": disk1 - disk0, "first_token_read_bytes": read1 - read0,
        }  # fmt: skip


class GpuMemory(threading.Thread):
    """The most memory of the GPU that the driver says is taken, above what was taken when the watch began."""

    def __init__(self, torch, device):
        super().__init__(daemon=True)
        self.torch, self.device = torch, device
        self.ended = threading.Event()
        square = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
        (square @ square).sum().item()  # the context, and what the libraries of linear algebra take for themselves
        self.before = self.most = self.taken()
        self.start()

    def taken(self):
        free, total = self.torch.cuda.mem_get_info(self.device)
        return total - free

    def run(self):
        while not self.ended.wait(0.01):
            self.most = max(self.most, self.taken())

    def stop(self):
        self.ended.set()
        self.join()
        return self.most - self.before


class Settings:
    def __init__(self, arguments):
        self.__dict__.update(vars(arguments))
        with open(os.path.join(self.folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        files = [name for name in os.listdir(self.folder) if name.endswith(".safetensors")]
        self.weights = sum(os.path.getsize(os.path.join(self.folder, name)) for name in files)
        self.allowed = int(self.weights * self.budget)
        self.has_transformers = not self.plain and bool(__import__("importlib.util").util.find_spec("transformers"))


def stream_prompt(torch, device):
    return torch.tensor([[1, 17, 5, 42, 9, 30, 2, 11]], device=device)


def decode(torch, settings, model, clock):
    """Greedy decoding, the way that the model has."""
    prompt = stream_prompt(torch, settings.device)
    clock.token()
    with torch.inference_mode():
        if not settings.has_transformers:
            return greedy(torch, model, prompt, settings.tokens, clock)[0].tolist()

        class Watch(__import__("transformers").StoppingCriteria):
            def __call__(self, ids, scores, **_):
                clock.token()
                return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        return model.generate(
            prompt, max_new_tokens=settings.tokens, min_new_tokens=settings.tokens, do_sample=False, stopping_criteria=[Watch()], pad_token_id=0
        )[0].tolist()  # fmt: skip


def run_headrace(torch, settings, clock):
    import headrace.torch

    options = {"device": settings.device, "budget": settings.allowed, "prefetch": settings.prefetch, "policy": settings.policy}
    if settings.host_budget:
        options["host_budget"] = settings.host_budget
    if settings.trace:
        options["trace"] = settings.trace
    if settings.has_transformers:
        model = headrace.LazyModel.from_safetensors(settings.folder, **options)
        attachment = model.attachment
    else:
        model = plain_llama(torch, settings.config)
        attachment = headrace.torch.attach(model, settings.folder, **options)
    said = decode(torch, settings, model, clock)
    return model, said, {"stats": attachment.stats(), "units": len(attachment.units), "cache_budget": attachment.cache.budget}


def run_whole(torch, settings, clock):
    if settings.has_transformers:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(settings.folder, dtype="auto").to(settings.device).eval()
    else:
        import headrace.torch

        model = plain_llama(torch, settings.config)
        model.load_state_dict(headrace.torch.load_file(settings.folder, device=settings.device), assign=True)
    return model, decode(torch, settings, model, clock), {}


def run_accelerate(torch, settings, clock):
    import accelerate
    import transformers

    where = 0 if settings.device != "cpu" else "cpu"
    offload = settings.scratch or os.path.join(settings.folder, "offload")
    os.makedirs(offload, exist_ok=True)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(settings.folder), dtype=getattr(torch, settings.config["dtype"])
        )
    model.tie_weights()
    # What fits is placed; the largest layer needs room beside it, which accelerate keeps free by itself on a GPU alone.
    layer = max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in model.model.layers)
    room = settings.allowed if where == 0 else max(settings.allowed - layer, 1)
    placed = accelerate.infer_auto_device_map(model, max_memory={where: room, "disk": 1 << 50} if where == 0 else {"cpu": room, "disk": 1 << 50},
                                              no_split_module_classes=model._no_split_modules)  # fmt: skip
    if not any(place == "disk" for place in placed.values()):
        raise SystemExit("everything fits: nothing to compare")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings.folder, dtype="auto", device_map=placed, offload_folder=offload
    ).eval()
    on_disk = sum(1 for place in model.hf_device_map.values() if place == "disk")
    return model, decode(torch, settings, model, clock), {"modules_on_disk": on_disk,
        "modules": len(model.hf_device_map),
        "version": accelerate.__version__,
    }


PEERS = {"headrace": run_headrace, "whole": run_whole, "accelerate": run_accelerate}


def logits_digest(torch, settings, model):
    """Of what the model says to the prompt: equal if every bit is."""
    with torch.inference_mode():
        found = model(stream_prompt(torch, settings.device))
    logits = (found.logits if hasattr(found, "logits") else found)[:, -1:]
    return hashlib.sha256(logits.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def peer_main(arguments):
    """One peer in this process; its answer is the last line of standard output."""
    settings = Settings(arguments)
    import torch

    torch.set_num_threads(settings.threads)
    watch = GpuMemory(torch, settings.device) if settings.device != "cpu" else None
    clock = Clock(torch, settings)
    gc.collect()
    start = time.perf_counter()
    model, said, more = PEERS[arguments.peer](torch, settings, clock)
    found = clock.told() | {"logits_sha256": logits_digest(torch, settings, model)} | {
        "setup_s": clock.marks[0][0] - start,
        "said": said,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if watch:
        found["driver_peak_bytes"] = watch.stop()
        found["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["torch_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    print("\n" + json.dumps(found | more))


# ---------------------------------------------------------------------------------------------------------------------- the caller


def drop_from_page_cache(folder):
    for where, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(where, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(arguments):
    settings = Settings(arguments)
    results = {}
    for peer in arguments.peers.split(","):
        if arguments.cold:
            drop_from_page_cache(arguments.folder)
        command = [sys.executable, os.path.abspath(__file__), "peer", arguments.folder, "--peer", peer, *passed_on(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}
        results[peer] = found
    all_answered = not any("error" in found for found in results.values())
    digests = {found["logits_sha256"] for found in results.values() if "logits_sha256" in found}
    said = {peer: found.pop("said") for peer, found in results.items() if "said" in found}
    tell("decode", arguments, {
        "weights_bytes": settings.weights, "budget_bytes": settings.allowed, "with_transformers": settings.has_transformers,
        "all_said_the_same": all_answered and len({tuple(tokens) for tokens in said.values()}) == 1, "all_logits_equal": all_answered and len(digests) == 1,
        "peers": results,
    })  # fmt: skip


def passed_on(arguments):
    names = ["device", "budget", "tokens", "prefetch", "policy", "host_budget", "threads", "scratch", "trace"]
    given = [
        item
        for name in names
        if getattr(arguments, name) is not None
        for item in ("--" + name.replace("_", "-"), str(getattr(arguments, name)))
    ]
    return given + [flag for flag, is_set in (("--plain", arguments.plain), ("--cold", arguments.cold)) if is_set]


def switch(arguments):
    """A, B, A: the time of a forward of each, in one cache that holds both or one and a half."""
    settings = Settings(arguments)
    import torch

    import headrace
    import headrace.torch

    torch.set_num_threads(arguments.threads)
    device = arguments.device
    prompt = stream_prompt(torch, device)
    options = headrace.torch.allocator(device, settings.allowed) if device != "cpu" else {}
    cache = headrace.Cache(device, budget=settings.allowed, policy=arguments.policy, host_budget=arguments.host_budget, **options)
    models = []
    for _ in range(2):
        module = plain_llama(torch, settings.config)
        headrace.torch.attach(module, settings.folder, cache=cache, prefetch=arguments.prefetch)
        models.append(module)
    times = []
    with torch.inference_mode():
        for name, module in zip("ABAB", models * 2):
            if arguments.cold and len(times) < 2:
                drop_from_page_cache(arguments.folder)
            start = time.perf_counter()
            module(prompt)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append({"model": name, "seconds": time.perf_counter() - start, "stats": cache.stats()})
    tell("switch", arguments, {"weights_bytes": settings.weights, "budget_bytes": settings.allowed, "runs": times})


def hit(arguments):
    """Nanoseconds of get() and release() of a resident group, best of seven rounds, an empty loop's left in."""
    import headrace

    with headrace.open(arguments.folder) as model:
        cache = headrace.Cache(arguments.device, budget=sum(tensor.nbytes + 4096 for tensor in model.tensors[:8]))
        group = cache.group(model, model.names[:8])
        cache.get(group).release()

        def best(call, n=100_000):
            rounds = []
            for _ in range(7):
                start = time.perf_counter_ns()
                for _ in range(n):
                    call()
                rounds.append((time.perf_counter_ns() - start) / n)
            return min(rounds)

        found = {
            "empty_call_ns": best(lambda: None), "get_release_ns": best(lambda: cache.get(group).release()),
            "get_by_names_ns": best(lambda: cache.get(model, group.names).release()),
        }  # fmt: skip
        cache.close()
    tell("hit", arguments, found)


def tell(what, arguments, found):
    import headrace
    import torch

    gpu = torch.cuda.get_device_name() if arguments.device != "cpu" else None
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "gpu": gpu,
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * 4096,
    }
    commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    versions = {"headrace": headrace.__version__, "commit": commit, "torch": torch.__version__, "python": platform.python_version()}
    document = {
        "benchmark": f"lazy {what}",
        "command": " ".join(sys.argv),
        "prediction": arguments.prediction,
        "machine": machine,
        "versions": versions,
    } | found
    text = json.dumps(document, indent=1)
    print(text)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def make(arguments):
    """Random weights, written tensor by tensor; no model is ever whole in memory."""
    import torch

    torch.manual_seed(1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": arguments.vocab, "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 11 // 4 // 64 * 64, "num_hidden_layers": arguments.layers, "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.heads, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "dtype": arguments.dtype, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 3,
    }  # fmt: skip
    os.makedirs(arguments.folder, exist_ok=True)
    with open(os.path.join(arguments.folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in plain_llama(torch, config).state_dict().items()}
    dtype = getattr(torch, arguments.dtype)
    code = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[arguments.dtype]
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with open(os.path.join(arguments.folder, "model.safetensors"), "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            values = torch.ones(shape, dtype=dtype) if len(shape) == 1 else torch.randn(shape, dtype=dtype, device=arguments.device) * 0.03
            file.write(values.cpu().view(torch.uint8).reshape(-1).numpy())
        file.flush()
        os.fsync(file.fileno())
    print(f"{arguments.folder}: {at:,} bytes of weights")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run", "switch", "hit", "peer"])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--policy", default="loop")
    parser.add_argument("--host-budget")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", default="headrace,accelerate,whole")
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--plain", action="store_true", help="the plain Llama, even if transformers is there")
    parser.add_argument("--cold", action="store_true", help="nothing of the folder stays in the page cache from token to token")
    parser.add_argument("--scratch", help="accelerate's offload folder")
    parser.add_argument("--trace")
    parser.add_argument("--prediction", default="")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    {"make": make, "run": run, "switch": switch, "hit": hit, "peer": peer_main}[arguments.what](arguments)


if __name__ == "__main__":
    main()
