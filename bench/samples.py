# SPDX-License-Identifier: Apache-2.0
"""Takes one sample: one load in a fresh process, by headrace's command or by a peer through loaders.py.

The same is counted for all: from "nothing of the model is open", with the device's context there, to "the last tensor is
on the device". For headrace that is the time of its load (loader, pool and buffers included) plus the time of opening the
model, which the command does before and which is measured apart, warm; it is added to wall and CPU time of each sample.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import threading

import loaders
import model_files
import page_cache
from sampler import Sampler

HEADRACE = "headrace"
NAMES = [HEADRACE] + list(loaders.PEERS)


def is_ours(name):
    """headrace's command, or headrace from Python."""
    return name == HEADRACE or loaders.PEERS[name][1] == HEADRACE


def label(name):
    return "load" if name == HEADRACE else loaders.PEERS[name][3]


class Failed(Exception):
    """A sample that did not come about; the text is the result."""


def last_words(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:]


class Child:
    """A loaders.py process: answers come as JSON lines, and it is ended if they do not come in time."""

    def __init__(self, command, environment, errors, timeout):
        self.errors = errors
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                        env=environment, text=True)
        self.late = False
        self.timer = threading.Timer(timeout, self._give_up)
        self.timer.start()

    def _give_up(self):
        self.late = True
        self.process.kill()

    def expect(self, event):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            words = last_words(self.errors.read())
            raise Failed("took too long" if self.late else f"died with status {self.process.returncode}: {words}")
        answer = json.loads(line)
        if answer.pop("event") == event:
            return answer
        raise Failed(answer.get("error", f"unexpected answer {line.strip()}"))

    def go(self):
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the next expect() tells

    def close(self):
        self.timer.cancel()
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


