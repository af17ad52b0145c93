"""A whole training: set up, all steps, signals answered, the history written."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

from speedkit.errors import Interrupted
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.history import History
from speedkit.train.loop import steps
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run
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
        history = run.finish()
    if run.stopping:
        resume = f"--resume goes on from {run.out / checkpoint.NAME}" if run.out else "nothing is kept without --out"
        raise Interrupted(f"stopped by {signal.Signals(run.stop).name} after step {run.step}; {resume}", run.stop)
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
