"""From a workload, a recipe and a plan to a run that is ready for its first step."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from speedkit.busy import advice
from speedkit.config import to_yaml
from speedkit.data.cache import open_cache
from speedkit.data.loader import BatchStream
from speedkit.errors import PlanError, SpeedkitError
from speedkit.fallbacks import EffectivePlan, Fallback, resolve
from speedkit.files import claim_folder, folder_held, write_text
from speedkit.machine import Hardware, this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe, learning_rates
from speedkit.train import attention, checkpoint, compile, memory
from speedkit.train.checkpoint_file import CheckpointWriter
from speedkit.train.guard import StepGuard
from speedkit.train.history import History
from speedkit.train.micro_batch import micro_batch_for
from speedkit.train.optimizer import build_optimizer
from speedkit.train.precision import Precision
from speedkit.train.process_state import process_state_kept, set_deterministic
from speedkit.train.progress import Progress, wanted
from speedkit.train.ranks import Ranks, local_device
from speedkit.train.run import ALL, Data, Learner, Position, Reporting, TrainingRun
from speedkit.workload import Batch, Workload


def setup_run(
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
    endless: bool = False,
    wrap_batches: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> TrainingRun:
    """Return a training run, ready for its first step. Its options are those of `fit`, and two for measuring.

    `endless`: it never stops nor evaluates. `wrap_batches` makes of the training stream the one that is learned from.
    """
    began_s = time.perf_counter()
    recipe = recipe or workload.recipe
    check_recipe(recipe, workload)
    hardware = this_machine(local_device(device))
    with contextlib.ExitStack() as cleanup:  # where setting up fails it is done here, else by the run's `close`
        cleanup.enter_context(process_state_kept(hardware.device))
        effective = resolve(plan or Plan(), hardware, strict, workload=workload, batch_size=recipe.batch_size)
        cleanup.enter_context(compile.recompile_limit_kept(effective.plan))
        ranks = Ranks(effective.plan, recipe, hardware.device)
        folder = claimed(out, ranks, resume, cleanup=cleanup)
        set_deterministic(deterministic)
        effective = choose_auto_settings(workload, recipe, effective, ranks=ranks)

        # The four parts. The learner comes first: a plan that `strict` refuses for it makes no cache.
        learner = build_learner(workload, recipe, effective, ranks=ranks, strict=strict)
        show = progress if ranks.first and not endless else False
        data = open_data(workload, recipe, effective.plan, ranks=ranks, cache_dir=cache_dir, show=show, endless=endless)
        data.training_batches = wrap_batches(data.train)
        cleanup.callback(data.close)
        position = Position(math.inf, 0) if endless else first_position(effective.plan, learner, data)
        reporting = open_reporting(workload, recipe, effective, ranks=ranks, show=show, on_log=on_log)
        cleanup.callback(reporting.close)
        run = TrainingRun(workload, recipe, effective, ranks.device, ranks, folder, learner, data, position, reporting)
        begin(run, resume)
        tell_plan(run, hardware, verbose)
        reporting.history.prepare_s = time.perf_counter() - began_s
        run.cleanup = cleanup.pop_all()
        return run


def claimed(out: str | Path | None, ranks: Ranks, resume: bool, *, cleanup: contextlib.ExitStack) -> Path | None:
    """Return the folder of the run, which the first rank claims and keeps others out of until `cleanup`."""
    if out is None:
        return None
    folder = Path(out)
    if ranks.first:
        claim_folder(folder, "train", resume or ranks.restarted)
        cleanup.enter_context(folder_held(folder))
    return folder


def open_data(
    workload: Workload,
    recipe: Recipe,
    plan: Plan,
    *,
    ranks: Ranks,
    cache_dir: str | Path | None,
    show: bool | str,
    endless: bool,
) -> Data:
    """Return the streams of this rank's batches; make what the cache lacks."""

    def open_stream(items: Sequence[Any], *, cached: bool, seed: int | None) -> BatchStream:
        """Return the stream of `items`, shuffled by `seed`, or in order where it is None."""
        if not items:
            raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
        cache = None
        if cached and plan.cache != "off":
            progress = wanted(show)
            cache = open_cache(workload, items, plan, device=ranks.device, cache_dir=cache_dir, progress=progress)
        return BatchStream(
            workload,
            items,
            plan,
            batch_size=recipe.batch_size,
            seed=seed,
            device=ranks.device,
            drop_last=recipe.drop_last and seed is not None,  # evaluation, in order, leaves nothing out
            cache=cache,
            rank=ranks.rank,
            world_size=ranks.count,
        )

    train = open_stream(workload.train, cached=True, seed=recipe.seed)
    test = open_stream(workload.test, cached=not endless, seed=None)  # which such a run does not see
    validation = test
    if workload.validation and not endless:
        validation = open_stream(workload.validation, cached=True, seed=None)
    return Data(train, validation, test, training_batches=train)


def open_reporting(
    workload: Workload,
    recipe: Recipe,
    effective: EffectivePlan,
    *,
    ranks: Ranks,
    show: bool | str,
    on_log: Callable[[dict[str, float]], object] | None,
) -> Reporting:
    """Return what a run tells, and has told nothing of yet; of several ranks only the first one calls `on_log`."""
    history = History(workload.name, recipe, effective, str(ranks.device))
    bar = Progress(workload.name, recipe.total_steps(len(workload.train)), recipe.batch_size, show=show)
    return Reporting(history, bar, on_log if ranks.first else None)


