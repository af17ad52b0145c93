"""The training loop: `train` is the page to read, `steps` answers what goes wrong in it."""

import contextlib
import gc
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.fallbacks import Fallback
from speedkit.plan import CUDA_GRAPHS
from speedkit.train.batches import micro_batches, next_batch, split
from speedkit.train.checkpoint import save
from speedkit.train.compile import eager, remove_compile
from speedkit.train.memory import is_out_of_memory, release
from speedkit.train.nonfinite import read_losses
from speedkit.train.run import ALL, TrainingRun
from speedkit.workload import Batch


def steps(run: TrainingRun) -> Generator[int, None, None]:
    """Make the steps of `train`; where one runs out of memory or fails to compile, repeat its batch without the cause.

    A generator, so that a measurement can hold two runs and let them take turns.
    """
    while run.step < run.total_steps:
        fallback = None
        try:
            yield from train(run)
        except Exception as error:
            fallback = fallback_for(run, error)  # raises where there is none
        if fallback is None:
            continue
        release(run.device)  # not in `except`: there the error still holds what the step had allocated
        if fallback.field == "micro_batch":
            run.micro_batch = fallback.got
        else:
            remove_compile(run.model)
        run.effective = run.effective.with_fallbacks(fallback)
        run.progress.say(f"  {fallback}")


def train(run: TrainingRun) -> Generator[int, None, None]:
    """Make optimizer steps until the recipe is done; yield how many were made, after each.

    The host waits for the device at log points and evaluations, and nowhere else.
    """
    model, optimizer, scaler, guard = run.model, run.optimizer, run.scaler, run.guard
    recipe, plan = run.recipe, run.plan
    model.train()
    lap(run)
    while run.step < run.total_steps:
        batch = next_batch(run)  # (inputs [B, ...], targets [B]), augmented, on the device
        set_learning_rate(run)
        guard.before_step()

        # Gradients of the micro-batches add up to those of the whole batch: each weighs as many samples as it holds.
        # Cleared here and not after the step: the memory just freed is still in the CPU's cache for the forward pass.
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        parts = micro_batches(run, batch)
        for part, weight in parts:
            with forward_context(run, part, last=len(losses) + 1 == len(parts)):
                loss, outputs = run.loss(run.replica, part, recipe)
            loss = loss if weight is None else loss * weight
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        step_loss = sum(losses[1:], losses[0])

        scaler.unscale_(optimizer)
        if recipe.clip_norm is not None or guard.active:
            norm = gradient_norm(run)
            if guard.active:  # a loss or norm that is not finite: the optimizer leaves this step out
                step_loss = guard.judge(step_loss, norm)
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(run.parameters, recipe.clip_norm, norm)
        run.batch = None  # from here on the step cannot be repeated
        scaler.step(optimizer)
        scaler.update()
        if guard.active:
            guard.after_step()
        run.step += 1
        run.last_loss = step_loss
        run.recent.append((step_loss, run.train_batches.epoch, run.train_batches.position))

        evaluates = run.step == run.total_steps or (run.evaluate_every and run.step % run.evaluate_every == 0)
        stops = run.stop and run.ranks is None  # several ranks agree on it at their next log point
        if evaluates or stops or run.step % plan.log_every == 0:
            log(run, outputs, part)  # the host waits for the device here
        del batch, parts, part, loss, outputs  # else they would lie in memory beside the next batch, or the test set's
        if evaluates:
            evaluate(run)
        if run.out is not None and (evaluates or run.stopping):
            save(run)
        yield run.step


def set_learning_rate(run: TrainingRun) -> None:
    """Set the learning rate of the next step, by the steps made: a fused optimizer's are counted on the device."""
    group, last = run.optimizer.param_groups[0], len(run.learning_rates) - 1  # at which a run that never ends stays
    rate: Any = run.recovery.rate
    if run.guard.active and run.plan.fused_optimizer:
        rate *= run.rates_on_device.take(run.guard.good_steps.clamp(max=last))
    else:
        rate *= run.learning_rates[min(run.steps_made, last)]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)  # in place, which does not wait for the device
    else:
        group["lr"] = rate


def forward_context(run: TrainingRun, part: Batch, *, last: bool) -> contextlib.AbstractContextManager:
    """Return the context of the forward pass over `part` of a batch, the `last` one or not."""
    mode = run.plan.compile
    if mode == "off" and run.ranks is None:
        return run.autocast  # nothing is built anew at each step
    if mode in CUDA_GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()
    contexts = contextlib.ExitStack()
    contexts.enter_context(run.autocast)
    # An epoch's last part would be compiled for anew; a user's batches may have any size.
    if len(part[0]) < run.micro_batch < ALL:
        contexts.enter_context(eager(run.plan))
    if run.ranks is not None:
        contexts.enter_context(run.ranks.gradient_exchange(run.replica, last))
    return contexts


