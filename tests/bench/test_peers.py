#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_peers.py HEADRACE BENCH_FOLDER: what bench/peers.py decides and counts. No peer needs to be installed."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree

EXE = os.path.abspath(sys.argv.pop(1))
BENCH = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, BENCH)

import chart  # noqa: E402
import loaders  # noqa: E402
import model_files  # noqa: E402
import page_cache  # noqa: E402
import peers  # noqa: E402
import samples  # noqa: E402

PAYLOAD = 2_000_000_000


def sample(seconds, **more):
    return {"seconds": seconds, "cpu_seconds": 1.0, "first_tensor_seconds": None, "extra_gpu_bytes": None,
            "host_rss_bytes": 1 << 20, "host_used_bytes": 0, "prepared": True, **more}


def section(taken, slow_rounds=1):
    args = types.SimpleNamespace(peers=list(taken), slow_rounds=slow_rounds)
    made = peers.Section({"spec": "m", "name": "m", "state": "warm", "rounds": 3}, None, args, 0)
    made.taken = taken
    return made


class Decisions(unittest.TestCase):
    def test_a_section_is_a_model_a_state_and_rounds(self):
        asked = peers.parse_section("small:100x32KiB@cold*4", 3)
        self.assertEqual((asked["spec"], asked["state"], asked["rounds"]), ("small:100x32KiB", "cold", 4))
        self.assertEqual(peers.parse_section("a@b@warm", 3)["rounds"], 3)
        for wrong in ("llama:1GiB", "m@hot", "m@warm*0", "m@warm*", "m@warm*x"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=wrong):
                peers.parse_section(wrong, 3)

    def test_a_slow_peer_takes_part_in_fewer_rounds(self):
        made = section({"headrace": [sample(0.01)], "runai": [sample(1.0)], "instanttensor": [sample(4.9)], "fastsafetensors": [sample(5.1)]})
        self.assertEqual([made.wants(name) for name in ("headrace", "runai", "instanttensor", "fastsafetensors")], [True, True, True, False])

    def test_headrace_does_not_decide_who_is_slow(self):
        made = section({"headrace": [sample(0.01)], "runai": [sample(1.0)]})
        self.assertTrue(made.wants("runai"))
        made = section({"headrace": [sample(50.0)], "runai": [sample(1.0)]})
        self.assertTrue(made.wants("headrace"))

    def test_headrace_from_python_counts_as_headrace(self):
        made = section({"headrace-torch": [sample(9.0)], "runai": [sample(1.0)], "instanttensor": [sample(3.0)]})
        self.assertTrue(made.wants("headrace-torch"))
        self.assertEqual(made.fastest(), 1.0)
        self.assertEqual([name for name in samples.NAMES if samples.is_ours(name)],
                         ["headrace", "headrace-torch", "headrace-torch-bypass", "headrace-torch-feed", "headrace-torch-own"])

    def test_a_peer_that_failed_is_not_tried_again(self):
        self.assertFalse(section({"runai": [{"error": "no"}], "instanttensor": []}).wants("runai"))

    def test_a_row_is_medians_and_spread_of_good_samples(self):
        taken = [sample(1.0), sample(4.0, prepared=False), sample(2.0), {"error": "died"}]
        row = peers.summary("runai", taken, PAYLOAD)
        self.assertEqual(row["gb_per_second"], {"median": 1.0, "min": 0.5, "max": 2.0})
        self.assertEqual((row["runs"], row["not_prepared"], row["error"]), (3, 1, "died"))
        self.assertEqual(row["cpu_seconds_per_gb"]["median"], 0.5)
        self.assertIsNone(row["extra_gpu_bytes"])


