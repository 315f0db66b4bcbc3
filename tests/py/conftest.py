# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: the checkpoints of the command's tests, and what is known of them."""
import os
import sys

import pytest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))

import checkpoints  # noqa: E402


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A folder with the checkpoints of tests/cli/checkpoints.py."""
    where = tmp_path_factory.mktemp("checkpoints")
    checkpoints.make_all(str(where))
    return where


@pytest.fixture(scope="session")
def two():
    """name -> (name, dtype, shape, bytes) of the checkpoint in two shards."""
    return {item[0]: item for tensors in checkpoints.two_shards().values() for item in tensors}


@pytest.fixture(scope="session")
def holes(tmp_path_factory):
    """A checkpoint of two shards that are one hole of 4 GiB each: it takes a while to load, and no room on the disk."""
    where = tmp_path_factory.mktemp("holes") / "model"
    checkpoints.make_sparse(str(where), 2, 4 << 30)
    return where
