# SPDX-License-Identifier: Apache-2.0
"""A torch module whose weights are brought in around each forward and dropped after it. attach() (_attach) makes it.

How it works. The module's parameters are replaced by LazyWeights. Its units (_units) are the smallest repeated blocks; the forward
of a unit's module is wrapped: it gets the unit's groups of the cache, puts the weights where they belong, runs the module's own
forward, puts the LazyWeights back and releases the groups, on the current stream. While one unit runs, the one that followed it the
last time is being loaded.

What always holds: a parameter that the user replaced is the user's and left alone; what one thread brings in stays until every
thread that runs the same unit is through; a module runs with the weights of the checkpoint or raises.
"""
from __future__ import annotations

import functools
import threading
from types import TracebackType
from typing import Any, Callable, Iterable

import torch
from torch import nn

from headrace import _units
from headrace._cache import Cache
from headrace._errors import Error
from headrace._native import Lease
from headrace._room import room_of
from headrace._weight_groups import Joined, Shelf, Weight, WeightGroup, buffer_from, lengths
from headrace._weights import LazyWeight

MARK = "_headrace_attachment"  #: where an attached module has its Attachment

NameOf = Callable[[str], str | Joined | None]


class Page:
    """A unit at work: its groups, and how many calls of its module are running."""

    def __init__(self, name: str, module: nn.Module, groups: list[WeightGroup], places: list[tuple[nn.Module, str, Weight]]) -> None:
        self.name, self.module, self.groups, self.places = name, module, groups, places
        self.running = 0
        self.put: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.need = 0  #: bytes that it and what runs inside of it take

    @property
    def nbytes(self) -> int:
        """What its groups count against the budget."""
        return sum(group.charge for group in self.groups)


