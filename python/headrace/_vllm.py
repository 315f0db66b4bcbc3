# SPDX-License-Identifier: Apache-2.0
"""The loader behind ``--load-format headrace``: vLLM's own, with another place for the weights to come from.

All that vLLM's loader does around the weights (names of files, downloads, filters, tracking, reloads, draft models) is inherited
or asked for. What always holds:

- All headers of all files are checked before the first tensor, and a reload begins only then: a bad path leaves the running
  model as it was.
- Tensors come in the stock order, and each owns its memory: models keep some of them until long after.
- The index decides between copies of a tensor; a tensor that it does not name is delivered all the same.
- The stock loader steps in only for what is not safetensors or not for this machine, and only before the first tensor; never
  for a file that is damaged or missing.
"""
from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import os
import time
import typing

import torch
import vllm.model_executor.model_loader.default_loader as stock
import vllm.model_executor.model_loader.weight_utils as weight_utils
from vllm.logger import init_logger
from vllm.platforms import current_platform

import headrace
from headrace import _on_gpu, _vllm_marks
from headrace.vllm import parse_options

logger = init_logger("vllm.headrace")

INDEX_NAME = "model.safetensors.index.json"
# Small tensors that go to a GPU share memory and a job: so many bytes of them, or one large one.
GROUP_BYTES = 8 << 20
VERIFY_BYTES = 8 << 20
STAGING_BYTES = 64 << 20
# On the CPU a feed has a block of small tensors ahead, so large at most. It is taken off the pool.
AHEAD_BYTES = 8 << 20

# What a source of weights may ask for, and is honoured here. Anything else is the stock loader's to do.
SOURCE_FIELDS = {
    "model_or_path",
    "revision",
    "subfolder",
    "prefix",
    "fall_back_to_pt",
    "allow_patterns_overrides",
    "is_unused_weight",
}

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}

Named = typing.Iterator[typing.Tuple[str, torch.Tensor]]


class Fallback(Exception):
    """This is not for headrace; the stock loader can do it. Raised before the first tensor only."""


