# SPDX-License-Identifier: Apache-2.0
"""headrace as a loader of vLLM: ``vllm serve DIR --load-format headrace``.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes, early. So
this module imports nothing: neither torch nor vLLM, nor the rest of headrace. The loader itself is in ``_vllm.py``.

Options come through ``--model-loader-extra-config``; :func:`parse_options` knows them all. See docs/vllm.md.
"""
from __future__ import annotations

import re
import typing

__all__ = ["register", "parse_options", "Options"]

LOAD_FORMAT = "headrace"
# The same with engine "cufile": straight from storage into a small window of GPU memory that is registered once.
GDS_LOAD_FORMAT = "gds_bounded"

# Keys of the stock loader. They are passed on: the last one works as ever, the others matter to what falls back to it.
STOCK_KEYS = ("enable_multithread_load", "num_threads", "enable_weights_track")
CACHING = ("auto", "fill", "bypass")
CUFILE = ("direct", "compat")


class Options(typing.NamedTuple):
    """What ``--model-loader-extra-config`` says; None is headrace's own default."""

    staging_bytes: typing.Optional[int] = None
    slot_bytes: typing.Optional[int] = None
    engine: typing.Optional[str] = None
    caching: typing.Optional[str] = None
    readers: typing.Optional[int] = None
    verify: bool = False
    fallback: bool = True
    cufile: typing.Optional[str] = None
    device: typing.Optional[str] = None


def register() -> None:
    """Makes ``--load-format headrace`` and ``gds_bounded`` known to vLLM in this process. Called again, it does nothing."""
    from vllm.model_executor import model_loader

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT in known:
        return
    from headrace._vllm import GdsBoundedModelLoader, HeadraceModelLoader

    model_loader.register_model_loader(LOAD_FORMAT)(HeadraceModelLoader)
    if GDS_LOAD_FORMAT not in known:  # another package had that name first
        model_loader.register_model_loader(GDS_LOAD_FORMAT)(GdsBoundedModelLoader)


def parse_options(config: object) -> tuple[Options, dict[str, object]]:
    """Splits an extra config into headrace's options and the stock loader's keys. Errors: ValueError, in one sentence."""
    if config is None:
        config = {}
    if not isinstance(config, dict):
        raise _wrong(f"must be a JSON object, and is {_shown(config)}")
    unknown = [key for key in config if key not in Options._fields and key not in STOCK_KEYS]
    if unknown:
        raise _wrong(f"has no key {_shown(unknown[0])}; the keys are {', '.join(Options._fields + STOCK_KEYS)}")
    found = {key: _PARSERS[key](key, config[key]) for key in Options._fields if config.get(key) is not None}
    return Options(**found), {key: config[key] for key in STOCK_KEYS if key in config}


def _wrong(what: str) -> ValueError:
    return ValueError(f"--model-loader-extra-config for --load-format headrace {what}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _size(key: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():  # what 1e6 becomes on a command line
        value = int(value)
    if isinstance(value, str):
        from headrace import parse_size

        try:
            value = parse_size(value)
        except (ValueError, OSError):
            pass  # still a string: refused below, in our words
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise _wrong(f'needs bytes in "{key}", like 67108864 or "64MiB", and has {_shown(value)}')
    return value


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 4096:
        raise _wrong(f'needs a number of threads in "{key}", from 1, and has {_shown(value)}')
    return value


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(f'needs true or false in "{key}", and has {_shown(value)}')
    return value


def _engine(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(f'needs the name of an engine in "{key}" (see "headrace engines"), and has {_shown(value)}')
    return value


def _cufile(key: str, value: object) -> str:
    if value not in CUFILE:
        raise _wrong(f'needs one of {", ".join(CUFILE)} in "{key}", and has {_shown(value)}')
    return str(value)


def _device(key: str, value: object) -> str:
    if not isinstance(value, str) or re.fullmatch(r"cpu|cuda(:\d{1,3})?", value) is None:
        raise _wrong(f'needs "cpu", "cuda" or "cuda:N" in "{key}", and has {_shown(value)}')
    return value


def _caching(key: str, value: object) -> str:
    if value not in CACHING:
        raise _wrong(f'needs one of {", ".join(CACHING)} in "{key}", and has {_shown(value)}')
    return str(value)


_PARSERS: dict[str, typing.Callable[[str, object], typing.Any]] = {
    "staging_bytes": _size,
    "slot_bytes": _size,
    "engine": _engine,
    "caching": _caching,
    "readers": _count,
    "verify": _flag,
    "fallback": _flag,
    "cufile": _cufile,
    "device": _device,
}
