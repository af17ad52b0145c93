"""The state of a training run: what the parts of the loop take, read and change."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from speedkit.data.loader import BatchStream
from speedkit.fallbacks import EffectivePlan
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.checkpoint_file import CheckpointWriter
from speedkit.train.guard import Recovery, StepGuard
from speedkit.train.history import History
from speedkit.train.progress import Progress
from speedkit.train.ranks import Ranks
from speedkit.workload import Batch, Loss, Workload

ALL = 1 << 40  # samples: more than any batch has


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainingRun:
    """A training run, ready for its first step as `setup.setup_run` returns it."""

    # What is trained, and how.
    workload: Workload
    recipe: Recipe
    effective: EffectivePlan
    device: torch.device
    ranks: Ranks | None  # None where it is the only process
    out: Path | None

    # What makes a step.
    model: nn.Module
    replica: nn.Module  # the model, or what exchanges its gradients with other ranks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: contextlib.AbstractContextManager
    guard: StepGuard
    loss: Loss  # the workload's; another function is put here to time it
    micro_batch: int  # samples per forward pass, at most
    recovery: Recovery = dataclasses.field(default_factory=Recovery)

    # Its data. Without a validation set, or in a run that never ends, the test set stands for it.
    train_batches: BatchStream
    validation_batches: BatchStream
    test_batches: BatchStream
    fetch: Callable[[], Batch]  # the next batch; another function is put here to measure without loading
    generator: torch.Generator  # of augmentation

    # How far it goes, and what it tells.
    learning_rates: list[float]  # one per step
    rates_on_device: Tensor  # [steps] the same
    total_steps: float
    evaluate_every: int  # steps; 0 is only at the end
    history: History
    progress: Progress
    on_log: Callable[[dict[str, float]], object] | None
    writer: CheckpointWriter | None = None

    # Where it is.
    step: int = 0
    raw_batch: Batch | None = None  # that of the step in progress, until it is augmented
    batch: Batch | None = None  # that of the step in progress, until the weights change
    # Loss [], epoch and batch of each step since the log point.
    recent: list[tuple[Tensor, int, int]] = dataclasses.field(default_factory=list)  # since the log point
    last_loss: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(torch.nan))  # [] of the latest step
    stop: int = 0  # the signal that asks the run to stop
    stopping: bool = False  # it stops after this step: found out at a log point, where several ranks agree on it
    lap_s: float = 0.0

    @property
    def plan(self) -> Plan:
        """The effective plan."""
        return self.effective.plan

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The weights that are learned, listed once: each step looks at their gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

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
