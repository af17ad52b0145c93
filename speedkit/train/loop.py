"""The training loop: `train` is the page to read, `steps` answers what goes wrong in it."""

import contextlib
import gc
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.fallbacks import Fallback
from speedkit.plan import CUDA_GRAPHS
from speedkit.train.attention import REFUSED_BY_CUDNN, leave_out_cudnn
from speedkit.train.batches import micro_batches, next_batch, split
from speedkit.train.checkpoint import save
from speedkit.train.compile import eager, remove_compile
from speedkit.train.memory import is_out_of_memory, release
from speedkit.train.nonfinite import read_losses
from speedkit.train.ranks import Ranks
from speedkit.train.run import ALL, Learner, TrainingRun
from speedkit.workload import Batch


def steps(run: TrainingRun) -> Generator[int, None, None]:
    """Run `train`; where memory, compiled code or cuDNN fails in a step, change that and repeat its batch.

    A generator, so that a measurement can hold two runs and let them take turns.
    """
    while run.position.step < run.position.total_steps:
        fallback = None
        try:
            yield from train(run)
        except Exception as error:
            fallback = fallback_for(run, error)  # raises where there is none
        if fallback is None:
            continue
        release(run.device)  # not in `except`: there the error still holds what the step had allocated
        if fallback.field == "micro_batch":
            run.learner.micro_batch = fallback.got
        elif fallback.field == "attention":
            leave_out_cudnn(run.learner.model)
        else:
            remove_compile(run.learner.model)
        run.effective.add(fallback)
        run.reporting.progress.say(f"  {fallback}")


def train(run: TrainingRun) -> Generator[int, None, None]:
    """Make optimizer steps until the recipe is done; yield how many were made, after each.

    The host waits for the device at log points and evaluations, and nowhere else.
    """
    learner = run.learner
    optimizer = learner.optimizer
    scaler = learner.precision.scaler
    guard = learner.guard
    position = run.position
    clip_norm = run.recipe.clip_norm
    learner.model.train()
    run.reporting.lap()
    while position.step < position.total_steps:
        batch = next_batch(run)  # (inputs [B, ...], targets [B]), augmented, on the device
        set_learning_rate(learner, position.step)
        guard.before_step()

        # Gradients of the micro-batches add up to those of the whole batch: each weighs as many samples as it holds.
        # Cleared here and not after the step: the memory just freed is still in the CPU's cache for the forward pass.
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        parts = micro_batches(run, batch)
        for part, weight in parts:
            with forward_context(run, part, last=len(losses) + 1 == len(parts)):
                loss, outputs = run.workload.loss(learner.replica, part, run.recipe)
            if weight is not None:
                loss = loss * weight
            loss = run.ranks.spread_nonfinite(loss)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        step_loss = sum(losses[1:], losses[0])

        scaler.unscale_(optimizer)
        if clip_norm is not None or guard.active:
            norm = gradient_norm(learner, run.ranks)
            if guard.active:  # a loss or norm that is not finite: the optimizer leaves this step out
                step_loss = guard.judge(step_loss, norm)
            if clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(learner.parameters, clip_norm, norm)
        position.batch = None  # from here on the step cannot be repeated
        scaler.step(optimizer)
        scaler.update()
        guard.after_step()
        position.step += 1
        position.last_loss = step_loss
        position.recent.append((step_loss, run.data.train.epoch, run.data.train.position))

        evaluates = position.evaluates()
        asked_to_stop = position.stop_signal and not run.ranks.several  # ranks agree on it at their next log point
        if evaluates or asked_to_stop or position.step % run.plan.log_every == 0:
            log(run, outputs, part)  # the host waits for the device here
        del batch, parts, part, loss, outputs  # else they would lie in memory beside the next batch, or the test set's
        if evaluates:
            evaluate(run)
        if run.out is not None and (evaluates or position.stop_agreed):
            save(run)
        yield position.step


def set_learning_rate(learner: Learner, step: int) -> None:
    """Set the learning rate of the next step; steps that were left out do not advance the schedule.

    With a fused optimizer their number stays on the device, so that the host does not wait for it.
    """
    guard = learner.guard
    last = len(learner.learning_rates) - 1  # at which a run that never ends stays
    rate: Any
    if guard.active and guard.fused:
        rate = learner.rates_on_device.take(guard.good_steps.clamp(max=last))
    else:
        rate = learner.learning_rates[min(learner.steps_made(step), last)]
    group = learner.optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)  # in place, which does not wait for the device
    else:
        group["lr"] = rate


def forward_context(run: TrainingRun, part: Batch, *, last: bool) -> contextlib.AbstractContextManager:
    """Return the context of the forward pass over `part` of a batch, the `last` one or not."""
    learner = run.learner
    mode = run.plan.compile
    if mode == "off" and not run.ranks.several:
        return learner.precision.context  # nothing is built anew at each step
    if mode in CUDA_GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()
    contexts = contextlib.ExitStack()
    contexts.enter_context(learner.precision.context)
    # A part smaller than the micro-batch would be compiled anew. Batches that vary (ALL) stay compiled.
    if len(part.inputs) < learner.micro_batch < ALL:
        contexts.enter_context(eager(run.plan))
    contexts.enter_context(run.ranks.gradient_exchange(learner.replica, last))
    return contexts


