"""The feature cache: the same features as live, never stale, and whole again after kills, damage and full disks."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Point, points

from speedkit.data import cache as module
from speedkit.data.cache import open_cache
from speedkit.data.cache_files import ENTRY, HEADER, fingerprint
from speedkit.data.loader import BatchStream
from speedkit.errors import BadItem, SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe

CPU = torch.device("cpu")
FILES = ("values.bin", "index.bin")


def load_file(item, wait_s):
    if not Path(item.path).exists():
        raise BadItem(item.path, "it is missing")
    time.sleep(wait_s)
    with open(Path(item.path).parent / "loads.log", "a") as log:
        log.write(f"{Path(item.path).stem}\n")
    return torch.from_numpy(np.fromfile(item.path, dtype=np.float32))


def features(waveform, gain):  # [T] -> [2, T]
    return torch.stack((waveform, gain * waveform))


def length(item):
    return Path(item.path).stat().st_size // 4


def files_workload(folder, count=20, varies=False, wait_s=0.0):
    """Small files with 8 numbers each, or 8 to 12 of them, that are multiples of 2**-15; the features are 2 of each."""
    folder.mkdir(exist_ok=True)
    items = [Point(str(folder / f"{number:03d}.raw"), number % 2) for number in range(count)]
    for number, item in enumerate(items):
        torch.randint(-9999, 9999, (8 + varies * number % 5,)).div(32768).numpy().tofile(item.path)
    functions = {"load": functools.partial(load_file, wait_s=wait_s), "features": functools.partial(features, gain=2.0)}
    parts = {"train": items, "test": items[:2], "length": length if varies else None, **functions}
    return dataclasses.replace(points(), parameters={"gain": 2.0}, sources=(), **parts)


@pytest.fixture
def workload(tmp_path):
    return files_workload(tmp_path / "data")


@pytest.fixture
def opened(tmp_path):
    """Open a cache of a workload below tmp_path."""

    def opened(workload, items=None, folder="cache", workers=0, device="cpu", **plan):
        plan, items = Plan(**({"cache": "disk"} | plan)), items or workload.train
        return open_cache(workload, items, plan, device=device, cache_dir=tmp_path / folder, workers=workers)

    return opened


def live(workload, items=None):
    return torch.stack([workload.features(workload.load(item)) for item in items or workload.train])


def served(cache):
    return cache.gather(torch.from_numpy(np.flatnonzero(cache.usable)), CPU).inputs


def content(folder):
    return {name: (Path(folder) / name).read_bytes() for name in FILES}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to keep entries on")
PLACES = [
    ("cpu", "disk"),
    ("cpu", "ram"),
    *(pytest.param("cuda", where, marks=needs_gpu) for where in ("disk", "ram", "device")),
]


@pytest.mark.parametrize(("device", "where"), PLACES)
@pytest.mark.parametrize(("varies", "dtype"), [(False, "float32"), (False, "float16"), (True, "float32")])
def test_gathered_rows_are_the_live_features_padded_with_zeros(tmp_path, opened, device, where, varies, dtype):
    workload, indices = files_workload(tmp_path / "data", varies=varies), torch.tensor([7, 0, 19, 7])
    opened(workload, items=workload.train[::-1], cache_dtype=dtype)  # another order on disk
    cache = opened(workload, device=device, cache=where, cache_dtype=dtype)
    for copy in (cache, pickle.loads(pickle.dumps(cache)), cache):
        batch = copy.gather(indices, torch.device(device), on_device=indices.to(device))
        inputs, targets, lengths = batch.inputs, batch.targets, batch.lengths
        assert inputs.dtype == torch.float32 and targets.tolist() == [1, 0, 1, 1]
        assert lengths.tolist() == [10, 8, 12, 10] if varies else lengths is None
        for row, index in zip(inputs.cpu(), indices, strict=True):
            expected = workload.features(workload.load(workload.train[index]))
            padded = torch.nn.functional.pad(expected, (0, inputs.shape[-1] - expected.shape[-1]))
            torch.testing.assert_close(row, padded, rtol=5e-4 if dtype == "float16" else 0, atol=0)  # 11 bits
        inputs.zero_(), targets.zero_()  # the batch is a copy
    assert cache.where == where and cache.why.startswith(f"cache={where}: ")


def half(item):
    return 0.5


@pytest.mark.parametrize("where", ["off", "disk", "ram"])
def test_decimal_targets_have_the_type_that_a_loss_takes_with_a_cache_and_without(opened, where):
    workload = dataclasses.replace(points(), target=half)
    plan = Plan(cache=where)
    cache = opened(workload, cache=where) if where != "off" else None
    stream = BatchStream(workload, workload.train, plan, batch_size=2, seed=None, device=CPU, cache=cache)
    assert next(stream).targets.dtype == torch.float32


def test_waveforms_are_kept_as_16_bits_and_what_does_not_fit_into_memory_stays_on_disk(workload, opened, monkeypatch):
    monkeypatch.setattr(module, "MEMORY_SHARE", 0.0)
    cache = opened(workload, cache="ram", cache_of="waveform")
    assert cache.where == "disk" and "more than half of what is free in ram" in cache.why
    assert (cache.folder / "values.bin").stat().st_size == 20 * 8 * 2
    assert torch.equal(served(cache), torch.stack([workload.load(item) for item in workload.train]))


def test_items_that_cannot_be_read_are_named_and_tried_again(workload, opened):
    path = Path(workload.train[4].path)
    data = path.read_bytes()
    path.unlink()
    cache = opened(workload)
    assert cache.bad == {str(path): "it is missing"}
    assert np.flatnonzero(~cache.usable).tolist() == [4] and len(served(cache)) == 19
    path.write_bytes(data)
    assert opened(workload).bad == {} and torch.equal(served(opened(workload)), live(workload))


def test_what_no_cache_can_be_made_of_is_an_error(workload, opened):
    with pytest.raises(SpeedkitError, match=r"cannot be seen .*lock"):
        opened(dataclasses.replace(workload, features=functools.partial(features, gain=threading.Lock())))
    with pytest.raises(SpeedkitError, match=r"cannot be built .*000\.raw.*cache_dir="):
        opened(workload, folder=workload.train[0].path)
    with pytest.raises(SpeedkitError, match=r"1 of 1 files cannot be used.*000\.raw.*its features hold NaN, infinity"):
        opened(dataclasses.replace(workload, features=torch.log), workload.train[:1])
    for item in workload.train:
        Path(item.path).unlink()
    with pytest.raises(SpeedkitError, match=r"20 of 20 files cannot be used.*it is missing"):
        opened(workload)


# What is built again, and what is not.


def test_only_what_changed_is_computed_again(workload, opened, tmp_path, monkeypatch):
    log = tmp_path / "data" / "loads.log"

    def loaded(items=workload.train, work=workload):
        log.unlink(missing_ok=True)
        cache = opened(work, items)
        again = sorted(set(log.read_text().split())) if log.exists() else []
        assert torch.equal(served(cache), live(work, items))
        assert cache.labels["targets"].tolist() == [item.label for item in items]
        return again

    assert loaded(workload.train[:15]) == [f"{number:03d}" for number in range(15)]
    assert loaded() == ["015", "016", "017", "018", "019"]  # added
    assert loaded() == loaded(workload.train[3:7][::-1]) == loaded([workload.train[5]] * 2) == []
    assert loaded([dataclasses.replace(item, label=5) for item in workload.train]) == []
    path = Path(workload.train[5].path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert loaded() == ["005"]
    louder = {"features": functools.partial(features, gain=4.0), "parameters": {"gain": 4.0}}
    assert len(loaded(work=dataclasses.replace(workload, **louder))) == 20
    # Another folder with files of the same names.
    relative = [dataclasses.replace(item, path=Path(item.path).name) for item in workload.train]
    for folder in ("data", "other"):
        files_workload(tmp_path / folder)
        monkeypatch.chdir(tmp_path / folder)
        loaded(relative)


def test_the_fingerprint_changes_with_each_thing_that_all_entries_depend_on(workload, tmp_path, monkeypatch):
    def of(plan=None, **changes):
        return fingerprint(dataclasses.replace(workload, **changes), plan or Plan())

    def edited(text):
        (tmp_path / "edited.py").write_text(text)
        spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made.transform

    one, other = lambda x: 5 * x, lambda x: 6 * x  # of one name
    helping = "def transform(x):\n    return helper(x)\n\ndef helper(x):\n    return {} * x\n"
    hashes = [
        of(),
        of(Plan(cache_of="waveform")),
        of(Plan(cache_dtype="float16")),
        of(Plan(decoder="torchcodec"), decoders=("torchcodec",)),
        of(parameters={"gain": 3.0}),
        of(features=functools.partial(features, gain=4.0)),
        of(features=torch.nn.Linear(8, 8)),
        of(sources=(live,)),
        of(features=one),
        of(features=other),
        of(features=edited(helping.format(1))),
        of(features=edited(helping.format(2))),
    ]
    assert len(set(hashes)) == len(hashes) and of(features=functools.partial(features, gain=4.0)) in hashes
    assert of(recipe=Recipe(batch_size=4, seed=9), margin=0.5, augment=print) == of()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    assert of() != hashes[0]


# Killed and concurrent builds.


def forked(work, *arguments, **options):
    """Start a process, of a group of its own, that calls `work`; return its id."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)
        work(*arguments, **options)
        os._exit(0)
    os._exit(1)


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("times", [2, pytest.param(22, marks=pytest.mark.slow)])
def test_a_killed_build_goes_on_and_comes_out_the_same(tmp_path, opened, times, attack):
    """Kill a build, of one process or two, at random moments."""
    many = files_workload(tmp_path / "data", 100, wait_s=0.002)
    rng, whole = random.Random(0), content(opened(many, folder="whole").folder)
    log = Path(many.train[0].path).with_name("loads.log")
    with attack("kills while a cache is built") as tried:
        for number in range(times):
            log.unlink()
            processes, until = 1 + number % 2, rng.randrange(3, 97)
            with tried(f"{processes} processes after {until} entries"):
                child = forked(opened, many, folder=f"{number}", workers=processes)
                while not log.exists() or len(log.read_text().split()) < until:
                    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the build ended before it was killed"
                os.killpg(child, signal.SIGKILL)
                exit_code(child)
                started = len(log.read_text().split())
                cache = opened(many, folder=f"{number}")
                assert 100 > 100 - cache.built >= started - 1 - processes  # one more is tried for the shape of entries
                assert content(cache.folder) == whole


