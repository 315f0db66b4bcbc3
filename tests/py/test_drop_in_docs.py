# SPDX-License-Identifier: Apache-2.0
"""The examples of the documents run as they stand, in a folder that has the files that they name."""
import os
import random
import re

import pytest

pytest.importorskip("headrace")
pytest.importorskip("numpy")
import drop_in  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def examples():
    for document in ("README.md", "docs/drop-in.md"):
        with open(os.path.join(ROOT, document), encoding="utf-8") as file:
            for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", file.read(), re.M | re.S)):
                if document != "README.md" or "safe_open" in block:
                    yield pytest.param(block, id="%s-%d" % (os.path.basename(document), number))


@pytest.mark.parametrize("block", list(examples()))
def test_an_example_runs_as_it_stands(block, tmp_path, monkeypatch, capsys):
    if "torch" in block:
        pytest.importorskip("torch")
    rng = random.Random(5)
    tensors = {name: ("F32", (32, 8), drop_in.content(rng, "U8", (32 * 8 * 4,))) for name in ("embedding", "head")}
    path = drop_in.write(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    with open(path, "rb") as whole, open(tmp_path / "damaged.safetensors", "wb") as damaged:
        damaged.write(whole.read()[:-1])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "example", "exec"), names)
    if "rows" in names:
        assert names["rows"].tobytes() == tensors["embedding"][2][8 * 32 : 16 * 32]
    if "error" in block:
        assert "HR_E_" in capsys.readouterr().out
    if "missing" in names:
        assert not names["missing"] and not names["unexpected"]


def test_the_readme_has_an_example():
    assert [example for example in examples() if example.id.startswith("README")]
