"""A whole training: set up, all steps, signals answered, the history written."""

import contextlib
import gc
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from speedkit.data.batches import STOPS
from speedkit.errors import SO_FAR, DataError, Interrupted, answered_by, stop_in_words
from speedkit.files import finite, write_json, write_quarantine
from speedkit.machine import peak_ram_bytes
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.checkpoint import save
from speedkit.train.checkpoint_file import NAME
from speedkit.train.history import History
from speedkit.train.loop import log, steps
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run
from speedkit.workload import Workload


@stop_in_words()
def fit(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | str | None = None,
    *,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    deterministic: bool = False,
    strict: bool = False,
    progress: bool | str = "auto",
    on_log: Callable[[dict[str, float]], object] | None = None,
    verbose: bool = False,
) -> History:
    """Train `workload` by `recipe`, as fast as `plan` says; return the course of the run with the trained model.

    By the workload's own recipe and `Plan()` by default; a plan may be a name, "fast", or that of a YAML file.

    device: "auto", "cpu", "cuda", "cuda:1", "mps".
    out: a folder, which gets checkpoint, plan and history; none of them are kept by default.
    resume: go on from the checkpoint in `out`.
    cache_dir: the folder of the feature cache [default: in machine.cache_root()].
    deterministic: ask CUDA for reproducible kernels (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    strict: a field of the plan that cannot be honoured is an error.
    progress: whether to show it; "auto" unless SPEEDKIT_PROGRESS=off.
    on_log: called with each log point, as history.jsonl gets it (`report`); of several ranks the first one does, and
        what it raises ends the run.
    verbose: say of each field of the plan why it falls back, however many they are.

    Ctrl-C, SIGTERM and SIGHUP end the run after the step in progress with a checkpoint (where `out` is set) and raise
    Interrupted, whose `so_far` is the history up to there, with the model. Data that can be loaded no more end it with
    a checkpoint, too, and DataError.
    """
    run = setup_run(**locals())  # all arguments, and as yet nothing else
    position = run.position
    with contextlib.closing(run):
        with stop_on_signal(run), gc_paused():
            try:
                for step in steps(run):
                    if run.reporting.history.log_steps[-1:] == [step]:
                        report(run)
                    if position.stop_agreed:
                        break
            except DataError:
                keep_last_step(run)
                raise
        history = finish(run)
    if position.stop_agreed:
        kept = SO_FAR
        if run.out is not None:
            kept = f"resume=True goes on from {run.out / NAME}"
        name = signal.Signals(position.stop_signal).name
        raise Interrupted(f"stopped by {name} after step {position.step}; {kept}", position.stop_signal, history)
    return history


def keep_last_step(run: TrainingRun) -> None:
    """Save the state after the last whole step, where a checkpoint is kept: no batch has come since."""
    if run.reporting.writer is None or run.ranks.several:  # others wait for a rank that saves
        return
    if run.position.recent:
        log(run)
    save(run)


def report(run: TrainingRun) -> None:
    """Give history.jsonl and `on_log` {step, epoch, seconds, loss, learning_rate, step_s, samples_per_s} of now.

    With the value and loss of a set that was evaluated, as "test/accuracy" and "test/loss".
    """
    reporting = run.reporting
    if reporting.log is None and reporting.on_log is None:
        return
    history = reporting.history
    stream = run.data.train
    step = run.position.step
    step_s = history.log_step_s[-1]
    point = {
        "step": step,
        "epoch": stream.epoch + stream.position / len(stream),
        "seconds": history.seconds,
        "loss": history.loss[-1],
        "learning_rate": float(run.learner.optimizer.param_groups[0]["lr"]),
        "step_s": step_s,
        "samples_per_s": run.recipe.batch_size / step_s,
    }
    for look in (*history.evaluations[-1:], history.tested):
        if look.get("step") == step:
            point[f"{look['set']}/{look['metric']}"] = look["value"]
            point[f"{look['set']}/loss"] = look["loss"]
    if reporting.log is not None:
        reporting.log.write(json.dumps(finite(point)) + "\n")
    if reporting.on_log is not None:
        reporting.on_log(point)
    reporting.lap()  # no part of the next step


def finish(run: TrainingRun) -> History:
    """Complete the history of `run`, write it where `out` is set, and return it."""
    reporting = run.reporting
    history = reporting.history
    history.steps = run.learner.steps_made(run.position.step)
    history.model = run.learner.model
    history.peak_memory_bytes = peak_ram_bytes()
    if run.device.type == "cuda":
        history.peak_memory_bytes = torch.cuda.max_memory_allocated(run.device)  # since the model was made
    history.quarantined = dict(run.workload.quarantined) | run.data.bad
    for quarantined in run.ranks.all_gather(history.quarantined):
        history.quarantined.update(quarantined)
    if reporting.writer is not None:
        folder = reporting.writer.folder
        reporting.writer.wait()
        write_json(folder / "history.json", history.as_dict())
        if history.quarantined:
            reporting.progress.say(f"  {len(history.quarantined)} files were left out (quarantine.csv says why)")
            write_quarantine(folder / "quarantine.csv", history.quarantined)
    run.ranks.all_gather(None)  # a rank that goes before all is written would take the others along
    return history


@contextlib.contextmanager
def stop_on_signal(run: TrainingRun) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request to stop after the step in progress."""
    heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one

    def request(number: int, _frame: Any) -> None:
        if run.position.stop_signal and not run.ranks.several:  # the second one stops at once
            raise KeyboardInterrupt
        run.position.stop_signal = number

    with answered_by(request, heard):
        yield


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Let no garbage collection begin by itself in what runs inside; log points collect what is young.

    Left alone it begins in the middle of some step, looks through every object of the process, and keeps a GPU waiting.
    Tensors are freed as ever, by their reference counts.
    """
    if not gc.isenabled():  # somebody else has paused it
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