class HeadraceModelLoader(stock.DefaultModelLoader):  # type: ignore[misc]
    """One is made for each load, by vLLM."""

    counter_before_loading_weights: float  # when the first tensor was asked for; vLLM logs the time from then

    def __init__(self, load_config: typing.Any) -> None:
        config = copy.copy(load_config)  # the caller uses his again, for draft models and reloads
        self.options, config.model_loader_extra_config = parse_options(load_config.model_loader_extra_config)
        config.load_format = "auto"
        super().__init__(config)
        ignored = [key for key in ("enable_multithread_load", "num_threads") if config.model_loader_extra_config.get(key)]
        if getattr(config, "safetensors_load_strategy", None) not in (None, "lazy", "torchao"):
            ignored.append("safetensors_load_strategy")
        if ignored:
            logger.warning_once("headrace: %s: no meaning for --load-format headrace, ignored", ", ".join(ignored))

    # ------------------------------------------------------------------------------------ what vLLM calls

    def get_all_weights(self, model_config: typing.Any, model: torch.nn.Module) -> Named:
        """As the stock one, but begun: what is wrong with the files is raised here, before a caller gives up old weights."""
        weights = super().get_all_weights(model_config, model)
        first = list(itertools.islice(weights, 1))

        def stream() -> Named:
            try:
                while first:
                    yield first.pop()
                yield from weights
            finally:
                weights.close()

        return stream()

    def load_weights(self, model: torch.nn.Module, model_config: typing.Any) -> None:
        is_draft = getattr(model_config, "runner_type", "") == "draft"
        is_tracked = getattr(self, "enable_weights_track", None) is not False
        marks = _vllm_marks.set_marks(model, is_draft) if is_tracked else []
        super().load_weights(model, model_config)
        is_certain = model_config.quantization is None and not is_draft
        _tell_lacking(_vllm_marks.lacking(marks), model_config.model, is_certain)

    def _get_weights_iterator(self, source: typing.Any) -> Named:
        """A plain function: files and headers are checked by the call, the tensors come from what it returns."""
        try:
            model, tensors = self._open(source)
        except Fallback as reason:
            return self._fall_back(source, reason)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._stream(source, model, tensors)

    # --------------------------------------------------------------------------------------------- files

    def _open(self, source: typing.Any) -> typing.Tuple[typing.Any, typing.List[typing.Any]]:
        """The model, all headers checked, and those of its tensors that are wanted, in the stock order."""
        for field in dataclasses.fields(source):
            if field.name not in SOURCE_FIELDS and getattr(source, field.name) != field.default:
                raise Fallback(f"this version of vLLM asks for {field.name}, which headrace does not know")
        if getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
            raise Fallback("checkpoints of torchao are put together by vLLM")

        folder, files, is_safetensors, index = self._files(source)
        if not is_safetensors:
            raise Fallback(f"there are no safetensors files in {folder}")
        model = _open_model(folder, files, index, getattr(self, "enable_weights_track", None) is not False)
        try:
            return model, self._wanted(source, model, self._without_language_model(folder, files, index, source))
        except BaseException:
            model.close()
            raise

    def _files(self, source: typing.Any) -> typing.Tuple[str, typing.List[str], bool, str]:
        found = _call(
            self._prepare_weights,
            model_name_or_path=source.model_or_path,
            subfolder=source.subfolder,
            revision=source.revision,
            fall_back_to_pt=source.fall_back_to_pt,
            allow_patterns_overrides=source.allow_patterns_overrides,
        )
        folder, files, is_safetensors, *more = found
        return folder, sorted(files, key=_natural_key), is_safetensors, more[0] if more else INDEX_NAME

    def _without_language_model(self, folder: str, files: typing.List[str], index: str, source: typing.Any) -> typing.List[str]:
        """Under --mm-encoder-only the stock loader leaves out files that hold nothing but the language model."""
        prefixes = getattr(self, "_encoder_only_lm_prefixes", None)
        if prefixes is None:
            return files
        choose = getattr(weight_utils, "filter_mm_encoder_only_safetensors_files")
        mapper = getattr(self, "_encoder_only_weights_mapper", None)
        files = list(choose(files, folder, index, prefixes, weights_mapper=mapper))
        if not files:
            raise RuntimeError(f"--mm-encoder-only leaves no weight file of {source.model_or_path}: see the prefixes {prefixes}")
        return files

    def _wanted(self, source: typing.Any, model: typing.Any, files: typing.List[str]) -> typing.List[typing.Any]:
        rank = {os.path.basename(path): number for number, path in enumerate(files)}
        shards = [rank.get(os.path.basename(shard.path)) for shard in model.shards]
        tensors = [tensor for tensor in model.tensors if shards[tensor.shard] is not None]
        # File by file, by name inside a file: models may hold on to tensors until a layer is complete.
        tensors.sort(key=lambda tensor: (shards[tensor.shard], tensor.name))

        unused = getattr(source, "is_unused_weight", None)
        if unused is not None:
            tensors = [tensor for tensor in tensors if not unused(tensor.name)] or tensors
        experts = getattr(self, "local_expert_ids", None)
        if experts is not None:
            from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

            tensors = [tensor for tensor in tensors if not should_skip_weight(tensor.name, experts)]
        for tensor in tensors:
            _torch_dtype(tensor, model)
        return tensors

    # ------------------------------------------------------------------------------------------- tensors

    def _stream(self, source: typing.Any, model: typing.Any, tensors: typing.List[typing.Any]) -> Named:
        try:
            loader, device = self._loader()
        except Fallback as reason:
            model.close()
            yield from self._fall_back(source, reason)
            return
        except BaseException:
            model.close()
            raise
        begun = time.perf_counter()
        bar = self._bar(sum(tensor.nbytes for tensor in tensors))
        deliver = _deliver_on_gpu if device.type == "cuda" else _deliver_on_cpu
        weights = deliver(loader, model, tensors, device)
        try:
            for info, tensor in weights:
                if self.options.verify:
                    _verify(model, info, tensor)
                bar.update(info.nbytes)
                yield source.prefix + info.name, tensor
                del tensor  # the consumer decides for how long it lives
            self._log(loader.stats(), tensors, time.perf_counter() - begun)
        finally:
            weights.close()
            bar.close()
            loader.close()
            model.close()

    def _loader(self) -> typing.Tuple[typing.Any, torch.device]:
        if current_platform.is_cpu():
            device = torch.device("cpu")
        elif current_platform.is_cuda():
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            raise Fallback(f"headrace has no device for the platform {current_platform.device_name}")
        options = self.options
        if options.device is not None and options.device != "cuda":  # "cuda" is this worker's own
            device = torch.device(options.device)
        # Several ranks of a node read the same files: the first to come leaves them in the page cache for the others.
        caching = options.caching or ("fill" if _n_ranks() > 1 and options.engine != "cufile" else "auto")
        try:
            loader = headrace.Loader(
                str(device),
                staging_bytes=_pool_bytes(options, device),
                slot_bytes=options.slot_bytes,
                engine=options.engine,
                caching=caching,
                readers=options.readers,
                cufile=options.cufile or "direct",
            )
        except headrace.Error as error:
            if error.name == "HR_E_UNSUPPORTED" and options.engine is None and options.caching is None:
                raise Fallback(str(error)) from error
            raise
        return loader, device

    def _fall_back(self, source: typing.Any, reason: Fallback) -> Named:
        if not self.options.fallback:
            raise ValueError(f'headrace does not load {source.model_or_path} and "fallback" is false: {reason}') from reason
        logger.warning("headrace: %s; the stock loader of vLLM loads it", reason)
        weights: Named = super()._get_weights_iterator(source)
        return weights

    def _bar(self, n_bytes: int) -> typing.Any:
        return weight_utils.tqdm(
            total=n_bytes,
            desc="Loading safetensors using headrace",
            disable=not _call(weight_utils.enable_tqdm, use_tqdm_on_load=self.load_config.use_tqdm_on_load),
            bar_format=getattr(weight_utils, "_BAR_FORMAT", None),
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            mininterval=1.0,
        )

    def _log(self, stats: typing.Dict[str, typing.Any], tensors: typing.List[typing.Any], seconds: float) -> None:
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        logger.info(
            "headrace: %d tensors, %s bytes in %.2f s, %.2f GB/s; engines: %s; staging peak %.1f of %.1f MiB%s",
            len(tensors),
            f"{n_bytes:,}",
            seconds,
            n_bytes / max(seconds, 1e-9) / 1e9,
            _shares(stats),
            stats["peak_staging_bytes"] / 2**20,
            stats["staging_bytes"] / 2**20,
            "; every byte compared with the files" if self.options.verify else "",
        )


