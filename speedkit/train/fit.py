"""A whole training: set up, all steps, signals answered, the history written."""

import contextlib
import gc
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from speedkit.errors import Interrupted
from speedkit.files import finite, write_json, write_quarantine, write_text
from speedkit.machine import peak_ram_bytes
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.checkpoint_file import NAME
from speedkit.train.history import History
from speedkit.train.loop import lap, steps
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run
from speedkit.workload import Workload


def fit(workload: Workload, recipe: Recipe | None = None, plan: Plan | None = None, **options: Any) -> History:
    """Train `workload` by `recipe`, as fast as `plan` says; return the course of the run with the trained model.

    Options are those of `setup_run`. Ctrl-C and SIGTERM end the run after the step in progress with a checkpoint (where
    `out` is set) and raise Interrupted.
    """
    with contextlib.closing(setup_run(workload, recipe, plan, **options)) as run, open_log(run) as log:
        with stop_on_signal(run), gc_paused():
            for step in steps(run):
                if run.history.log_steps[-1:] == [step]:
                    report(run, log)
                if run.stopping:
                    break
        history = finish(run)
    if run.stopping:
        resume = f"--resume goes on from {run.out / NAME}" if run.out else "nothing is kept without --out"
        raise Interrupted(f"stopped by {signal.Signals(run.stop).name} after step {run.step}; {resume}", run.stop)
    return history


def open_log(run: TrainingRun) -> contextlib.AbstractContextManager[TextIO | None]:
    """Return history.jsonl, to write to after the log points that the checkpoint knows of; None without `out`."""
    if run.writer is None:
        return contextlib.nullcontext()
    path = run.writer.folder / "history.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    write_text(path, "".join(lines[: len(run.history.loss)]))
    return path.open("a", encoding="utf-8", buffering=1)  # a line is in the file once it is written


def report(run: TrainingRun, log: TextIO | None) -> None:
    """Give history.jsonl and `on_log` {step, epoch, seconds, loss, learning_rate, step_s, samples_per_s} of now.

    With the value and loss of a set that was evaluated, as "test/accuracy" and "test/loss", and a GPU's power_w and
    utilisation as the progress last showed them.
    """
    if log is None and run.on_log is None:
        return
    history, stream, step_s = run.history, run.train_batches, run.history.log_step_s[-1]
    epoch, rate = stream.epoch + stream.position / len(stream), float(run.optimizer.param_groups[0]["lr"])
    point = {"step": run.step, "epoch": epoch, "seconds": history.seconds, "loss": history.loss[-1]}
    point |= {"learning_rate": rate, "step_s": step_s, "samples_per_s": run.recipe.batch_size / step_s}
    for look in (*history.evaluations[-1:], history.tested):
        if look.get("step") == run.step:
            point |= {f"{look['set']}/{look['metric']}": look["value"], f"{look['set']}/loss": look["loss"]}
    point |= run.progress.gpu
    if log is not None:
        log.write(json.dumps(finite(point)) + "\n")
    if run.on_log is not None:
        run.on_log(point)
    lap(run)  # no part of the next step


def finish(run: TrainingRun) -> History:
    """Complete the history of `run`, write it where `out` is set, and return it."""
    history = run.history
    history.effective, history.steps, history.model = run.effective, run.steps_made, run.model
    if run.device.type == "cuda":  # since the model was made
        history.peak_memory_bytes = torch.cuda.max_memory_allocated(run.device)
    else:  # RAM of this process, ever
        history.peak_memory_bytes = peak_ram_bytes()
    history.quarantined = dict(run.workload.quarantined) | run.train_batches.bad | run.test_batches.bad
    history.quarantined |= run.validation_batches.bad
    if run.ranks is not None:
        for quarantined in run.ranks.all_gather(history.quarantined):
            history.quarantined |= quarantined
    if history.until is not None:
        when = "not reached" if history.reached_s is None else f"reached after {history.reached_s:.1f} s of training"
        run.progress.say(f"  {run.workload.metric} {history.until:g} was {when}")
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