def gradient_norm(learner: Learner, ranks: Ranks) -> Tensor:
    """Return the norm of all gradients together, []: of several ranks that share weights out, of all of them."""
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in learner.parameters if weight.grad is not None])
    if ranks.sharded:
        return norm.full_tensor()  # type: ignore[attr-defined]
    return norm


def log(run: TrainingRun, outputs: Tensor | None = None, part: Batch | None = None) -> None:
    """Read the losses since the last log point; show the score of the last `part` of a batch by its `outputs`."""
    position = run.position
    reporting = run.reporting
    position.stop_signal = max(run.ranks.all_gather(position.stop_signal))
    position.stop_agreed = bool(position.stop_signal)
    loss = read_losses(run)
    step_s = reporting.lap() / len(position.recent)
    position.recent.clear()
    reporting.history.loss.append(loss)
    reporting.history.log_steps.append(position.step)
    reporting.history.log_step_s.append(step_s)
    if reporting.progress.due(position.step):
        score = None
        if outputs is not None and run.workload.own_loader is None:  # else no score is known but the loss
            score = float(run.workload.score(outputs.detach(), part).float().mean())  # type: ignore[arg-type]
        reporting.progress.update(position.step, step_s, loss, score=score, metric=run.workload.metric)
    if not gc.isenabled():  # as in `fit`
        gc.collect(1)
    reporting.lap()


def evaluate(run: TrainingRun) -> None:
    """Look at the validation set, where there is one; without one, and at the end, at the test set."""
    position = run.position
    history = run.reporting.history
    history.evaluations.append(mean_score(run, run.data.validation))
    if run.data.validation is run.data.test:
        history.tested = history.evaluations[-1]
    elif position.step == position.total_steps:
        history.tested = mean_score(run, run.data.test)


@torch.no_grad()
def mean_score(run: TrainingRun, stream: BatchStream) -> dict[str, Any]:
    """Return `{step, seconds, set, metric, value, loss, n}`: the mean score and loss of the items of `stream`.

    The model runs in evaluation mode, uncompiled: its other mode would be compiled once more.
    """
    learner = run.learner
    workload = run.workload
    reporting = run.reporting
    sums = torch.zeros(2, device=run.device)  # of scores and of losses
    count = 0
    learner.model.eval()
    for batch in stream.one_epoch():
        for part, counts in split(batch, learner.micro_batch, stream, ranks=run.ranks):  # of the size that fits
            with learner.precision.context, eager(run.plan):
                loss, outputs = workload.loss(learner.model, part, run.recipe)
            if counts:
                sums[0] += workload.score(outputs, part).float().sum()
                sums[1] += loss * len(part.inputs)
                count += len(part.inputs)
    score, loss = run.ranks.sum(sums).tolist()
    count = sum(run.ranks.all_gather(count))
    learner.model.train()
    reporting.lap()
    name = "test" if stream is run.data.test else "validation"
    value = score / count
    reporting.progress.look = f", {name} {value:.3f} at step {run.position.step}"
    reporting.progress.say(f"  step {run.position.step}: {workload.metric} {value:.4f} on {count} {name} items")
    return {
        "step": run.position.step,
        "seconds": reporting.history.seconds,
        "set": name,
        "metric": workload.metric,
        "value": value,
        "loss": loss / count,
        "n": count,
    }


def fallback_for(run: TrainingRun, error: Exception) -> Fallback:
    """Return what to change so that the step which failed by `error` can be repeated; raise it where nothing is left.

    A failure of compiled code has any type, in the forward pass, the backward pass or where a shape is new. Repeated
    eagerly, the step shows whether compiling was the cause: an error of the model's own comes again, as itself.
    """
    position = run.position
    now = f"at step {position.step + 1}"
    # Once weights change a step cannot be repeated, nor by one of several ranks: the others wait for its gradients.
    batch = None if run.ranks.several else position.batch
    if not is_out_of_memory(error):
        if batch is None or isinstance(error, SpeedkitError):
            raise error
        message = " ".join(str(error).split("\n\n")[0].split())  # commands, stacks and advice follow
        why = f"it failed {now}: {type(error).__name__}: {message[:300]}"
        if run.plan.compile != "off":  # first: compiled code keeps the attention that it was traced with
            return Fallback("compile", run.plan.compile, "off", why)
        if run.plan.attention in ("auto", "cudnn") and REFUSED_BY_CUDNN.search(message):
            return Fallback("attention", run.plan.attention, "flash", why)
        raise error
    own = run.workload.own_loader
    if batch is not None and (own is None or own.splits):
        size = min(run.learner.micro_batch, len(batch.inputs))
        if size > 1:
            return Fallback("micro_batch", size, (size + 1) // 2, f"out of memory {now}")
    where = f" on rank {run.ranks.rank}" if run.ranks.several else ""
    raise SpeedkitError(
        f"out of memory {now}{where}: {str(error).splitlines()[0]}; take a smaller micro_batch or model, "
        "precision=bf16, checkpointing=blocks or a lower max_duration_s"
    ) from error