class GdsBoundedModelLoader(HeadraceModelLoader):
    """--load-format gds_bounded: engine "cufile", unless the options name another."""

    def __init__(self, load_config: typing.Any) -> None:
        super().__init__(load_config)
        if self.options.engine is None:
            self.options = self.options._replace(engine="cufile")


# ------------------------------------------------------------------------------------------------ opening


def _pool_bytes(options: typing.Any, device: torch.device) -> typing.Optional[int]:
    """The pool's share of staging_bytes: all of it, or what is left when small tensors wait in the rest."""
    asked: typing.Optional[int] = options.staging_bytes
    pool = (asked or STAGING_BYTES) - AHEAD_BYTES
    if device.type != "cpu" or pool < max(AHEAD_BYTES, 2 * (options.slot_bytes or 0)):
        return asked
    return pool


def _open_model(folder: str, files: typing.List[str], index: str, strict: bool) -> typing.Any:
    """By the index, if it is about these files: then it decides between copies, and what it names must be there if strict."""
    path = os.path.join(folder, index)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            shards = set(json.load(file)["weight_map"].values())
        if shards == {os.path.relpath(name, folder) for name in files}:
            try:
                return headrace.open(path)
            except headrace.Error as error:
                if strict or error.name != "HR_E_INDEX":
                    raise
                logger.warning("headrace: %s; going on without the index, since enable_weights_track is false", error)
    return headrace.open(files)


def _natural_key(path: str) -> typing.Any:
    """vLLM's order of files: numbers inside names count as numbers."""
    key = getattr(weight_utils, "_natural_sort_key", None)
    return key(path) if key else path


