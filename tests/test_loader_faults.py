"""What can happen to a loader's workers: each end is one sentence that says what to do, and leaves no process."""

import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import features, load, points
from torch.multiprocessing import active_children

from speedkit.data import workers
from speedkit.data.loader import BatchStream
from speedkit.data.samples import shuffled
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.train.loop import begin, close, steps

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


def batches_of(load_item, **plan):
    workload = dataclasses.replace(points(), load=load_item)
    return BatchStream(workload, workload.train, Plan(**plan), 16, 0, CPU)


def take_all(batches):
    """Take two epochs of batches, then end what is left."""
    try:
        for _ in range(12):
            batches.next()
    finally:
        batches.close()


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_a_killed_worker_ends_the_run_in_a_sentence(persistent):
    before = set(active_children())
    plan = Plan(workers=2, persistent_workers=persistent)
    run = begin(points(train=1600), plan=plan, device="cpu", progress=False)  # 100 batches, 5 of them made ahead
    with pytest.raises(SpeedkitError, match=r"a loader process died \(exit code -9\).*memory runs out.*workers=0"):
        for step in steps(run):
            if step == 3:
                os.kill(run.batches.pids[0], signal.SIGKILL)
    close(run)
    assert set(active_children()) <= before


def crashes_at_40(item):
    if item.path == "40":
        os.kill(os.getpid(), signal.SIGSEGV)
    return load(item, 8)


@pytest.mark.slow
def test_an_item_that_crashes_its_worker_is_named():
    before = set(active_children())
    with pytest.raises(SpeedkitError, match=r"died \(exit code -11\) at 40; workers=0 shows"):
        take_all(batches_of(crashes_at_40, workers=2))
    assert set(active_children()) <= before


def hangs_at_40(item):
    if item.path == "40":
        time.sleep(600)
    return load(item, 8)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_an_item_that_hangs_is_named(kind, monkeypatch):
    monkeypatch.setattr(workers, "HUNG_S", 0.5)
    before = set(active_children())
    with pytest.raises(SpeedkitError, match=r"no batch for 0.5 s: a worker hangs at 40; .*workers=0"):
        take_all(batches_of(hangs_at_40, workers=2, worker_kind=kind))
    assert set(active_children()) <= before


def hangs_once(item, folder, paths):
    if item.path in paths and not (folder / item.path).exists():
        (folder / item.path).touch()
        time.sleep(600)
    return load(item, 8)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_after_a_passing_hang_new_workers_go_on_with_the_same_batches(persistent, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "HUNG_S", 0.5)
    before = set(active_children())
    loading = functools.partial(hangs_once, folder=tmp_path, paths=("40", "7", "81"))  # in three batches of six
    plan = {"workers": 2, "persistent_workers": persistent}
    theirs, alone = batches_of(loading, **plan), batches_of(functools.partial(load, size=8))
    with pytest.warns(UserWarning, match=r"no batch for 0.5 s: a worker hangs at \d+; .* once more with new workers"):
        for _ in range(14):
            assert all(map(torch.equal, theirs.next(), alone.next()))
    assert len(list(tmp_path.iterdir())) == 3
    theirs.close()
    assert set(active_children()) <= before


def slow(item):
    time.sleep(0.05)
    return load(item, 8)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_batch_that_takes_long_is_no_hang_while_its_items_come(kind, monkeypatch):
    monkeypatch.setattr(workers, "HUNG_S", 0.5)  # a batch of 16 takes 0.8 s
    batches = batches_of(slow, workers=1, worker_kind=kind)
    assert len(batches.next()[0]) == 16
    batches.close()


def fails_at_40(item, error):
    if item.path == "40":
        raise error("a bug in load")
    return load(item, 8)


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError])  # the latter is also what PyTorch raises
@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"workers": 2, "worker_kind": "thread"}], ids=str)
def test_a_bug_in_load_stays_the_error_it_is(plan, error):
    before = set(active_children())
    with pytest.raises(error, match="a bug in load"):
        take_all(batches_of(functools.partial(fails_at_40, error=error), **plan))
    assert set(active_children()) <= before


FULL = """
import dataclasses, sys, torch
sys.path.insert(0, "tests")
from tiny import points
from speedkit.data.loader import BatchStream
from speedkit.plan import Plan
workload = dataclasses.replace(points(size=100_000), features=torch.Tensor.contiguous)
batches = BatchStream(workload, workload.train, Plan(workers=2), 16, 0, torch.device("cpu"))
try:
    for _ in range(6):
        batches.next()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_shared_memory_is_named():
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("a small /dev/shm of its own needs root and `unshare`")
    done = subprocess.run([*mount, sys.executable, "-c", FULL], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "SpeedkitError /dev/shm (8 MB) is full: workers * prefetch_factor = 4 batches must fit" in done.stdout


# Mid-epoch.


class Counted:
    """A `load` that writes down what it loads."""

    def __init__(self, path):
        self.path = path

    def __call__(self, item):
        with open(self.path, "a") as file:
            file.write(f"{item.path}\n")
        return load(item, 8)


@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"workers": 2, "worker_kind": "thread"}], ids=str)
def test_resuming_in_an_epoch_loads_nothing_twice_and_skips_nothing(tmp_path, plan):
    order = shuffled(96, seed=0, epoch=0).tolist()
    batches = batches_of(Counted(tmp_path / "loaded"), **plan)
    batches.position = 4  # of 6 batches of 16
    rest = [batches.next() for _ in range(2)]
    batches.close()
    expected = torch.stack([features(load(points().train[index], 8)) for index in order[64:]])
    assert torch.equal(torch.cat([inputs for inputs, _ in rest]), expected)
    loaded = [int(line) for line in (tmp_path / "loaded").read_text().split()]
    assert sorted(loaded) == sorted(order[64:])
