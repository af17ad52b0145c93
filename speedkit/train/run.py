"""One training run: its state, and what happens to it between steps."""

import contextlib
import dataclasses
import gc
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from speedkit.data.augment import augment_batch
from speedkit.data.loader import RANK, BatchStream
from speedkit.data.sources import write_quarantine
from speedkit.files import write_json
from speedkit.plan import CUDA_GRAPHS, EffectivePlan, Fallback, Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint, compile, distributed, memory, precision
from speedkit.train.history import History
from speedkit.train.nonfinite import Recovery, StepGuard
from speedkit.train.progress import Progress
from speedkit.workloads.workload import Batch, Workload

COLLECT_S = 10  # between garbage collections, which `fit` keeps out of steps


@dataclasses.dataclass(kw_only=True)
class TrainingRun:
    """The state of one training run."""

    workload: Workload
    recipe: Recipe
    effective: EffectivePlan
    device: torch.device
    model: nn.Module
    replica: nn.Module  # what a step calls: the model, or what exchanges its gradients with other ranks
    micro_batch: int  # samples per forward pass, at most
    optimizer: torch.optim.Optimizer
    train_batches: BatchStream
    test_batches: BatchStream
    learning_rates: list[float]  # one per step
    total_steps: int | None  # None never ends
    evaluate_every: int  # steps; 0 is only at the end
    history: History
    progress: Progress
    out: Path | None = None
    writer: checkpoint.CheckpointWriter | None = None
    ranks: distributed.Ranks | None = None  # this process among those of the run; None where it is the only one
    recovery: Recovery = dataclasses.field(default_factory=Recovery)

    step: int = 0
    batch: Batch | None = None  # that of the step in progress, until the weights change
    losses: list[Tensor] = dataclasses.field(default_factory=list)  # of the steps since the last log point
    positions: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (epoch, batch) that they learned from
    last_loss: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(torch.nan))  # [] of the latest step
    stop: int = 0  # the signal that asks the run to stop
    all_stop: bool = False  # several ranks agreed on it at the last log point
    lap_s: float = 0.0
    time_since_log_s: float = 0.0  # spent on steps
    collected_s: float = 0.0

    def __post_init__(self):
        plan = self.plan
        self.loss = compile.compile_loss(self.workload.loss, plan, self.workload)
        self.compiled = plan.compile != "off"
        self.autocast = precision.autocast(plan, self.device)
        self.scaler = precision.grad_scaler(plan, self.device)
        self.guard = StepGuard(plan, self.model, self.optimizer, several_ranks=self.ranks is not None)
        if compile.compiles_update(plan):
            compile.compile_update(self.optimizer, plan)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.fetch = self.train_batches.__next__  # another function is put here to measure without loading
        self.generator = torch.Generator(device=self.device)
        self.rates_on_device = torch.tensor(self.learning_rates, device=self.device)

    @property
    def plan(self) -> Plan:
        """The effective plan."""
        return self.effective.plan

    @property
    def learning_rate(self) -> float | Tensor:
        """Of the next step: the schedule counts steps that were made, which where some are left out the device knows.

        A run that never ends outlasts its schedule, and stays at the last rate.
        """
        last = len(self.learning_rates) - 1
        if self.guard.active and self.plan.fused_optimizer:
            return self.recovery.rate * self.rates_on_device.take(self.guard.good_steps.clamp(max=last))
        made = int(self.guard.good_steps) if self.guard.active else self.step
        return self.recovery.rate * self.learning_rates[min(made, last)]

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop after this step; several ranks agree on it at log points."""
        return bool(self.stop) and (self.ranks is None or self.all_stop)

    def next_batch(self) -> Batch:
        """Return the batch of the next step, augmented, on the device; again the same one if it is to be repeated."""
        if self.batch is None:
            batch = self.fetch()
            self.positions.append((self.train_batches.epoch, self.train_batches.position))
            self.batch = self.augment(batch, self.step)
        return self.batch

    def augment(self, batch: Batch, step: int) -> Batch:
        """Return `batch` as the step learns from it that comes after so many others; each rank has draws of its own."""
        step += RANK * self.train_batches.sampler.rank
        return augment_batch(batch, self.workload, self.recipe, step=step, generator=self.generator)

    def eager(self) -> contextlib.AbstractContextManager:
        """Return the context in which compiled code is not used."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def compiled_for(self, part: Batch) -> contextlib.AbstractContextManager:
        """Return the context for a forward pass over `part`: eager where it is smaller than all others.

        An epoch's last part would be compiled for anew.
        """
        if not self.compiled:
            return contextlib.nullcontext()
        if self.plan.compile in CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        return contextlib.nullcontext() if len(part[0]) == self.micro_batch else self.eager()

    def gradients_exchanged(self, last: bool) -> contextlib.AbstractContextManager:
        """Return the context for a forward pass, the `last` of a step or not, whose gradients may be for all ranks."""
        if self.ranks is not None and self.ranks.sharded:
            self.replica.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.ranks is not None and not last:
            return self.replica.no_sync()  # type: ignore[operator]
        return contextlib.nullcontext()

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

    def read_losses(self) -> list[float]:
        """Return the losses since the last log point; the host waits for the device here."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0, device=self.device)
        if self.ranks is not None:
            losses = self.ranks.mean(losses)
            self.stop = self.ranks.signal_received(self.stop)
            self.all_stop = bool(self.stop)
        return losses.tolist()

    def log(self, outputs: Tensor, part: Batch) -> None:
        """Read the losses since the last log point; show the score of the last `part` of a batch by its `outputs`."""
        history, count = self.history, max(1, len(self.losses))
        history.loss.append(self.recovery.read(self))
        history.log_steps.append(self.step)
        self.time_since_log_s += self.lap()
        history.log_step_s.append(self.time_since_log_s / count)
        if self.progress.due(self.step):
            score = float(self.workload.score(outputs.detach(), part).float().mean())
            self.progress.update(self.step, history.log_step_s[-1], history.loss[-1], score, self.workload.metric)
        if not gc.isenabled() and time.perf_counter() - self.collected_s > COLLECT_S:
            gc.collect()
            self.collected_s = time.perf_counter()
        self.losses.clear()
        self.positions.clear()
        self.time_since_log_s = 0.0
        self.lap()

    def save_checkpoint(self) -> None:
        """Begin to write the state of the run, where `out` is set; a state that is not finite is an error instead."""
        if self.out is None:
            return
        if not self.guard.skips and self.losses:
            Recovery().read(self)  # never over a good checkpoint
        self.history.quarantined = self.quarantined
        checkpoint.save(self)

    @property
    def quarantined(self) -> dict[str, str]:
        """The files that were left out: path -> why."""
        return dict(self.workload.quarantined) | self.train_batches.bad | self.test_batches.bad

    def finish(self) -> History:
        """Complete the history, write it where `out` is set, and return it."""
        history, guard = self.history, self.guard
        if self.writer is not None:
            self.writer.wait()
        history.steps = int(guard.good_steps) if guard.active else self.step
        history.model = self.model
        history.quarantined = self.quarantined
        if self.ranks is not None:
            history.quarantined = self.ranks.merge_dicts(history.quarantined)
        history.peak_memory_bytes = memory.peak_memory_bytes(self.device)
        if history.quarantined:
            self.progress.say(f"  {len(history.quarantined)} files were left out (quarantine.csv says why)")
        if self.out is not None and self.writer is not None:
            write_json(self.out / "history.json", history.as_dict())
            if history.quarantined:
                write_quarantine(self.out / "quarantine.csv", sorted(history.quarantined.items()))
        if self.ranks is not None:
            self.ranks.all_gather(None)  # a rank that goes before all is written would take the others along
        return history

    def close(self) -> None:
        """End the loader processes, the progress bar, and the writing of a checkpoint that was begun."""
        if self.writer is not None:
            self.writer.close()
        self.train_batches.close()
        self.test_batches.close()
        self.progress.close()
