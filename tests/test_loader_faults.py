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

from speedkit.data import workers
from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, THREADS = {"workers": 2}, {"workers": 2, "worker_kind": "thread"}
PERSISTENT = {"workers": 2, "persistent_workers": True}


class Unpicklable(Exception):
    def __init__(self, one, other):
        super().__init__(one)
        self.lock = threading.Lock()


def recursive():
    return recursive()


def open_too_many():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    [open(os.devnull) for _ in range(70)]  # noqa: SIM115


FAULTS = {
    "unpicklable": (lambda: Unpicklable("a bug", 2), "Unpicklable: a bug"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "recursion": (recursive, "RecursionError"),
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
ENDS += [(fault, THREADS) for fault in ("unpicklable", "sys.exit", "hung")]


@pytest.mark.parametrize(("fault", "plan"), ENDS, ids=str)
def test_a_fault_in_a_worker_is_one_sentence_that_names_the_item(fault, plan, monkeypatch, capfd):
    monkeypatch.setattr(workers, "HUNG_S", 2.0)
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


@pytest.mark.parametrize("plan", [PROCESSES, THREADS], ids=str)
def test_samples_that_do_not_stack_are_one_sentence(plan):
    with pytest.raises(SpeedkitError, match=r"stack expects each tensor to be equal size.*\[\d\].*workers=0"):
        drain(uneven, **plan)


def slow(item):
    time.sleep(0.03)
    return load(item, 8)


def test_a_batch_that_takes_long_is_no_hang_while_its_items_come(monkeypatch):
    monkeypatch.setattr(workers, "HUNG_S", 0.2)  # a batch of 16 takes 0.5 s
    drain(slow, count=1, **PROCESSES)


# Whole runs, by the command line: how they end, and that they do.

FAULTY = """
import dataclasses, os, signal, sys, time, torch
sys.path.insert(0, {tests!r})
from speedkit.data import workers
from tiny import load, points
workers.HUNG_S = 2.0


class Loss:
    calls = 0
    def __call__(self, model, batch, recipe):
        from tiny import loss
        Loss.calls += 1
        if Loss.calls == 3:
            {fault}
        return loss(model, batch, recipe)

def at_40(item):
    if item.path == "40":
        {in_load}
    return load(item, 8)

def workload():
    return dataclasses.replace(points(train=1600), loss=Loss(), load=at_40)
"""
CHILDREN = "[process.pid for process in __import__('multiprocessing').active_children()]"


def start(folder, *options, fault="pass", in_load="pass"):
    """`speedkit train` on points whose step 3 has the `fault`, or whose item 40."""
    (folder / "faulty.py").write_text(FAULTY.format(tests=str(ROOT / "tests"), fault=fault, in_load=in_load))
    command = [sys.executable, "-m", "speedkit", "train", "faulty:workload", "--workers", "2", *options]
    return subprocess.Popen(
        [*command, "--out", str(folder / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process):
    """Return (exit code, lines of stderr) once the run has ended; hold that nothing of it is left."""
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout.split()
        if left:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left
    return process.returncode, errors.splitlines()


STOP_ALL = f"[os.kill(pid, signal.SIGSTOP) for pid in {CHILDREN}]"
RUNS = {
    "stopped": ({"fault": STOP_ALL}, ("--persistent-workers",), "a worker hangs"),
    "killed": ({"fault": f"os.kill({CHILDREN}[0], signal.SIGKILL)"}, (), "exit code -9"),
    "thread": ({"in_load": "time.sleep(1000)"}, ("--worker-kind", "thread"), "hangs at 40"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_workers_fail_ends_with_one_sentence_and_leaves_no_process(name, tmp_path):
    faults, options, words = RUNS[name]
    code, errors = end(start(tmp_path, *options, **faults))
    assert code == 1 and len(errors) == 1 and words in errors[0], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [(signal.SIGINT, 130, "stopped by SIG"), (signal.SIGTERM, 143, "stopped by SIG"), (signal.SIGKILL, -9, "")],
)
def test_a_signal_ends_run_and_workers(number, expected, words, tmp_path):
    started = tmp_path / "started"
    process = start(tmp_path, "--epochs", "1000", fault=f"open({str(started)!r}, 'w').close()")
    while not started.exists():
        assert process.poll() is None
    if number == signal.SIGKILL:  # to the run alone: its workers find the pipe closed, one after the other
        process.kill()
        process.wait()
        psutil.wait_procs([child for child in psutil.process_iter() if in_group(child, process.pid)], timeout=10)
    else:
        os.killpg(process.pid, number)
    code, errors = end(process)
    assert code == expected and words in "".join(errors), errors


def in_group(process, group):
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group
