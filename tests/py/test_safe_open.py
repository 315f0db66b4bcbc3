# SPDX-License-Identifier: Apache-2.0
"""The drop-in against the official package: the same result, or the same class of error, for files, dtypes and slices."""
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading

import pytest

pytest.importorskip("headrace")
numpy = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors", reason="the official package is the judge")
import drop_in  # noqa: E402
import headrace  # noqa: E402
import headrace.numpy as ours_numpy  # noqa: E402
import safetensors.numpy as official_numpy  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

SEED = int(os.environ.get("HR_SEED", random.SystemRandom().randrange(2**32)))
N_RANDOM = int(os.environ.get("HR_SLICES", "1500"))
FRAMEWORKS = ["np", pytest.param("pt", marks=pytest.mark.skipif(torch is None, reason="torch is not installed"))]
# Where the official package dies of an accident (a negative size for bytearray, a reshape to it) ours says what is wrong.
ACCIDENTS = [(SystemError, headrace.SafetensorError), (ValueError, headrace.SafetensorError)]


@pytest.fixture
def rng():
    print("SEED=%d" % SEED)
    return random.Random(SEED)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, drop_in.make_corpus.make(str(folder)) or json.loads((folder / "expected.json").read_text())


def same_file(path, framework):
    """'' if both packages say the same of a file."""
    theirs = drop_in.answer(lambda: safetensors.safe_open(path, framework))
    ours = drop_in.answer(lambda: headrace.safe_open(path, framework))
    if theirs[0] == "bad":
        return "" if ours[0] == "bad" and isinstance(ours[1], type(theirs[1])) else "ours %r, official %r" % (ours, theirs)
    if ours[0] == "bad":
        return "refused: %r" % ours[1]
    ours, theirs = ours[1], theirs[1]
    if ours.keys() != theirs.keys() or ours.metadata() != (theirs.metadata() or None):
        return "names or metadata differ"
    if sorted(ours.offset_keys()) != sorted(theirs.offset_keys()):
        return "names by offset differ"
    for name in theirs.keys():
        mine, other = ours.get_slice(name), theirs.get_slice(name)
        if mine.get_shape() != other.get_shape() or mine.get_dtype() != other.get_dtype():
            return "shape or dtype of %r" % name
        a = drop_in.answer(lambda: ours.get_tensor(name))
        b = drop_in.answer(lambda: theirs.get_tensor(name))
        problem = drop_in.same_answer(a, b)
        if problem and not (framework == "np" and mine.get_dtype() in ("BF16", "F4") or mine.get_dtype().startswith("F8")):
            return "%r: %s" % (name, problem)
    return ""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_file_of_the_corpus_is_told_as_the_official_package_tells_it(corpus, framework):
    folder, rows = corpus
    problems = []
    for row in rows:
        path = str(folder / row["file"])
        if row["official"] == (row["code"] == "HR_OK"):
            huge = any(n > 2**62 for tensor in row.get("tensors", ()) for n in tensor[2])
            problem = "" if huge else same_file(path, framework)
        else:  # deliberately stricter
            ours = drop_in.answer(lambda: headrace.safe_open(path, framework))
            problem = "" if ours[0] == "bad" and isinstance(ours[1], safetensors.SafetensorError) else repr(ours)
        if problem:
            problems.append("%s: %s" % (row["id"], problem))
    assert not problems, "\n".join(problems)


