#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""headrace beside other loaders: the same model, every tensor kept, in one run on one machine.

  bench/peers.py run --section llama:15GiB@warm --section llama:15GiB@cold*2 --out result.json
  bench/peers.py run --section small:100000x32KiB@warm --peers headrace,safetensors-prefetch
  bench/peers.py run --section /models/Llama-3.1-8B@warm --device cuda:0
  bench/peers.py table result.json
  bench/peers.py plot result.json

Every sample is a fresh process; rounds are interleaved and start with another peer each time; the page cache is
prepared and asked before each sample. docs/benchmarks.md says what is counted and how. A peer that cannot run here is
listed with its error.
"""
import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time

import chart
import model_files
import page_cache
import samples
from sampler import Gpu

SCHEMA = 1
SLOW_FACTOR = 5  # a peer this many times slower than the fastest peer takes part in --slow-rounds rounds only


# ---- what is asked for ----

def parse_section(text, default_rounds):
    """SPEC@STATE or SPEC@STATE*ROUNDS"""
    spec, at, state = text.rpartition("@")
    state, star, rounds = state.partition("*")
    if not at or state not in ("warm", "cold") or (star and not (rounds.isdigit() and int(rounds) > 0)):
        raise argparse.ArgumentTypeError(f"{text}: expected MODEL@warm or MODEL@cold, with *ROUNDS if wanted")
    return {"spec": spec, "state": state, "rounds": int(rounds) if star else default_rounds}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--section", action="append", required=True, metavar="MODEL@STATE[*ROUNDS]",
                     help="MODEL: what `headrace bench --synthetic` understands, or a directory; STATE: warm or cold")
    run.add_argument("--rounds", type=int, default=3, help="samples of each peer (default 3)")
    run.add_argument("--slow-rounds", type=int, default=1, metavar="N",
                     help=f"samples of peers that are {SLOW_FACTOR} times slower than the fastest peer (default 1)")
    run.add_argument("--peers", default=",".join(samples.NAMES), metavar="A,B",
                     help="default: all: " + ", ".join(samples.NAMES))
    run.add_argument("--device", default="cuda:0")
    run.add_argument("--headrace", default="build/cli/headrace", metavar="PATH")
    run.add_argument("--headrace-python", metavar="DIR",
                     help="where Python finds the package headrace (default: beside the command, in its build folder)")
    run.add_argument("--safetensors9", metavar="DIR", help="site directory of safetensors 0.9, for the prefetch peers")
    run.add_argument("--dir", default="/var/tmp", help="where synthetic models are made (default /var/tmp)")
    run.add_argument("--keep", action="store_true", help="do not remove synthetic models")
    run.add_argument("--ceiling-rounds", type=int, default=2, metavar="N",
                     help="rounds of `headrace bench` for the ceilings of each section (default 2, 0: none)")
    run.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="start no sample that would pass this")
    run.add_argument("--timeout", type=float, default=150, metavar="SECONDS", help="for one sample (default 150)")
    run.add_argument("--prediction", default="", help="what was expected before the run, kept with the result")
    run.add_argument("--out", metavar="FILE", help="the result as JSON")
    for name, text in (("table", "print a result"), ("plot", "draw a result as SVG and PNG, with matplotlib")):
        command = commands.add_parser(name, help=text)
        command.add_argument("result")
        if name == "plot":
            command.add_argument("chart", nargs="?", help="name without .svg and .png (default: the result's)")
    return parser, parser.parse_args()


# ---- facts ----

def cpu_model():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(args, gpu):
    return {**gpu.facts(), "device": args.device, "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory_bytes(), "kernel": platform.release(), "architecture": platform.machine(),
            "python": platform.python_version(), "page_cache_asked_by": page_cache.way()}


# ---- one section ----

def spread(values):
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


FIGURES = ("gb_per_second", "seconds", "cpu_seconds_per_gb", "first_tensor_seconds", "extra_gpu_bytes",
           "host_rss_bytes", "host_used_bytes")


def summary(name, taken, payload):
    """The row of one peer: medians and spread of its good samples, or why there are none."""
    good = [sample for sample in taken if "error" not in sample]
    row = {"peer": name, "what": samples.label(name), "runs": len(good), "samples": taken}
    if taken:
        row["versions"] = taken[-1].get("versions", {})
    errors = [sample["error"] for sample in taken if "error" in sample]
    if errors:
        row["error"] = errors[0]
    for sample in good:
        sample["gb_per_second"] = payload / sample["seconds"] / 1e9
        sample["cpu_seconds_per_gb"] = sample["cpu_seconds"] / (payload / 1e9)
    for figure in FIGURES:
        row[figure] = spread([sample[figure] for sample in good])
    row["not_prepared"] = sum(not sample["prepared"] for sample in good)
    return row


class Section:
    """One model in one state, loaded by everybody in turn."""

    def __init__(self, asked, runner, args, deadline):
        self.asked = asked
        self.runner = runner
        self.args = args
        self.deadline = deadline
        self.taken = {name: [] for name in args.peers}
        self.cost = {}  # seconds that the last sample of a peer took in all
        self.cut_short = False

    def fastest(self):
        """Seconds of the fastest sample of any peer, headrace left out: it must not decide who takes part."""
        return min((sample["seconds"] for name, taken in self.taken.items() for sample in taken
                    if not samples.is_ours(name) and "error" not in sample), default=float("inf"))

    def wants(self, name):
        taken = self.taken[name]
        if any("error" in sample for sample in taken):
            return False
        slow = not samples.is_ours(name) and taken and taken[0]["seconds"] > SLOW_FACTOR * self.fastest()
        if slow and len(taken) >= self.args.slow_rounds:
            return False
        if self.deadline and time.monotonic() + self.cost.get(name, 0) > self.deadline:
            self.cut_short = True
            return False
        return True

    def sample(self, folder, name):
        start = time.monotonic()
        sample = self.runner.take(name, folder, self.asked["state"])
        self.cost[name] = time.monotonic() - start
        self.taken[name].append(sample)
        said = sample.get("error") or f"{sample['seconds']:.3f} s"
        if not sample.get("prepared", True):
            said += f", NOT {self.asked['state']} ({sample['resident_before']:.1%} resident)"
        print(f"  {name}: {said}", file=sys.stderr, flush=True)

    def run(self, folder):
        for round_number in range(self.asked["rounds"]):
            turn = round_number % len(self.args.peers)
            for name in self.args.peers[turn:] + self.args.peers[:turn]:
                if self.wants(name):
                    self.sample(folder, name)

    def result(self, folder, ceilings):
        entries = [entry for path in model_files.names(folder) for entry in model_files.tensors(path)]
        payload = sum(size for _, _, size in entries)
        rows = [summary(name, taken, payload) for name, taken in self.taken.items()]
        result = {"model": self.asked["name"], "state": self.asked["state"], "tensors": len(entries),
                  "bytes": payload, "files": len(model_files.names(folder)),
                  "file_system": page_cache.file_system(folder), "ceilings": ceilings, "rows": rows,
                  "cut_short_by_limit": self.cut_short}
        rates = {row["peer"]: row["gb_per_second"]["median"] for row in rows if row["runs"]}
        others = [name for name in rates if not samples.is_ours(name)]
        if others and len(others) < len(rates):
            best = max(others, key=rates.get)
            result["best_peer"] = best
            result["to_best_peer"] = {name: rates[name] / rates[best] for name in rates if samples.is_ours(name)}
            if samples.HEADRACE in rates:
                result["headrace_to_best_peer"] = rates[samples.HEADRACE] / rates[best]
        return result


# ---- tables ----

def number(figure, scale, form):
    return form.format(figure["median"] / scale) if figure else "-"


def print_section(section):
    print(f"\n{section['model']}, {section['state']}: {section['tensors']:,} tensors, {section['bytes']:,} bytes, "
          f"{section['files']} files on {section['file_system']}")
    ceilings = {name: c["gb_per_second"]["median"] for name, c in section["ceilings"].items()}
    if ceilings:
        print("ceilings, GB/s: " + ", ".join(f"{name} {rate:.2f}" for name, rate in ceilings.items()))
    print(f"{'':26}{'GB/s':>8} {'min':>7} {'max':>7} {'runs':>5} {'CPU-s/GB':>9} {'first ms':>9} {'GPU+MiB':>8} "
          f"{'RSS+MiB':>8} {'host+MiB':>9}")
    for row in sorted(section["rows"], key=lambda row: -(row["gb_per_second"] or {"median": -1})["median"]):
        rate = row["gb_per_second"]
        if not rate:
            print(f"{row['peer']:26}{row.get('error') or 'no sample'}")
            continue
        marks = f"  {row['not_prepared']} NOT {section['state']}" if row["not_prepared"] else ""
        marks += f"  {row['error']}" if row.get("error") else ""
        print(f"{row['peer']:26}{rate['median']:8.2f} {rate['min']:7.2f} {rate['max']:7.2f} {row['runs']:5} "
              f"{number(row['cpu_seconds_per_gb'], 1, '{:.3f}'):>9} "
              f"{number(row['first_tensor_seconds'], 1e-3, '{:.1f}'):>9} "
              f"{number(row['extra_gpu_bytes'], 2**20, '{:.0f}'):>8} {number(row['host_rss_bytes'], 2**20, '{:.0f}'):>8} "
              f"{number(row['host_used_bytes'], 2**20, '{:.0f}'):>9}{marks}")
    ratios = section.get("to_best_peer") or {samples.HEADRACE: section.get("headrace_to_best_peer")}
    if "best_peer" in section:
        for name, ratio in ratios.items():
            print(f"{name} is {ratio:.2f} x the best peer ({section['best_peer']})")
    if section["cut_short_by_limit"]:
        print("the limit on time was reached: some rounds are missing")


def print_result(result):
    facts = result["machine"]
    print(f"{result['date']}  {result['headrace']}  {facts['gpu']}, driver {facts['driver']}, {facts['cores']} x "
          f"{facts['cpu']}, kernel {facts['kernel']}")
    if result["prediction"]:
        print(f"predicted: {result['prediction']}")
    for section in result["sections"]:
        print_section(section)


# ---- the run ----

class Models:
    """Synthetic models, each made once and removed at the end."""

    def __init__(self, args, runner):
        self.args = args
        self.runner = runner
        self.folders = {}

    def folder(self, spec):
        if os.path.isdir(spec):
            return spec, os.path.basename(os.path.normpath(spec))
        if spec not in self.folders:
            self.folders[spec] = self.runner.make_model(spec, self.args.dir)
        return self.folders[spec], spec

    def remove(self):
        for folder in self.folders.values():
            if self.args.keep:
                print(f"kept {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def write(result, path):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


def measure(args, scratch):
    gpu = Gpu(args.device)
    runner = samples.Runner(args, gpu, scratch)
    result = {"kind": "headrace peers", "schema": SCHEMA, "headrace": runner.version(),
              "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "machine": machine(args, gpu), "prediction": args.prediction, "sections": []}
    models = Models(args, runner)
    start = time.monotonic()
    try:
        for i, asked in enumerate(args.sections):
            folder, asked["name"] = models.folder(asked["spec"])
            print(f"{asked['name']}, {asked['state']}", file=sys.stderr, flush=True)
            ceilings = runner.ceilings(folder, asked["state"])
            deadline = start + args.limit * (i + 1) / len(args.sections) if args.limit else 0
            section = Section(asked, runner, args, deadline)
            runner.prepare_headrace(folder, asked["state"], args.peers)
            section.run(folder)
            result["sections"].append(section.result(folder, ceilings))
            if args.out:
                write(result, args.out)  # after each section: a run that is cut off still leaves something
    finally:
        models.remove()
    return result


def check_args(parser, args):
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = [name for name in args.peers if name not in samples.NAMES]
    if unknown:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(samples.NAMES)}")
    try:
        args.sections = [parse_section(text, args.rounds) for text in args.section]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(args.headrace))), "python")
    if args.headrace_python is None and os.path.isdir(os.path.join(beside, "headrace")):
        args.headrace_python = beside
    if not os.access(args.headrace, os.X_OK):
        parser.error(f"{args.headrace} cannot be run; build it, or give its path with --headrace")


def main():
    parser, args = parse_args()
    if args.command == "run":
        check_args(parser, args)
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="headrace-peers-") as scratch:
            print_result(measure(args, scratch))
        return 0
    with open(args.result, encoding="utf-8") as file:
        result = json.load(file)
    if args.command == "table":
        print_result(result)
    else:
        try:
            print("\n".join(chart.write(result, chart.base_of(args.chart or args.result))))
        except ImportError as error:
            raise SystemExit(f"a chart needs matplotlib ({error}): install it with pip") from None
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; finished sections are in the file of --out", file=sys.stderr)
        sys.exit(130)