class Attachment:
    """A module whose weights headrace brings in and out. attach() makes it; detach() or the end of a `with` ends it."""

    def __init__(self, module: nn.Module, shelf: Shelf, weights: list[Weight], prefetch: int, owned: list[Any]) -> None:
        self.module, self.model, self.cache, self.prefetch = module, shelf.model, shelf.cache, prefetch
        self.weights = weights
        self.pages: list[Page] = []
        self.resident_bytes = 0  #: of the module's buffers, which stay
        self._owned = owned
        self._shelf = shelf
        self._lock = threading.RLock()
        self._here = threading.local()
        self._room = room_of(shelf.cache)
        self._after: dict[int, Page] = {}
        self._kept: list[tuple[nn.Module, str, Any]] = []

    # ----------------------------------------------------------------------------------------------------------------- setting up

    def begin(self, units: list[_units.Unit], names: NameOf) -> None:
        """Puts everything in place."""
        self._make_pages(units, by_place_of(self.weights))
        buffers = self._load_buffers(names)
        self._install()
        for module, name, tensor in buffers:
            module._buffers[name] = tensor
        self.module.__dict__[MARK] = self
        self.resident_bytes = lengths(self.module.buffers())

    def _make_pages(self, units: list[_units.Unit], by_place: dict[tuple[int, str], Weight]) -> None:
        flat = list(_units.walk(units))
        of_unit = [list(dict.fromkeys(by_place[id(module), name] for module, name in unit.slots)) for unit in flat]
        times: dict[int, int] = {}
        for weights in of_unit:
            for weight in weights:
                times[id(weight)] = times.get(id(weight), 0) + 1
        pages: dict[int, Page] = {}
        for unit, weights in zip(flat, of_unit):
            # What several units use is a group of its own: it is read and counted once.
            groups = [weight.group or WeightGroup(self._shelf, [weight], weight.label) for weight in weights if times[id(weight)] > 1]
            own = [weight for weight in weights if times[id(weight)] == 1]
            if own:
                groups.append(WeightGroup(self._shelf, own, unit.name or type(unit.module).__name__))
            places = [(module, name, by_place[id(module), name]) for module, name in unit.slots]
            pages[id(unit)] = Page(unit.name, unit.module, groups, places)
        for unit in units:
            _add_needs(unit, pages)
        self.pages = list(pages.values())
        for page, following in zip(self.pages, self.pages[1:] + self.pages[:1]):
            self._after[id(page)] = following

    def _load_buffers(self, names: NameOf) -> list[tuple[nn.Module, str, torch.Tensor]]:
        found = []
        for prefix, module in self.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                label = f"{prefix}.{name}" if prefix else name
                source = None if name in module._non_persistent_buffers_set else names(label)
                if isinstance(source, Joined):
                    raise ValueError(f"buffer {label} would have to be joined of several tensors: that is for parameters")
                if source is not None:
                    info = self.model.tensor(source)
                    tensor = buffer_from(self._shelf, info, buffer)
                    if tensor.shape != buffer.shape:
                        raise ValueError(f"buffer {label} has the shape {tuple(buffer.shape)}, and {source!r} {tuple(tensor.shape)}")
                    found.append((module, name, tensor))
                elif buffer.is_meta:
                    raise ValueError(
                        f"buffer {label} has no memory (it is on meta) and is not in the checkpoint: make the module so that its buffers "
                        "have memory, or set this one before attach()"
                    )
                elif buffer.device != self._shelf.device:
                    found.append((module, name, buffer.to(self._shelf.device)))
        return found

    def _install(self) -> None:
        for weight in self.weights:
            for module, name in weight.places:
                module._parameters[name] = weight.stand_in
        for page in self.pages:
            self._replace(page.module, "forward", self._wrapped(page, page.module.forward))
        for owner in {id(module): module for weight in self.weights for module, _ in weight.places}.values():
            self._replace(owner, "_apply", functools.partial(_apply, self, owner))

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._kept.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def _wrapped(self, page: Page, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and _any_needs_grad(args, kwargs):
                raise RuntimeError(
                    f"the weights of {page.name or type(page.module).__name__} leave memory after its forward, so autograd cannot go back "
                    "through it: use torch.no_grad() or torch.inference_mode(), or headrace.torch.detach() before training"
                )
            leases, stream = self._enter(page)
            spoiled = False
            try:
                return forward(*args, **kwargs)
            except RuntimeError as error:
                spoiled = "Inplace update to inference tensor" in str(error)
                raise
            finally:
                self._leave(page, leases, stream)
                if spoiled:
                    self._drop(page)

        return run

    # -------------------------------------------------------------------------------------------------------------------- running

    def _enter(self, page: Page) -> tuple[list[Lease], int]:
        here = self._here.__dict__
        depth = here.get("depth", 0)
        stream = self._shelf.stream()
        if not depth:
            self._room.take(page.need)
            here["taken"] = page.need
        leases: list[Lease] = []
        try:
            for group in page.groups:
                leases.append(group.get(stream))
            with self._lock:
                if not page.running:
                    self._put_in(page, leases)
                page.running += 1
            here["depth"] = depth + 1
            self._look_ahead(page, here, stream)
        except BaseException:
            if here.get("depth", 0) > depth:
                self._leave(page, leases, stream)
            else:
                self._give_back(leases, stream, depth)
            raise
        return leases, stream

    def _put_in(self, page: Page, leases: list[Lease]) -> None:
        found: dict[int, torch.Tensor] = {}
        for group, lease in zip(page.groups, leases):
            for weight, tensor in zip(group.weights, group.tensors(lease)):
                found[id(weight)] = tensor
        for module, name, weight in page.places:
            if module._parameters.get(name) is weight.stand_in:
                tensor = found[id(weight)]
                module._parameters[name] = tensor
                page.put.append((module, name, tensor))

    def _leave(self, page: Page, leases: list[Lease], stream: int) -> None:
        with self._lock:
            page.running -= 1
            if not page.running:
                stand_ins = {(id(module), name): weight.stand_in for module, name, weight in page.places}
                while page.put:
                    module, name, tensor = page.put.pop()
                    if module._parameters.get(name) is tensor:
                        module._parameters[name] = stand_ins[id(module), name]
                    del tensor
        self._here.depth -= 1
        self._give_back(leases, stream, self._here.depth)

    def _give_back(self, leases: list[Lease], stream: int, depth: int) -> None:
        try:
            for lease in leases:
                lease.release(stream)
        finally:
            if not depth:
                self._room.give(self._here.__dict__.pop("taken", 0))
        if self.cache.is_traced:
            self.cache.flush_trace()

    def _drop(self, page: Page) -> None:
        """Evicts what a forward wrote into before torch said that it must not."""
        for group in page.groups:
            try:
                self.cache.evict(group.group)
            except Error:
                pass  # another call uses it still

    def _look_ahead(self, page: Page, here: dict[str, Any], stream: int) -> None:
        """Learns what follows what, and begins to load what followed this page the last time."""
        last = here.get("last")
        if last is not None and last is not page:
            self._after[id(last)] = page
        here["last"] = following = page
        for _ in range(self.prefetch):
            following = self._after.get(id(following), page)
            if following is page:
                return
            for group in following.groups:
                group.prefetch(stream)

    # --------------------------------------------------------------------------------------------------------------------- for users

    def stats(self) -> dict[str, int]:
        """The cache's statistics, with what the units take and what stays in memory. Of a shared cache: this module's part."""
        return self.cache.stats(None if self.cache in self._owned else self.model) | {
            "n_units": len(self.pages),
            "largest_unit_bytes": max((page.nbytes for page in self.pages), default=0),
            "weights_bytes": sum(weight.nbytes for weight in self.weights),
            "resident_bytes": self.resident_bytes,
        }

    @property
    def units(self) -> list[tuple[str, int]]:
        """Names and bytes of what comes and goes together, in the order of the module's tree."""
        return [(page.name, page.nbytes) for page in self.pages]

    def load(self) -> None:
        """Brings all in, as far as the budget goes."""
        for page in self.pages:
            for group in page.groups:
                group.get(self._shelf.stream()).release(self._shelf.stream())

    def detach(self, load: bool = True) -> nn.Module:
        """Gives the module back: with all its weights as ordinary parameters in memory of their own, which the budget does not bound.

        load=False: with parameters on meta instead, which have no memory.
        """
        with self._lock:
            if self.module.__dict__.get(MARK) is not self:
                return self.module
            if any(page.running for page in self.pages):
                raise RuntimeError("the module is running in another call: detach it when it is not")
            made = [(weight, _ordinary(weight, load)) for weight in self.weights]
            for weight, parameter in made:
                for module, name in weight.places:
                    if module._parameters.get(name) is weight.stand_in:
                        module._parameters[name] = parameter
            while self._kept:
                module, name, before = self._kept.pop()
                module.__dict__.pop(name, None)
                if before is not None:
                    module.__dict__[name] = before
            del self.module.__dict__[MARK]
        self._close()
        return self.module

    def _close(self) -> None:
        """Closes what was opened for this module."""
        self.pages.clear()
        self._after.clear()
        for weight in self.weights:
            weight.group = None
        for item in self._owned:
            if isinstance(item, Cache):
                item.let_go()
            else:
                item.close()
        self._owned.clear()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach(load=False)


def by_place_of(weights: Iterable[Weight]) -> dict[tuple[int, str], Weight]:
    """Weights by module and attribute."""
    return {(id(module), name): weight for weight in weights for module, name in weight.places}


def _add_needs(unit: _units.Unit, pages: dict[int, Page]) -> int:
    inside = max((_add_needs(inner, pages) for inner in unit.inner), default=0)
    page = pages[id(unit)]
    page.need = page.nbytes + inside
    return page.need


def _any_needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        if isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) and item.requires_grad for item in value):
            return True
    return False


def _ordinary(weight: Weight, load: bool) -> nn.Parameter:
    """A parameter in memory of its own, or on meta."""
    if not load:
        return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=weight.requires_grad)
    with weight.borrow() as tensor, torch.inference_mode(False):
        copy = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).copy_(tensor)
    return nn.Parameter(copy, requires_grad=weight.requires_grad)


def _apply(attachment: Attachment, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In place of Module._apply, which to(), half(), cuda() … go through: what would change a weight raises."""
    held = {name: value for name, value in module._parameters.items() if isinstance(value, LazyWeight)}
    for dtype, device, label in {(value.dtype, value.device, value._source.label) for value in held.values()}:
        probe = fn(torch.empty((0,), dtype=dtype, device=device))
        if probe.dtype != dtype or probe.device != device:
            raise RuntimeError(
                f"{label} is held by headrace as {dtype} on {device} and cannot become {probe.dtype} on {probe.device}: say so when the "
                "module is attached, or detach it first"
            )
    for name in held:
        del module._parameters[name]
    try:
        type(module)._apply(module, fn, recurse)
    finally:
        order = list(held) + [name for name in module._parameters if name not in held]
        module._parameters.update(held)
        for name in order:
            module._parameters[name] = module._parameters.pop(name)
    return module
