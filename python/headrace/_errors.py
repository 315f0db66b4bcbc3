# SPDX-License-Identifier: Apache-2.0
"""What headrace raises. The C code calls make() with all that hr_error_last() knows."""
from __future__ import annotations

import errno


class Error(OSError):
    """What went wrong: a code that is stable, and where, as far as it is known.

    An OSError, so errno, strerror and filename are there too; they may be approximations. The classes below are Errors that are
    also what Python code commonly catches; their codes are the same.
    """

    code: int = 0  #: HR_E_* as a number: the same on every system, never used again for something else
    name: str = ""  #: "HR_E_JSON"
    stage: str = ""  #: "open", "header", "index", "plan", "read", "copy", "device"
    path: str = ""  #: file, or ""
    tensor: str = ""  #: tensor, with control bytes escaped, or ""
    offset: int | None = None  #: byte in the file, or None
    system: int = 0  #: errno, or the driver's code with HR_E_DEVICE; 0 if there is none
    message: str = ""  #: one sentence with the values and what to do

    def __str__(self) -> str:
        return self.message or super().__str__()


class SourceNotFound(Error, FileNotFoundError):
    """No such file, model or device."""


class TensorNotFound(Error, KeyError):
    """No such tensor in this model."""


class Unfinished(Error, TimeoutError):
    """A wait expired, or storage did not answer in time."""


for _class in (Error, SourceNotFound, TensorNotFound, Unfinished):
    _class.__module__ = "headrace"  # as tracebacks name it

_ERRNO = {
    "HR_E_NOTFOUND": errno.ENOENT, "HR_E_CHANGED": errno.ESTALE, "HR_E_PENDING": errno.ETIMEDOUT, "HR_E_TIMEDOUT": errno.ETIMEDOUT,
    "HR_E_CANCELLED": errno.ECANCELED, "HR_E_BUSY": errno.EBUSY, "HR_E_UNSUPPORTED": errno.ENOTSUP, "HR_E_DEVICE": errno.EIO,
    "HR_E_DEVICE_MEMORY": errno.ENOMEM, "HR_E_SHORT": errno.EIO, "HR_E_LOST": errno.EIO, "HR_E_IO": errno.EIO,
}  # fmt: skip


def _class_of(name: str, stage: str, path: str) -> type[Error]:
    if name == "HR_E_NOTFOUND":
        return TensorNotFound if stage == "open" and not path else SourceNotFound
    if name in ("HR_E_PENDING", "HR_E_TIMEDOUT"):
        return Unfinished
    return Error


def make(
    code: int, name: str, system: int, stage: str, message: str, path: str, tensor: str, offset: int | None
) -> BaseException:
    """The exception for an error of the C library."""
    if name == "HR_E_NOMEM":
        return MemoryError(message)
    number = system if system and not name.startswith("HR_E_DEVICE") else _ERRNO.get(name, errno.EINVAL)
    made = _class_of(name, stage, path)(number, message)
    if path:
        made.filename = path
    made.code, made.name, made.stage, made.path, made.tensor = code, name, stage, path, tensor
    made.offset, made.system, made.message = offset, system, message
    return made
