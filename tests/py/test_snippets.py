# SPDX-License-Identifier: Apache-2.0
"""The Python in the README's section "Python" and in docs/python.md runs as it stands."""
import os
import re
import subprocess
import sys

import checkpoints
import pytest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def snippets(path, section=None):
    with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
        text = file.read()
    if section:
        text = re.search(rf"^## {section}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE).group(1)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("path, section", [("README.md", "Python"), ("docs/python.md", None)])
def test_what_the_documentation_shows_works(tmp_path, path, section):
    code = snippets(path, section)
    assert "import headrace" in code
    checkpoints.write_sharded(str(tmp_path / "Llama-3.1-8B"), {
        "model-00001-of-00002.safetensors": [checkpoints.tensor("model.embed_tokens.weight", "F16", [64, 64], 1)],
        "model-00002-of-00002.safetensors": [checkpoints.tensor("lm_head.weight", "F16", [64, 64], 2)]})  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "lm_head.weight" in done.stdout or "64" in done.stdout
