# SPDX-License-Identifier: Apache-2.0
"""What the --json outputs look like. A dict names all keys there may be ("key?" need not be there), a list has one form for
all its items, a tuple offers several forms, Map has free keys. matches() gives the path of the first thing that differs."""


class Map:
    def __init__(self, form):
        self.form = form


NUMBER = (int, float)
NULL = type(None)
ERROR = {"code": int, "name": str, "message": str, "path": str, "tensor": str, "offset": (int, NULL), "stage": str}
ENGINES = [{"engine": str, "way": str, "bytes": int, "share": NUMBER}]
WAITING = {"storage": NUMBER, "copies": NUMBER, "cpu": NUMBER}
SPREAD = {"median": NUMBER, "min": NUMBER, "max": NUMBER}
MACHINE = {
    "cpu": str, "cores": int, "memory_bytes": int, "kernel": str, "architecture": str, "file_system": str, "device?": str,
    "device_name?": str, "driver?": int, "batch_copy?": bool, "headrace": str, "build": str, "date": str}
SAMPLE = {
    "bytes": int, "ns": int, "cpu_ns": int, "setup_ns?": int, "first_ns?": int, "peak_resident_bytes?": int,
    "beyond_tensors_bytes?": int, "device_taken_bytes?": int, "prepared": bool}
COMMON = {
    "gb_per_second": SPREAD, "seconds": SPREAD, "cpu_seconds_per_gb": SPREAD, "rounds_not_prepared": int, "samples": [SAMPLE]}

WAY = {"works": bool, "reason": str}

STORE = {
    "uuid": str, "name": str, "kind": str, "generation": int, "floor_generation": int, "body_sha256": str, "region_bytes": int,
    "data_bytes": int, "live_bytes": int, "free_bytes": int, "largest_free_bytes": int, "retired_bytes": int,
    "unbound_bytes": int, "objects": int, "unbound_objects": int, "lba_bytes": int}
MODEL = {
    "name": str, "uuid": str, "provenance": str, "bytes": int, "files": int, "shards": int, "created_generation": int}