class Runner:
    def __init__(self, args, gpu, scratch):
        self.args = args
        self.gpu = gpu
        self.scratch = scratch
        self.bare = None
        self.fault = None
        self.on_cpu = args.device == "cpu"
        self.compared = set()  # (name, folder): headrace from Python, whose first sample compares every byte

    # ---- headrace ----

    def command(self, *words):
        done = subprocess.run([self.args.headrace, *words], capture_output=True, text=True, timeout=self.args.timeout,
                              check=False)
        if done.returncode:
            raise Failed(last_words(done.stderr) or f"ended with status {done.returncode}")
        return done

    def version(self):
        return self.command("--version").stdout.strip()

    def make_model(self, spec, where):
        """Synthetic models are made by `headrace bench`, which also measures a little; that is not used."""
        done = subprocess.run([self.args.headrace, "bench", "--synthetic", spec, "--dir", where, "--keep", "--rounds", "1",
                               "--open"], capture_output=True, text=True, check=False)
        kept = re.search(r"kept (\S+)", done.stderr)
        if done.returncode or not kept:
            raise SystemExit(f"cannot make {spec}: {last_words(done.stderr)}")
        return kept.group(1)

    def ceilings(self, folder, state):
        """GB/s of link, storage, memory and page cache, as `headrace bench` measures them on these files."""
        if not self.args.ceiling_rounds:
            return {}
        try:
            done = self.command("bench", folder, "--" + state, "--rounds", str(self.args.ceiling_rounds), "--device",
                                self.args.device, "--json")
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"  no ceilings: {error}", file=sys.stderr)
            return {}
        return json.loads(done.stdout)["ceilings"]

    def _load(self, folder, *words):
        """One `headrace load` with what was seen from outside while it ran."""
        sampler = Sampler(self.gpu)
        sampler.start()
        try:
            done = self.command("load", folder, "--device", self.args.device, "--json", *words)
        finally:
            gpu_bytes, host_bytes = sampler.stop()
        told = json.loads(done.stdout)
        return told, {"gpu": gpu_bytes, "host": host_bytes, "resident": told["memory"]["peak_resident_bytes"]}

    def prepare_headrace(self, folder, state, peers):
        """Untimed, before the rounds: every byte compared, and what a process with nothing to do takes."""
        if HEADRACE not in peers:
            return
        tiny = os.path.join(self.scratch, "tiny")
        model_files.write_tiny(tiny)
        self.fault = None
        try:
            seen = [self._load(tiny, "--staging", "128KiB", "--slot", "64KiB")[1] for _ in range(3)]
            self.bare = {key: statistics.median(s[key] for s in seen) if seen[0][key] is not None else None
                         for key in seen[0]}
            page_cache.prepare(model_files.names(folder), state)
            if not self._load(folder, "--verify")[0]["verified"]:
                raise Failed("--verify did not verify")
        except (Failed, subprocess.TimeoutExpired) as error:
            self.fault = str(error)

    def _headrace(self, folder, paths, state):
        if self.fault:
            raise Failed(self.fault)
        share, good = page_cache.prepare(paths, state)
        told, seen = self._load(folder)
        payload = told["bytes"]
        on_host = payload if self.on_cpu else 0
        gpu = None if seen["gpu"] is None or self.bare["gpu"] is None else seen["gpu"] - self.bare["gpu"] - payload
        if gpu is None and not self.on_cpu:
            gpu = told["memory"]["device_taken_bytes"] - payload
        opening = told["model"]["open_seconds"]
        return {"seconds": told["seconds"] + opening,
                "cpu_seconds": told["cpu_seconds_per_gb"] * payload / 1e9 + told["model"]["open_cpu_seconds"],
                "first_tensor_seconds": told["first_tensor_seconds"] + opening,
                "open_seconds": opening, "tensors": told["tensors"], "extra_gpu_bytes": gpu,
                "host_rss_bytes": max(0, seen["resident"] - self.bare["resident"] - on_host),
                "host_used_bytes": max(0, seen["host"] - self.bare["host"] - on_host),
                "pinned_bytes": told["memory"]["peak_pinned_bytes"], "engines": told["engines"], "note": told["note"],
                "checked": "every byte, in a run before", "resident_before": share, "prepared": good}

    # ---- the peers ----

    def _environment(self, name):
        environment = dict(os.environ)
        site = self.args.safetensors9 if name.startswith("safetensors-prefetch") else None
        if is_ours(name):
            site = self.args.headrace_python
        if site:
            path = [os.path.abspath(site), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        return environment

    def _timed(self, child, paths, state):
        ready = child.expect("ready")
        share, good = page_cache.prepare(paths, state)
        sampler = Sampler(self.gpu)
        sampler.start()
        try:
            child.go()
            loaded = child.expect("loaded")
        finally:
            gpu_bytes, host_bytes = sampler.stop()
        wrong = child.expect("checked")["wrong"]
        if wrong:
            raise Failed(f"WRONG DATA: {len(wrong)} faults, the first: {wrong[0]}")
        return ready, loaded, {"gpu": gpu_bytes, "host": host_bytes, "share": share, "good": good}

    def _peer(self, name, folder, paths, state):
        check_all = is_ours(name) and (name, folder) not in self.compared
        command = [sys.executable, loaders.__file__, name, self.args.device, folder] + ["all"] * check_all
        with open(os.path.join(self.scratch, "errors"), "w+", encoding="utf-8", errors="replace") as errors:
            child = Child(command, self._environment(name), errors, self.args.timeout)
            try:
                ready, loaded, seen = self._timed(child, paths, state)
            finally:
                child.close()
        if check_all:
            self.compared.add((name, folder))
        payload = sum(size for path in paths for _, _, size in model_files.tensors(path))
        on_host = payload if self.on_cpu else 0
        taken = loaded["device_taken_bytes"] if seen["gpu"] is None else seen["gpu"]
        return {"seconds": loaded["seconds"], "cpu_seconds": loaded["cpu_seconds"],
                "first_tensor_seconds": loaded["first_tensor_seconds"], "tensors": loaded["tensors"],
                "extra_gpu_bytes": None if taken is None else taken - payload,
                "host_rss_bytes": max(0, loaded["host_peak_bytes"] - on_host),
                "host_used_bytes": max(0, seen["host"] - on_host), "versions": ready["versions"],
                "checked": f"names of all tensors, bytes of {'all' if check_all else 'some'}", "resident_before": seen["share"],
                "prepared": seen["good"]}

    def take(self, name, folder, state):
        paths = model_files.names(folder)
        try:
            if name == HEADRACE:
                sample = self._headrace(folder, paths, state)
                sample["versions"] = {"headrace": self.version()}
            else:
                sample = self._peer(name, folder, paths, state)
        except subprocess.TimeoutExpired:
            return {"error": "took too long"}
        except Failed as error:
            return {"error": str(error).replace(folder, "MODEL").replace(os.getcwd(), ".")}
        return sample
