"""The training loop, and what is set up before it and put away after it.

`steps` is the loop: a generator that makes one optimizer step per `next()`, so that a measurement can hold two runs and
let them take turns. `fit` drains it.
"""

import contextlib
import dataclasses
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedkit.data.cache import open_cache
from speedkit.data.loader import Batches
from speedkit.errors import Interrupted, SpeedkitError
from speedkit.files import atomic, claim_folder, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.plan import Effective, Plan, resolve
from speedkit.recipe import Recipe, learning_rates, steps_per_epoch
from speedkit.settings import to_yaml
from speedkit.train import checkpoint, compilation, optimizer, precision
from speedkit.train.evaluate import evaluate
from speedkit.train.history import History
from speedkit.train.optimizer import LearningRate
from speedkit.train.progress import Progress


@dataclasses.dataclass
class Run:
    """The state of one training run."""

    workload: Any
    recipe: Recipe
    effective: Effective
    device: torch.device
    model: torch.nn.Module
    forward: Callable[..., Tensor]  # the model as the plan has it: itself, or compiled
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    scale: precision.LossScale | None
    autocast: contextlib.AbstractContextManager | None
    batches: Batches
    test_batches: Batches
    total_steps: int | None  # None never ends
    evaluate_every: int
    history: History
    progress: Progress
    out: Path | None
    step: int = 0
    pending: list[Tensor] = dataclasses.field(default_factory=list)  # losses not read yet, one per step
    last_loss: Tensor | None = None  # of the latest step, still on the device
    logged_s: float = 0.0  # when the last log point was
    stop: int = 0  # the signal that asks the run to stop

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.effective.plan


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


def steps(run: Run) -> Iterator[int]:
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
        if workload.augment is not None:
            # Seeded by the step, so that a resumed run draws what the uninterrupted one would have drawn.
            batch = workload.augment(batch, generator.manual_seed(recipe.seed * 1_000_003 + run.step))
        run.learning_rate.set(run.step)

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
        run.optimizer.zero_grad(set_to_none=True)
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


def begin(
    workload: Any,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    deterministic: bool = False,
    strict: bool = False,
    progress: bool | str = "auto",
    endless: bool = False,
) -> Run:
    """Return a run of `workload` that is ready for its first step: data found, cache built, model made, plan applied.

    `recipe` and `plan` default to the workload's recipe and `Plan()`. `out` gets checkpoint, plan and history;
    `resume` goes on from the checkpoint there. `strict` makes a field of the plan that cannot be honoured an error.
    `deterministic` asks CUDA for reproducible kernels; a CPU needs no asking. `endless` ignores the recipe's length and
    never evaluates: for measuring.
    """
    began_s = time.perf_counter()
    recipe = recipe or workload.recipe
    hardware = this_machine(device)
    device = hardware.device
    effective = resolve(plan or Plan(), hardware, strict)
    plan = effective.plan
    folder = claim_folder(out, "train", resume) if out is not None else None
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    precision.apply(plan)
    train_cache = test_cache = None
    if plan.cache != "off":
        train_cache = open_cache(workload, workload.train, plan, device=device, cache_dir=cache_dir)
        if not endless:
            test_cache = open_cache(workload, workload.test, plan, device=device, cache_dir=cache_dir)
    batches = Batches(workload, workload.train, plan, recipe.batch_size, recipe.seed, device, train_cache)
    test_batches = Batches(workload, workload.test, plan, recipe.batch_size, None, device, test_cache)

    torch.manual_seed(recipe.seed)
    memory_format = torch.channels_last if plan.channels_last else torch.contiguous_format
    model = workload.model().to(device=device, memory_format=memory_format)
    update = optimizer.build(model.parameters(), recipe, plan.fused_optimizer)
    scale = precision.LossScale(device) if plan.precision == "fp16" else None
    if scale is not None:
        update.found_inf = scale.found_inf  # type: ignore[attr-defined]  # read by fused optimizers
    total = recipe.total_steps(len(workload.train), plan.drop_last)
    table = learning_rates(recipe, total)
    per_epoch = steps_per_epoch(len(workload.train), recipe.batch_size, plan.drop_last)
    name, show = workload.name, False if endless else progress
    run = Run(
        workload, recipe, effective, device, model, compilation.apply(model, plan), update,
        LearningRate(update, table, scale.steps if scale else None), scale, precision.autocast(plan, device),
        batches, test_batches,
        total_steps=None if endless else total,
        evaluate_every=0 if endless else per_epoch if plan.validate_every is None else plan.validate_every,
        history=History(name, recipe, effective, str(device)),
        progress=Progress(name, total, 0, recipe.batch_size, device, show),
        out=folder,
    )  # fmt: skip
    if folder is not None:
        write_text(folder / "plan.yaml", to_yaml(plan))
        if resume:
            checkpoint.load(run, folder)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for fallback in effective.fallbacks:
        run.progress.say(f"  {fallback}")
    run.history.prepare_s = time.perf_counter() - began_s
    return run


def finish(run: Run) -> History:
    """Complete the history of a run whose steps are done, write it where `out` is set, and return it."""
    history = run.history
    history.steps = int(run.scale.steps) if run.scale else run.step
    history.model = run.model
    history.quarantined = {**dict(run.workload.quarantined), **run.batches.bad, **run.test_batches.bad}
    if run.device.type == "cuda":
        history.peak_memory_bytes = torch.cuda.max_memory_allocated(run.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        history.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if history.quarantined:
        run.progress.say(f"  {len(history.quarantined)} unreadable files were left out (quarantine.csv names them)")
    if run.out is not None:
        write_json(run.out / "history.json", history.as_dict())
        if history.quarantined:
            write_quarantine(run.out / "quarantine.csv", history.quarantined)
    return history


def write_quarantine(path: Path, bad: dict[str, str]) -> None:
    """Write the files that could not be read, with why, as CSV."""
    import csv

    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("path", "why"), *sorted(bad.items())])


def close(run: Run) -> None:
    """End the run's loader processes and its progress bar."""
    run.batches.close()
    run.test_batches.close()
    run.progress.close()


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
