# SPDX-License-Identifier: Apache-2.0
"""Which weights of a module come and go together: its units.

A unit is a module whose forward needs the unit's weights in memory. Units are the smallest repeated blocks of the module's tree (the
layers of a transformer, the experts of a layer), and outside of them each module's own weights. A unit that would not fit is cut into
the units of its children, down to single modules. Nothing here reads or writes a weight.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

from torch import nn

# Modules that use the weights of their children without calling them, or that compute otherwise if they do not find them.
_WHOLE = (nn.MultiheadAttention,)

Slot = tuple[nn.Module, str]  #: a module and the name of one of its parameters


@dataclass
class Unit:
    """A module, and the parameters in it that its forward needs."""

    name: str
    module: nn.Module
    slots: list[Slot]
    inner: list[Unit] = field(default_factory=list)  #: units whose forwards run inside of this one's


def units_of(root: nn.Module, wanted: Callable[[nn.Module, str], bool], size: Callable[[list[Slot]], int], room: int) -> list[Unit]:
    """The outermost units of a module, each with those inside of it.

    wanted: whether a parameter counts. size: bytes that some of them take together. room: bytes that those of one unit and of the
    units around it may take at once; ValueError with the numbers if that cannot be had.
    """
    cutter = _Cutter(wanted, size)
    units = cutter.of(root, "", set(smallest_repeated(root)))
    for unit in units:
        cutter.fit(unit, room)
    return units


def walk(units: list[Unit]) -> Iterator[Unit]:
    """All units, outer ones first."""
    for unit in units:
        yield unit
        yield from walk(unit.inner)


def smallest_repeated(root: nn.Module) -> Iterator[nn.Module]:
    """The elements of lists of equal modules that have no such list in them."""
    for module in root.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = [child for child in module.children() if any(True for _ in child.parameters())]
            classes = [type(child) for child in children]
            for child in children:
                if classes.count(type(child)) > 1 and not any(True for _ in smallest_repeated(child)):
                    yield child


def named_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Children with their full names; one that is there twice, once."""
    for child_name, child in module.named_children():
        yield (f"{name}.{child_name}" if name else child_name), child


class _Cutter:
    def __init__(self, wanted: Callable[[nn.Module, str], bool], size: Callable[[list[Slot]], int]) -> None:
        self.wanted, self.size = wanted, size
        self.seen: set[int] = set()

    def own(self, module: nn.Module) -> list[Slot]:
        return [(module, name) for name, value in module._parameters.items() if value is not None and self.wanted(module, name)]

    def whole(self, module: nn.Module) -> list[Slot]:
        return [slot for inner in module.modules() for slot in self.own(inner)]

    def of(self, module: nn.Module, name: str, blocks: set[nn.Module]) -> list[Unit]:
        """The units of a module and of all below it."""
        if id(module) in self.seen:
            return []
        self.seen.add(id(module))
        if module in blocks or isinstance(module, _WHOLE):
            slots = self.whole(module)
            return [Unit(name, module, slots)] if slots else []
        inner = [unit for child_name, child in named_children(module, name) for unit in self.of(child, child_name, blocks)]
        slots = self.own(module)
        return [Unit(name, module, slots, inner)] if slots else inner

    def need(self, unit: Unit) -> int:
        return self.size(unit.slots) + max((self.need(inner) for inner in unit.inner), default=0)

    def fit(self, unit: Unit, room: int) -> None:
        """Cuts a unit until it and what is inside of it fit."""
        if self.need(unit) <= room:
            return
        own = unit.slots if isinstance(unit.module, _WHOLE) else self.own(unit.module)
        if len(unit.slots) > len(own):
            unit.slots = own
            unit.inner = [made for child_name, child in named_children(unit.module, unit.name) for made in self.halves(child, child_name)]
        left = room - self.size(unit.slots)
        if left < 0 or not unit.inner:
            names = ", ".join(f"{unit.name}.{attribute}" for _, attribute in unit.slots)
            raise ValueError(
                f"{names or unit.name} takes {self.size(unit.slots):,} bytes at once, and {max(room, 0):,} can be given to it: "
                "use a larger budget"
            )
        for inner in unit.inner:
            self.fit(inner, left)

    def halves(self, module: nn.Module, name: str) -> list[Unit]:
        """A part of a unit that was cut: as one where it can be called, else its children."""
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return [unit for child_name, child in named_children(module, name) for unit in self.halves(child, child_name)]
        slots = self.whole(module)
        return [Unit(name, module, slots)] if slots else []


def describe(units: list[Unit], size: Callable[[list[Slot]], int]) -> list[dict[str, Any]]:
    """What the units are, for people: name, bytes, how many weights."""
    return [{"name": unit.name, "bytes": size(unit.slots), "weights": len(unit.slots)} for unit in walk(units)]