def test_an_error_names_code_file_and_byte(corpus):
    folder, rows = corpus
    for row in rows:
        if row["code"] != "HR_OK":
            with pytest.raises(headrace.SafetensorError) as caught:
                headrace.safe_open(str(folder / row["file"]), "np")
            assert caught.value.name == row["code"] and row["file"] in str(caught.value.path)
            assert isinstance(caught.value, headrace.Error) and str(caught.value) == caught.value.message != ""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_dtype_has_the_same_bytes_as_in_the_official_package(tmp_path, rng, framework):
    dtypes = drop_in.NUMPY if framework == "np" else drop_in.TORCH
    path = drop_in.many(tmp_path / "all.safetensors", rng, dtypes)
    with headrace.safe_open(path, framework) as ours, safetensors.safe_open(path, framework) as theirs:
        assert ours.offset_keys() == list(ours.get_tensors())
        everything = ours.get_tensors()
        n_compared = 0
        for name in theirs.keys():
            official = drop_in.answer(lambda: theirs.get_tensor(name))
            problem = drop_in.same_answer(drop_in.answer(lambda: ours.get_tensor(name)), official)
            assert not problem, "%s: %s" % (name, problem)
            if official[0] == "good":
                n_compared += 1
                assert not drop_in.same_tensor(everything[name], official[1]), name
        assert n_compared > 50


def test_numpy_gets_float8_and_bfloat16_where_ml_dtypes_is_installed(tmp_path, rng):
    pytest.importorskip("ml_dtypes")
    path = drop_in.many(tmp_path / "small.safetensors", rng, [d for d in drop_in.BITS if d.startswith("F8") or d == "BF16"])
    with headrace.safe_open(path, "np") as opened, open(path, "rb") as file:
        data = file.read()
        infos = {t.name: t for t in headrace.open(path).tensors}
        for name, tensor in opened.get_tensors().items():
            info = infos[name]
            assert tensor.tobytes() == data[info.offset : info.offset + info.nbytes] and tensor.shape == info.shape


def test_what_no_framework_holds_is_refused_before_anything_is_read(tmp_path, rng):
    path = drop_in.many(tmp_path / "six.safetensors", rng, ["F32", "F6_E2M3"], [(4, 4)])
    with headrace.safe_open(path, "np") as opened:
        with pytest.raises(safetensors.SafetensorError, match="Dtype not understood: F6_E2M3"):
            opened.get_tensors()
        with pytest.raises(safetensors.SafetensorError, match="Dtype not understood: F6_E2M3"):
            opened.get_tensor("F6_E2M3.4x4")
        assert opened.get_slice("F6_E2M3.4x4").get_shape() == [4, 4]


FORMS = [
    0, -1, -3, 2, slice(None), ..., (0, 1), (0, 1, 2), (0, 1, 2, 3), (-1, -1), (slice(None), slice(None), 1), (slice(0, 1), ...),
    (..., slice(1, 2)), (..., 1), (..., ...), (0, ..., 1), slice(0, 2, 2), slice(None, None, 2), slice(-1, None), slice(None, -1),
    slice(1, 0), slice(2, 2), slice(2, None), slice(0, 10), slice(5, 10), slice(None, None, -1), slice(None, None, 0), None, (None, 0),
    [0], [0, 1], ([0, 1],), (0, [1, 2]), [], (), True, False, 1.0, numpy.int64(1), numpy.array([0, 1]), numpy.array(1),
    (slice(numpy.int64(0), numpy.int64(1)),), slice(1.0, 2), (slice(1, 1), 0), 2**70, 2**40, -(2**40), slice(0, 2**70),
    slice(2**40, None), (slice(0, 2), slice(3, 1)), (slice(None), 3), slice(None, 0), slice(True, 2), slice("x", None), slice(1, 0, 2),
    (0, 0, 0, ...), (..., 0, 0, 0), (0, 0, 0, 0, ...), (1, -1, slice(3, 4)), slice(None, True), slice(0, 1, 1000),
]  # fmt: skip


