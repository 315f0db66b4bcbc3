# SPDX-License-Identifier: Apache-2.0
"""SafetensorError: what the drop-in raises where the official package raises its own error of that name.

It is a headrace.Error, with code, file, tensor and byte; where the package safetensors is installed it is also that package's
SafetensorError, so that code written for either catches it.
"""
from __future__ import annotations

import errno

from headrace._errors import Error, SourceNotFound, Unfinished

TYPE_CHECKING = False
if TYPE_CHECKING:

    class SafetensorError(Error):
        """A file that is not good safetensors, or a request that it cannot answer."""

else:
    try:
        from safetensors import SafetensorError as _Official

        _bases = (Error, _Official)
    except ImportError:
        _bases = (Error,)
    SafetensorError = type(
        "SafetensorError",
        _bases,
        {"__doc__": "A file that is not good safetensors, or a request that it cannot answer.", "__module__": "headrace"},
    )


def refuse(message: str, path: str = "", tensor: str = "") -> SafetensorError:
    """A SafetensorError of the drop-in's own: the caller asked for what cannot be."""
    made = SafetensorError(errno.EINVAL, message)
    made.message, made.path, made.tensor, made.stage = message, path, tensor, "slice" if tensor else "open"
    return made


def translated(error: Error) -> Error:
    """The same error as the drop-in tells it: a missing file and an expired wait stay what they are."""
    if isinstance(error, (SafetensorError, SourceNotFound, Unfinished)):
        return error
    made = SafetensorError(error.errno, error.strerror)
    if error.path:
        made.filename = error.path
    for part in ("code", "name", "stage", "path", "tensor", "offset", "system", "message"):
        setattr(made, part, getattr(error, part))
    return made
