"""A training run: its state, and what happens to it between steps."""

import contextlib
import dataclasses
import gc
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from speedkit.data.augment import augment_batch
from speedkit.data.loader import RANK, BatchStream
from speedkit.data.sources import write_quarantine
from speedkit.files import write_json
from speedkit.plan import CUDA_GRAPHS, EffectivePlan, Fallback, Plan
from speedkit.recipe import Recipe, learning_rates
from speedkit.train import checkpoint, compile, distributed, memory, precision
from speedkit.train.history import History
from speedkit.train.nonfinite import Recovery, StepGuard
from speedkit.train.progress import Progress
from speedkit.workloads.workload import Batch, Workload


@dataclasses.dataclass(kw_only=True)
class TrainingRun:
    """The state of one training run."""

    workload: Workload
    recipe: Recipe
    effective: EffectivePlan
    device: torch.device
    model: nn.Module
    replica: nn.Module  # what a step calls: the model, or what exchanges its gradients with other ranks
    optimizer: torch.optim.Optimizer
    train_batches: BatchStream
    test_batches: BatchStream
    show: bool | str  # whether progress is shown
    endless: bool  # it never stops nor evaluates: for measuring
    out: Path | None = None
    ranks: distributed.Ranks | None = None  # this process among those of the run; None where it is the only one
    writer: checkpoint.CheckpointWriter | None = None

    step: int = 0
    batch: Batch | None = None  # that of the step in progress, until the weights change
    losses: list[Tensor] = dataclasses.field(default_factory=list)  # of the steps since the last log point
    positions: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (epoch, batch) that they learned from
    last_loss: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(torch.nan))  # [] of the latest step
    stop: int = 0  # the signal that asks the run to stop
    stopping: bool = False  # it stops after this step: found out at a log point, where several ranks agree on it
    lap_s: float = 0.0

    def __post_init__(self):
        recipe, plan = self.recipe, self.plan

        # How far it goes, and what it tells.
        last_step = recipe.total_steps(len(self.workload.train), plan.drop_last)
        self.total_steps = math.inf if self.endless else last_step
        self.learning_rates = learning_rates(recipe, last_step)  # one per step
        self.rates_on_device = torch.tensor(self.learning_rates, device=self.device)
        self.evaluate_every = 0 if self.endless else plan.validate_every  # steps; 0 is only at the end
        if self.evaluate_every is None:
            self.evaluate_every = len(self.train_batches)
        self.history = History(self.workload.name, recipe, self.effective, str(self.device))
        self.progress = Progress(self.workload.name, last_step, recipe.batch_size, show=self.show)

        # How a step is made.
        share = recipe.batch_size if self.ranks is None else self.ranks.share
        self.micro_batch = min(int(plan.micro_batch or share), share)  # samples per forward pass, at most
        self.loss = compile.compile_step(self.workload, self.optimizer, plan)
        self.compiled = plan.compile != "off"
        self.autocast = precision.autocast(plan, self.device)
        self.scaler = precision.grad_scaler(plan, self.device)
        self.guard = StepGuard(plan, self.model, self.optimizer, several_ranks=self.ranks is not None)
        self.recovery = Recovery()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.fetch = self.train_batches.__next__  # another function is put here to measure without loading
        self.augments = self.workload.augment is not None or recipe.mixup > 0
        self.generator = torch.Generator(device=self.device)

    @property
    def plan(self) -> Plan:
        """The effective plan."""
        return self.effective.plan

    @property
    def steps_made(self) -> int:
        """How many steps changed the weights; asks the device where some may have been left out."""
        return int(self.guard.good_steps) if self.guard.active else self.step

    @property
    def learning_rate(self) -> float | Tensor:
        """That of the next step: the schedule counts steps that were made, which with a fused optimizer stays unasked.

        A run that never ends outlasts its schedule, and stays at the last rate.
        """
        last = len(self.learning_rates) - 1
        if self.guard.active and self.plan.fused_optimizer:
            return self.recovery.rate * self.rates_on_device.take(self.guard.good_steps.clamp(max=last))
        return self.recovery.rate * self.learning_rates[min(self.steps_made, last)]

    def next_batch(self) -> Batch:
        """Return the batch of the next step, augmented, on the device; again the same one if it is to be repeated."""
        if self.batch is None:
            batch, stream = self.fetch(), self.train_batches
            self.positions.append((stream.epoch, stream.position))
            self.batch = self.augment(batch, self.step) if self.augments else batch
        return self.batch

    def augment(self, batch: Batch, step: int) -> Batch:
        """Return `batch` as the step learns from it that comes after so many others; each rank has draws of its own."""
        step += RANK * self.train_batches.sampler.rank
        return augment_batch(batch, self.workload, self.recipe, step=step, generator=self.generator)

    def eager(self) -> contextlib.AbstractContextManager:
        """Return the context in which compiled code is not used."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def forward_context(self, part: Batch, *, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of the forward pass over `part` of a batch, the `last` one or not."""
        if not self.compiled and self.ranks is None:
            return self.autocast  # nothing is built anew at each step
        if self.compiled and self.plan.compile in CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        contexts = contextlib.ExitStack()
        contexts.enter_context(self.autocast)
        if len(part[0]) != self.micro_batch:  # an epoch's last part would be compiled for anew
            contexts.enter_context(self.eager())
        if self.ranks is not None:
            contexts.enter_context(self.ranks.gradient_exchange(self.replica, last))
        return contexts

    def fall_back(self, fallback: Fallback) -> None:
        """Change the plan while training."""
        if fallback.field == "micro_batch":
            self.micro_batch = fallback.got
        else:
            compile.remove_compile(self.model, self.optimizer)
            self.loss, self.compiled = self.workload.loss, False
        self.effective = self.history.effective = self.effective.with_fallbacks(fallback)
        self.progress.say(f"  {fallback}")

    def lap(self) -> float:
        """Return the seconds since it was last called, and add them to those of the history."""
        now_s = time.perf_counter()
        elapsed_s, self.lap_s = now_s - (self.lap_s or now_s), now_s
        self.history.seconds += elapsed_s
        return elapsed_s

    def log(self, outputs: Tensor, part: Batch) -> None:
        """Read the losses since the last log point; show the score of the last `part` of a batch by its `outputs`."""
        if self.ranks is not None:
            self.stop = max(self.ranks.all_gather(self.stop))
        self.stopping = bool(self.stop)
        loss = self.recovery.read(self)
        step_s = self.lap() / len(self.losses)
        self.history.loss.append(loss)
        self.history.log_steps.append(self.step)
        self.history.log_step_s.append(step_s)
        if self.progress.due(self.step):
            score = float(self.workload.score(outputs.detach(), part).float().mean())
            self.progress.update(self.step, step_s, loss, score=score, metric=self.workload.metric)
        if not gc.isenabled():  # as in `fit`
            gc.collect(1)
        self.losses.clear()
        self.positions.clear()
        self.lap()

    def finish(self) -> History:
        """Complete the history, write it where `out` is set, and return it."""
        history = self.history
        history.steps, history.model = self.steps_made, self.model
        history.peak_memory_bytes = memory.peak_memory_bytes(self.device)
        history.quarantined = dict(self.workload.quarantined) | self.train_batches.bad | self.test_batches.bad
        if self.ranks is not None:
            for quarantined in self.ranks.all_gather(history.quarantined):
                history.quarantined |= quarantined
        if history.quarantined:
            self.progress.say(f"  {len(history.quarantined)} files were left out (quarantine.csv says why)")
        if self.writer is not None:
            self.writer.wait()
            write_json(self.writer.folder / "history.json", history.as_dict())
            if history.quarantined:
                write_quarantine(self.writer.folder / "quarantine.csv", sorted(history.quarantined.items()))
        if self.ranks is not None:
            self.ranks.all_gather(None)  # a rank that goes before all is written would take the others along
        return history

    def close(self) -> None:
        """End the loader processes, the progress bar, and the writing of a checkpoint that was begun."""
        if self.writer is not None:
            self.writer.executor.shutdown()
        self.train_batches.close()
        self.test_batches.close()
        self.progress.close()
