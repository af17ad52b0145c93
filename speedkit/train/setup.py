"""From a workload, a recipe and a plan to a run that is ready for its first step."""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedkit.config import to_yaml
from speedkit.data.cache import open_cache
from speedkit.data.loader import BatchStream
from speedkit.data.shards import pack
from speedkit.errors import PlanError
from speedkit.files import claim_folder, write_text
from speedkit.hardware import cache_root, this_machine
from speedkit.plan import EffectivePlan, Fallback, Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train import attention, checkpoint, compile, distributed, memory, precision
from speedkit.train.micro_batch import find_micro_batch
from speedkit.train.optimizer import build_optimizer
from speedkit.train.progress import wanted
from speedkit.train.run import TrainingRun
from speedkit.workloads.workload import Workload


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
    endless: bool = False,
) -> TrainingRun:
    """Return a run of `workload` that is ready for its first step, by its own recipe and `Plan()` by default.

    `out` gets checkpoint, plan and history; `resume` goes on from the checkpoint there. `strict` makes a field of the
    plan that cannot be honoured an error. `deterministic` asks CUDA for reproducible kernels
    (https://docs.pytorch.org/docs/stable/notes/randomness.html). `endless` never stops nor evaluates: for measuring.
    """
    began_s = time.perf_counter()
    recipe, plan = recipe or workload.recipe, plan or Plan()
    check_recipe(recipe, workload)

    # Machine and ranks: what the plan becomes here, and which share of each batch this process learns from.
    hardware = this_machine(distributed.local_device(plan, device))
    device = hardware.device
    effective = resolve(plan, hardware, strict, workload=workload, batch_size=recipe.batch_size)
    ranks = distributed.join(effective.plan, recipe, device)
    rank = 0 if ranks is None else ranks.rank
    resume = resume or (ranks is not None and ranks.restarted)
    folder = None if out is None else Path(out) if rank else claim_folder(out, "train", resume)
    if deterministic:  # PyTorch raises later where CUDA has no such kernel
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    # What takes trying out: micro-batch and workers where they are auto. All ranks take what suits each of them.
    share = recipe if ranks is None else dataclasses.replace(recipe, batch_size=ranks.share)
    effective = choose_auto_settings(workload, share, effective, device=device)
    if ranks is not None:
        effective = min(ranks.all_gather(effective), key=lambda choice: choice.plan.micro_batch or 0)

    # Model and optimizer, then compilation on top of all that changes layers.
    precision.set_matmul_precision(effective.plan)
    model, replica, optimizer, fallbacks = build_learner(workload, recipe, effective.plan, device=device, ranks=ranks)
    effective = effective.with_fallbacks(*fallbacks)
    if strict:
        check_strict(effective)

    # Data: what is missing of shards and cache is made. A run that never ends does not see its test set.
    show = False if endless or rank else progress
    open_stream = functools.partial(
        open_batches, workload=workload, recipe=recipe, ranks=ranks, cache_dir=cache_dir, progress=wanted(show)
    )
    test_plan = dataclasses.replace(effective.plan, cache="off", shards=False) if endless else effective.plan
    run = TrainingRun(
        workload=workload,
        recipe=recipe,
        effective=effective,
        device=device,
        model=model,
        replica=replica,
        optimizer=optimizer,
        train_batches=open_stream(workload.train, effective.plan, device, seed=recipe.seed),
        test_batches=open_stream(workload.test, test_plan, device, seed=None),
        show=show,
        endless=endless,
        out=folder,
        ranks=ranks,
    )
    open_checkpoint(run, resume=resume)
    for note in filter(None, (*effective.fallbacks, getattr(run.train_batches.cache, "why", ""))):
        run.progress.say(f"  {note}")
    run.history.prepare_s = time.perf_counter() - began_s
    return run