def test_two_builders_at_once_share_the_work_of_one(tmp_path, opened):
    many = files_workload(tmp_path / "data", 100, wait_s=0.002)
    children = [forked(opened, many, workers=2) for _ in range(2)]
    assert [exit_code(child) for child in children] == [0, 0]
    assert opened(many).built == 0 and torch.equal(served(opened(many)), live(many))


@pytest.mark.slow
def test_a_run_says_for_whom_it_waits(tmp_path, opened, monkeypatch):
    monkeypatch.setattr("speedkit.data.cache.WAIT_S", 0.1)
    many = files_workload(tmp_path / "data", 40, wait_s=0.05)
    child = forked(opened, many)
    while not list(tmp_path.glob("cache/*/.builder")):
        time.sleep(0.01)
    with pytest.warns(UserWarning, match=f"waiting for process {child}, which builds the cache"):
        assert opened(many).built == 0
    assert exit_code(child) == 0


# Places that cannot be written.


@contextlib.contextmanager
def mounted(folder, size):
    """A small file system in memory at `folder`."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_sentence(tmp_path, opened):
    workload = files_workload(tmp_path / "data", 200, varies=True)  # 16 kB
    with mounted(tmp_path / "small", "16k"), pytest.raises(SpeedkitError, match=r"No space left on device.*make room"):
        opened(workload, folder="small")


# Damage.


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def cut(path, place, _):
    os.truncate(path, place)


def remove(path, *_):
    path.unlink()


HEADER_BYTES, ROW_BYTES = HEADER.itemsize, ENTRY.itemsize
WHERE = {  # the bytes of each part of the files, of caches with 20 entries of 64 bytes
    "header": ("index.bin", range(HEADER_BYTES)),
    "row": ("index.bin", range(HEADER_BYTES, HEADER_BYTES + 20 * ROW_BYTES)),
    "size": ("index.bin", [HEADER_BYTES + row * ROW_BYTES + 8 + byte for row in range(20) for byte in range(8)]),
    "index": ("index.bin", range(HEADER_BYTES + 20 * ROW_BYTES)),
    "values": ("values.bin", range(20 * 64)),
}
FEW = [(kind, part) for kind in (flip, cut, remove) for part in ("index", "values")] * 2
MANY = [(flip, part) for part in ("header", "row", "size", "values")] * 40
MANY += [(cut, part) for part in ("header", "row", "values")] * 20
MANY += [(remove, part) for part in ("index", "values")] * 10


@pytest.mark.filterwarnings("ignore:an entry in .* is not as it was written")
@pytest.mark.parametrize("kinds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=len)
def test_damage_is_never_served_and_is_mended(workload, opened, tmp_path, kinds, attack):
    expected, folder, rng = live(workload), opened(workload).folder, random.Random(0)
    with attack("cache damage") as tried:
        for number, (kind, part) in enumerate(kinds):
            name, places = WHERE[part]
            place, bit = rng.choice(places), rng.randrange(8)
            copy = tmp_path / str(number) / folder.name
            shutil.copytree(folder, copy)
            with tried(f"{kind.__name__} {name} at {place}.{bit}"):
                running = opened(workload, folder=str(number))
                assert torch.equal(served(running), expected)
                kind(copy / name, place, bit)
                # Some of the items alone: the rows of the others are read as well.
                for where, items in itertools.product(("disk", "ram"), (workload.train[7:3:-1], workload.train)):
                    cache = opened(workload, items, folder=str(number), cache=where)
                    assert torch.equal(served(cache), live(workload, items)), "it was served"
                assert opened(workload, folder=str(number)).built == 0
                assert name == "index.bin" or content(copy) == content(folder)
                assert torch.equal(served(running), expected), "a run that went on was harmed"
            shutil.rmtree(copy)


@pytest.mark.filterwarnings("ignore:an entry in .* is not as it was written")
@pytest.mark.parametrize(("kind", "place"), [(flip, 90), (cut, HEADER_BYTES + 2 * ROW_BYTES)])
def test_a_run_goes_on_with_its_entries_when_another_finds_the_index_damaged(workload, opened, kind, place):
    mine = opened(workload)
    kind(mine.folder / "index.bin", place, 0)
    other = opened(workload, items=workload.train[::-1])  # lies in another order in the same files
    assert other.built == 20 and torch.equal(served(other), live(workload, workload.train[::-1]))
    assert torch.equal(served(mine), live(workload))


def test_a_file_that_was_cut_is_said_when_an_epoch_begins(workload, opened):
    cache = opened(workload)
    cache.check_size()
    os.truncate(cache.folder / "values.bin", 8)
    with pytest.raises(SpeedkitError, match="was cut"):
        cache.check_size()
