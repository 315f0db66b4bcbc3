# SPDX-License-Identifier: Apache-2.0
"""safe_open() and its slices: what safetensors.safe_open does, from one file, several, a directory or an index.

A model is shared by a safe_open and its slices, as the official package shares its file: a slice goes on working after the file was
closed, and what it used is given back when the last of them is. Loaders are shared by all that read onto one device with the same
options, since each has threads and a pool of its own; the last user closes it. Both follow a fork: the child gets a loader of its own.
Lock order: only `_lock`, for the counts; nothing is opened, closed or read under it.
"""
from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Any, Sequence, Union

from headrace import _on_gpu
from headrace import _native as native
from headrace._errors import Error, SourceNotFound, TensorNotFound
from headrace._frameworks import KNOWN_ELSEWHERE, NAMES, Framework, Numpy, Torch, item_bytes, understood
from headrace._safetensor_error import SafetensorError, refuse, translated
from headrace._slices import View, blocks

Name = Union[str, "os.PathLike[str]"]

MOVED = ("mps", "npu", "xpu", "xla", "mlu", "musa", "hpu")  #: torch's devices that are reached through memory of the host
SCRATCH_BYTES = 32 << 20
READS_AT_ONCE = 4096
SMALL_BYTES = 512 << 10  #: up to here a read by the calling thread is quicker than a job
SMALL_HOLEY_BYTES = 64 << 10  #: the same, if not all of it is wanted

OPTIONS = ("staging_bytes", "slot_bytes", "engine", "caching", "readers", "cufile")

_lock = threading.Lock()
_loaders: dict[Any, list[Any]] = {}  #: guarded by _lock; key: [loader, users]
_dropped: deque[_Opened] = deque()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()
    _loaders.clear()
    _dropped.clear()


os.register_at_fork(after_in_child=_new_lock)


def _acquire_loader(device: str, options: dict[str, Any]) -> tuple[Any, native.Loader]:
    """A loader that is shared, and the key to release it by."""
    key = (os.getpid(), device, tuple(sorted(options.items())))
    with _lock:
        entry = _loaders.get(key)
        if entry:
            entry[1] += 1
            return key, entry[0]
    fresh = native.Loader(device, **options)
    with _lock:
        entry = _loaders.setdefault(key, [fresh, 0])
        entry[1] += 1
        shared: native.Loader = entry[0]
    if shared is not fresh:
        fresh.close()
    return key, shared


def _release_loader(key: Any) -> None:
    with _lock:
        entry = _loaders.get(key)
        if not entry:
            return
        entry[1] -= 1
        if entry[1]:
            return
        del _loaders[key]
    entry[0].close()


