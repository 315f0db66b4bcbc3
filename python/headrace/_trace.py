# SPDX-License-Identifier: Apache-2.0
"""What a cache did, as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: loads, hits, evictions, waits.

The file is a JSON array in Chrome's trace format, one event a line. It can be read while it grows, and after a crash.
"""
from __future__ import annotations

import json
import os
import threading
from typing import Any, Iterable

_GETS, _LOADS, _EVICTIONS = 1, 2, 3
_ROWS = {_GETS: "gets", _LOADS: "loads", _EVICTIONS: "evictions"}
# What the numbers of HR_CACHE_* mean here: the event's category and its row.
_KINDS = {
    1: ("hit", _GETS), 2: ("miss", _GETS), 3: ("join", _GETS), 4: ("load", _LOADS), 5: ("load from host memory", _LOADS),
    6: ("failed load", _LOADS), 7: ("evict", _EVICTIONS), 8: ("wait for room", _GETS), 9: ("prefetch passed over", _LOADS),
}  # fmt: skip

Event = tuple[int, int, int, int, int, int]  #: kind, start_ns, duration_ns, group, bytes, prefetch


class Trace:
    """A trace file that is being written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "w", encoding="utf-8")
        self._lock = threading.Lock()
        self.labels: dict[int, str] = {}  #: groups by number
        self._file.write("[\n")
        self._write({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "headrace cache"}})
        for row, name in _ROWS.items():
            self._write({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def add(self, events: Iterable[Event], lost: int) -> None:
        """Writes events down."""
        with self._lock:
            if self._file.closed:
                return
            last = 0
            for kind, start, duration, group, nbytes, prefetch in events:
                category, row = _KINDS.get(kind, ("other", _GETS))
                event = {
                    "name": f"{category}: {self.labels.get(group, group)}", "cat": category, "pid": 1, "tid": row, "ts": start / 1000,
                    "args": {"bytes": nbytes, "group": group, "prefetch": bool(prefetch)},
                }  # fmt: skip
                self._write(event | ({"ph": "X", "dur": duration / 1000} if duration else {"ph": "i", "s": "t"}))
                last = start
            if lost:
                name = f"{lost} events were lost: nobody came for them in time"
                self._write({"name": name, "cat": "lost", "pid": 1, "tid": _GETS, "ts": last / 1000, "ph": "i", "s": "p"})
            self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps({"ph": "M", "name": "process_labels", "pid": 1, "args": {"labels": "complete"}}) + "\n]\n")
                self._file.close()
