"""What can happen to a loader's workers: each end is one sentence that says what to do, and leaves no process."""

import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny import load, points

from speedkit.data import batches
from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = {"workers": 2}
PERSISTENT = {"workers": 2, "persistent_workers": True}


class Unpicklable(Exception):
    def __init__(self, one, other):
        super().__init__(one)
        self.lock = threading.Lock()


def open_too_many():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    [open(os.devnull) for _ in range(70)]  # noqa: SIM115


FAULTS = {
    "unpicklable": (lambda: Unpicklable("a bug", 2), "Unpicklable: a bug"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "end of iteration": (lambda: StopIteration(), "StopIteration"),
    "files": (open_too_many, "Too many open files"),
    "runtime": (lambda: RuntimeError("line one\nline two"), "RuntimeError: line one"),
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        r"died \(exit code -9,.* memory is out\) at 40; workers=0",
    ),
    "hung": (lambda: time.sleep(1000), "no batch for 2 s: a worker hangs at 40; workers=0"),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "no batch for 2 s: a worker hangs at 40"),
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


ENDS = [(fault, PROCESSES) for fault in FAULTS] + [("stopped", PERSISTENT)]


@pytest.mark.parametrize(("fault", "plan"), ENDS, ids=str)
def test_a_fault_in_a_worker_is_one_sentence_that_names_the_item(fault, plan, monkeypatch, capfd):
    monkeypatch.setattr(batches, "HUNG_S", 2.0)
    monkeypatch.setattr(batches, "CHECK_S", 0.5)
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


def uneven(item):
    return torch.zeros(9 if item.path == "40" else 8)


def test_samples_that_do_not_stack_are_one_sentence():
    with pytest.raises(SpeedkitError, match=r"stack expects each tensor to be equal size.*\[\d\].*workers=0"):
        drain(uneven, **PROCESSES)


def wait(item):  # a batch of 16 takes 2.4 s
    time.sleep(0.15)
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


@pytest.mark.parametrize("slow", [wait, compute, read])
def test_what_takes_long_is_no_hang_while_items_come_or_one_is_worked_on(slow, monkeypatch):
    monkeypatch.setattr(batches, "HUNG_S", 1.0)
    monkeypatch.setattr(batches, "CHECK_S", 0.3)
    drain(slow, count=6, **PROCESSES)


# Whole runs, by the command line: how they end, and that they do.

FAULTY = """
import dataclasses, itertools, multiprocessing, os, signal, sys, time
sys.path.insert(0, {tests!r})
import tiny
from speedkit.data import batches
batches.CHECK_S, batches.HUNG_S = 0.5, 2.0
calls = itertools.count(1)

def loss(model, batch, recipe):
    if next(calls) == 3:
        pids = [process.pid for process in multiprocessing.active_children()]
        {fault}
    return tiny.loss(model, batch, recipe)

def load(item):
    if item.path == "40":
        {in_load}
    return tiny.load(item, 8)

def workload():
    return dataclasses.replace(tiny.points(train=1600), loss=loss, load=load)
"""
SELF = "os.killpg(os.getpid(), signal.SIG{})"
# What goes wrong, options, the exit code, and words of the one line of stderr.
RUNS = {
    "stopped": ({"fault": "[os.kill(pid, signal.SIGSTOP) for pid in pids]"}, ["--persistent-workers"], 1, "hangs"),
    "killed": ({"fault": "os.kill(pids[0], signal.SIGKILL)"}, [], 1, "exit code -9"),
    "hung": ({"in_load": "time.sleep(1000)"}, [], 1, "hangs at 40"),
    "ctrl-c": ({"fault": SELF.format("INT")}, [], 130, "stopped by SIG"),
    "terminated": ({"fault": SELF.format("TERM")}, [], 143, "stopped by SIG"),
    "killed itself": ({"fault": "os.kill(os.getpid(), signal.SIGKILL)"}, [], -9, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_one_sentence_and_leaves_no_process(name, tmp_path):
    faults, options, code, words = RUNS[name]
    script = FAULTY.format(tests=str(ROOT / "tests"), **({"fault": "pass", "in_load": "pass"} | faults))
    (tmp_path / "faulty.py").write_text(script)
    command = [sys.executable, "-m", "speedkit", "train", "faulty:workload", "--workers", "2", *options]
    process = subprocess.Popen(
        [*command, "--out", tmp_path / "out"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, errors = process.communicate(timeout=60)  # until the workers have closed stderr, too
    assert process.returncode == code and words in errors, errors
    assert errors.count("\n") == 1 or code == -signal.SIGKILL, errors  # its workers may say that their pipe broke
    group = [child for child in psutil.process_iter() if in_group(child, process.pid)]
    assert psutil.wait_procs(group, timeout=10)[1] == []


def in_group(process, group):
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group
