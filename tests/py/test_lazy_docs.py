# SPDX-License-Identifier: Apache-2.0
"""The Python in the README's section on models larger than memory, and in docs/lazy.md, runs as it stands on real models."""
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import lazy_models as lm  # noqa: E402

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHECKS = """
import transformers
whole = transformers.AutoModel.from_pretrained("path/to/model").eval()
for parameter in whole.parameters():
    parameter.data = parameter.data.clone()
with torch.no_grad():
    assert torch.equal(embeddings, whole.get_input_embeddings()(input_ids))
    if hasattr(whole, "encoder"):
        expected = whole.encoder.layer[0](whole.get_input_embeddings()(input_ids))
        expected = expected[0] if isinstance(expected, tuple) else expected
    else:
        expected = whole(input_ids, output_hidden_states=True).hidden_states[1]
assert torch.equal(hidden[0] if isinstance(hidden, tuple) else hidden, expected)
print(model.stats()["n_groups"])
"""


def snippets(path, section=None):
    with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
        text = file.read()
    if section:
        text = re.search(rf"^## {section}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE).group(1)
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(params=["a real model", "a Llama"])
def folder(request, tmp_path):
    """A folder with path/to/model in it."""
    (tmp_path / "path/to").mkdir(parents=True)
    if request.param == "a Llama":
        lm.SMALL["vocab_size"] = 8000  # the README's tokens are those of a real vocabulary
        lm.make("llama", tmp_path / "path/to/model")
        lm.SMALL["vocab_size"] = 64
    elif "HR_CHECKPOINT" in os.environ:
        os.symlink(os.environ["HR_CHECKPOINT"], tmp_path / "path/to/model")
    else:
        pytest.skip("HR_CHECKPOINT names no real checkpoint")
    return tmp_path


def test_what_the_documentation_shows_works(folder):
    (readme,) = snippets("README.md", "Models larger than memory")
    assert 'LazyModel.from_safetensors("path/to/model", lazy=True)' in readme
    docs = snippets("docs/lazy.md")
    assert len(docs) == 4
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([readme, CHECKS, *docs])], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
