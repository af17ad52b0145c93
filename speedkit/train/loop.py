"""The training loop.

`steps` is the loop: a generator that makes one optimizer step per `next()`, so that a measurement can hold two runs and
let them take turns. `fit` drains it.
"""

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from speedkit.data.augment import augment_batch
from speedkit.errors import Interrupted, SpeedkitError
from speedkit.plan import Fallback, Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint, compilation, memory
from speedkit.train.collection import no_collection
from speedkit.train.distributed import told_apart
from speedkit.train.history import History
from speedkit.train.oom import is_out_of_memory, release
from speedkit.train.run import Run, begin, close, finish
from speedkit.workloads.workload import Batch

COLLECT_S = 10  # between garbage collections, which `fit` keeps out of steps

__all__ = ["Run", "begin", "close", "finish", "fit", "optimizer_step", "steps"]


def fit(workload: Any, recipe: Recipe | None = None, plan: Plan | None = None, **options: Any) -> History:
    """Train `workload` by `recipe`, as fast as `plan` says; return the course of the run with the trained model.

    Options are those of `begin`. Ctrl-C and SIGTERM end the run after the step in progress with a checkpoint (where
    `out` is set) and raise Interrupted.
    """
    with told_apart(plan):
        run = begin(workload, recipe, plan, **options)
        try:
            with _signals_to(run), no_collection():
                for _ in steps(run):
                    pass
            history = finish(run)
            if run.ranks is not None:
                run.ranks.gathered(None)  # a rank that goes before all is written would take the others along
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
    workload, recipe, plan, history, guard = run.workload, run.recipe, run.plan, run.history, run.guard
    generator, random_changes = torch.Generator(device=run.device), workload.augment is not None or recipe.mixup
    per_epoch, own_draws = len(run.batches), run.batches.sampler.rank << 40
    run.model.train()
    began_s = logged_s = collected_s = time.perf_counter()
    logged_step = run.step

    while run.total_steps is None or run.step < run.total_steps:
        batch = run.batches.next()  # (inputs [B, ...], targets [B])
        if random_changes:
            batch = augment_batch(batch, workload, recipe, step=run.step + own_draws, generator=generator)
        run.set_learning_rate(run.step - guard.left_out)
        run.last_loss, outputs, part = optimizer_step(run, batch)
        run.pending.append(run.last_loss)
        guard.places.append(run.batches.epoch * per_epoch + run.batches.position)
        run.step += 1
        at_end = run.step == run.total_steps
        if at_end or run.step % plan.log_every == 0:
            history.loss.append(run.recovery.read(run))  # the host waits for the device here
            history.log_steps.append(run.step)
            for seen in (run.pending, guard.flags, guard.places):
                seen.clear()
            history.log_step_s.append((time.perf_counter() - logged_s) / (run.step - logged_step))
            if run.progress.show:
                score = float(workload.score(outputs.detach(), part).float().mean())
                run.progress.update(run.step, history.log_step_s[-1], history.loss[-1], score, workload.metric)
            if not gc.isenabled() and time.perf_counter() - collected_s > COLLECT_S:
                gc.collect()
                collected_s = time.perf_counter()
            logged_s, logged_step = time.perf_counter(), run.step
        due = at_end or (run.evaluate_every and run.step % run.evaluate_every == 0)
        stop = run.stop if run.ranks is None else run.ranks.stopping(run)
        if due or stop:
            paused_s = time.perf_counter()
            found = _evaluate(run) if due else None
            history.seconds += time.perf_counter() - began_s
            began_s = time.perf_counter()
            if found:
                history.evaluations.append({"step": run.step, "seconds": history.seconds, **found})
                run.progress.say("  step {}: {metric} {value:.4f} on {n} test items".format(run.step, **found))
            if run.out is not None:
                if not guard.skips:
                    run.recovery.read(run)  # never over a good checkpoint
                history.quarantined = run.batches.bad | run.test_batches.bad
                checkpoint.save(run)
            logged_s += time.perf_counter() - paused_s  # evaluation is not training time
            if stop:
                return
        yield run.step


