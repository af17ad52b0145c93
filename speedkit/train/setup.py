"""From a workload, a recipe and a plan to a run that is ready for its first step."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from speedkit.train.history import History
from speedkit.train.loop import ALL
from speedkit.train.micro_batch import micro_batch_for, preallocate_for_longer
from speedkit.train.nonfinite import Recovery, StepGuard
from speedkit.train.optimizer import build_optimizer
from speedkit.train.progress import Progress, wanted
from speedkit.train.ranks import Ranks, join, local_device
from speedkit.workload import Batch, Workload


class TrainingRun:
    """A training run: its state, ready for the first step.

    By the workload's own recipe and `Plan()` by default. `out` gets checkpoint, plan and history; `resume` goes on from
    the checkpoint there. `strict` makes a field of the plan that cannot be honoured an error. `deterministic` asks CUDA
    for reproducible kernels (https://docs.pytorch.org/docs/stable/notes/randomness.html). `on_log` is called with each
    log point, as history.jsonl gets it (fit.report); of several ranks the first one does, and what it raises ends the
    run. The first evaluation as good as `until` is the last. `verbose` says of each field why it falls back, however
    many they are. `endless` never stops nor evaluates: for measuring.
    """

    def __init__(
        self,
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
    ):
        began_s = time.perf_counter()
        self.workload = workload
        self.recipe = recipe = recipe or workload.recipe
        check_recipe(recipe, workload)

        # Machine and ranks: what the plan becomes here, and which share of each batch this process learns from.
        plan = plan or Plan()
        hardware = this_machine(local_device(plan, device))
        self.device = device = hardware.device
        effective = resolve(plan, hardware, strict, workload=workload, batch_size=recipe.batch_size)
        self.ranks = ranks = join(effective.plan, recipe, device)  # None where it is the only process
        rank, world_size, share = (0, 1, recipe.batch_size) if ranks is None else (ranks.rank, ranks.count, ranks.share)
        resume = resume or (ranks is not None and ranks.restarted)
        self.out = None if out is None else Path(out) if rank else claim_folder(out, "train", resume)
        if deterministic:  # PyTorch raises later where CUDA has no such kernel
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

        # What takes trying out: the micro-batch where it is auto. All ranks take what suits each of them.
        own_recipe = dataclasses.replace(recipe, batch_size=share)
        effective = choose_auto_settings(workload, own_recipe, effective, device=device)
        choices = [effective] if ranks is None else ranks.all_gather(effective)
        effective = min(choices, key=lambda choice: choice.plan.micro_batch or 0)
        share = share if workload.own_loader is None else ALL  # a user's batches may be larger than their first one
        self.micro_batch = min(int(effective.plan.micro_batch or share), share)  # samples per forward pass, at most

        # Model and optimizer. A step calls the replica: the model, or what exchanges its gradients with other ranks.
        precision.set_matmul_precision(effective.plan)
        self.model, self.replica, self.optimizer, fallbacks = build_learner(
            workload, recipe, effective.plan, device=device, ranks=ranks
        )
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.effective = effective.with_fallbacks(*fallbacks)
        # What is auto was to be chosen, and what is got as asked (8 bits, but for some layers) is told only.
        late = [fallback for fallback in self.effective.fallbacks if fallback.asked not in ("auto", fallback.got)]
        if strict and late:
            raise PlanError(f"the plan cannot be honoured, and --strict allows no fallback: {late[0]}")

        # How a step is made.
        plan = self.plan
        self.loss = workload.loss  # another function is put here to time it
        self.autocast, self.scaler = precision.autocast(plan, device), precision.grad_scaler(plan, device)
        self.guard = StepGuard(recipe, plan, self.model, optimizer=self.optimizer, several_ranks=ranks is not None)
        self.recovery = Recovery()

        # Data: what is missing of the cache is made. A run that never ends does not see its test set.
        progress = False if endless or rank else progress
        options: Any = {"batch_size": recipe.batch_size, "device": device, "rank": rank, "world_size": world_size}

        def open_stream(items: Sequence[Any], plan: Plan, seed: int | None) -> BatchStream:
            cache = None
            if plan.cache != "off":
                cache = open_cache(workload, items, plan, device=device, cache_dir=cache_dir, progress=wanted(progress))
            drop_last = recipe.drop_last and seed is not None  # evaluation, in order, leaves nothing out
            return BatchStream(workload, items, plan, seed=seed, drop_last=drop_last, cache=cache, **options)

        test_plan = dataclasses.replace(plan, cache="off") if endless else plan
        self.train_batches = open_stream(workload.train, plan, recipe.seed)
        self.test_batches = self.validation_batches = open_stream(workload.test, test_plan, None)
        if workload.validation and not endless:  # it then is the one to look at until the end
            self.validation_batches = open_stream(workload.validation, test_plan, None)
        self.fetch = self.train_batches.__next__  # another function is put here to measure without loading
        self.generator = torch.Generator(device=device)  # of augmentation

        # How far it goes, and what it tells.
        last_step = recipe.total_steps(len(workload.train))
        self.learning_rates = learning_rates(recipe, last_step)  # one per step
        self.rates_on_device = torch.tensor(self.learning_rates, device=device)
        self.total_steps: float = math.inf if endless else last_step
        self.evaluate_every = 0 if endless else steps_between_evaluations(plan, len(self.train_batches))
        self.history = History(workload.name, recipe, self.effective, str(device))
        self.history.until, self.history.higher_is_better = until, workload.higher_is_better
        self.on_log = None if rank else on_log
        self.progress = Progress(workload.name, last_step, recipe.batch_size, device=device, show=progress)

        # Where it is: at the start, or where a checkpoint left off.
        self.step = 0
        self.raw_batch: Batch | None = None  # that of the step in progress, until it is augmented
        self.batch: Batch | None = None  # that of the step in progress, until the weights change
        self.recent: list[tuple[Tensor, int, int]] = []  # loss [], epoch and batch of the steps since the log point
        self.last_loss = torch.tensor(torch.nan)  # [] of the latest step
        self.stop = 0  # the signal that asks the run to stop
        self.stopping = False  # it stops after this step: found out at a log point, where several ranks agree on it
        self.lap_s = 0.0
        if self.out is not None and resume:
            checkpoint.load(self, self.out)
        self.writer = None if self.out is None or rank else checkpoint.CheckpointWriter(self.out, device)
        if self.writer is not None:
            write_text(self.writer.folder / "plan.yaml", to_yaml(plan))
        preallocate_for_longer(self)
        self.recovery.take_snapshot(self)
        for note in filter(None, (*self.effective.notes(verbose), getattr(self.train_batches.cache, "why", ""))):
            self.progress.say(f"  {note}")
        self.history.prepare_s = time.perf_counter() - began_s

    @property
    def plan(self) -> Plan:
        """The effective plan."""
        return self.effective.plan

    @property
    def steps_made(self) -> int:
        """How many steps changed the weights; asks the device where some may have been left out."""
        return int(self.guard.good_steps) if self.guard.active else self.step

    def close(self) -> None:
        """End the loader processes, the progress bar, and the writing of a checkpoint that was begun."""
        if self.writer is not None:
            self.writer.executor.shutdown()
        for batches in (self.train_batches, self.validation_batches, self.test_batches):
            batches.close()
        self.progress.close()


setup_run = TrainingRun  # said as what it does


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
