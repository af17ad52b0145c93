"""The training loop.

`steps` is the loop: a generator that makes one optimizer step per `next()`, so that a measurement can hold two runs and
let them take turns. `fit` drains it.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from speedkit.data.augment import mixup
from speedkit.errors import Interrupted, SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.run import History, Run, begin, close, finish
from speedkit.workloads.workload import Batch

__all__ = ["Run", "begin", "close", "finish", "fit", "optimizer_step", "steps"]


def fit(workload: Any, recipe: Recipe | None = None, plan: Plan | None = None, **options: Any) -> History:
    """Train `workload` by `recipe`, as fast as `plan` says; return the course of the run with the trained model.

    Options are those of `begin`. Ctrl-C and SIGTERM end the run after the step in progress with a checkpoint (where
    `out` is set) and raise Interrupted.
    """
    run = begin(workload, recipe, plan, **options)
    try:
        with _signals_to(run):
            for _ in steps(run):
                pass
        history = finish(run)
    finally:
        close(run)
    if run.stop:
        kept = f"--resume goes on from {run.out / checkpoint.NAME}" if run.out else "nothing is kept without --out"
        raise Interrupted(f"stopped by {signal.Signals(run.stop).name} after step {run.step}; {kept}", run.stop)
    return history


def steps(run: Run) -> Generator[int, None, None]:
    """Make optimizer steps until the recipe is done, or `run.stop` is set; yield the number of steps made after each.

    The host reads the device at log points and evaluations and nowhere else.
    """
    workload, recipe, plan, history = run.workload, run.recipe, run.plan, run.history
    generator = torch.Generator(device=run.device)
    run.model.train()
    began_s = logged_s = time.perf_counter()
    logged_step = run.step

    while run.total_steps is None or run.step < run.total_steps:
        batch = run.batches.next()  # (inputs [B, ...], targets [B])
        if workload.augment is not None or recipe.mixup:
            # Seeded by the step, so that a resumed run draws what the uninterrupted one would have drawn.
            generator.manual_seed(recipe.seed * 1_000_003 + run.step)
        if workload.augment is not None:
            batch = workload.augment(batch, generator)
        if recipe.mixup:
            batch = mixup(batch, recipe.mixup, generator)
        run.set_learning_rate(run.step)
        run.last_loss, outputs, part = optimizer_step(run, batch)
        run.pending.append(run.last_loss)
        run.step += 1
        at_end = run.step == run.total_steps
        if at_end or run.step % plan.log_every == 0:
            latest = _read_losses(run)  # the host waits for the device here
            run.pending.clear()
            history.loss.append(sum(latest) / len(latest))
            history.log_steps.append(run.step)
            history.log_step_s.append((time.perf_counter() - logged_s) / (run.step - logged_step))
            if run.progress.show:
                score = float(workload.score(outputs.detach(), part).float().mean())
                run.progress.update(run.step, history.log_step_s[-1], history.loss[-1], score, workload.metric)
            logged_s, logged_step = time.perf_counter(), run.step
        due = at_end or (run.evaluate_every and run.step % run.evaluate_every == 0)
        if due or run.stop:
            paused_s = time.perf_counter()
            found = _evaluate(run) if due else None
            history.seconds += time.perf_counter() - began_s
            began_s = time.perf_counter()
            if found:
                history.evaluations.append({"step": run.step, "seconds": history.seconds, **found})
                run.progress.say("  step {}: {metric} {value:.4f} on {n} test items".format(run.step, **found))
            if run.out is not None:
                _read_losses(run)  # never over a good checkpoint
                history.quarantined = run.batches.bad | run.test_batches.bad
                checkpoint.save(run)
            logged_s += time.perf_counter() - paused_s  # evaluation is not training time
            if run.stop:
                return
        yield run.step


def optimizer_step(run: Run, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """Learn from `batch`, tensors `[B, ...]`, once; return its loss `[]`, and outputs and batch of its last part.

    Nothing here waits for the device.
    """
    # Here and not after the step, the memory just freed is still in the CPU's cache when the forward pass takes it.
    run.optimizer.zero_grad(set_to_none=True)
    loss, outputs, part = accumulate(run, batch)
    if run.scale is not None:
        run.scale.unscale([parameter.grad for parameter in run.parameters if parameter.grad is not None])
    if run.recipe.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(run.parameters, run.recipe.clip_norm)
    run.update()
    if run.scale is not None:
        run.scale.update()
    return loss, outputs, part


def accumulate(run: Run, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """Add the gradients of `batch` to those there are, a micro-batch at a time; return what `optimizer_step` does.

    Each part weighs as many valid items as it holds, so the sum is the exact mean over the whole batch.
    """
    whole = run.micro_batch == run.recipe.batch_size
    parts = [batch] if whole else list(zip(*(tensor.split(run.micro_batch) for tensor in batch), strict=True))
    count_of = run.workload.count or (lambda part: len(part[0]))
    counts = [1] if whole else [count_of(part) for part in parts]
    losses, valid = [], sum(counts)
    for part, count in zip(parts, counts, strict=True):
        # Only full parts go through compiled code: an epoch's last, smaller one would be compiled for anew.
        forward = run.forward if len(part[0]) == run.micro_batch else run.model
        loss, outputs = run.loss(forward, part, run.recipe)
        loss = loss if whole else loss * (count / valid)
        (loss if run.scale is None else loss * run.scale.scale).backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0]), outputs, part


@torch.no_grad()
def _evaluate(run: Run) -> dict[str, Any]:
    """Return `{metric, value, n}`: the mean score of the test set, read by the host once.

    The model runs in evaluation mode, uncompiled: its other mode would be compiled once more.
    """
    workload, total, count = run.workload, torch.zeros((), device=run.device), 0
    run.model.eval()
    for batch in run.test_batches.one_pass():
        _, outputs = run.loss(run.model, batch, run.recipe)
        total += workload.score(outputs, batch).float().sum()
        count += len(batch[0])
    run.model.train()
    return {"metric": workload.metric, "value": float(total) / count if count else math.nan, "n": count}


def _read_losses(run: Run) -> list[float]:
    """Return the losses since the last log point. Raises SpeedkitError naming the first that is not finite."""
    losses = torch.stack(run.pending).tolist() if run.pending else []
    for step, loss in enumerate(losses, run.step - len(losses) + 1):
        if not math.isfinite(loss):
            raise SpeedkitError(
                f"the loss of step {step} is {loss}: lower learning_rate (now {run.recipe.learning_rate:g}), set "
                f"clip_norm, or train in a wider format than precision={run.plan.precision}"
            )
    return losses


@contextlib.contextmanager
def _signals_to(run: Run) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the step in progress."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, _frame: Any) -> None:
        if run.stop:  # the second one stops at once
            raise KeyboardInterrupt
        run.stop = number

    before = {name: signal.signal(name, request) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
