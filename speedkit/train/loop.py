"""The training loop.

`steps` is the loop: a generator that makes one optimizer step per `next()`, so that a measurement can hold two runs and
let them take turns. `fit` drains it.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from speedkit.data.augment import mixup
from speedkit.errors import Interrupted, SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.evaluate import evaluate
from speedkit.train.history import History
from speedkit.train.run import Run, begin, close, finish

__all__ = ["Run", "begin", "close", "finish", "fit", "steps"]


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
        return finish(run)
    finally:
        close(run)


def steps(run: Run) -> Generator[int, None, None]:
    """Make optimizer steps until the recipe is done; yield the number of steps made after each.

    The host reads the device at log points and evaluations and nowhere else.
    """
    workload, recipe, plan, device, history = run.workload, run.recipe, run.plan, run.device, run.history
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    micro_batch = min(int(plan.micro_batch or recipe.batch_size), recipe.batch_size)
    whole = micro_batch == recipe.batch_size  # no accumulation
    generator = torch.Generator(device=device)
    loss_of = workload.loss if run.autocast is None else _under(run.autocast, workload.loss)
    run.model.train()
    began_s = run.logged_s = time.perf_counter()
    logged_step = run.step

    while run.total_steps is None or run.step < run.total_steps:
        batch = run.batches.next()  # (inputs [B, ...], targets [B])
        # Seeded by the step, so that a resumed run draws what the uninterrupted one would have drawn.
        generator.manual_seed(recipe.seed * 1_000_003 + run.step)
        if workload.augment is not None:
            batch = workload.augment(batch, generator)
        if recipe.mixup:
            batch = mixup(batch, recipe.mixup, generator)
        run.learning_rate.set(run.step)
        # Here and not after the step, the memory just freed is still in the CPU's cache when the forward pass takes it.
        run.optimizer.zero_grad(set_to_none=True)

        if whole:
            # Only full batches go through compiled code: an epoch's last, smaller one would be compiled for anew.
            forward = run.forward if len(batch[0]) == micro_batch else run.model
            loss, outputs = loss_of(forward, batch, recipe)
            (loss if run.scale is None else loss * run.scale.scale).backward()
            loss = loss.detach()
        else:
            # Each part weighs as many valid items as it holds, so the sum is the exact mean over the whole batch.
            parts = list(zip(*(tensor.split(micro_batch) for tensor in batch), strict=True))
            counts = [len(part[0]) if workload.count is None else workload.count(part) for part in parts]
            valid = sum(counts)
            loss = torch.zeros((), device=device)
            for part, count in zip(parts, counts, strict=True):
                forward = run.forward if len(part[0]) == micro_batch else run.model
                part_loss, outputs = loss_of(forward, part, recipe)
                part_loss = part_loss * (count / valid)
                (part_loss if run.scale is None else part_loss * run.scale.scale).backward()
                loss += part_loss.detach()
            batch = parts[-1]  # what `outputs` belongs to

        if run.scale is not None:
            run.scale.unscale([parameter.grad for parameter in parameters if parameter.grad is not None])
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        run.optimizer.step()
        if run.scale is not None:
            run.scale.update()

        run.pending.append(loss)
        run.last_loss = loss
        run.step += 1
        if run.step % plan.log_every == 0 or run.step == run.total_steps:
            mean_loss = _read_losses(run)  # the host waits for the device here
            now_s = time.perf_counter()
            history.loss.append(mean_loss)
            history.log_steps.append(run.step)
            history.log_step_s.append((now_s - run.logged_s) / (run.step - logged_step))
            if run.progress.show:
                run.progress.update(run.step, mean_loss, _score(workload, outputs, batch), workload.metric)
            run.logged_s, logged_step = time.perf_counter(), run.step
        at_end = run.step == run.total_steps
        if at_end or (run.evaluate_every and run.step % run.evaluate_every == 0):
            paused_s = time.perf_counter()
            result = evaluate(workload, run.model, run.test_batches.one_pass(), recipe, run.autocast)
            now_s = time.perf_counter()
            history.evaluations.append({"step": run.step, "seconds": history.seconds + now_s - began_s, **result})
            run.progress.say(f"  step {run.step}: {result['metric']} {result['value']:.4f} on {result['n']} test items")
            run.logged_s += now_s - paused_s  # evaluation is not training time
        if run.stop or at_end or (run.evaluate_every and run.step % run.evaluate_every == 0):
            history.seconds += time.perf_counter() - began_s
            began_s = time.perf_counter()
            if run.out is not None:
                _check_finite(run, [float(loss) for loss in run.pending])  # never over a good checkpoint
                history.quarantined = run.batches.bad | run.test_batches.bad
                checkpoint.save(run, run.out)
                run.logged_s += time.perf_counter() - began_s
            if run.stop:
                raise _interrupted(run)
        yield run.step


def _under(context: contextlib.AbstractContextManager, loss: Callable) -> Callable:
    def loss_under_autocast(model, batch, recipe):
        with context:
            return loss(model, batch, recipe)

    return loss_under_autocast


def _read_losses(run: Run) -> float:
    """Return the mean loss since the last log point, once all of them are known to be finite."""
    losses = torch.stack(run.pending).tolist()
    _check_finite(run, losses)
    run.pending.clear()
    return sum(losses) / len(losses)


def _check_finite(run: Run, losses: list[float]) -> None:
    """Raise SpeedkitError naming the first of the latest `losses` that is not finite, and its step."""
    for offset, loss in enumerate(losses):
        if not math.isfinite(loss):
            at = run.step - len(losses) + offset + 1
            rate = run.recipe.learning_rate
            raise SpeedkitError(
                f"the loss of step {at} is {loss}: lower learning_rate (now {rate:g}), set clip_norm, "
                f"or train in a wider format than precision={run.plan.precision}"
            )


def _score(workload: Any, outputs: Tensor, batch: tuple[Tensor, ...]) -> float:
    return float(workload.score(outputs.detach(), batch).float().mean())


def _interrupted(run: Run) -> Interrupted:
    finish(run)
    name = signal.Signals(run.stop).name
    kept = f"--resume goes on from {run.out / checkpoint.NAME}" if run.out else "nothing is kept where --out is not set"
    return Interrupted(f"stopped by {name} after step {run.step}; {kept}", run.stop)


@contextlib.contextmanager
def _signals_to(run: Run) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the step in progress; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, _frame: Any) -> None:
        run.stop = number
        for name in before:
            signal.signal(name, before[name])

    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, request)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