def begin(run: TrainingRun, resume: bool) -> None:
    """Put `run` where a checkpoint in its folder left off, if it is to `resume`; the first rank writes there."""
    if run.out is None:
        return
    if resume or run.ranks.restarted:
        checkpoint.load(run, run.out)
    if run.ranks.first:
        run.reporting.writer = CheckpointWriter(run.out, run.device)
        run.reporting.log = open_log(run.out / "history.jsonl", run.reporting)
        write_text(run.out / "plan.yaml", to_yaml(run.plan))


def tell_plan(run: TrainingRun, hardware: Hardware, verbose: bool) -> None:
    """Show what the plan has become, what the cache is, and which processes use the cores."""
    bar = run.reporting.progress
    cache = run.data.train.cache
    for note in run.effective.notes(verbose):
        bar.say(f"  {note}")
    if cache is not None:
        bar.say(f"  {cache.why}")
    if bar.mode != "off" and not run.ranks.several and (busy := advice(hardware)):
        bar.say(f"  {busy}")


def open_log(path: Path, reporting: Reporting) -> TextIO:
    """Return the file at `path`, to write to after the lines of the log points that the history has."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    log_steps = set(reporting.history.log_steps)
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] in log_steps:
                kept.append(f"{line.decode()}\n")
        except (ValueError, TypeError, LookupError):
            reporting.progress.say(f"  line {number} of {path} is not as it was written: it is left out")
    write_text(path, "".join(kept))
    return path.open("a", encoding="utf-8", buffering=1)  # a line is in the file once it is written


def first_position(plan: Plan, learner: Learner, data: Data) -> Position:
    """Return where a run begins and ends; `validate_every` may be a share of an epoch, or 0: at the end."""
    every = plan.validate_every
    if every is None:
        every = len(data.train)
    elif isinstance(every, float):
        every = max(1, round(every * len(data.train)))
    return Position(len(learner.learning_rates), every)


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
    workload: Workload, recipe: Recipe, effective: EffectivePlan, *, ranks: Ranks
) -> EffectivePlan:
    """Return `effective` with memory settings applied, and with a number for micro_batch=auto."""
    memory.set_allocator(effective.plan, ranks.device)
    if effective.plan.micro_batch == "auto":
        share = dataclasses.replace(recipe, batch_size=ranks.share)
        search = micro_batch_for(workload, share, effective.plan, device=ranks.device, make_run=setup_run)
        memory.release(ranks.device)  # what the search had allocated, in blocks cut for other sizes
        effective.add(Fallback("micro_batch", "auto", search.micro_batch, search.why))
    # Ranks may have found different micro-batches: all take the smallest, which fits everywhere.
    return min(ranks.all_gather(effective), key=lambda choice: choice.plan.micro_batch or 0)


def build_learner(
    workload: Workload, recipe: Recipe, effective: EffectivePlan, *, ranks: Ranks, strict: bool
) -> Learner:
    """Return the learner, its weights a function of the seed; what its model cannot do falls back in `effective`.

    Raises PlanError under `strict` where that loses something.
    """
    device = ranks.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    plan = effective.plan
    precision = Precision(plan, device)
    precision.set_switches()
    torch.manual_seed(recipe.seed)  # loading and augmenting have generators of their own
    memory_format = torch.channels_last if plan.channels_last else torch.contiguous_format
    model = workload.model().to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    effective.add(*transform_model(model, plan, precision=precision, workload=workload))
    if strict:
        effective.check_strict()
    replica = ranks.apply_data_parallel(model, recipe, precision)  # sharding comes after the rest
    optimizer = build_optimizer(model.parameters(), recipe, fused=plan.fused_optimizer)
    micro_batch = ranks.share
    if workload.own_loader is not None or (plan.bucket and workload.of_frames):
        micro_batch = ALL  # a user's batches may be larger than their first one; those of equally many frames are
    if plan.micro_batch is not None:
        micro_batch = min(int(plan.micro_batch), micro_batch)
    rates = learning_rates(recipe, recipe.total_steps(len(workload.train)))
    return Learner(
        model=model,
        replica=replica,
        optimizer=optimizer,
        precision=precision,
        guard=StepGuard(model, optimizer, recipe, precision=precision, fused=plan.fused_optimizer),
        micro_batch=micro_batch,
        learning_rates=rates,
        rates_on_device=torch.tensor(rates, device=device),
    )


def transform_model(
    model: nn.Module, plan: Plan, *, precision: Precision, workload: Workload | None = None
) -> list[Fallback]:
    """Give `model` the 8-bit layers, attention, recomputation and compiled code of `plan`, in place; return why not."""
    # The order counts: 8-bit layers take the place of others, and what is compiled includes all the rest.
    changes = (
        ("precision", plan.precision, precision.convert(model)),
        ("attention", "auto", attention.apply_attention(model, plan)),
        ("checkpointing", "off", memory.checkpoint_blocks(model, plan)),
        ("compile_scope", "model", compile.apply_compile(model, plan, workload)),
    )
    return [Fallback(field, getattr(plan, field), got, why) for field, got, why in changes if why]