WAYS = [{}, {"engine": "pread"}]  # small slices by the calling thread, and by jobs like large ones


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_form_of_slice_gives_what_the_official_one_gives(tmp_path, rng, framework, how):
    path = drop_in.many(tmp_path / "all.safetensors", rng, ["I32", "F16", "C64", "BOOL"], [(2, 3, 4), (5,), (), (0, 3), (3, 0, 2)])
    problems = []
    with headrace.safe_open(path, framework, **how) as ours, safetensors.safe_open(path, framework) as theirs:
        for name in theirs.keys():
            mine, other = ours.get_slice(name), theirs.get_slice(name)
            for form in FORMS:
                problem = drop_in.same_answer(drop_in.answer(lambda: mine[form]), drop_in.answer(lambda: other[form]), ACCIDENTS)
                if problem:
                    problems.append("%s[%r]: %s" % (name, form, problem))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_random_slices_give_what_the_official_ones_give(tmp_path, rng, framework, how):
    shapes = [(13,), (5, 7), (4, 3, 9), (2, 3, 4, 5), (1, 6, 1), (0, 4), (300, 20)]
    path = drop_in.many(tmp_path / "all.safetensors", rng, ["U8", "F16", "F32", "I64"], shapes)
    problems, n_good = [], 0
    with headrace.safe_open(path, framework, **how) as ours, safetensors.safe_open(path, framework) as theirs:
        names = theirs.keys()
        for _ in range(N_RANDOM):
            name = rng.choice(names)
            mine, other = ours.get_slice(name), theirs.get_slice(name)
            index = drop_in.random_index(rng, mine.get_shape())
            answer, official = drop_in.answer(lambda: mine[index]), drop_in.answer(lambda: other[index])
            n_good += official[0] == "good"
            problem = drop_in.same_answer(answer, official, ACCIDENTS)
            if "ends before it begins" in str(answer[1]):  # the official package panics, or gives a shape of 2**64
                problem = "" if isinstance(answer[1], headrace.SafetensorError) else problem
            if problem:
                problems.append("%s[%r]: %s" % (name, index, problem))
    assert not problems, "\n".join(problems[:20])
    assert n_good > N_RANDOM // 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_large_slices_by_ranges_and_by_blocks_are_right(tmp_path, rng, framework):
    shape = (40, 500, 700)
    path = drop_in.write(tmp_path / "large.safetensors", {"x": ("U16", shape, rng.randbytes(2 * 40 * 500 * 700))})
    with headrace.safe_open(path, framework) as ours, safetensors.safe_open(path, framework) as theirs:
        for index in [slice(3, 9), (slice(None), 7), (slice(None), slice(None), 5), (..., slice(0, 350)), (slice(0, 40, 7), slice(3, 400, 3)),
                      (slice(None), slice(100, 400)), (slice(1, 40, 2), slice(None), slice(1, 700, 3)), (..., slice(0, 1))]:
            assert not drop_in.same_tensor(ours.get_slice("x")[index], theirs.get_slice("x")[index]), index


def test_a_slice_of_rows_reads_no_other_rows(tmp_path, rng):
    path = drop_in.write(tmp_path / "rows.safetensors", {"x": ("U8", (4096, 4096), rng.randbytes(1 << 24))})
    with headrace.safe_open(path, "np", engine="pread") as opened:
        piece = opened.get_slice("x")
        piece[0:1]
        before = opened._opened.loader().stats()["read_bytes"]
        piece[100:108]
        assert opened._opened.loader().stats()["read_bytes"] - before <= 8 * 4096 + 2 * 4096


def test_small_slices_need_no_loader_and_own_their_memory(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["I32", "F16"])
    with headrace.safe_open(path, "np") as opened:
        piece = opened.get_slice("I32.3x4x6")
        whole = piece[...]
        parts = [piece[1], piece[:, 2:3, 1], piece[2, 3, 5]]
        assert opened._opened._loader is None
        expected = [whole[1].copy(), whole[:, 2:3, 1].copy(), whole[2, 3, 5].copy()]
        whole[...] = 0
    for part, same in zip(parts, expected):
        assert numpy.array_equal(part, same) and part.flags.writeable and part.flags.c_contiguous


