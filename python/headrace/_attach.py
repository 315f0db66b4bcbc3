# SPDX-License-Identifier: Apache-2.0
"""attach() and detach(): which weights of a module are in a checkpoint, how they are cut into units that fit, and in which cache."""
from __future__ import annotations

import os
from typing import Any, Iterable, Mapping

import torch
from torch import nn

from headrace import _native as native
from headrace import _units
from headrace._cache import Cache
from headrace._native import Model, parse_size
from headrace._pager import MARK, Attachment, NameOf, by_place_of
from headrace._torch_memory import allocator, granularity_of
from headrace._weight_groups import Joined, Place, Shelf, Weight
from headrace._weights import LazyWeight


def attach(
    module: nn.Module,
    source: Any,
    *,
    budget: int | str | None = None,
    device: Any = None,
    cache: Cache | None = None,
    policy: str = "loop",
    prefetch: int = 1,
    names: Mapping[str, str | Joined] | NameOf | None = None,
    strict: bool = True,
    trace: str | os.PathLike[str] | None = None,
    **loader_options: Any,
) -> Attachment:
    """Lets a module run with the weights of a checkpoint, which are in memory only around the forwards that need them.

    source: what headrace.open() takes, or a Model. budget: device memory for weights, in bytes or as "8GiB"; None: as much as they all
    take. device: "cpu", "cuda:0"; None: where the module is. cache: a Cache to share with other modules; then budget, device, policy,
    trace and loader options are the cache's. prefetch: how many units ahead are loaded. names: from the module's names to the
    checkpoint's, a mapping or a function that gives None for what is not there. strict=False: parameters that the checkpoint lacks
    stay as they are. trace: a file for Perfetto.

    The module's parameters become LazyWeights, and values that they had are dropped. Its buffers are loaded, or moved to the device,
    and stay. Raises ValueError, before anything is changed, if something does not fit together.
    """
    if MARK in module.__dict__:
        raise ValueError("the module is attached already: detach it first")
    if cache is not None and (budget is not None or device is not None or trace is not None or loader_options):
        raise ValueError("with `cache`, budget, device, trace and loader options are the cache's: do not give them here")
    owned: list[Any] = []
    model = source if isinstance(source, Model) else native.open(source)
    if model is not source:
        owned.append(model)
    name_of = _name_of(names, model)
    try:
        shelf = Shelf(model, _numbered(cache.device if cache else device if device is not None else _device_of(module)))
        weights = _weights_of(module, shelf, name_of, strict)
        if cache is None:
            room = _room_for(module, shelf, weights, budget)
            options = allocator(shelf.device, room)
            cache = Cache(str(shelf.device), room, policy, trace=trace, **options, **loader_options)
            owned.insert(0, cache)
        shelf.cache = cache
        _choose_rows(weights, cache.budget)
        made = Attachment(module, shelf, weights, prefetch, owned)
        made.begin(_cut(module, shelf, weights, cache.budget), name_of)
    except BaseException:
        for item in owned:
            item.close()
        raise
    return made


def _room_for(module: nn.Module, shelf: Shelf, weights: list[Weight], budget: int | str | None) -> int:
    """The cache's part of a budget: what copies in other dtypes take at most is not the cache's."""
    if budget is None:
        whole = sum(shelf.charge([weight]) for weight in weights)
        shelf.granularity = granularity_of(shelf.device, whole)
        return sum(shelf.charge([weight]) for weight in weights) + (4096 if shelf.granularity is None else shelf.granularity)
    room = parse_size(budget)
    shelf.granularity = granularity_of(shelf.device, room)
    _choose_rows(weights, room)
    if not any(weight.cast_bytes for weight in weights):
        return room
    return room - _most_cast(_cut(module, shelf, weights, room, casts=True), by_place_of(weights))


def _name_of(names: Mapping[str, str | Joined] | NameOf | None, model: Model) -> NameOf:
    if names is None:
        return lambda name: name if name in model else None
    if callable(names):
        return names
    mapping = names
    return lambda name: mapping.get(name)


def _numbered(device: Any) -> torch.device:
    """A device with its number, as tensors have it."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def _device_of(module: nn.Module) -> torch.device:
    """Where a module is, for as far as it is anywhere."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def detach(module: nn.Module, load: bool = True) -> nn.Module:
    """Gives back a module whole that was attached. See Attachment.detach()."""
    found = module.__dict__.get(MARK)
    if not isinstance(found, Attachment):
        raise ValueError("the module is not attached")
    return found.detach(load)


# ----------------------------------------------------------------------------------------------------------- the module's weights


def _weights_of(root: nn.Module, shelf: Shelf, names: NameOf, strict: bool) -> list[Weight]:
    """The module's parameters that the checkpoint has. Those that share memory are one."""
    labels: dict[int, list[str]] = {}
    places: dict[int, list[Place]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for prefix, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{prefix or 'the module'} is a ScriptModule, whose forward cannot be wrapped: attach the module it was made of"
            )
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, LazyWeight):
                raise ValueError(f"{prefix or 'the module'} is attached already: detach it first")
            labels.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
            places.setdefault(id(parameter), []).append((module, name))
            parameters[id(parameter)] = parameter
    found, missing = [], []
    for key, parameter in parameters.items():
        source = next((name for name in map(names, labels[key]) if name is not None), None)
        if source is not None:
            weight = Weight(shelf, labels[key][0], source, parameter)
            weight.places = places[key]
            found.append(weight)
        elif strict or parameter.is_meta:
            missing.append(labels[key][0])
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} of the module's weights: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}; "
            "give `names`, from the module's names to the checkpoint's, or strict=False to keep those that have memory"
        )
    if not found:
        raise ValueError("the module has no weights that the checkpoint has")
    return found


def _choose_rows(weights: Iterable[Weight], budget: int) -> None:
    """Tables of embeddings that would take more than a quarter of the budget are read row by row."""
    for weight in weights:
        tables = [
            module for module, name in weight.places if isinstance(module, nn.Embedding) and name == "weight" and module.max_norm is None
        ]
        weight.by_rows = bool(tables) and weight.join is None and weight.nbytes > budget // 4


def _cut(root: nn.Module, shelf: Shelf, weights: list[Weight], room: int, casts: bool = False) -> list[_units.Unit]:
    """The module's units such that each fits into `room`, with the copies in other dtypes if `casts`."""
    by_place = by_place_of(weights)

    def in_a_unit(module: nn.Module, name: str) -> bool:
        weight = by_place.get((id(module), name))
        return weight is not None and not (weight.by_rows and isinstance(module, nn.Embedding))

    def size(slots: list[Place]) -> int:
        found = {id(weight): weight for weight in (by_place[id(module), name] for module, name in slots)}
        return shelf.charge(found.values()) + (_cast_bytes(found.values()) if casts else 0)

    return _units.units_of(root, in_a_unit, size, room)


def _cast_bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.cast_bytes for weight in weights)


def _most_cast(units: list[_units.Unit], by_place: dict[tuple[int, str], Weight]) -> int:
    """The most that copies in other dtypes take at once."""
    most = 0
    for unit in units:
        own = {id(weight): weight for weight in (by_place[id(module), name] for module, name in unit.slots)}
        most = max(most, _cast_bytes(own.values()) + _most_cast(unit.inner, by_place))
    return most
