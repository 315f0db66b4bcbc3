# SPDX-License-Identifier: Apache-2.0
"""The wheel: built from a copy of the tree, looked at, installed where there is no compiler, used. Needs PyPI for what builds it."""
import glob
import os
import re
import shutil
import subprocess
import sys
import zipfile

import checkpoints
import pytest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **more)
    return done.returncode, done.stdout + done.stderr


def good(*command, **more):
    status, output = run(*command, **more)
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What is in the repository, without what was built or fetched here."""
    copy = tmp_path_factory.mktemp("tree") / "headrace"
    shutil.copytree(SOURCE, copy, ignore=lambda folder, names: [
        name for name in names if name == "__pycache__" or (folder == SOURCE and name.startswith(("build", ".", "dist")))])
    return copy


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A Python with what builds wheels, or a skip."""
    venv = tmp_path_factory.mktemp("tools") / "venv"
    good(sys.executable, "-m", "venv", venv)
    status, output = run(venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "meson-python>=0.16", "meson>=1.2", "ninja")
    if status:
        pytest.skip("meson-python could not be had from PyPI: " + output.strip().rpartition("\n")[2])
    return venv / "bin"


@pytest.fixture(scope="module")
def wheel(tree, tools, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    environment = dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}")
    good(tools / "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree, env=environment)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def files(wheel, tmp_path_factory):
    where = tmp_path_factory.mktemp("files")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where)
    return where


def test_it_is_one_small_wheel_for_every_cpython(wheel):
    assert re.fullmatch(r"headrace-[0-9.]+-cp3[0-9]+-abi3-linux_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 2000000


def test_it_needs_the_c_library_and_nothing_else(files):
    binaries = glob.glob(f"{files}/headrace/*.so") + glob.glob(f"{files}/*.data/scripts/headrace")
    assert len(binaries) == 2
    for path in binaries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", good("readelf", "-d", path))
        assert [name for name in needed if not name.startswith(("libc.so", "ld-linux", "libm.so"))] == []
        assert "RPATH" not in good("readelf", "-d", path) and "RUNPATH" not in good("readelf", "-d", path)


def test_it_shows_python_one_symbol_and_uses_the_limited_api(files, tools):
    (extension,) = glob.glob(f"{files}/headrace/*.abi3.so")
    assert [line.split()[-1] for line in good("nm", "-D", "--defined-only", extension).splitlines()] == ["PyInit__native"]
    status, output = run(tools / "pip", "install", "-q", "--disable-pip-version-check", "abi3audit")
    if status:
        pytest.skip("abi3audit could not be had from PyPI")
    good(tools / "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", extension)


def test_it_has_the_types_and_they_are_strict(files, tools):
    assert os.path.exists(f"{files}/headrace/py.typed") and os.path.exists(f"{files}/headrace/_native.pyi")
    status, output = run(tools / "pip", "install", "-q", "--disable-pip-version-check", "mypy")
    if status:
        pytest.skip("mypy could not be had from PyPI")
    good(tools / "mypy", "--config-file", f"{SOURCE}/pyproject.toml", "--cache-dir", f"{files}/mypy", "--strict", f"{SOURCE}/python/headrace",
         cwd=SOURCE)  # fmt: skip


SMOKE = """
import sys, headrace
with headrace.open(sys.argv[1]) as model, headrace.Loader() as loader:
    assert [loader.get(model, name).tobytes() for name in model.names] == [
        model.read_shard(info.shard, info.offset, info.nbytes) for info in model.tensors]
    print(len(model), headrace.__file__)
"""


def use(bin_folder, tmp_path):
    """Without the source tree, a compiler, or anything else of this Python."""
    shutil.rmtree(tmp_path / "two", ignore_errors=True)
    checkpoints.write_sharded(str(tmp_path / "two"), checkpoints.two_shards())
    environment = {"PATH": str(bin_folder)}
    output = good(bin_folder / "python", "-c", SMOKE, tmp_path / "two", env=environment, cwd=tmp_path)
    assert output.startswith("6 ") and str(bin_folder.parent) in output
    assert "embed.weight" in good(bin_folder / "headrace", "ls", tmp_path / "two", env=environment, cwd=tmp_path)


def test_it_works_where_there_is_no_compiler(wheel, tmp_path):
    good(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    good(bin_folder / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", wheel,
         env={"PATH": str(bin_folder)})  # fmt: skip
    use(bin_folder, tmp_path)


def test_pip_installs_the_tree(tree, tools, tmp_path):
    good(sys.executable, "-m", "venv", tmp_path / "venv")
    good(tmp_path / "venv" / "bin" / "pip", "install", "-q", "--disable-pip-version-check", tree)
    use(tmp_path / "venv" / "bin", tmp_path)