def test_a_column_of_a_large_tensor_takes_little_memory_beside_itself(tmp_path):
    path = str(tmp_path / "sparse.safetensors")
    rows = 6_000_000  # of 256 bytes: 1.5 GB, one hole
    header = json.dumps({"x": {"dtype": "F32", "shape": [rows, 64], "data_offsets": [0, rows * 256]}}).encode()
    with open(path, "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + rows * 256)
    code = (
        "import re, sys, headrace, numpy\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "with headrace.safe_open(sys.argv[1], 'np', staging_bytes='8MiB') as f:\n"
        "    f.get_slice('x')[0]\n"
        "    before = peak()\n"
        "    column = f.get_slice('x')[:, 3]\n"
        "    assert column.shape == (6_000_000,) and not column.any()\n"
        "    grown = peak() - before - column.nbytes // 1024\n"
        "assert grown < 48 << 10, '%d KiB' % grown\n"
    )
    environ = {**os.environ, "MALLOC_PERTURB_": "0"}
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=120, env=environ)


ODD_NAMES = ["/nonexistent/x", "", "/etc/hostname", b"x", 3, None]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_file_that_is_none_gives_the_same_class_of_error(name):
    problem = drop_in.same_answer(
        drop_in.answer(lambda: headrace.safe_open(name, "np")), drop_in.answer(lambda: safetensors.safe_open(name, "np"))
    )
    assert not problem


@pytest.mark.parametrize("framework", ["PT", "x", "", None, 3])
def test_a_framework_that_is_none_gives_the_same_class_of_error(tmp_path, framework):
    path = drop_in.write(tmp_path / "a.safetensors", {})
    problem = drop_in.same_answer(
        drop_in.answer(lambda: headrace.safe_open(path, framework)), drop_in.answer(lambda: safetensors.safe_open(path, framework))
    )
    assert not problem


@pytest.mark.parametrize("device", ["meta", "x", "", -1, 1.5, "cpu:0", "cuda:x", "cuda", 0, "mps"])
def test_a_device_that_numpy_has_not_gives_the_same_class_of_error(tmp_path, device):
    path = drop_in.write(tmp_path / "a.safetensors", {})
    problem = drop_in.same_answer(
        drop_in.answer(lambda: headrace.safe_open(path, "np", device)), drop_in.answer(lambda: safetensors.safe_open(path, "np", device))
    )
    assert not problem


@pytest.mark.parametrize("backend", ["x", "PREAD", 1])
def test_a_backend_that_is_none_gives_the_same_class_of_error(tmp_path, backend):
    path = drop_in.write(tmp_path / "a.safetensors", {})
    ours = drop_in.answer(lambda: headrace.safe_open(path, "np", backend=backend))
    assert not drop_in.same_answer(ours, drop_in.answer(lambda: safetensors.safe_open(path, "np", backend=backend)))
    for good in ("mmap", "pread"):
        assert headrace.safe_open(path, "np", backend=good).keys() == []


def test_names_that_are_none_give_the_same_class_of_error(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["F32"])
    with headrace.safe_open(path, "np") as ours, safetensors.safe_open(path, "np") as theirs:
        for name in ("nope", "", 3):
            for method in ("get_tensor", "get_slice"):
                a, b = (drop_in.answer(lambda: getattr(f, method)(name)) for f in (ours, theirs))
                assert not drop_in.same_answer(a, b), name


def test_a_closed_file_refuses_all_but_its_slices_and_tensors(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["F32"])
    with headrace.safe_open(path, "np") as opened:
        piece, tensor = opened.get_slice("F32.7"), opened.get_tensor("F32.7")
    for call in (opened.keys, opened.offset_keys, opened.metadata, opened.get_tensors, lambda: opened.get_tensor("F32.7")):
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            call()
    assert piece[:].tobytes() == tensor.tobytes() and piece.get_shape() == [7]
    opened.__exit__(None, None, None)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_tensors_stay_right_after_everything_is_closed_and_memory_is_used_again(tmp_path, rng, framework):
    path = drop_in.write(tmp_path / "a.safetensors", {"t%d" % i: ("U8", (n,), rng.randbytes(n))
                                                      for i, n in enumerate([1, 100, 5000, 70_000, 3_000_000] * 8)})
    data = open(path, "rb").read()
    infos = headrace.open(path).tensors
    opened = headrace.safe_open(path, framework)
    kept = [opened.get_tensors(), {i.name: opened.get_tensor(i.name) for i in infos}, {i.name: opened.get_slice(i.name)[:] for i in infos}]
    opened.close()
    del opened
    gc.collect()
    for _ in range(3):
        headrace.safe_open(path, framework).get_tensors()
        trash = [bytearray(b"\xa5" * 3_000_000) for _ in range(20)]
    del trash
    os.unlink(path)
    for tensors in kept:
        for info in infos:
            assert drop_in.bytes_of(tensors[info.name]) == data[info.offset : info.offset + info.nbytes]
    kept[0]["t4"][...] = 7
    assert drop_in.bytes_of(kept[1]["t4"]) != drop_in.bytes_of(kept[0]["t4"]), "tensors share no memory"


