"""The feature cache: the same features as live, never stale, whole or absent, and shared by builders in peace."""

import dataclasses
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Point, points, target

from speedkit.data.cache import check_space, fingerprint, open_cache
from speedkit.data.decode import BadItem
from speedkit.data.loader import Batches
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import fit

CPU = torch.device("cpu")


def load_file(item):
    if not Path(item.path).exists():
        raise BadItem(item.path, "it is missing")
    return torch.from_numpy(np.fromfile(item.path, dtype=np.float32))


def features(waveform, gain):
    return waveform * gain


@pytest.fixture
def workload(tmp_path):
    """Twenty files of 8 numbers each."""
    folder = tmp_path / "data"
    folder.mkdir()
    items = [Point(str(folder / f"{number:02d}.raw"), number % 2) for number in range(20)]
    for item in items:
        torch.randn(8).numpy().tofile(item.path)
    return dataclasses.replace(
        points(), train=items, load=load_file, features=functools.partial(features, gain=2.0), target=target,
        parameters={"gain": 2.0}, sources=(load_file, features),
    )  # fmt: skip


@pytest.fixture
def cache(tmp_path):
    """`cache(workload, **plan)` opens the cache in a folder of this test's own."""
    return lambda workload, **plan: open_cache(
        workload, workload.train, Plan(**({"cache": "disk"} | plan)), cache_dir=tmp_path / "cache"
    )


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def live(workload, items=None):
    items = workload.train if items is None else items
    return torch.stack([workload.features(workload.load(item)) for item in items])


# What is gathered.


@pytest.mark.parametrize("where", ["disk", "ram"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 5e-4)])  # 11 bits of precision
def test_gathered_rows_are_the_live_features(workload, cache, where, dtype, tolerance):
    indices = torch.tensor([7, 0, 19, 7])
    inputs, targets = cache(workload, cache=where, cache_dtype=dtype).gather(indices, CPU)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, live(workload)[indices], rtol=tolerance, atol=0)
    assert targets.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_changing_a_gathered_batch_changes_no_cached_row(workload, cache, where):
    found = cache(workload, cache=where)
    inputs, targets = found.gather(torch.arange(20), CPU)
    inputs.zero_(), targets.zero_()
    assert torch.equal(found.gather(torch.arange(20), CPU)[0], live(workload))
    assert found.gather(torch.arange(20), CPU)[1].sum() == 10


