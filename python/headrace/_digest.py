# SPDX-License-Identifier: Apache-2.0
"""Model.digest(): in pieces, so that Ctrl-C is heard between them."""
from __future__ import annotations

import hashlib

from headrace._native import Model

_PIECE = 8 << 20


def digest(model: Model, shard: int) -> str:
    """SHA-256 of a shard's file."""
    size = model.shards[shard].nbytes
    sha = hashlib.sha256()
    for at in range(0, size, _PIECE):
        sha.update(model.read_shard(shard, at, min(_PIECE, size - at)))
    return sha.hexdigest()