def gradient_norm(run: TrainingRun) -> Tensor:
    """Return the norm of all gradients together, []: of several ranks that share weights out, of all of them."""
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in run.parameters if weight.grad is not None])
    return norm.full_tensor() if run.ranks is not None and run.ranks.sharded else norm  # type: ignore[attr-defined]


def log(run: TrainingRun, outputs: Tensor, part: Batch) -> None:
    """Read the losses since the last log point; show the score of the last `part` of a batch by its `outputs`."""
    if run.ranks is not None:
        run.stop = max(run.ranks.all_gather(run.stop))
    run.stopping = bool(run.stop)
    loss = read_losses(run)
    step_s = lap(run) / len(run.recent)
    run.recent.clear()
    run.history.loss.append(loss)
    run.history.log_steps.append(run.step)
    run.history.log_step_s.append(step_s)
    if run.progress.due(run.step):
        items = run.workload.own_loader is None  # else no score is known but the loss
        score = float(run.workload.score(outputs.detach(), part).float().mean()) if items else None
        run.progress.update(run.step, step_s, loss, score=score, metric=run.workload.metric)
    if not gc.isenabled():  # as in `fit`
        gc.collect(1)
    lap(run)


def lap(run: TrainingRun) -> float:
    """Return the seconds since it was last called, and add them to those of the history."""
    now_s = time.perf_counter()
    elapsed_s, run.lap_s = now_s - (run.lap_s or now_s), now_s
    run.history.seconds += elapsed_s
    return elapsed_s


def evaluate(run: TrainingRun) -> None:
    """Look at the validation set, where there is one; without one, and at the end (at `until` too), at the test set."""
    history = run.history
    history.evaluations.append(mean_score(run, run.validation_batches))
    if history.reached_s is not None:
        run.total_steps = run.step
    if run.validation_batches is run.test_batches:
        history.tested = history.evaluations[-1]
    elif run.step == run.total_steps:
        history.tested = mean_score(run, run.test_batches)


@torch.no_grad()
def mean_score(run: TrainingRun, batches: BatchStream) -> dict[str, Any]:
    """Return `{step, seconds, set, metric, value, loss, n}`: the mean score and loss of the items of `batches`.

    The model runs in evaluation mode, uncompiled: its other mode would be compiled once more.
    """
    workload, sums = run.workload, torch.zeros(3, device=run.device)  # of scores, of losses, and how many items
    run.model.eval()
    for batch in batches.one_epoch():
        for part, counts in split(run, batch, batches):  # of the size that fits in training
            with run.autocast, eager(run.plan):
                loss, outputs = workload.loss(run.model, part, run.recipe)
            if counts:
                sums[0] += workload.score(outputs, part).float().sum()
                sums[1] += loss * len(part[0])
                sums[2] += len(part[0])
    score, loss, count = (run.ranks.sum(sums) if run.ranks is not None else sums).tolist()
    run.model.train()
    lap(run)
    name = "test" if batches is run.test_batches else "validation"
    run.progress.look = f", {name} {score / count:.3f}"
    run.progress.say(f"  step {run.step}: {workload.metric} {score / count:.4f} on {count:.0f} {name} items")
    means = {"metric": workload.metric, "value": score / count, "loss": loss / count, "n": int(count)}
    return {"step": run.step, "seconds": run.history.seconds, "set": name, **means}


def fallback_for(run: TrainingRun, error: Exception) -> Fallback:
    """Return what to change so that the step which failed by `error` can be repeated; raise it where nothing is left.

    A failure of compiled code has any type, in the forward pass, the backward pass or where a shape is new. Repeated
    eagerly, the step shows whether compiling was the cause: an error of the model's own comes again, as itself.
    """
    # Once weights change a step cannot be repeated, nor by one of several ranks: the others wait for its gradients.
    batch, now = run.batch if run.ranks is None else None, f"at step {run.step + 1}"
    if not is_out_of_memory(error):
        if (batch or run.raw_batch) is None or run.plan.compile == "off" or isinstance(error, SpeedkitError):
            raise error
        message = " ".join(str(error).split("\n\n")[0].split())  # commands, stacks and advice follow
        why = f"it failed {now}: {type(error).__name__}: {message[:300]}"
        return Fallback("compile", run.plan.compile, "off", why)
    if run.out is not None and run.device.type == "cuda":  # a map of its memory, for docs.pytorch.org/memory_viz
        torch.cuda.memory._dump_snapshot(str(run.out / "memory.pickle"))
    own = run.workload.own_loader
    size = 1 if batch is None or (own and not own.splits) else min(run.micro_batch, len(batch[0]))
    if size > 1:
        return Fallback("micro_batch", size, (size + 1) // 2, f"out of memory {now}")
    where = "" if run.ranks is None else f" on rank {run.ranks.rank}"
    raise SpeedkitError(
        f"out of memory {now}{where}: {str(error).splitlines()[0]}; take a smaller micro_batch or model, "
        "precision=bf16, checkpointing=blocks or a lower max_duration_s"
    ) from error