def test_cached_batches_are_the_loaders_in_the_loaders_order(workload, cache):
    def stream(found):
        batches = Batches(workload, workload.train, Plan(), 8, 3, CPU, found)
        return [batches.next() for _ in range(7)]

    for mine, theirs in zip(stream(cache(workload)), stream(None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_unreadable_items_are_named_and_never_gathered(workload, cache, tmp_path):
    missing = workload.train[4].path
    Path(missing).unlink()
    for _ in range(2):  # built, then found
        found = cache(workload)
        assert found.bad == {missing: "it is missing"}
        inputs, targets = found.gather(torch.tensor([3, 4, 5]), CPU)
        assert torch.equal(inputs, live(workload, [workload.train[3], workload.train[5]]))
        assert targets.tolist() == [1, 1]


def test_the_second_time_nothing_is_computed(workload, cache, tmp_path):
    first = cache(workload)
    again = dataclasses.replace(workload, load=None, features=None)  # calling either would fail
    second = cache(again)
    assert second.folder == first.folder
    assert np.array_equal(second.values, first.values)
    assert folders(tmp_path) == [first.folder.name]


def test_building_reports_how_far_it_is(workload, tmp_path):
    seen = []
    open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=tmp_path / "cache",
               progress=lambda done, of: seen.append((done, of)))  # fmt: skip
    assert seen == [(16, 20), (20, 20)]


# Staleness.


def edited_module(path, factor):
    """A module with a transform, written to `path` and imported afresh."""
    path.write_text(f"def transform(waveform):\n    return waveform * {factor}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fingerprint_changes_with_each_thing_that_a_row_depends_on(workload, tmp_path):
    def of(changed=workload, items=None, dtype="float32"):
        return fingerprint(changed, workload.train if items is None else items, dtype)

    path = Path(workload.train[5].path)
    seen = [of()]
    assert of() == seen[0]
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.append(of())
    path.write_bytes(path.read_bytes() + b"1234")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a changed size behind the old time
    seen.append(of())
    path.unlink()
    seen.append(of())
    seen.append(of(dataclasses.replace(workload, parameters={"gain": 3.0})))
    seen.append(of(dataclasses.replace(workload, parameters={"gain": 2.0, "bands": 64})))
    seen.append(of(dtype="float16"))
    seen.append(of(items=workload.train[:-1]))
    seen.append(of(items=workload.train[::-1]))
    seen.append(of(items=[dataclasses.replace(workload.train[0], label=1), *workload.train[1:]]))
    for name, factor in (("one", 2.0), ("two", 3.0)):
        module = edited_module(tmp_path / f"{name}.py", factor)
        seen.append(of(dataclasses.replace(workload, sources=(module.transform,))))
    assert len(set(seen)) == len(seen)


def test_what_a_row_does_not_depend_on_leaves_the_cache_valid(workload):
    before = fingerprint(workload, workload.train, "float32")
    other = dataclasses.replace(workload, recipe=Recipe(batch_size=4, seed=9), margin=0.5, augment=print)
    assert fingerprint(other, workload.train, "float32") == before


def test_a_changed_file_is_read_again(workload, cache, tmp_path):
    before = cache(workload).gather(torch.tensor([5]), CPU)[0]
    path = Path(workload.train[5].path)
    modified_ns = path.stat().st_mtime_ns
    torch.randn(8).numpy().tofile(path)
    os.utime(path, ns=(0, modified_ns + 1))
    after = cache(workload).gather(torch.tensor([5]), CPU)[0]
    assert not torch.equal(after, before)
    assert torch.equal(after, live(workload, [workload.train[5]]))
    assert len(folders(tmp_path)) == 2


def test_a_changed_parameter_is_computed_again(workload, cache):
    cache(workload)
    louder = dataclasses.replace(
        workload, features=functools.partial(features, gain=4.0), parameters={"gain": 4.0}
    )
    assert torch.equal(cache(louder).gather(torch.arange(20), CPU)[0], live(louder))


def test_a_damaged_cache_is_named(workload, cache):
    folder = cache(workload).folder
    os.truncate(folder / "features.npy", 200)
    with pytest.raises(SpeedkitError, match=rf"{folder.name} is damaged .* remove it"):
        cache(workload)
    shutil.rmtree(folder)
    assert torch.equal(cache(workload).gather(torch.arange(20), CPU)[0], live(workload))


# Building.

INTERRUPTED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
import dataclasses
from tiny import points
from speedkit.data.cache import open_cache
from speedkit.plan import Plan

def progress(done, of):
    if done >= 48:
        os.kill(os.getpid(), int(sys.argv[3]))

workload = points()
open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=sys.argv[2], progress=progress)
"""

TWO = """
import sys
sys.path[:0] = [sys.argv[1]]
from tiny import points
from speedkit.data.cache import open_cache
from speedkit.plan import Plan

def progress(done, of):
    if done == 16:
        print("building", flush=True)
        sys.stdin.readline()  # until the other one builds too

workload = points()
found = open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=sys.argv[2], progress=progress)
print(found.folder.name, float(found.values.sum()))
"""


def start(code, *arguments):
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_build_leaves_nothing_that_is_taken_for_a_cache(tmp_path, number):
    child = start(INTERRUPTED, tmp_path, int(number))
    child.communicate(timeout=60)
    assert child.returncode in (-number, 128 + number)
    left = list(tmp_path.iterdir())
    assert all(path.name.startswith(".") for path in left)
    assert number == signal.SIGKILL or not left
    workload = points()
    found = open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=tmp_path)
    assert torch.equal(found.gather(torch.arange(96), CPU)[0], live(workload))


def test_a_transform_that_fails_leaves_nothing_behind(workload, cache, tmp_path):
    def failing(waveform):
        raise ValueError("a bug in the features")

    with pytest.raises(ValueError, match="a bug"):
        cache(dataclasses.replace(workload, features=failing))
    assert folders(tmp_path) == []


def test_two_builders_at_once_do_not_harm_each_other(tmp_path):
    children = [start(TWO, tmp_path) for _ in range(2)]
    assert [child.stdout.readline() for child in children] == ["building\n"] * 2
    said = [child.communicate("\n", timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert [path.name for path in tmp_path.iterdir()] == [said[0][0].split()[0]]


def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(SpeedkitError, match=r"needs 4\.0 GB and .* has 3\.0 GB free: .*--cache-dir"):
        check_space(4_000_000_000, 3_000_000_000, tmp_path)
    check_space(4_000_000_000, 5_000_000_000, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(workload, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpeedkitError, match=r"cannot be written to .*/file/cache"):
        open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=tmp_path / "file" / "cache")


def test_an_error_of_the_files_that_are_read_is_not_taken_for_one_of_the_cache(workload, cache):
    def unready(item):
        raise FileNotFoundError(2, "No such file or directory", item.path)

    with pytest.raises(FileNotFoundError):
        cache(dataclasses.replace(workload, load=unready))


def test_training_from_a_cache_found_is_training_from_a_cache_built(workload, tmp_path):
    workload = dataclasses.replace(workload, test=workload.train[:4])
    runs = [
        fit(workload, plan=Plan(cache=where, log_every=1), device="cpu", progress=False, cache_dir=tmp_path / "cache")
        for where in ("ram", "ram", "disk")
    ]
    assert runs[0].loss == runs[1].loss == runs[2].loss
