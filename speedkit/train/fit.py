"""A whole training: set up, all steps, signals answered, the history written."""

import contextlib
import gc
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from speedkit.data.sources import write_quarantine
from speedkit.errors import Interrupted
from speedkit.files import write_json
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.history import History
from speedkit.train.loop import steps
from speedkit.train.setup import TrainingRun, setup_run
from speedkit.workloads.workload import Workload


def fit(workload: Workload, recipe: Recipe | None = None, plan: Plan | None = None, **options: Any) -> History:
    """Train `workload` by `recipe`, as fast as `plan` says; return the course of the run with the trained model.

    Options are those of `setup_run`. Ctrl-C and SIGTERM end the run after the step in progress with a checkpoint (where
    `out` is set) and raise Interrupted.
    """
    with contextlib.closing(setup_run(workload, recipe, plan, **options)) as run:
        with stop_on_signal(run), gc_paused():
            for _ in steps(run):
                if run.stopping:
                    break
        history = finish(run)
    if run.stopping:
        resume = f"--resume goes on from {run.out / checkpoint.NAME}" if run.out else "nothing is kept without --out"
        raise Interrupted(f"stopped by {signal.Signals(run.stop).name} after step {run.step}; {resume}", run.stop)
    return history


def finish(run: TrainingRun) -> History:
    """Complete the history of `run`, write it where `out` is set, and return it."""
    history = run.history
    history.effective, history.steps, history.model = run.effective, run.steps_made, run.model
    if run.device.type == "cuda":  # since the model was made
        history.peak_memory_bytes = torch.cuda.max_memory_allocated(run.device)
    else:  # RAM of this process, ever
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        history.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    history.quarantined = dict(run.workload.quarantined) | run.train_batches.bad | run.test_batches.bad
    if run.ranks is not None:
        for quarantined in run.ranks.all_gather(history.quarantined):
            history.quarantined |= quarantined
    if run.writer is not None:
        run.writer.wait()
        write_json(run.writer.folder / "history.json", history.as_dict())
        if history.quarantined:
            run.progress.say(f"  {len(history.quarantined)} files were left out (quarantine.csv says why)")
            write_quarantine(run.writer.folder / "quarantine.csv", sorted(history.quarantined.items()))
    if run.ranks is not None:
        run.ranks.all_gather(None)  # a rank that goes before all is written would take the others along
    return history


@contextlib.contextmanager
def stop_on_signal(run: TrainingRun) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the step in progress."""

    def request(number: int, _frame: Any) -> None:
        if run.stop and run.ranks is None:  # the second one stops at once
            raise KeyboardInterrupt
        run.stop = number

    handlers = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
        handlers = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Let no garbage collection begin by itself in what runs inside; log points collect what is young.

    Left alone it begins in the middle of some step, looks through every object of the process, and keeps a GPU waiting.
    Tensors are freed as ever, by their reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
