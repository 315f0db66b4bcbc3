# SPDX-License-Identifier: Apache-2.0
"""headrace.Cache: groups of tensors on one device under a byte budget."""
from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Sequence, Union

from headrace._errors import Error
from headrace._native import Group, Lease, Loader, Model
from headrace._trace import Trace

Names = Union[str, int, Sequence[Union[str, int]]]

_N_EVENTS = 1 << 16


class Cache:
    """Groups of tensors of any number of models, kept on one device under a byte budget.

        with headrace.Cache("cuda:0", budget="8GiB") as cache, headrace.open("Llama-3.1-8B") as model:
            layer = cache.group(model, [name for name in model if name.startswith("model.layers.0.")])
            with cache.get(layer) as lease:
                lease.tensors["model.layers.0.mlp.up_proj.weight"]      # an Array

    A group is loaded when it is asked for, stays while there is room, and never leaves while somebody uses it. Good in any thread.

    device: "cpu", "cuda", "cuda:N". budget: device memory in bytes or as "8GiB", what is kept free for the next groups included.
    policy: "lru", what was used longest ago leaves first; "loop", what will be used last leaves first, judged by how it was used so
    far: for layers that are walked again and again. host_budget: pinned host memory in which groups that leave a GPU may stay.
    granularity: what `alloc` rounds sizes up to. io_timeout: seconds that one read may take. trace: a file that gets the cache's
    doings for Perfetto. Further options are those of Loader.
    """

    def __init__(
        self,
        device: str = "cpu",
        budget: int | str = "8GiB",
        policy: str = "lru",
        *,
        host_budget: int | str | None = None,
        granularity: int | str | None = None,
        io_timeout: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        **loader_options: Any,
    ) -> None:
        self._trace: Trace | None = None
        self.loader = Loader(device, **loader_options)
        try:
            n_events = 0 if trace is None else _N_EVENTS
            self._cache = self.loader.cache(budget, policy, host_budget, granularity, io_timeout, n_events)
            if trace is not None:
                self._trace = Trace(trace)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> str:
        """Where the tensors are."""
        return self.loader.device

    def group(self, model: Model, names: Names, label: str | None = None) -> Group:
        """The group of a model's tensors with these names (or numbers). The same names give the same group.

        label: what a trace calls it.
        """
        group = self._cache.group(model, names)
        if self._trace is not None:
            more = len(group.names) - 1
            self._trace.labels[group.id] = label or (f"{group.names[0]} and {more} more" if more else group.names[0])
        return group

    def get(self, group: Group | Model, names: Names | None = None, stream: int = 0, timeout: float | None = None) -> Lease:
        """The tensors of a group, loaded if need be: a Lease, whose `tensors` are the Arrays by name. Waits.

        group: a Group, or a Model together with names; a Group is quicker. stream: CUDA stream, as int: work queued there afterwards
        sees the tensors. timeout: seconds to wait, for the bytes as for room if others use all of the budget; then Unfinished, or
        Error with HR_E_FULL. None: as long as loading takes, and half a minute for room.

        The group stays in memory until the lease is released and every Array of it, with what shares its memory, is gone.
        """
        return self._cache.get(group, names, stream, timeout)

    def prefetch(self, group: Group | Model, names: Names | None = None, stream: int = 0) -> None:
        """Begins to bring a group in, so that the next get() finds it. A hint: does nothing if there is no room. Does not wait."""
        self._cache.prefetch(group, names, stream)

    def evict(self, group: Group | Model, names: Names | None = None) -> int:
        """Lets a group go that nobody uses; answers with the bytes that are free by that, 0 if it was not there."""
        return self._cache.evict(group, names)

    def trim(self, nbytes: int | str | None = None) -> int:
        """Gives at least so much memory back to the device (None: all that nobody uses); answers with the bytes that it was."""
        return self._cache.trim(nbytes)

    def charge(self, group: Group | Model, names: Names | None = None) -> int:
        """What a group counts against the budget: its bytes, rounded up as the allocator does."""
        return self._cache.charge(group, names)

    def stats(self, model: Model | None = None) -> dict[str, int]:
        """What it holds and did so far, as a dict; of one model's groups, or of all."""
        return self._cache.stats(model)

    @property
    def used(self) -> int:
        """Bytes of device memory that it has now, in use or not."""
        return self.stats()["used_bytes"]

    @property
    def pinned(self) -> int:
        """Bytes of them that somebody uses."""
        return self.stats()["pinned_bytes"]

    @property
    def budget(self) -> int:
        """The most that `used` will ever be. Can be set; a smaller one gives memory back at once, or raises if it is in use."""
        return self.stats()["budget_bytes"]

    @budget.setter
    def budget(self, nbytes: int | str) -> None:
        self._cache.set_budget(nbytes)

    @property
    def is_traced(self) -> bool:
        """Whether a trace is being written."""
        return self._trace is not None

    def flush_trace(self) -> None:
        """Brings the trace file up to now. Needed before 65,536 events have gathered, by whoever uses the cache without LazyModel."""
        if self._trace is not None and not self._cache.closed:
            self._trace.add(*self._cache.events())

    @property
    def closed(self) -> bool:
        """Whether close() has closed it."""
        return self._cache.closed

    def close(self, timeout: float | None = None) -> None:
        """Gives all memory back and ends the threads.

        Waits for leases and Arrays that are still in use, and raises Error (HR_E_BUSY) if there are some after `timeout` seconds:
        then nothing was closed.
        """
        cache = getattr(self, "_cache", None)
        if cache is not None:
            self.flush_trace()
            cache.close(timeout)
        if self._trace is not None:
            self._trace.close()
        self.loader.close(timeout)

    def let_go(self) -> None:
        """close() that does not wait for what is in use: that memory is given back when nobody uses it any more."""
        if self._cache.closed:
            return
        try:
            self._cache.trim(None)
            self.close(1)
        except Error as error:
            if error.name != "HR_E_BUSY":
                raise
            if self._trace is not None:
                self._trace.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.let_go()  # what the failing block still holds would be waited for without end

    def __repr__(self) -> str:
        if self.closed:
            return "<headrace.Cache, closed>"
        found = self.stats()
        return f"<headrace.Cache on {self.device}: {found['used_bytes']:,} of {found['budget_bytes']:,} bytes used>"
