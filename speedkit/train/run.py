"""One training run: its state, what is set up before its first step, and what it leaves behind."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedkit.data.cache import open_cache
from speedkit.data.decode import with_decoder
from speedkit.data.loader import BatchStream
from speedkit.data.shards import pack
from speedkit.data.sources import write_quarantine
from speedkit.data.workers import choose_workers
from speedkit.errors import PlanError
from speedkit.files import claim_folder, write_json, write_text
from speedkit.hardware import cache_root, this_machine
from speedkit.plan import EffectivePlan, Fallback, Plan, resolve
from speedkit.recipe import Recipe, learning_rates, steps_per_epoch
from speedkit.settings import to_yaml
from speedkit.train import attention, checkpoint, compilation, distributed, memory, optimizer, precision
from speedkit.train.batch_size import choose_micro_batch
from speedkit.train.guard import Guard
from speedkit.train.history import History
from speedkit.train.progress import Progress, wanted
from speedkit.train.recovery import Recovery

Loss = Callable[..., tuple[Tensor, Tensor]]  # model, batch, recipe -> mean over the batch's valid items, outputs


@dataclasses.dataclass
class Run:
    """The state of one training run."""

    workload: Any
    recipe: Recipe
    effective: EffectivePlan
    plan: Plan  # the effective one
    device: torch.device
    model: torch.nn.Module
    parameters: list[torch.nn.Parameter]  # those that are trained
    forward: torch.nn.Module | compilation.Compiled  # the model as the plan has it: itself, or compiled
    loss: Loss  # the workload's, computed as the plan has it
    micro_batch: int  # samples per forward pass, at most
    optimizer: torch.optim.Optimizer
    update: Callable[[], Any]  # its step, or the compiled form of it
    set_learning_rate: Callable[[int], Any]  # for the step after so many
    scale: precision.LossScale | None
    guard: Guard
    batches: "Batches"
    test_batches: "Batches"
    total_steps: int | None  # None never ends
    scheduled: int  # steps that the learning rate is laid out for
    evaluate_every: int
    history: History
    progress: Progress
    out: Path | None
    keeper: checkpoint.Keeper | None = None  # where `out` is set
    step: int = 0
    pending: list[Tensor] = dataclasses.field(default_factory=list)  # losses not read yet, one per step
    last_loss: Any = None  # of the latest step, still on the device
    stop: int = 0  # the signal that asks the run to stop
    recovery: Recovery = dataclasses.field(default_factory=Recovery)
    ranks: distributed.Ranks | None = None  # this process among those of the run; None where it is the only one
    draws: bool | None = None  # whether a step draws from the global random generators; None before the first

    def loss_in(self, name: str) -> Loss:
        """Return the loss as `loss`, but computed in the number format `name`."""
        return loss_under(dataclasses.replace(self.plan, precision=name), self.workload, self.device)

    def set_precision(self, name: str) -> None:
        """Go on in the number format `name`, one that needs no loss scale."""
        self.plan, self.loss = dataclasses.replace(self.plan, precision=name), self.loss_in(name)
        self.scale = self.guard.scale = None
        precision.apply(self.plan)


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
    `deterministic` asks CUDA for reproducible kernels (https://docs.pytorch.org/docs/stable/notes/randomness.html); a
    CPU needs no asking. `endless` ignores the recipe's length and never evaluates: for measuring. Raises PlanError for
    a field of the recipe that the workload's loss would silently ignore.
    """
    began_s = time.perf_counter()
    recipe = checked(recipe or workload.recipe, workload)
    device = (hardware := this_machine(distributed.own_device(plan, device))).device
    effective = resolve(plan or Plan(), hardware, strict, workload)
    share, ranks = (0, 1), distributed.join(effective.plan, recipe, device)
    if ranks is not None:
        share, resume = (ranks.rank, ranks.count), resume or distributed.started_again()
    folder = None if out is None else Path(out) if share[0] else claim_folder(out, "train", resume)
    if deterministic:
        reproducibly()
    alone = dataclasses.replace(recipe, batch_size=-(-recipe.batch_size // share[1]))  # what of it this process gets
    effective = settled(workload, alone, effective, device)
    plan = (effective := effective if ranks is None else ranks.agreed(effective)).plan
    workload = dataclasses.replace(workload, load=with_decoder(workload, plan.decoder))
    precision.apply(plan)
    shown = progress if not endless and not share[0] else False
    options: Any = {"share": share, "device": device, "cache_dir": cache_dir, "progress": wanted(shown)}
    test_plan = dataclasses.replace(plan, cache="off", shards=False) if endless else plan  # its test set is never seen
    model, update, scale, late = make_learner(workload, recipe, plan, device, ranks)
    forward = compilation.apply(model, plan, workload)
    plan = (effective := allowed(compilation.honoured(effective.with_fallbacks(*late), forward), strict)).plan
    total = recipe.total_steps(len(workload.train), plan.drop_last)
    guard = Guard(plan, model, update, scale, ranks is not None)
    run = Run(
        workload,
        recipe,
        effective,
        plan,
        device,
        model,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        forward,
        loss_under(plan, workload, device),
        min(int(plan.micro_batch or alone.batch_size), alone.batch_size),
        update,
        compilation.update(forward, update),
        optimizer.schedule(update, learning_rates(recipe, total), guard.steps_done),
        scale,
        guard,
        open_batches(workload, workload.train, plan, recipe.batch_size, recipe.seed, **options),
        open_batches(workload, workload.test, test_plan, recipe.batch_size, None, **options),
        total_steps=None if endless else total,
        scheduled=total,
        evaluate_every=0 if endless else evaluate_every(workload, recipe, plan),
        history=History(workload.name, recipe, effective, str(device)),
        progress=Progress(workload.name, total, recipe.batch_size, device, shown),
        out=folder,
        ranks=ranks,
    )
    if folder is not None and resume:
        checkpoint.load(run, folder)
    if folder is not None and share[0] == 0:
        write_text(folder / "plan.yaml", to_yaml(plan))
        run.keeper = checkpoint.Keeper(run, folder)
    run.progress.follow(run.batches)
    run.recovery.start(run)
    run.progress.tell(*effective.fallbacks, run.batches.padding, getattr(run.batches.cache, "why", ""))
    run.history.prepare_s = time.perf_counter() - began_s
    return run


def reproducibly() -> None:
    """Ask CUDA for kernels that give the same bits each time; raises later where there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def allowed(effective: EffectivePlan, strict: bool) -> EffectivePlan:
    """Return `effective`. Raises PlanError under `strict` for what came out late and is not as it was asked for."""
    # What is auto was to be chosen, and what is got as asked (8 bits, but for some layers) is told only.
    for found in effective.fallbacks:
        if strict and found.asked not in ("auto", found.got):
            raise PlanError(f"the plan cannot be honoured, and --strict allows no fallback: {found}")
    return effective


def evaluate_every(workload: Any, recipe: Recipe, plan: Plan) -> int:
    """Return the steps from one evaluation to the next, by default an epoch's; 0 is only at the end."""
    if plan.validate_every is not None:
        return plan.validate_every
    return steps_per_epoch(len(workload.train), recipe.batch_size, plan.drop_last)


def checked(recipe: Recipe, workload: Any) -> Recipe:
    """Return `recipe`. Raises PlanError for what the loss of `workload` would silently ignore."""
    if not isinstance(recipe.batch_size, int):
        raise PlanError("batch_size=auto takes several trainings: let measure.larger_batch.choose_batch_size find it")
    for name in ("label_smoothing", "focal_gamma", "mixup"):
        if (value := getattr(recipe, name)) and name not in workload.honours:
            raise PlanError(f"{name}={value} is not applied by workload {workload.name}: leave it at 0")
    return recipe


def settled(workload: Any, recipe: Recipe, effective: EffectivePlan, device: torch.device) -> EffectivePlan:
    """Return `effective` with what takes trying out: the allocator, and micro-batch and workers where they are auto."""
    memory.keep_freed_memory()
    if why := memory.set_allocator(effective.plan, device):
        effective = effective.with_fallbacks(Fallback("allocator", effective.plan.allocator, "default", why))
    effective = choose_micro_batch(workload, recipe, effective, device, make_learner, loss_under)
    return measure_workers(workload, recipe, effective, device)


def open_batches(workload: Any, items: Any, plan: Plan, batch_size: int, seed: int | None, **options: Any) -> "Batches":
    """Return the stream of `items`, out of shards and a cache where the plan says so; what is missing is made."""
    share = options.pop("share", (0, 1))
    if plan.shards:
        items = pack(workload, items, Path(options["cache_dir"] or cache_root()) / "shards")
    cache = open_cache(workload, items, plan, **options) if plan.cache != "off" else None
    settings = {"batch_size": batch_size, "seed": seed, "device": options["device"], "cache": cache}
    return Batches(workload, items, plan, rank=share[0], world_size=share[1], **settings)


class Batches(BatchStream):
    """A stream by the names that the loop, measurements and ranks of today know; goes with them."""

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch."""
        return next(self)

    def one_pass(self) -> Any:
        """Yield the batches of one epoch."""
        return self.one_epoch()

    def counts(self, epoch: int, position: int) -> bool:
        """Whether the batch is no other rank's."""
        return self.sampler.counts(position)

    def largest(self, position: int) -> int:
        """Return the size of the largest share of batch number `position`."""
        whole = min(self.sampler.batch_size, self.sampler.count - (position - 1) * self.sampler.batch_size)
        return -(-whole // self.sampler.world_size)


def measure_workers(workload: Any, recipe: Recipe, effective: EffectivePlan, device: torch.device) -> EffectivePlan:
    """Return `effective`, where workers="auto" with those that suit steps of a model made for this, not compiled."""
    plan = effective.plan
    if plan.workers != "auto":
        return effective
    model, update, *_ = make_learner(workload, recipe, plan, device)
    micro_batch, loss_of = int(plan.micro_batch or recipe.batch_size), loss_under(plan, workload, device)

    def compute(batch: tuple[Tensor, ...]) -> None:
        update.zero_grad()
        for part in zip(*(tensor.split(micro_batch) for tensor in batch), strict=True):
            loss_of(model, part, recipe)[0].backward()

    precision.apply(plan)
    chosen, why = choose_workers(
        workload, workload.train, plan, batch_size=recipe.batch_size, device=device, compute=compute
    )
    found = effective.with_fallbacks(Fallback("workers", "auto", chosen.workers, why))
    return dataclasses.replace(found, plan=chosen)  # with their kind, and whether they stay


class Learner(NamedTuple):
    """What a step changes: the model, its optimizer, float16's loss scale; and what of the plan it is not."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scale: precision.LossScale | None
    fallbacks: tuple[Fallback, ...]


def make_learner(workload: Any, recipe: Recipe, plan: Plan, device: torch.device, ranks: Any = None) -> Learner:
    """Return the learner on `device`, as the plan has it; its weights are a function of the recipe's seed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(recipe.seed)  # loading and augmenting have generators of their own
    memory_format = torch.channels_last if plan.channels_last else torch.contiguous_format
    model = workload.model().to(device=device, memory_format=memory_format)
    fallbacks = [Fallback("precision", plan.precision, plan.precision, why) for why in precision.convert(model, plan)]
    if why := memory.checkpoint_blocks(model, plan):
        fallbacks.append(Fallback("checkpointing", plan.checkpointing, "off", why))
    if ranks is not None and (why := ranks.shard(model, recipe, plan)):
        fallbacks.append(Fallback("fused_optimizer", True, False, why))
        plan = dataclasses.replace(plan, fused_optimizer=False)
    update = optimizer.build(model.parameters(), recipe, plan.fused_optimizer, compilation.compiles_update(plan))
    scale = precision.LossScale(device) if plan.precision == "fp16" else None
    if scale is not None:
        update.found_inf = scale.found_inf  # type: ignore[attr-defined]  # read by fused optimizers
    return Learner(model, update, scale, tuple(fallbacks))


def loss_under(plan: Plan, workload: Any, device: torch.device) -> Loss:
    """Return the loss of `workload`, computed in the number format and by the attention kernel of `plan`."""
    loss = compilation.loss(workload.loss, plan, workload)
    for context in (attention.kernels(plan), precision.autocast(plan, device)):
        loss = loss if context is None else context(loss)
    return loss


def finish(run: Run) -> History:
    """Complete the history of a run whose steps are done, write it where `out` is set, and return it."""
    history = run.history
    if run.keeper is not None:
        run.keeper.wait()
    history.effective = compilation.honoured(history.effective, run.forward)
    history.steps = run.guard.made(run.step)
    if not run.guard.skips:
        history.overflows = run.step - history.steps  # else counted as they were read
    history.model = run.model
    history.quarantined = dict(run.workload.quarantined) | run.batches.bad | run.test_batches.bad
    if run.ranks is not None:
        history.quarantined = run.ranks.united(history.quarantined)
    if run.device.type == "cuda":
        history.peak_memory_bytes = torch.cuda.max_memory_allocated(run.device)
    else:
        history.peak_memory_bytes = memory.fragmentation(run.device)["peak_rss_bytes"]
    if history.quarantined:
        run.progress.say(f"  {len(history.quarantined)} files were left out (quarantine.csv says why)")
    if run.out is not None and run.keeper is not None:
        write_json(run.out / "history.json", history.as_dict())
        if history.quarantined:
            write_quarantine(run.out / "quarantine.csv", sorted(history.quarantined.items()))
    return history


def close(run: Run) -> None:
    """End the run's loader processes, its progress bar, and the writing of a checkpoint that was begun."""
    if run.keeper is not None and run.keeper.writer is not None:
        run.keeper.writer.join()
    run.batches.close()
    run.test_batches.close()
    run.progress.close()