def test_a_directory_an_index_and_a_list_are_one_model(tmp_path, rng):
    shards = {"a.safetensors": {"x": ("U8", (3,), b"abc")}, "b.safetensors": {"y": ("U8", (3,), b"def"), "x": ("U8", (3,), b"old")}}
    for name, tensors in shards.items():
        drop_in.write(tmp_path / name, tensors, {"format": "pt", "from": name})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    for source in (tmp_path, index, str(index)):
        with headrace.safe_open(source, "np") as opened:
            assert {n: t.tobytes() for n, t in opened.get_tensors().items()} == {"x": b"abc", "y": b"def"}
            assert opened.metadata() == {"format": "pt", "from": "a.safetensors"}
    with pytest.raises(headrace.SafetensorError, match="x"):
        headrace.safe_open([tmp_path / name for name in shards], "np")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "only")
    assert ours_numpy.load_file(tmp_path / "only").keys() == {"x"}


def test_loading_a_file_and_bytes_in_numpy_is_as_in_the_official_package(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, drop_in.NUMPY)
    data = open(path, "rb").read()
    official = official_numpy.load_file(path)
    for ours in (ours_numpy.load_file(path), ours_numpy.load_file(path, backend="pread"), ours_numpy.load(data),
                 ours_numpy.load_file(path, staging_bytes="1MiB", readers=1)):
        assert list(ours) == list(official) and not any(drop_in.same_tensor(ours[n], official[n]) for n in official)
        assert all(t.flags.writeable for t in ours.values())
    for bad in (b"", b"123", b"12345678", data[:-1], bytearray(data), "x", None):
        assert not drop_in.same_answer(drop_in.answer(lambda: ours_numpy.load(bad)), drop_in.answer(lambda: official_numpy.load(bad)))


def test_a_file_cut_short_after_it_was_opened_is_an_error_and_not_a_signal(tmp_path, rng):
    path = drop_in.write(tmp_path / "a.safetensors", {"x": ("U8", (1 << 20,), rng.randbytes(1 << 20))})
    with headrace.safe_open(path, "np") as opened:
        piece = opened.get_slice("x")
        os.truncate(path, 5000)
        for call in (lambda: opened.get_tensor("x"), lambda: piece[900_000:], lambda: piece[100:200], lambda: piece[10:], opened.get_tensors):
            with pytest.raises(safetensors.SafetensorError) as caught:
                call()
            assert caught.value.tensor == "x"
            assert caught.value.name in ("HR_E_CHANGED", "HR_E_SHORT") and "a.safetensors" in caught.value.path


