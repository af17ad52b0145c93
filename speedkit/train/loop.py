"""The training loop: `train` is the page to read, `steps` answers what goes wrong in it."""

import math
from collections.abc import Generator

import torch
from torch import Tensor

from speedkit.errors import SpeedkitError
from speedkit.plan import Fallback
from speedkit.train.compile import failure
from speedkit.train.memory import is_out_of_memory, release, save_snapshot
from speedkit.train.optimizer import set_learning_rate
from speedkit.train.run import TrainingRun
from speedkit.workloads.workload import Batch


def steps(run: TrainingRun) -> Generator[int, None, None]:
    """Make the steps of `train`; where one runs out of memory or fails to compile, repeat its batch without the cause.

    A generator, so that a measurement can hold two runs and let them take turns.
    """
    while run.total_steps is None or run.step < run.total_steps:
        fallback = None
        try:
            yield from train(run)
        except Exception as error:
            fallback = fallback_for(run, error)  # raises where there is none
        if fallback is not None:
            release(run.device)  # not in `except`: there the error still holds what the step had allocated
            run.guard.restore()
            run.fall_back(fallback)


def train(run: TrainingRun) -> Generator[int, None, None]:
    """Make optimizer steps until the recipe is done; yield how many were made, after each.

    The host waits for the device at log points and evaluations, and nowhere else.
    """
    model, optimizer, scaler, guard = run.model, run.optimizer, run.scaler, run.guard
    recipe, plan = run.recipe, run.plan
    model.train()
    run.lap()
    while run.total_steps is None or run.step < run.total_steps:
        batch = run.next_batch()  # (inputs [B, ...], targets [B]), augmented, on the device
        set_learning_rate(optimizer, run.learning_rate)
        guard.before_step()

        # Gradients of the micro-batches add up to those of the whole batch: each weighs as many samples as it holds.
        # Cleared here and not after the step: the memory just freed is still in the CPU's cache for the forward pass.
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        parts = micro_batches(run, batch)
        for part, weight in parts:
            last = len(losses) + 1 == len(parts)
            with run.autocast, run.compiled_for(part), run.gradients_exchanged(last):
                loss, outputs = run.loss(run.replica, part, recipe)
            loss = loss if weight is None else loss * weight
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        step_loss = sum(losses[1:], losses[0])

        scaler.unscale_(optimizer)
        if recipe.clip_norm is not None or guard.active:
            norm = gradient_norm(run)
            if guard.active:
                guard.judge(step_loss, norm)  # a loss or norm that is not finite: the optimizer leaves this step out
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(run.parameters, recipe.clip_norm, norm)
        run.batch = None  # from here on the step cannot be repeated
        scaler.step(optimizer)
        scaler.update()
        if guard.active:
            guard.after_step()
        run.step += 1
        run.last_loss = step_loss
        run.losses.append(step_loss)

        at_end = run.step == run.total_steps
        if at_end or run.step % plan.log_every == 0:
            run.log(outputs, part)  # the host waits for the device here
        if at_end or (run.evaluate_every and run.step % run.evaluate_every == 0):
            evaluate(run)
            run.save_checkpoint()
        yield run.step


def micro_batches(run: TrainingRun, batch: Batch) -> list[tuple[Batch, Tensor | float | None]]:
    """Return the parts of `batch`, at most `run.micro_batch` samples each, and what part of the loss each counts for.

    Counted are valid items, so that the parts add up to the exact mean over the batch. None: the part is the batch.
    """
    size = run.micro_batch
    if run.ranks is None and len(batch[0]) <= size:
        return [(batch, None)]
    parts: list[Batch] = list(zip(*(tensor.split(size) for tensor in batch), strict=True))
    count = run.workload.count or (lambda part: len(part[0]))
    counts = [count(part) for part in parts]
    if run.ranks is not None:
        stream = run.train_batches
        learned = stream.sampler.counts(stream.position)  # else another rank has these samples too
        return run.ranks.weighted(parts, counts if learned else [], size)
    return [(part, number / sum(counts)) for part, number in zip(parts, counts, strict=True)]


def gradient_norm(run: TrainingRun) -> Tensor:
    """Return the norm of all gradients together, []: of several ranks that share weights out, of all of them."""
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in run.parameters if weight.grad is not None])
    return norm.full_tensor() if run.ranks is not None and run.ranks.sharded else norm  # type: ignore[attr-defined]


@torch.no_grad()
def evaluate(run: TrainingRun) -> None:
    """Add `{step, seconds, metric, value, loss, n}`, the mean score and loss of the test set, to the history.

    The model runs in evaluation mode, uncompiled: its other mode would be compiled once more.
    """
    workload, sums = run.workload, torch.zeros(3, device=run.device)  # of scores, of losses, and how many items
    run.time_since_log_s += run.lap()
    run.model.eval()
    for position, batch in enumerate(run.test_batches.one_epoch(), 1):
        counts = run.ranks is None or run.test_batches.sampler.counts(position)
        parts: list[Batch] = list(zip(*(tensor.split(run.micro_batch) for tensor in batch), strict=True))
        own = len(parts) if counts else 0
        if run.ranks is not None:
            parts = run.ranks.as_many_parts(parts, run.micro_batch)
        for index, part in enumerate(parts):  # of the size that fits in training
            with run.autocast, run.eager():
                loss, outputs = workload.loss(run.model, part, run.recipe)
            if index < own:
                size = torch.tensor(float(len(part[0])), device=run.device)
                sums += torch.stack([workload.score(outputs, part).float().sum(), loss * size, size])
    total, total_loss, count = (run.ranks.sum(sums) if run.ranks is not None else sums).tolist()
    run.model.train()
    value, loss_value = (total / count, total_loss / count) if count else (math.nan, math.nan)
    run.lap()
    run.history.evaluations.append(
        {"step": run.step, "seconds": run.history.seconds, "metric": workload.metric, "value": value}
        | {"loss": loss_value, "n": int(count)}
    )
    run.progress.say(f"  step {run.step}: {workload.metric} {value:.4f} on {count:.0f} test items")


def fallback_for(run: TrainingRun, error: Exception) -> Fallback:
    """Return what to change so that the step which failed by `error` can be repeated; raise it where nothing is left.

    A failure of compiled code has any type, in the forward pass, the backward pass or where a shape is new. Repeated
    eagerly, the step shows whether compiling was the cause: an error of the model's own comes again, as itself.
    """
    # Once weights change a step cannot be repeated, nor by one of several ranks: the others wait for its gradients.
    repeatable, now = run.batch is not None and run.ranks is None, f"at step {run.step + 1}"
    if is_out_of_memory(error):
        if run.out is not None:
            save_snapshot(run.out, run.device)
        size = min(run.micro_batch, len(run.batch[0])) if run.batch is not None else 0
        if repeatable and size > 1:
            return Fallback("micro_batch", size, (size + 1) // 2, f"out of memory {now}")
        where = "" if run.ranks is None else f" on rank {run.ranks.rank}"
        raise SpeedkitError(
            f"out of memory {now}{where}, which cannot be repeated in smaller parts: {str(error).splitlines()[0]}; "
            "take a smaller micro_batch or model, precision=bf16, checkpointing=blocks or a lower max_duration_s"
        ) from error
    if repeatable and run.compiled and not isinstance(error, SpeedkitError):
        return Fallback("compile", run.plan.compile, "off", f"it failed {now}: {failure(error)}")
    raise error
