"""From a workload, a recipe and a plan to a run that is ready for its first step."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedkit.config import to_yaml
from speedkit.data.cache import open_cache
from speedkit.data.loader import BatchStream
from speedkit.errors import PlanError
from speedkit.fallbacks import EffectivePlan, Fallback, resolve
from speedkit.files import claim_folder, write_text
from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe, learning_rates
from speedkit.train import attention, checkpoint, compile, memory, precision
from speedkit.train.checkpoint_file import CheckpointWriter
from speedkit.train.guard import StepGuard
from speedkit.train.history import History
from speedkit.train.micro_batch import micro_batch_for
from speedkit.train.nonfinite import take_snapshot
from speedkit.train.optimizer import build_optimizer
from speedkit.train.progress import Progress, wanted
from speedkit.train.ranks import Ranks, join, local_device
from speedkit.train.run import ALL, TrainingRun
from speedkit.workload import Workload


def setup_run(
    workload: Workload,
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
    on_log: Callable[[dict[str, float]], object] | None = None,
    until: float | None = None,
    verbose: bool = False,
    endless: bool = False,
) -> TrainingRun:
    """Return a training run, ready for its first step.

    By the workload's own recipe and `Plan()` by default. `out` gets checkpoint, plan and history; `resume` goes on from
    the checkpoint there. `strict` makes a field of the plan that cannot be honoured an error. `deterministic` asks CUDA
    for reproducible kernels (https://docs.pytorch.org/docs/stable/notes/randomness.html). `on_log` is called with each
    log point, as history.jsonl gets it (fit.report); of several ranks the first one does, and what it raises ends the
    run. The first evaluation as good as `until` is the last. `verbose` says of each field why it falls back, however
    many they are. `endless` never stops nor evaluates: for measuring.
    """
    began_s = time.perf_counter()
    recipe = recipe or workload.recipe
    check_recipe(recipe, workload)

    # Machine and ranks: what the plan becomes here, and which share of each batch this process learns from.
    asked = plan or Plan()
    hardware = this_machine(local_device(asked, device))
    effective = resolve(asked, hardware, strict, workload=workload, batch_size=recipe.batch_size)
    ranks = join(effective.plan, recipe, hardware.device)
    first = ranks is None or ranks.rank == 0
    share = recipe.batch_size if ranks is None else ranks.share
    resume = resume or (ranks is not None and ranks.restarted)
    folder = None
    if out is not None:
        folder = claim_folder(out, "train", resume) if first else Path(out)
    if deterministic:  # PyTorch raises later where CUDA has no such kernel
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    # What takes trying out: the micro-batch where it is auto. All ranks take what suits each of them.
    own_recipe = dataclasses.replace(recipe, batch_size=share)
    effective = choose_auto_settings(workload, own_recipe, effective, device=hardware.device)
    choices = [effective] if ranks is None else ranks.all_gather(effective)
    effective = min(choices, key=lambda choice: choice.plan.micro_batch or 0)
    share = share if workload.own_loader is None else ALL  # a user's batches may be larger than their first one

    # Model and optimizer, then data: what is missing of the cache is made.
    precision.set_matmul_precision(effective.plan)
    model, replica, optimizer, fallbacks = build_learner(
        workload, recipe, effective.plan, device=hardware.device, ranks=ranks
    )
    effective = effective.with_fallbacks(*fallbacks)
    check_strict(effective, strict)
    show = progress if first and not endless else False
    open_stream = functools.partial(
        open_batches,
        workload,
        recipe=recipe,
        device=hardware.device,
        ranks=ranks,
        cache_dir=cache_dir,
        show=wanted(show),
    )
    # A run that never ends does not see its test set.
    test_plan = dataclasses.replace(effective.plan, cache="off") if endless else effective.plan
    train_batches = open_stream(workload.train, effective.plan, seed=recipe.seed)
    test_batches = validation_batches = open_stream(workload.test, test_plan, seed=None)
    if workload.validation and not endless:
        validation_batches = open_stream(workload.validation, test_plan, seed=None)

    last_step = recipe.total_steps(len(workload.train))
    rates = learning_rates(recipe, last_step)
    history = History(workload.name, recipe, effective, str(hardware.device))
    history.until = until
    history.higher_is_better = workload.higher_is_better
    run = TrainingRun(
        workload=workload,
        recipe=recipe,
        effective=effective,
        device=hardware.device,
        ranks=ranks,
        out=folder,
        model=model,
        replica=replica,
        optimizer=optimizer,
        scaler=precision.grad_scaler(effective.plan, hardware.device),
        autocast=precision.autocast(effective.plan, hardware.device),
        guard=StepGuard(recipe, effective.plan, model, optimizer=optimizer, several_ranks=ranks is not None),
        loss=workload.loss,
        micro_batch=min(int(effective.plan.micro_batch or share), share),
        train_batches=train_batches,
        validation_batches=validation_batches,
        test_batches=test_batches,
        fetch=train_batches.__next__,
        generator=torch.Generator(device=hardware.device),
        learning_rates=rates,
        rates_on_device=torch.tensor(rates, device=hardware.device),
        total_steps=math.inf if endless else last_step,
        evaluate_every=0 if endless else steps_between_evaluations(effective.plan, len(train_batches)),
        history=history,
        progress=Progress(workload.name, last_step, recipe.batch_size, device=hardware.device, show=show),
        on_log=on_log if first else None,
    )
    begin(run, resume, first=first)
    for note in filter(None, (*effective.notes(verbose), getattr(train_batches.cache, "why", ""))):
        run.progress.say(f"  {note}")
    history.prepare_s = time.perf_counter() - began_s
    return run


def check_strict(effective: EffectivePlan, strict: bool) -> None:
    """Raise PlanError where `strict` and a field was lost; what was to be chosen (auto) was not lost."""
    lost = [fallback for fallback in effective.fallbacks if fallback.asked not in ("auto", fallback.got)]
    if strict and lost:
        raise PlanError(f"the plan cannot be honoured, and --strict allows no fallback: {lost[0]}")


def open_batches(
    workload: Workload,
    items: Sequence[Any],
    plan: Plan,
    *,
    recipe: Recipe,
    seed: int | None,
    device: torch.device,
    ranks: Ranks | None,
    cache_dir: str | Path | None,
    show: bool,
) -> BatchStream:
    """Return the stream of this rank's batches of `items`, from the cache that `plan` asks for."""
    cache = None
    if plan.cache != "off":
        cache = open_cache(workload, items, plan, device=device, cache_dir=cache_dir, progress=show)
    return BatchStream(
        workload,
        items,
        plan,
        batch_size=recipe.batch_size,
        seed=seed,
        device=device,
        drop_last=recipe.drop_last and seed is not None,  # evaluation, in order, leaves nothing out
        cache=cache,
        rank=0 if ranks is None else ranks.rank,
        world_size=1 if ranks is None else ranks.count,
    )


def begin(run: TrainingRun, resume: bool, *, first: bool) -> None:
    """Put `run` at its start, or where a checkpoint left off."""
    if run.out is not None and resume:
        checkpoint.load(run, run.out)
    if run.out is not None and first:
        run.writer = CheckpointWriter(run.out, run.device)
        write_text(run.out / "plan.yaml", to_yaml(run.plan))
    take_snapshot(run)


def steps_between_evaluations(plan: Plan, epoch_steps: int) -> int:
    """Return validate_every in steps, where it may be a share of an epoch; 0 is only at the end."""
    every = 1.0 if plan.validate_every is None else plan.validate_every
    return max(1, round(every * epoch_steps)) if isinstance(every, float) else every


def check_recipe(recipe: Recipe, workload: Workload) -> None:
    """Raise PlanError for what the loss of `workload` would silently ignore."""
    if workload.own_loader is not None and recipe.batch_size != workload.own_loader.batch_size:
        has = f"the loader of {workload.name} makes batches of {workload.own_loader.batch_size}"
        raise PlanError(f"batch_size={recipe.batch_size}, and {has}: set it there")
    if workload.own_loader is not None and recipe.drop_last:
        raise PlanError(f"drop_last=True is for the loader of {workload.name}: set it there")
    for name in ("label_smoothing", "focal_gamma", "mixup"):
        if (value := getattr(recipe, name)) and name not in workload.honours:
            raise PlanError(f"{name}={value} is not applied by workload {workload.name}: leave it at 0")


def choose_auto_settings(
    workload: Workload, recipe: Recipe, effective: EffectivePlan, *, device: torch.device
) -> EffectivePlan:
    """Return `effective` with memory settings applied, and with a number for micro_batch=auto."""
    memory.set_allocator(effective.plan, device)
    if effective.plan.micro_batch == "auto":
        search = micro_batch_for(workload, recipe, effective.plan, device=device, make_run=setup_run)
        memory.release(device)  # what the search had allocated, in blocks cut for other sizes
        effective = effective.with_fallbacks(Fallback("micro_batch", "auto", search.micro_batch, search.why))
    return effective


def build_learner(
    workload: Workload, recipe: Recipe, plan: Plan, *, device: torch.device, ranks: Ranks | None = None
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, list[Fallback]]:
    """Return the model, what a step calls in its place, its optimizer, and what of the plan they are not.

    The weights are a function of the recipe's seed.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(recipe.seed)  # loading and augmenting have generators of their own
    memory_format = torch.channels_last if plan.channels_last else torch.contiguous_format
    model = workload.model().to(device=device, memory_format=memory_format)  # type: ignore[call-overload]

    fallbacks = transform_model(model, plan, workload)  # sharding comes after it
    replica = model if ranks is None else ranks.apply_data_parallel(model, recipe, plan)
    optimizer = build_optimizer(model.parameters(), recipe, fused=plan.fused_optimizer)
    return model, replica, optimizer, fallbacks


def transform_model(model: nn.Module, plan: Plan, workload: Workload | None = None) -> list[Fallback]:
    """Give `model` the 8-bit layers, attention, recomputation and compiled code of `plan`, in place; return why not."""
    # The order counts: 8-bit layers take the place of others, and what is compiled includes all the rest.
    fallbacks = []
    if why := precision.apply_float8(model, plan):
        fallbacks.append(Fallback("precision", plan.precision, plan.precision, why))
    if why := attention.apply_attention(model, plan):
        fallbacks.append(Fallback("attention", plan.attention, "auto", why))
    if why := memory.checkpoint_blocks(model, plan):
        fallbacks.append(Fallback("checkpointing", plan.checkpointing, "off", why))
    if why := compile.apply_compile(model, plan, workload):
        fallbacks.append(Fallback("compile_scope", "blocks", "model", why))
    return fallbacks