SCHEMAS = {
    "error": {"error": {**ERROR, "system": int}},
    "ls": {
        "tensors": [{"name": str, "dtype": str, "shape": [int], "bytes": int, "shard": str, "offset": int, "listed": bool}],
        "shards": [{"path": str, "bytes": int, "data_offset": int, "tensors": int, "metadata": Map(str)}],
        "metadata": Map(str), "warnings": [str]},
    "check": {
        "ok": bool, "tensors": int, "shards": int, "verified_shards": int, "verified_tensors": int, "error?": ERROR,
        "checksummed_bytes?": int, "faults": [ERROR], "warnings": [str]},
    "digest": {
        "shards": [{"path": str, "bytes": int, "sha256": str}],
        "tensors": [{"name": str, "shard": str, "bytes": int, "sha256": str}]},
    "plan": {
        "device": {"spec": str, "name": str}, "tensors": int, "payload_bytes": int, "read_bytes": int, "reads": int,
        "pieces": int, "resident_bytes": int, "engines": ENGINES, "staging_bytes": int, "device_bytes": int, "note": str},
    "engines": {
        "engines": [{"name": str, "usable": bool, "reason": str}], "devices": [{"name": str, "usable": bool, "reason": str}]},
    "load": {
        "device": {"spec": str, "name": str, "open_seconds": NUMBER},
        "model": {"open_seconds": NUMBER, "open_cpu_seconds": NUMBER}, "tensors": int, "bytes": int, "seconds": NUMBER,
        "setup_seconds": NUMBER, "gb_per_second": NUMBER, "first_tensor_seconds": NUMBER, "engines": ENGINES,
        "waiting": WAITING, "cpu_seconds_per_gb": NUMBER, "read_bytes": int, "reads": int, "copies": int, "copy_calls": int,
        "readers": int,
        "memory": {
            "staging_bytes": int, "peak_staging_bytes": int, "peak_pinned_bytes": int, "peak_resident_bytes": int,
            "buffer_bytes": int, "device_taken_bytes": int},
        "note": str, "verified": bool, "verify_seconds?": NUMBER},
    "verify": {
        "ok": bool, "device": {"spec": str, "name": str}, "compared_with": str, "tensors": int, "bytes": int, "seconds": NUMBER,
        "gb_per_second": NUMBER, "windows": int, "window_bytes": int, "engines": ENGINES, "peak_staging_bytes": int,
        "peak_resident_bytes": int, "verified_shards": int, "verified_tensors": int, "note": str},
    "doctor": {
        "checks": [{"id": str, "what": str, "verdict": str, "reason": str, "advice": str}],
        "engines": [{"name": str, "usable": bool, "reason": str, "fill?": WAY, "bypass?": WAY}],
        "devices": [{"name": str, "usable": bool, "reason": str}],
        "trial?": {
            "sample_bytes": int, "seconds": NUMBER, "series": [{
                "state": str, "engine": str, "caching": str, "rounds": int, "gb_per_second?": SPREAD,
                "cpu_seconds_per_gb?": NUMBER, "peak_pinned_bytes?": int, "peak_staging_bytes?": int, "prepared?": bool,
                "error": str}]},
        "best?": {
            "engine": str, "caching": str, "why": str, "command": str, "vllm_command": str, "vllm_extra_config": str},
        "ok": bool},
    "verify-digests": {"error": ERROR, "faults": [ERROR]},
    "bench": {
        "kind": str, "machine": MACHINE,
        "model": {"name": str, "synthetic": bool, "tensors": int, "shards": int, "bytes": int},
        "options": {"staging_bytes": int, "slot_bytes": int, "engine": str, "caching": str, "readers": int},
        "rounds": int, "peak_resident_is_per_sample": bool, "device_open_seconds": NUMBER, "ceilings": Map(COMMON),
        "results": [{
            **COMMON, "what": str, "state": str, "resident_percent?": int, "engine?": str, "of_best_alone?": NUMBER, "staging_bytes": int,
            "slots": int, "peak_staging_bytes": int, "peak_pinned_bytes": int, "readers": int, "first_tensor_ms": SPREAD, "setup_ms": SPREAD, "bound": str,
            "share_of": Map(NUMBER), "cpu_of_cached?": NUMBER, "engines": ENGINES, "waiting": WAITING, "reads": int,
            "copies": int, "copy_calls": int, "note": str}]},
    "bench-loop": {
        "kind": str, "machine": MACHINE, "model": str, "tensors": int, "groups": int, "bytes": int, "budget_bytes": int,
        "host_budget_bytes": int, "passes": int, "rounds": int, "load_gb_per_second": SPREAD, "hit_ns": SPREAD, "loops": [{
            "policy": str, "ahead": int, "gb_per_second": SPREAD, "loaded_gb_per_second": SPREAD, "cpu_seconds_per_gb": SPREAD,
            "share_of_load": NUMBER, "loaded_share_of_load": NUMBER, "hits": int, "joins": int, "misses": int, "evictions": int,
            "passed_over": int, "host_hits": int, "peak_bytes": int, "host_peak_bytes": int, "peak_device_bytes": int,
            "samples": [{"bytes": int, "loaded_bytes": int, "ns": int, "cpu_ns": int, "device_taken_bytes": int}]}]},
    "store-ls": {
        "path": str, **STORE, "models": [MODEL]},
    "store-check": {
        "ok": bool, "verdict": str, "generation": int, "objects": int, "checked_bytes": int, "damaged": int, "repaired": int,
        "salvaged": int, "findings": [{"damage": bool, "text": str}]},
    "store-model": {
        **MODEL, "content": [{
            "name": str, "bytes": int, "offset": int, "shard": bool, "tensors": int, "sha256": str}]},
    "bench-open": {
        "kind": str, "machine": MACHINE, "tensors": int, "shards": int, "header_bytes": int, "rounds": int, "open_ms": SPREAD,
        "peak_memory_bytes": int},
}


def matches(value, form, path="$"):
    """None, or what is wrong and where."""
    if isinstance(form, tuple):
        wrong = [matches(value, one, path) for one in form]
        return None if None in wrong else wrong[0]
    if isinstance(form, type):
        right = isinstance(value, form) and not (form in (int, float) and isinstance(value, bool))
        return None if right else f"{path}: {type(value).__name__} instead of {form.__name__}"
    kind = list if isinstance(form, list) else dict
    if not isinstance(value, kind):
        return f"{path}: {type(value).__name__} instead of {kind.__name__}"
    if isinstance(form, list):
        pairs = [(item, form[0], f"{path}[{i}]") for i, item in enumerate(value)]
    elif isinstance(form, Map):
        pairs = [(item, form.form, f"{path}.{key}") for key, item in value.items()]
    else:
        known = {key.rstrip("?"): item for key, item in form.items()}
        missing = [key for key in form if not key.endswith("?") and key not in value]
        if missing or set(value) - set(known):
            return f"{path}: missing {missing}, unknown {sorted(set(value) - set(known))}"
        pairs = [(item, known[key], f"{path}.{key}") for key, item in value.items()]
    for item in pairs:
        wrong = matches(*item)
        if wrong:
            return wrong
    return None