def _call(function: typing.Callable[..., typing.Any], **arguments: typing.Any) -> typing.Any:
    """Calls with those of the arguments that this version of the function has."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})


def _n_ranks() -> int:
    try:
        from vllm.distributed import get_world_group

        return int(get_world_group().world_size)
    except (ImportError, AssertionError):  # not set up: a process of its own
        return 1


def _shares(stats: typing.Dict[str, typing.Any]) -> str:
    parts = []
    for way, key in (("page cache", "cached_bytes"), ("direct", "direct_bytes")):
        parts += [(n, f"{engine} ({way})") for engine, n in stats[key].items() if n]
    total = sum(n for n, _ in parts) or 1
    return ", ".join(f"{name} {100 * n / total:.1f} %" for n, name in sorted(parts, reverse=True)) or "none"


# ----------------------------------------------------------------------------------------------- delivery


def _torch_dtype(info: typing.Any, model: typing.Any) -> torch.dtype:
    dtype = getattr(torch, DTYPES.get(info.dtype, ""), None)
    if dtype is None:
        path = model.shards[info.shard].path
        raise ValueError(f'{path}: tensor "{info.name}" has dtype {info.dtype}, which this torch ({torch.__version__}) has not')
    return dtype


def _torch_shape(info: typing.Any) -> typing.List[int]:
    """torch counts pairs of 4-bit elements, the file single ones."""
    shape = list(info.shape)
    if info.dtype == "F4":
        shape[-1] //= 2
    return shape


def _deliver_on_cpu(
    loader: typing.Any, model: typing.Any, tensors: typing.List[typing.Any], device: torch.device
) -> typing.Generator[typing.Tuple[typing.Any, torch.Tensor], None, None]:
    feed = loader.feed(model, [tensor.name for tensor in tensors], given_order=True)
    for info, array in feed:
        dtype, shape = _torch_dtype(info, model), _torch_shape(info)
        if info.nbytes:
            tensor = torch.frombuffer(array, dtype=dtype).reshape(shape)  # keeps the array, and nothing else writes it
        else:
            tensor = torch.empty(shape, dtype=dtype)
        del array
        yield info, tensor
        del tensor


def _deliver_on_gpu(
    loader: typing.Any, model: typing.Any, tensors: typing.List[typing.Any], device: torch.device
) -> typing.Generator[typing.Tuple[typing.Any, torch.Tensor], None, None]:
    """Into memory of torch's own allocator, ordered with the consumer's stream; a few jobs are ahead."""
    numbers = [info.index for info in tensors]
    pairs = _on_gpu.tensors(model, loader, numbers, block_bytes=GROUP_BYTES, window_bytes=GROUP_BYTES)
    infos = iter(tensors)
    for _, tensor in pairs:
        yield next(infos), tensor
        del tensor


def _verify(model: typing.Any, info: typing.Any, tensor: torch.Tensor) -> None:
    """Reads the tensor's bytes once more, in the plainest way there is, and compares."""
    path = model.shards[info.shard].path
    found = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if info.nbytes else ()
    with open(path, "rb") as file:
        file.seek(info.offset)
        for at in range(0, info.nbytes, VERIFY_BYTES):
            piece = bytearray(file.read(min(VERIFY_BYTES, info.nbytes - at)))
            if not piece or not torch.equal(found[at : at + len(piece)], torch.frombuffer(piece, dtype=torch.uint8)):
                raise RuntimeError(
                    f'{path}: tensor "{info.name}": what was loaded differs from the file, between bytes '
                    f"{info.offset + at} and {info.offset + at + VERIFY_BYTES}: was the file written meanwhile?"
                )


# ------------------------------------------------------------------------------------------- completeness


def _tell_lacking(names: typing.List[str], source: str, is_certain: bool) -> None:
    """An error; or a warning, where values may have come in a way that is not known here."""
    if not names:
        return
    what = (
        f"{source}: the checkpoint gave {'no values' if len(names) == 1 else 'no values, or not all of them,'} to "
        f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}: a tensor is missing from it or holds NaN"
    )
    if is_certain:
        raise ValueError(f'{what}; to serve it nevertheless, set "enable_weights_track" to false in --model-loader-extra-config')
    logger.warning("headrace: %s, or vLLM has filled it by a way of its own", what)
