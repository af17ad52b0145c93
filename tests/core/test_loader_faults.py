"""What can happen to a loader's workers: each end is one sentence that says what to do, and leaves no process."""

import dataclasses
import functools
import itertools
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny import load, points

from speedkit import from_loader
from speedkit.data import batches
from speedkit.data.loader import BatchStream
from speedkit.errors import DataError, SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.train.prepare import prepare

PROCESSES = {"workers": 2}
PERSISTENT = {"workers": 2, "persistent_workers": True}


def open_too_many():
    time.sleep(1.0)  # the batch before is on its way, by a thread that needs files, too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        [open(os.devnull) for _ in range(70)]  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # that thread sends the next batch, too


FAULTS = {
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "files": (open_too_many, "Too many open files"),
    "runtime": (lambda: RuntimeError("line one\nline two"), "RuntimeError: line one"),
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        r"died \(exit code -9,.* memory is out\) at 40; workers=0",
    ),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "no batch for 2 s: a worker hangs at 40; workers=0"),
}


def faulty_load(item, fault):
    if item.path == "40":
        error = FAULTS[fault][0]()
        raise error
    return load(item, 8)


def drain(load_item, count=12, **plan):
    """Take batches, of two epochs by default, then end what is left."""
    workload = dataclasses.replace(points(), load=load_item)
    stream = BatchStream(workload, workload.train, Plan(**plan), batch_size=16, seed=0, device=torch.device("cpu"))
    try:
        for _ in itertools.islice(stream, count):
            pass
    finally:
        stream.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(batches, "HUNG_S", 2.0)
    monkeypatch.setattr(batches, "CHECK_S", 0.5)


ENDS = [(fault, PROCESSES) for fault in FAULTS] + [("stopped", PERSISTENT)]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "plan"), ENDS, ids=str)
@pytest.mark.usefixtures("impatient")
def test_a_fault_in_a_worker_is_one_sentence_that_names_the_item(fault, plan, capfd):
    before = set(psutil.Process().children())
    with pytest.raises(SpeedkitError, match=FAULTS[fault][1]) as caught:
        drain(functools.partial(faulty_load, fault=fault), **plan)
    assert "at 40" in str(caught.value) and "\n" not in str(caught.value)
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=10)
    assert alive == [] and capfd.readouterr().err == ""


def test_a_loader_of_the_user_s_own_hears_nothing_of_ended_workers(capfd):
    """PyTorch's handler for dead workers, there from its first loader on, would raise in the main thread."""
    list(torch.utils.data.DataLoader(range(4), num_workers=1))
    drain(functools.partial(load, size=8), **PERSISTENT)
    assert capfd.readouterr().err == ""


def test_ctrl_c_while_workers_start_is_acted_on_once_they_have():
    started = False
    other = threading.Event()
    threading.Thread(target=other.wait).start()  # a thread that takes the signal
    with pytest.raises(KeyboardInterrupt), batches.stops_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        started = True
    other.set()
    assert started and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Stopping(torch.utils.data.Dataset):
    """Its 40th sample, when it is made for the second time, stops the process that makes it."""

    made = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.made += index == 40
        if index == 40 and self.made == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((8,), float(index)), index % 2


def train_from_loader(loader):
    def step(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    work = from_loader(lambda: torch.nn.Linear(8, 2), loader, step, recipe=Recipe(epochs=3))
    fit(work, device="cpu", progress=False)


def train_in_own_loop(loader):
    model = torch.nn.Linear(8, 2)
    _, _, loader = prepare(Plan(), model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(3):
        list(loader)


@pytest.mark.parametrize("train", [train_from_loader, train_in_own_loop])
@pytest.mark.usefixtures("impatient")
def test_a_stopped_worker_of_the_user_s_own_loader_is_one_sentence(train):
    """In the second epoch, whose workers were there in the first."""
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    with pytest.raises(SpeedkitError, match="no batch for 2 s: a worker hangs"):
        train(torch.utils.data.DataLoader(Stopping(), batch_size=8, **options))
    processes = [process.info for process in psutil.process_iter(["ppid", "status"])]
    assert {"ppid": os.getpid(), "status": psutil.STATUS_STOPPED} not in processes


def uneven(item):
    return torch.zeros(9 if item.path == "40" else 8)


def test_samples_that_do_not_stack_are_one_sentence():
    with pytest.raises(SpeedkitError, match=r"stack expects each tensor to be equal size.*\[\d\].*workers=0"):
        drain(uneven, **PROCESSES)


def wait(item):  # a batch of 16 takes 1.6 s
    time.sleep(0.1)
    return load(item, 8)


def compute(item):
    if item.path == "40":
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < 2:
            pass
    return load(item, 8)


def read(item):
    if item.path == "40":
        for _ in range(20):
            Path(__file__).read_bytes()
            time.sleep(0.1)
    return load(item, 8)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [wait, compute, read])
def test_what_takes_long_is_no_hang_while_items_come_or_one_is_worked_on(slow, monkeypatch):
    monkeypatch.setattr(batches, "HUNG_S", 1.0)
    monkeypatch.setattr(batches, "CHECK_S", 0.3)
    drain(slow, count=6, **PROCESSES)


def dies_once(item, mark):
    if item.path == "40" and not mark.exists():
        mark.touch()
        os.closerange(3, 1 << 10)  # as the kernel does it: files first, which whoever reads them notices
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return load(item, 8)


@pytest.mark.slow
def test_a_dead_worker_leaves_a_checkpoint_of_the_last_step_from_which_the_run_goes_on(tmp_path):
    options = {"plan": Plan(workers=1, log_every=1), "device": "cpu", "progress": False}
    whole = fit(points(), **options)
    workload = dataclasses.replace(points(), load=functools.partial(dies_once, mark=tmp_path / "mark"))
    with pytest.raises(DataError, match="died"):
        fit(workload, out=tmp_path / "out", **options)
    again = fit(workload, out=tmp_path / "out", resume=True, **options)
    assert again.resumed_from > 0 and again.loss == whole.loss