class _Opened:
    """A model, the framework that its tensors are for, and a loader from the first read on. Counted by those that use it."""

    def __init__(
        self, model: native.Model, framework: Framework, moved_to: str, share_blocks: bool, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.share_blocks = share_blocks
        self.framework = framework
        self.moved_to = moved_to
        self.options = options
        self.mapped = False  #: whole tensors are given in place
        # What is small is read at once by the thread that asks, unless the caller said how to read. Of a store only a loader verifies.
        told = {key: value for key, value in options.items() if key not in ("staging_bytes", "slot_bytes", "readers")}
        self.reads_small = (
            framework.device == "cpu"
            and all(value in (None, "auto", "fill") for value in told.values())
            and not any(shard.path.startswith("store:") for shard in model.shards)
        )
        self._users = 1
        self._key: Any = None
        self._loader: native.Loader | None = None

    def acquire(self) -> _Opened:
        """One more user."""
        with _lock:
            self._users += 1
        _let_go_of_dropped()
        return self

    def release(self) -> None:
        """One user less; after the last one all is closed."""
        self._let_go()
        _let_go_of_dropped()

    def drop(self) -> None:
        """release() for __del__, which the collector may call anywhere, even in a thread that holds the lock: then whoever holds it
        does the work when it has let go."""
        if _dropped is None:  # the interpreter is ending
            return
        _dropped.append(self)
        if _lock.acquire(blocking=False):
            _lock.release()
            _let_go_of_dropped()

    def _let_go(self) -> None:
        with _lock:
            self._users -= 1
            if self._users:
                return
            key, self._key, self._loader = self._key, None, None
        if key and key[0] == os.getpid():
            _release_loader(key)
        self.model.close()

    def loader(self) -> native.Loader:
        """The loader, which this process made."""
        with _lock:
            if self._loader is not None and self._key[0] == os.getpid():
                return self._loader
        if self.framework.device != "cpu":
            self.framework.empty(0)  # torch tells what is wrong with its device in its own words
        key, loader = _acquire_loader(self.framework.device, self.options)
        with _lock:
            is_first = self._loader is None or self._key[0] != os.getpid()
            if is_first:
                self._key, self._loader = key, loader
        if not is_first:
            _release_loader(key)
        _let_go_of_dropped()
        return loader

    def find(self, name: str) -> native.TensorInfo:
        """Describes a tensor."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {type(name).__name__}")
        try:
            return self.model.tensor(name)
        except TensorNotFound as error:
            made = translated(error)
            made.message = f"File does not contain tensor {name}"
            made.tensor = name
            raise made from None

    def check(self, info: native.TensorInfo) -> None:
        """Raises what the framework cannot hold."""
        self.check_kind(info.dtype, info.shape, info.name)

    def check_kind(self, dtype: str, shape: tuple[int, ...], name: str) -> None:
        """The same, of parts."""
        understood(dtype, name)
        self.framework.check(dtype, shape)

    def whole(self, info: native.TensorInfo) -> Any:
        """Reads all of a tensor."""
        self.check(info)
        if self.mapped:
            return self.framework.tensor(self.model.map(info.index))
        if self.framework.device == "cpu":
            return self.finished(self.framework.tensor(self.loader().get(self.model, info.name)))
        (tensor,) = self.on_gpu(_on_gpu.gathered, [info.index]).values()
        return tensor

    def on_gpu(self, how: Any, numbers: list[int] | None) -> Any:
        """Tensors of torch on a GPU, in one of _on_gpu's ways."""
        return how(self.model, self.loader(), numbers, share_blocks=self.share_blocks, check=self.check_kind)

    def finished(self, tensor: Any) -> Any:
        """The tensor where the caller wants it."""
        return tensor.to(self.moved_to) if self.moved_to else tensor

    def part(self, info: native.TensorInfo, view: View, item: int) -> Any:
        """Reads a view of a tensor into new memory; only the bytes that it needs, and holes that are cheaper to read than to leave out."""
        framework = self.framework
        n_elements, reach = view.n_elements, view.reach * item
        if self.reads_small and 0 < reach <= (SMALL_BYTES if reach == n_elements * item else SMALL_HOLEY_BYTES):
            raw = self.model.read_part(info.index, view.first * item, reach)
            return self.finished(framework.small(raw, info.dtype, view, item))
        memory = framework.empty(n_elements * item)
        if n_elements:
            reads = _Reads(self, info, framework.address(memory), memory, item)
            for block, at in blocks(view, item):
                reads.add(block, at)
            reads.flush()
        return self.finished(framework.shaped(memory, info.dtype, view.sizes))


def _let_go_of_dropped() -> None:
    while _dropped:
        try:
            opened = _dropped.popleft()
        except IndexError:
            return
        opened._let_go()


class _Reads:
    """Blocks of one view on their way: some go straight to the result, others into scratch memory first."""

    def __init__(self, opened: _Opened, info: native.TensorInfo, address: int, memory: Any, item: int) -> None:
        self.opened, self.info, self.address, self.memory, self.item = opened, info, address, memory, item
        self.reads: list[tuple[int, int, int, int, int]] = []
        self.picks: list[tuple[int, Any, View]] = []
        self.scratch_bytes = 0

    def add(self, block: View, at: int) -> None:
        item = self.item
        n, place = block.reach * item, self.address + at * item
        if not block.is_dense:
            if self.scratch_bytes + n > SCRATCH_BYTES:
                self.flush()
            scratch = self.opened.framework.empty(n)
            place = self.opened.framework.address(scratch)
            self.picks.append((at, scratch, block))
            self.scratch_bytes += n
        self.reads.append((self.info.index, block.first * item, n, place, n))
        if len(self.reads) >= READS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if not self.reads:
            return
        framework = self.opened.framework
        stream = framework.stream
        keep = [self.memory, self.picks]
        with self.opened.loader().start(
            self.opened.model, self.reads, keep=keep, wait_stream=stream, signal_stream=stream
        ) as job:
            job.wait()
        for at, scratch, block in self.picks:
            framework.pick(self.memory, at, scratch, block, self.item)
        self.reads, self.picks, self.scratch_bytes = [], [], 0


class SafeSlice:
    """A tensor of which parts can be read: slice[1:3], slice[:, ::8], slice[...]. Made by safe_open.get_slice().

    With torch every index that torch has for a tensor; with numpy ints, slices that stay inside the tensor and begin and end with
    positive numbers, and one Ellipsis, as in safetensors. Only the bytes that an index of ints, slices and Ellipsis needs are read.
    """

    def __init__(self, opened: _Opened, info: native.TensorInfo) -> None:
        self._info = info
        self._opened: _Opened | None = opened.acquire()

    def __del__(self) -> None:
        opened = getattr(self, "_opened", None)
        if opened is not None:
            self._opened = None
            opened.drop()

    def get_shape(self) -> list[int]:
        """Its shape as in the file's header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Its dtype as the format spells it: "F32", "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        opened, info = self._opened, self._info
        assert opened is not None
        try:
            item = item_bytes(info.dtype)
            if not item:
                return _part_of_packed(opened, info, index)
            view = opened.framework.view(info.shape, index, info.name)
            opened.check(info)
            if view is None:
                return opened.whole(info)[index]
            return opened.part(info, view, item)
        except Error as error:
            error.tensor = error.tensor or info.name
            raise translated(error) from None


def _part_of_packed(opened: _Opened, info: native.TensorInfo, index: Any) -> Any:
    """Two F4 share a byte: rows can be told apart, but no elements within a row."""
    view = opened.framework.view(info.shape, index, info.name)
    n = info.shape[-1] if info.shape else 1
    if view is None or not view.sizes or view.sizes[-1] != n or view.strides[-1] != 1:
        raise refuse(
            f"a slice of tensor '{info.name}' does not end at a byte boundary: its dtype {info.dtype} is smaller than a byte, "
            "so take all of the last dimension",
            tensor=info.name,
        )
    opened.check(info)
    halved = View(view.first // 2, (*view.sizes[:-1], n // 2), (*(stride // 2 for stride in view.strides[:-1]), 1))
    return opened.part(info, halved, 1)


def _framework_of(framework: str, device: Any) -> tuple[Framework, str]:
    """The framework over its device, and where to move tensors to in the end ("" for nowhere)."""
    if not isinstance(framework, str):
        raise TypeError(f"framework must be a str, not {type(framework).__name__}")
    kind = NAMES.get(framework)
    if kind is None:
        if framework in KNOWN_ELSEWHERE:
            raise refuse(
                f"framework {framework} is not served by headrace: load as numpy, or use headrace.feed(framework=None) and DLPack"
            )
        raise refuse(f"framework {framework} is invalid: use 'pt' or 'np'")
    place = _device_of(device)
    if kind == "numpy":
        if place != "cpu":
            raise refuse(f"Device {device} is not supported for framework numpy")
        return Numpy(), ""
    if place == "cpu" or place.startswith("cuda"):
        return Torch(place), ""
    return Torch("cpu"), place


def _device_of(device: Any) -> str:
    if device is None:
        return "cpu"
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    kind = type(device)
    if kind.__name__ == "device" and kind.__module__ == "torch":
        device = device.type if device.index is None or device.type == "cpu" else f"{device.type}:{device.index}"
    if isinstance(device, str):
        if device == "cpu":
            return device
        kind_name, colon, number = device.partition(":")
        if kind_name == "cuda" or kind_name in MOVED:
            if colon and not (number.isascii() and number.isdigit()):
                raise ValueError(f"device {device} is invalid: '{number}' is no number of a device")
            return "cuda:0" if device == "cuda" else device
    raise refuse(f"device {device} is invalid: use 'cpu', 'cuda', 'cuda:N' or N")


def _source_of(filename: Any) -> Any:
    """What headrace.open() takes, with the refusals of the official package for what is no name."""
    if isinstance(filename, (list, tuple)):
        return [_source_of(name) for name in filename]
    name = os.fspath(filename)
    if not isinstance(name, str):
        raise TypeError(f"filename must be a str or os.PathLike of str, not {type(filename).__name__}")
    if not name:
        raise SourceNotFound(errno.ENOENT, "No such file or directory: the name is empty")
    return name


class safe_open:
    """Opens safetensors and gives its tensors as they are asked for; a drop-in for safetensors.safe_open.

    filename: a file, a list of files that form one model, a directory, or an index ("model.safetensors.index.json").
    framework: "pt" (or "torch", "pytorch") or "np" (or "numpy"). device: "cpu", "cuda:N", N, a torch.device; others of torch's devices
    are reached through memory of the host. backend: accepted for safetensors' sake; headrace chooses how to read by itself.
    map: on cpu, whole tensors in place: read-only, over the page cache's own pages; headrace.Model.map says at what price.
    ugds: the node of a disk that belongs to uGDS, for a model in a store; as for headrace.load().
    share_blocks: as for headrace.feed(). Further options are those of headrace.Loader (staging_bytes, slot_bytes,
    engine, caching, readers, cufile).

    All headers are checked here, and no tensor is read. Tensors own their memory, and are still good after the file was closed.
    Raises FileNotFoundError, OSError, and headrace.SafetensorError (also a safetensors.SafetensorError).
    """

    def __init__(
        self,
        filename: Name | Sequence[Name],
        framework: str,
        device: Any = "cpu",
        *,
        backend: str | None = None,
        share_blocks: bool = True,
        map: bool = False,
        ugds: str | None = None,
        **loader_options: Any,
    ) -> None:
        self._opened: _Opened | None = None
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must be a str, not {type(backend).__name__}")
        if backend not in (None, "mmap", "pread"):
            raise refuse(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        for option in loader_options:
            if option not in OPTIONS:
                raise TypeError(f"safe_open() has no option {option!r}: there are backend, map, share_blocks, {', '.join(OPTIONS)}")
        source = _source_of(filename)
        frame, moved_to = _framework_of(framework, device)
        if map and (frame.device != "cpu" or moved_to or loader_options):
            raise refuse("map=True gives tensors of files in place: on cpu, and without options of a loader")
        if ugds is not None and frame.device != "cpu":
            loader_options.setdefault("engine", "ugds")
        try:
            model = native.open(source, ugds=ugds)
        except Error as error:
            raise translated(error) from None
        self._opened = _Opened(model, frame, moved_to, share_blocks, loader_options)
        self._opened.mapped = map
        if loader_options:
            self._opened.loader()  # a value that is not valid is told here, and not at the first read

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        opened = getattr(self, "_opened", None)
        if opened is not None:
            self._opened = None
            opened.drop()

    def close(self) -> None:
        """Closes it. Tensors and slices that it gave stay good."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()

    def _good(self) -> _Opened:
        if self._opened is None:
            raise refuse("File is closed")
        return self._opened

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._good().model.names)

    def offset_keys(self) -> list[str]:
        """Names of all tensors in file order: by shard, then by offset."""
        return list(self._good().model.names)

    def metadata(self) -> dict[str, str] | None:
        """The header's free text, or None if it has none. Of several files: all of it, the first file that has a key decides."""
        model = self._good().model
        merged: dict[str, str] = {}
        for shard in range(len(model.shards)):
            for key, value in model.metadata(shard).items():
                merged.setdefault(key, value)
        return merged or None

    def get_tensor(self, name: str) -> Any:
        """Reads one tensor."""
        opened = self._good()
        try:
            return opened.whole(opened.find(name))
        except Error as error:
            raise translated(error) from None

    def get_slice(self, name: str) -> SafeSlice:
        """A tensor to read parts of. Reads nothing yet."""
        opened = self._good()
        return SafeSlice(opened, opened.find(name))

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors: a dict in file order. What the framework cannot hold is told before anything is read."""
        opened = self._good()
        if opened.framework.device == "cpu":
            return dict(self.tensors())
        try:
            return opened.on_gpu(_on_gpu.gathered, None)  # type: ignore[no-any-return]
        except Error as error:
            raise translated(error) from None

    def tensors(self) -> Any:
        """Reads all tensors one after the other: an iterator of (name, tensor) in file order, with bounded look-ahead."""
        opened = self._good()
        if opened.framework.device != "cpu":
            pairs = opened.on_gpu(_on_gpu.tensors, None)
            return _passed_on(opened.acquire(), pairs)
        for info in opened.model.tensors:
            opened.check(info)
        return _fed(opened.acquire())


def _passed_on(opened: _Opened, pairs: Any) -> Any:
    try:
        yield from pairs
    except Error as error:
        raise translated(error) from None
    finally:
        opened.release()


def _fed(opened: _Opened) -> Any:
    try:
        if opened.mapped:
            for info in opened.model.tensors:
                yield info.name, opened.whole(info)
            return
        with opened.loader().feed(opened.model) as feed:
            for info, array in feed:
                yield info.name, opened.finished(opened.framework.tensor(array))
    except Error as error:
        raise translated(error) from None
    finally:
        opened.release()


__all__ = ["SafeSlice", "SafetensorError", "safe_open"]