def optimizer_step(run: Run, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """Learn from `batch`, tensors `[B, ...]`, once; return its loss `[]`, and outputs and batch of its last part.

    Where memory runs out it begins again with smaller micro-batches, and where compiling fails without, as if it had
    from the start. But for that nothing here waits for the device.
    """
    # Once it has shown that nothing draws from the global generators, their state need not be kept.
    random_state = checkpoint.get_random_state(run.device) if run.draws is not False else []
    if run.guard.kept:
        run.guard.keep()
    if run.draws is None and run.ranks is not None:
        run.ranks.rehearse(run, batch, cure)
    while True:
        # Here and not after the step, the memory just freed is still in the CPU's cache when the forward pass takes it.
        run.optimizer.zero_grad(set_to_none=True)
        updating = False
        try:
            loss, outputs, part = accumulate(run, batch)
            updating = True
            update(run, loss)
            if run.draws is None:
                after = checkpoint.get_random_state(run.device)
                run.draws = not all(map(torch.equal, random_state, after))
            return loss, outputs, part
        except Exception as error:
            cure(run, error, min(run.micro_batch, len(batch[0])), updating)  # raises it where there is no cure
        # Outside of `except`, for the error holds what the step had allocated.
        release(run.device)
        if random_state:
            checkpoint.set_random_state(random_state, run.device)
        run.guard.put_back()


def accumulate(run: Run, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """Add the gradients of `batch` to those there are, a micro-batch at a time; return what `optimizer_step` does.

    Each part weighs as many valid items as it holds, so the sum is the exact mean over the whole batch.
    """
    if run.ranks is not None:
        return run.ranks.accumulate(run, batch)
    parts, weights = [batch], [1.0]
    if run.micro_batch != run.recipe.batch_size:
        parts = list(zip(*(tensor.split(run.micro_batch) for tensor in batch), strict=True))
        counts = [run.workload.count(part) if run.workload.count else len(part[0]) for part in parts]
        weights = [count / sum(counts) for count in counts]
    losses = []
    for part, weight in zip(parts, weights, strict=True):
        # Only full parts go through compiled code: an epoch's last, smaller one would be compiled for anew.
        forward = run.forward if len(part[0]) == run.micro_batch else run.model
        loss, outputs = run.loss(forward, part, run.recipe)
        loss = loss if len(parts) == 1 else loss * weight
        (loss if run.scale is None else loss * run.scale.scale).backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0]), outputs, part


def update(run: Run, loss: Tensor) -> None:
    """Change the weights by the gradients there are; a bad step, by these and the `loss []`, may be left out."""
    guard, clip_norm, ready = run.guard, run.recipe.clip_norm, True
    if run.scale is not None:
        run.scale.unscale([parameter.grad for parameter in run.parameters if parameter.grad is not None])
    if guard.skips or clip_norm is not None:
        # Two calls for clip_grad_norm_: clipping spreads what is not finite, so the guard looks before.
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in run.parameters if weight.grad is not None])
        norm = norm if run.ranks is None or not run.ranks.fsdp else norm.full_tensor()  # type: ignore[attr-defined]
        ready = guard.judge(loss, norm) if guard.skips else True
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(run.parameters, clip_norm, norm)
    if ready:
        run.update()
    if guard.skips:
        guard.settle()
    elif run.scale is not None:
        run.scale.update()


def cure(run: Run, error: Exception, size: int, updating: bool) -> None:
    """Change what a step failed by, with `error` on micro-batches of `size`, so that it can be repeated; else raise."""
    if not is_out_of_memory(error):
        if not (why := compilation.gave_up(run.forward, error)):
            raise error
        run.progress.say(f"  compile: {why}")
        return
    if run.out is not None:
        memory.save_snapshot(run.out, run.device)
    if (alone := run.ranks is None or not run.ranks.ready) is False or size == 1 or updating:
        where = "in the optimizer's update, whatever the micro-batch" if updating else "with a single sample"
        if run.ranks is not None and not alone:
            where = f"on rank {run.ranks.rank}, for which the others cannot repeat it"
        raise SpeedkitError(
            f"out of memory at step {run.step + 1} {where}: {str(error).splitlines()[0]}; take "
            f"{'' if alone else f'micro_batch={(size + 1) // 2}, '}precision=bf16, checkpointing=blocks, a lower "
            "max_duration_s, a smaller model, or go on with --resume where memory is free"
        ) from error
    run.micro_batch = (size + 1) // 2
    why = f"out of memory at step {run.step + 1}"
    fallback = Fallback("micro_batch", size, run.micro_batch, why)
    run.effective = run.history.effective = run.effective.with_fallbacks(fallback)
    run.progress.say(f"  {fallback}")


@torch.no_grad()
def _evaluate(run: Run) -> dict[str, Any]:
    """Return `{metric, value, n}`: the mean score of the test set, read by the host once.

    The model runs in evaluation mode, uncompiled: its other mode would be compiled once more.
    """
    workload, total, count = run.workload, torch.zeros((), device=run.device), 0
    run.model.eval()
    if run.ranks is not None:
        run.ranks.same_buffers(run.model)
    for position, batch in enumerate(run.test_batches.one_pass(), 1):
        # In parts that fit in training.
        parts: Any = ((part, True) for part in zip(*(tensor.split(run.micro_batch) for tensor in batch), strict=True))
        for part, counts in parts if run.ranks is None else run.ranks.parts(run, batch, run.test_batches, 0, position):
            _, outputs = run.loss(run.model, part, run.recipe)
            if counts:
                total += workload.score(outputs, part).float().sum()
                count += len(part[0])
    if run.ranks is not None:
        total, count = run.ranks.scored(total, count)
    run.model.train()
    return {"metric": workload.metric, "value": float(total) / count if count else math.nan, "n": count}


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