def open_checkpoint(run: TrainingRun, *, resume: bool) -> None:
    """Put `run` where its checkpoint left off, if it is to go on from there, and get ready to write the next one."""
    if run.out is not None and resume:
        checkpoint.load(run, run.out)
    if run.out is not None and (run.ranks is None or run.ranks.rank == 0):
        write_text(run.out / "plan.yaml", to_yaml(run.plan))
        run.writer = checkpoint.CheckpointWriter(run.out, run.device)
    if run.plan.on_nonfinite == "recover":
        run.recovery.take_snapshot(run)


def check_recipe(recipe: Recipe, workload: Workload) -> None:
    """Raise PlanError for what the loss of `workload` would silently ignore."""
    if not isinstance(recipe.batch_size, int):
        raise PlanError("batch_size=auto takes several trainings: let measure.quality.choose_batch_size find it")
    for name in ("label_smoothing", "focal_gamma", "mixup"):
        if (value := getattr(recipe, name)) and name not in workload.honours:
            raise PlanError(f"{name}={value} is not applied by workload {workload.name}: leave it at 0")


def check_strict(effective: EffectivePlan) -> None:
    """Raise PlanError for what came out after `resolve` and is not as it was asked for."""
    for fallback in effective.fallbacks:
        # What is auto was to be chosen, and what is got as asked (8 bits, but for some layers) is told only.
        if fallback.asked not in ("auto", fallback.got):
            raise PlanError(f"the plan cannot be honoured, and --strict allows no fallback: {fallback}")


def choose_auto_settings(
    workload: Workload, recipe: Recipe, effective: EffectivePlan, *, device: torch.device
) -> EffectivePlan:
    """Return `effective` with memory settings applied, and with a number for micro_batch=auto."""
    memory.keep_freed_memory()
    memory.set_allocator(effective.plan, device)
    if effective.plan.micro_batch == "auto":
        search = find_micro_batch(workload, recipe, effective.plan, device=device, make_run=setup_run)
        memory.release(device)  # what the search had allocated, in blocks cut for other sizes
        effective = effective.with_fallbacks(Fallback("micro_batch", "auto", search.micro_batch, search.why))
    return effective


def build_learner(
    workload: Workload, recipe: Recipe, plan: Plan, *, device: torch.device, ranks: distributed.Ranks | None = None
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
    fused, tensor_rate = plan.fused_optimizer, plan.compile_scope == "step"
    optimizer = build_optimizer(model.parameters(), recipe, fused=fused, tensor_rate=tensor_rate)
    return model, replica, optimizer, fallbacks


def transform_model(model: nn.Module, plan: Plan, workload: Workload | None = None) -> list[Fallback]:
    """Give `model` the 8-bit layers, attention, recomputation and compiled code of `plan`, in place; return why not."""
    # The order counts: 8-bit layers take the place of others, and what is compiled includes all the rest.
    fallbacks = []
    if why := precision.apply_float8(model, plan):
        fallbacks.append(Fallback("precision", plan.precision, plan.precision, why))
    attention.apply_attention(model, plan)
    if why := memory.checkpoint_blocks(model, plan):
        fallbacks.append(Fallback("checkpointing", plan.checkpointing, "off", why))
    if why := compile.apply_compile(model, plan, workload):
        fallbacks.append(Fallback("compile_scope", "blocks", "model", why))
    return fallbacks


def open_batches(
    items: Sequence[Any],
    plan: Plan,
    device: torch.device,
    *,
    seed: int | None,
    workload: Workload,
    recipe: Recipe,
    ranks: distributed.Ranks | None,
    cache_dir: str | Path | None,
    progress: bool,
) -> BatchStream:
    """Return the stream of `items`, out of shards and a cache where the plan says so; what is missing is made."""
    cache, options = None, {} if ranks is None else {"rank": ranks.rank, "world_size": ranks.count}
    if plan.shards:
        items = pack(workload, items, Path(cache_dir or cache_root()) / "shards")
    if plan.cache != "off":
        cache = open_cache(workload, items, plan, device=device, cache_dir=cache_dir, progress=progress)
    size = recipe.batch_size
    return BatchStream(workload, items, plan, batch_size=size, seed=seed, device=device, cache=cache, **options)