class Files(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)

    def test_a_file_that_was_read_is_warm(self):
        path = os.path.join(self.scratch.name, "f")
        with open(path, "wb") as file:
            file.write(os.urandom(300_001))
        self.assertEqual(page_cache.prepare([path], "warm"), (1.0, True))

    def test_both_ways_to_ask_agree(self):
        path = os.path.join(self.scratch.name, "f")
        with open(path, "wb") as file:
            file.write(os.urandom(300_001))
            file.flush()
            by_cachestat = page_cache._by_cachestat(file.fileno())
        with open(path, "rb") as file:
            by_mincore = page_cache._by_mincore(file.fileno(), 300_001)
        self.assertEqual(by_mincore, -(-300_001 // page_cache.PAGE))
        self.assertIn(by_cachestat, (None, by_mincore))

    def test_the_index_says_which_files_there_are(self):
        model_files.write_tiny(self.scratch.name)
        self.assertEqual(len(model_files.names(self.scratch.name)), 1)
        with open(os.path.join(self.scratch.name, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {"runai": "2.safetensors", "instanttensor": "1.safetensors", "fastsafetensors": "2.safetensors"}}, file)
        names = [os.path.basename(path) for path in model_files.names(self.scratch.name)]
        self.assertEqual(names, ["1.safetensors", "2.safetensors"])

    def test_the_sample_of_tensors_has_first_last_and_largest(self):
        entries = [(f"t{i}", i, 900 if i == 77 else 1) for i in range(1000)]
        chosen = model_files.sample(entries, 10)
        for i in (0, 77, 999):
            self.assertIn(entries[i], chosen)
        self.assertLess(len(chosen), 15)


class Drawing(unittest.TestCase):
    def result(self):
        row = peers.summary("headrace", [sample(1.0), sample(2.0)], PAYLOAD)
        broken = peers.summary("runai", [{"error": 'no <backend> & "so" on'}], PAYLOAD)
        rich = peers.summary("safetensors", [sample(4.0, first_tensor_seconds=0.5, extra_gpu_bytes=5 << 20)], PAYLOAD)
        return {"headrace": "headrace 0", "date": "2026-01-01", "machine": {"gpu": "g", "driver": "d", "cores": 1, "kernel": "k"},
                "sections": [{"model": "m", "state": state, "tensors": 1, "bytes": PAYLOAD, "rows": [broken, row, rich],
                              "ceilings": {"link": {"gb_per_second": {"median": 3.0}}}} for state in ("warm", "cold")]}

    def test_a_chart_is_well_formed_whatever_an_error_says_and_the_same_each_time(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("matplotlib is not installed")
        with tempfile.TemporaryDirectory() as folder:
            names = [chart.write(self.result(), os.path.join(folder, base)) for base in ("a", "b")]
            contents = [[open(name, "rb").read() for name in pair] for pair in names]
        self.assertEqual(contents[0], contents[1])
        self.assertTrue(contents[0][1].startswith(b"\x89PNG"))
        words = [element.text for element in xml.etree.ElementTree.fromstring(contents[0][0]).iter() if element.text]
        for word in ('no <backend> & "so" on', "link 3.0", "headrace", "safetensors", "runai", "GB/s; line: smallest to largest",
                     "MiB beside the tensors (log)", "seconds (log); black: first tensor"):
            self.assertIn(word, words)

    def test_charts_are_named_after_their_result(self):
        for path in ("x/a.json", "x/a.svg", "x/a.png", "x/a"):
            self.assertEqual(chart.base_of(path), "x/a")
        self.assertEqual(chart.base_of("x/v1.2"), "x/v1.2")

    def test_the_rows_are_sorted_and_ours_stand_out(self):
        rows = chart.sorted_rows(self.result()["sections"][0])
        self.assertEqual([row["peer"] for row in rows], ["runai", "safetensors", "headrace"])
        self.assertEqual([chart.colour(row) == chart.OURS for row in rows], [False, False, True])
        self.assertEqual(chart.host_mib(rows[2]), 1.0)


class EndToEnd(unittest.TestCase):
    def test_a_run_gives_figures_of_headrace_and_errors_of_what_is_not_there(self):
        with tempfile.TemporaryDirectory() as scratch:
            hidden = os.path.join(scratch, "hidden")  # a torch that cannot be imported, whatever is installed
            os.mkdir(hidden)
            with open(os.path.join(hidden, "torch.py"), "w", encoding="utf-8") as file:
                file.write("raise ImportError('hidden')\n")
            out = os.path.join(scratch, "result.json")
            command = [sys.executable, os.path.join(BENCH, "peers.py"), "run", "--device", "cpu", "--headrace", EXE,
                       "--section", "small:200x4KiB@warm*2", "--dir", scratch, "--peers", "headrace,safetensors",
                       "--ceiling-rounds", "0", "--prediction", "it works", "--out", out]
            done = subprocess.run(command, capture_output=True, text=True, check=False,
                                  env={**os.environ, "PYTHONPATH": hidden})
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(out, encoding="utf-8") as file:
                result = json.load(file)
            self.assertEqual(sorted(os.listdir(scratch)), ["hidden", "result.json"])
        ours, theirs = result["sections"][0]["rows"]
        self.assertEqual(result["sections"][0]["bytes"], 200 * 4096)
        self.assertEqual((ours["peer"], ours["runs"]), ("headrace", 2), ours)
        self.assertGreater(ours["samples"][0]["open_seconds"], 0)
        self.assertGreater(ours["seconds"]["min"], ours["samples"][0]["open_seconds"])
        self.assertEqual((theirs["runs"], theirs["error"]), (0, "ImportError: hidden"))
        self.assertNotIn("headrace_to_best_peer", result["sections"][0])
        self.assertIn("ImportError: hidden", done.stdout)

    def test_every_peer_has_a_name_and_a_way(self):
        self.assertEqual(samples.NAMES[1:], list(loaders.PEERS))
        self.assertLessEqual(loaders.WANT_CUDA, set(loaders.PEERS))


class Checking(unittest.TestCase):
    class Tensor:
        """As much of a torch tensor as the check uses."""

        def __init__(self, content):
            self.content = content

        def __getattr__(self, name):
            return lambda *_: self

        def tobytes(self):
            return self.content

    def check(self, tensors, check_all=False):
        with tempfile.TemporaryDirectory() as folder:
            model_files.write_tiny(folder)
            made = {name: self.Tensor(content) for name, content in tensors.items()}
            return loaders.check(types.SimpleNamespace(uint8=None), model_files.names(folder), made, check_all)

    def test_wrong_missing_and_foreign_tensors_are_found(self):
        self.assertEqual(self.check({"t": bytes(range(16))}), [])
        for check_all in (False, True):
            self.assertEqual(self.check({"t": bytes(16)}, check_all), ["t has other bytes than its file"])
        self.assertEqual(self.check({}), ["t is missing"])
        self.assertEqual(self.check({"t": bytes(range(16)), "u": b""}), ["u is in no file"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
