# SPDX-License-Identifier: Apache-2.0
"""Models of a store read through uGDS from Python, over the look-alikes of tests/fakes; the store's image stands for the disk."""
import os
import subprocess

import headrace
import pytest

COMMAND = os.environ["HR_COMMAND"]


@pytest.fixture(scope="module")
def disk(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ugds")
    image, manifest = folder / "disk.img", folder / "side.json"
    subprocess.run([COMMAND, "store", "init", image, "--size", "64M"], check=True, capture_output=True)
    subprocess.run([COMMAND, "store", "import", image, root / "two", "--as", "two"], check=True, capture_output=True)
    with open(manifest, "wb") as file:
        subprocess.run([COMMAND, "store", "export", image], check=True, stdout=file)
    try:
        headrace.open(f"store:{manifest}#two", ugds=str(image)).close()
    except headrace.Error as error:
        pytest.skip(f"no look-alikes here: {error}")
    return f"store:{manifest}#two", str(image)


def plain(root):
    with headrace.open(root / "two") as model, headrace.Loader("cpu") as loader:
        return {info.name: array.tobytes() for info, array in loader.feed(model)}


def test_a_load_to_a_gpu_uses_engine_ugds(root, disk):
    name, node = disk
    found = headrace.load(name, "cuda:0", framework=None, ugds=node)
    assert {key: array.tobytes() for key, array in found.items()} == plain(root)
    with headrace.open(name, ugds=node) as model, headrace.Loader("cuda:0", engine="ugds", staging_bytes="1MiB") as loader:
        for info, array in loader.feed(model):
            assert array.nbytes == info.nbytes
        assert list(loader.stats()["direct_bytes"]) == ["ugds"]


def test_a_load_to_the_cpu_goes_by_way_of_the_host(root, disk):
    name, node = disk
    found = headrace.load(name, "cpu", framework=None, ugds=node)
    assert {key: array.tobytes() for key, array in found.items()} == plain(root)


def test_a_model_that_is_open_takes_no_node(disk):
    name, node = disk
    with headrace.open(name, ugds=node) as model, pytest.raises(ValueError, match="headrace.open"):
        headrace.load(model, ugds=node)


def test_the_store_itself_is_refused(disk):
    with pytest.raises(headrace.Error, match="headrace store export"):
        headrace.open(f"store:{disk[1]}#two", ugds=disk[1])


def test_safe_open_reads_through_it(root, disk):
    name, node = disk
    with headrace.safe_open(name, "np", ugds=node) as opened:
        found = {key: opened.get_tensor(key).tobytes() for key in opened.keys()}
    assert found == plain(root)
