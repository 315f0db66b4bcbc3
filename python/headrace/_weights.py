# SPDX-License-Identifier: Apache-2.0
"""LazyWeight: what stands in a module where a weight that is not in memory belongs.

It has the weight's shape, dtype and device and no memory. A module's forward finds the weight itself in its place (_pager puts it
there); whoever else uses it, brings it in for that one operation. What always holds:

 - Nothing ever sees memory that is not the weight: an operation gets the weight, or raises.
 - Weights are never written: the source is the truth, and what was written would be lost when the weight leaves. An operation that
   writes raises, on a view too. The weight itself, inside forward, is one of torch's inference tensors: outside
   torch.inference_mode() torch tells of a write, alas after it, and the pager then drops the memory.
 - What an operation gives that shares the weight's memory is a WeightView. It keeps that memory in the cache as long as it lives.
"""
from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Callable, ContextManager, Protocol

import torch


class Source(Protocol):
    """Where a LazyWeight's bytes are."""

    label: str  #: the weight's name in the module
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    by_rows: bool  #: embeddings read the rows that they need, since the whole is too large

    def borrow(self) -> ContextManager[torch.Tensor]:
        """The weight, for as long as the context or anything that shares its memory lives."""

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows with these numbers, in memory of their own."""


class LazyWeight(torch.Tensor):  # type: ignore[misc]
    """A weight that comes into memory when it is used. It cannot be written, moved or trained; take a copy by clone()."""

    _is_param = True  # what isinstance(…, torch.nn.Parameter) looks at
    _source: Source

    @staticmethod
    def __new__(cls, source: Source) -> LazyWeight:
        made: LazyWeight = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device, requires_grad=False
        )
        made._source = source
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        if name in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _SPECIAL.get(name)
        if handler is not None:
            return handler(func, args, kwargs)
        if _writes(name, args, kwargs):
            raise _refused(_first(args, kwargs), f"{name}() would write it")
        return _with_weights(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refused(_first(args, kwargs or {}), f"{func} reached it from compiled code, which cannot bring it in")


class WeightView(torch.Tensor):  # type: ignore[misc]
    """A view of a weight: a tensor like any other, but for being written."""

    _source: Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and isinstance(args[0], WeightView):
            return _attribute(func, name, args)
        if _writes(name, args, kwargs):
            raise _refused(_first(args, kwargs), f"{name}() would write it")
        views = [item for item in _all([args, kwargs]) if isinstance(item, WeightView)]
        if name in _COPIED and views and isinstance(args[0], WeightView):
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                copy = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device).copy_(args[0])
            return getattr(copy, name)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return _guarded(func(*args, **kwargs), {id(view): view for view in views}, views)


def _guarded(result: Any, real: dict[int, torch.Tensor], owners: Any) -> Any:
    """What an operation gave, with WeightViews for what shares the memory of weights."""
    if isinstance(result, (list, tuple)):
        items = [_guarded(item, real, owners) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if not isinstance(result, torch.Tensor) or isinstance(result, LazyWeight) or result.device.type == "meta" or not result.numel():
        return result
    start = result.untyped_storage().data_ptr()
    for tensor, owner in zip(real.values(), owners):
        if tensor.numel() and tensor.untyped_storage().data_ptr() == start:
            view = result.as_subclass(WeightView)
            view._source = owner._source
            return view
    return result


def _refused(weight: Any, why: str) -> RuntimeError:
    return RuntimeError(
        f"{weight._source.label} is held by headrace, which brings it into memory when it is used and may drop it after that: {why}. "
        "Use a copy (clone()), or headrace.torch.detach() to have the module's weights as ordinary parameters."
    )


def _all(value: Any) -> list[Any]:
    """The LazyWeights and WeightViews among arguments, down to lists in them."""
    if isinstance(value, (LazyWeight, WeightView)):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _all(item)]
    if isinstance(value, dict):
        return [found for item in value.values() for found in _all(item)]
    return []


def _first(args: Any, kwargs: Any) -> Any:
    return _all([args, kwargs])[0]


_READ_ONLY_GETTERS = {"T", "mT", "H", "mH", "real", "imag"}


def _attribute(func: Any, kind: str, args: Any) -> Any:
    """Getting or setting one of Tensor's attributes: what describes the tensor is answered, what shows its elements brings it in."""
    weight, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "an attribute")
    if kind == "__get__":
        if name == "data":
            return weight
        if name in _READ_ONLY_GETTERS:
            return _with_weights(func, args, {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    if name == "requires_grad" and kind == "__set__" and not args[1] or name == "grad" and (len(args) < 2 or args[1] is None):
        return None
    if name == "requires_grad":
        raise _refused(weight, "it cannot be trained")
    raise _refused(weight, f"its {name} cannot be set")


def _writes(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation of this name changes one of the weights that it was given."""
    if _all(kwargs.get("out")):
        return True
    in_place = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__delitem__")
    in_place = in_place or name.startswith("__i") and name[3:-2] in _OPERATORS
    if not in_place:
        return False
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input", kwargs.get("self")))
    return bool(_all(target))


_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"}

# Methods and functions that look at the description of a tensor alone.
_DESCRIBES = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "storage_offset", "get_device", "__len__", "__hash__", "is_inference", "is_shared", "has_names", "is_conj",
    "is_neg", "is_same_size", "is_distributed", "dim_order",
}  # fmt: skip


def _with_weights(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation with the weights themselves."""
    weights = {id(weight): weight for weight in _all([args, kwargs]) if isinstance(weight, LazyWeight)}
    with ExitStack() as stack:
        real = {key: stack.enter_context(weight._source.borrow()) for key, weight in weights.items()}
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*_replaced(args, real), **_replaced(kwargs, real))
        except RuntimeError as error:
            if "saved for backward" not in str(error):
                raise
            why = "it cannot take part in autograd; use torch.no_grad() or torch.inference_mode()"
            raise _refused(next(iter(weights.values())), why) from error
        for key, tensor in real.items():
            if result is tensor:
                return weights[key]
        with torch._C.DisableTorchFunctionSubclass():
            return _guarded(result, real, weights.values())


def _replaced(value: Any, real: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, LazyWeight):
        return real[id(value)]
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, real) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    if isinstance(value, dict):
        return {key: _replaced(item, real) for key, item in value.items()}
    return value


# ------------------------------------------------------------------------------------------- operations with a rule of their own


def _itself(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _converted(func: Any, args: Any, kwargs: Any) -> Any:
    """to(), float() …: what changes nothing gives the LazyWeight; a tensor of no elements tells."""
    weight = args[0]
    if not isinstance(weight, LazyWeight):
        return _with_weights(func, args, kwargs)
    probe = torch.empty((0,), dtype=weight.dtype, device=weight.device)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(probe, *(probe if isinstance(item, LazyWeight) else item for item in args[1:]), **kwargs)
    if found is probe:
        return weight
    return found if isinstance(found, str) else _with_weights(func, args, kwargs)


def _trainable(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("requires_grad", args[1] if len(args) > 1 else True):
        raise _refused(args[0], "it cannot be trained")
    return args[0]


def _of_a_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """For what gives its memory out of torch's hands, or keeps it for later: a copy of its own."""
    with args[0]._source.borrow() as tensor:
        with torch.inference_mode(False):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return getattr(copy, func.__name__)(*args[1:], **kwargs)


def _has_no_memory(func: Any, args: Any, kwargs: Any) -> Any:
    raise _refused(args[0], f"{func.__name__}() needs its memory")


def _shown(func: Any, args: Any, kwargs: Any) -> str:
    weight = args[0]
    return f"LazyWeight({weight._source.label}, shape={tuple(weight.shape)}, dtype={weight.dtype}, device={weight.device})"


def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.nn.functional.embedding: of a table that is read by rows, only those rows."""
    found = dict(zip(("input", "weight", "padding_idx", "max_norm"), args)) | kwargs
    indices, weight = found["input"], found["weight"]
    if not isinstance(weight, LazyWeight) or not weight._source.by_rows or isinstance(indices, LazyWeight):
        return _with_weights(func, args, kwargs)
    if found.get("max_norm") is not None:
        raise _refused(weight, "embedding() with max_norm writes it")
    return weight._source.rows(indices)


# What takes a tensor's memory out of torch's hands, or keeps it for later.
_COPIED = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "__reduce__")

_SPECIAL: dict[str, Callable[[Any, Any, Any], Any]] = {
    "detach": _itself, "requires_grad_": _trainable, "__repr__": _shown, "__str__": _shown, "__format__": _shown,
    "embedding": _embedding,
    **dict.fromkeys(["to", "cpu", "cuda", "type", "float", "half", "double", "bfloat16", "contiguous"], _converted),
    **dict.fromkeys(_COPIED, _of_a_copy),
    **dict.fromkeys(["data_ptr", "storage", "untyped_storage", "typed_storage", "_typed_storage", "share_memory_", "__deepcopy__",
                     "register_hook", "register_post_accumulate_grad_hook", "backward", "retain_grad", "pin_memory"], _has_no_memory),
}  # fmt: skip