def test_threads_share_a_file_and_its_slices(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, drop_in.NUMPY)
    expected = {n: t.tobytes() for n, t in official_numpy.load_file(path).items()}
    problems = []
    with headrace.safe_open(path, "np") as opened:
        def work(seed):
            mine = random.Random(seed)
            for _ in range(200):
                name = mine.choice(list(expected))
                tensor = mine.choice([opened.get_tensor, lambda n: opened.get_slice(n)[()]])(name)
                if tensor.tobytes() != expected[name]:
                    problems.append(name)
        threads = [threading.Thread(target=work, args=(SEED + i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems


def test_a_forked_child_goes_on_reading(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["I32"])
    code = (
        "import os, sys, headrace\n"
        "f = headrace.safe_open(sys.argv[1], 'np')\n"
        "want = f.get_tensor('I32.3x4x6').tobytes()\n"
        "s = f.get_slice('I32.3x4x6')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    good = f.get_tensor('I32.3x4x6').tobytes() == want and s[...].tobytes() == want\n"
        "    del s\n"
        "    f.close()\n"
        "    os._exit(0 if good else 3)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "assert f.get_tensor('I32.3x4x6').tobytes() == want\n"
        "sys.exit(status >> 8 or status)\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code, path], timeout=60).returncode == 0


def test_opening_many_times_leaves_no_descriptor_and_no_loader(tmp_path, rng):
    from headrace import _safe_open

    path = drop_in.many(tmp_path / "a.safetensors", rng, ["I32"])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for i in range(1000):
        with headrace.safe_open(path, "np") as opened:
            if i % 50 == 0:
                piece = opened.get_slice("I32.7")
                opened.get_tensor("I32.7")
    del piece
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before and not _safe_open._loaders


def test_options_of_the_loader_are_checked_when_the_file_is_opened(tmp_path):
    path = drop_in.write(tmp_path / "a.safetensors", {"x": ("U8", (3,), b"abc")})
    assert headrace.safe_open(path, "np", staging_bytes="4MiB", engine="pread", readers=2).get_tensor("x").tobytes() == b"abc"
    with pytest.raises(TypeError, match="stagin_bytes"):
        headrace.safe_open(path, "np", stagin_bytes=1)
    for bad in ({"staging_bytes": 1}, {"engine": "nope"}, {"caching": "maybe"}):
        with pytest.raises((headrace.Error, ValueError)):
            headrace.safe_open(path, "np", **bad)


def test_slices_that_the_collector_drops_in_a_cycle_or_at_exit_are_silent(tmp_path, rng):
    path = drop_in.many(tmp_path / "a.safetensors", rng, ["I32"])
    code = (
        "import gc, sys, headrace\n"
        "from headrace import _safe_open\n"
        "def cycle():\n"
        "    f = headrace.safe_open(sys.argv[1], 'np')\n"
        "    s = f.get_slice('I32.7')\n"
        "    s[1:3]\n"
        "    a = [f, s]\n"
        "    a.append(a)\n"
        "gc.set_threshold(1)\n"
        "for _ in range(200):\n"
        "    cycle()\n"
        "gc.collect()\n"
        "assert not _safe_open._loaders, _safe_open._loaders\n"
        "kept = headrace.safe_open(sys.argv[1], 'np')\n"
        "piece = kept.get_slice('I32.7')\n"
        "piece[...]\n"
        "iterator = kept.tensors()\n"
        "next(iterator)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_imported_that_was_not_asked_for(tmp_path):
    path = drop_in.write(tmp_path / "a.safetensors", {})
    code = (
        "import sys, headrace\n"
        "assert not {'safetensors', 'numpy', 'torch'} & set(sys.modules), sorted(sys.modules)\n"
        "headrace.safe_open(sys.argv[1], 'np')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)


def test_without_the_official_package_the_error_is_still_ours(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['safetensors'] = None\n"
        "import headrace\n"
        "assert headrace.SafetensorError.__mro__[1] is headrace.Error\n"
        "try:\n"
        "    headrace.safe_open('/etc/hostname', 'np')\n"
        "except headrace.SafetensorError as error:\n"
        "    assert error.name == 'HR_E_SMALL', error.name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not os.environ.get("HR_CHECKPOINT"), reason="HR_CHECKPOINT names no checkpoint")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_real_checkpoint_is_equal_in_every_bit(framework):
    path = os.environ["HR_CHECKPOINT"]
    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    with headrace.safe_open(path, framework) as ours, safetensors.safe_open(path, framework) as theirs:
        assert ours.keys() == theirs.keys() and ours.metadata() == theirs.metadata()
        tensors = ours.get_tensors()
        assert len(tensors) == len(theirs.keys()) > 0
        for name in theirs.keys():
            assert not drop_in.same_tensor(tensors[name], theirs.get_tensor(name)), name
