"""The state of a training run, in four parts: what learns, its data, where it is, and what it tells."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from speedkit.data.loader import BatchStream
from speedkit.fallbacks import EffectivePlan
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.checkpoint_file import CheckpointWriter
from speedkit.train.guard import StepGuard
from speedkit.train.history import History
from speedkit.train.precision import Precision
from speedkit.train.progress import Progress
from speedkit.train.ranks import Ranks
from speedkit.workload import Batch, Workload

ALL = 1 << 40  # samples: more than any batch has


@dataclasses.dataclass(kw_only=True, eq=False)
class Learner:
    """What makes an optimizer step of a batch."""

    model: nn.Module
    replica: nn.Module  # the model, or what exchanges its gradients with other ranks
    optimizer: torch.optim.Optimizer
    precision: Precision
    guard: StepGuard
    micro_batch: int  # samples per forward pass, at most
    learning_rates: list[float]  # one per step
    rates_on_device: Tensor  # [steps] the same

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The weights that are learned, listed once: each step looks at their gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def steps_made(self, step: int) -> int:
        """Return how many of `step` steps changed the weights; asks the device where some may have been left out."""
        if self.guard.active:
            return int(self.guard.good_steps)
        return step


@dataclasses.dataclass(eq=False)
class Data:
    """The streams of batches. Without a validation set, or in a run that never ends, the test set stands for it."""

    train: BatchStream
    validation: BatchStream
    test: BatchStream
    training_batches: Iterator[Batch]  # what is learned from: those of `train`, or what a measurement makes of them

    @property
    def bad(self) -> dict[str, str]:
        """Path -> why of each file that could not be read."""
        return self.train.bad | self.test.bad | self.validation.bad

    def close(self) -> None:
        """End the loader processes."""
        for stream in (self.train, self.validation, self.test):
            stream.close()


@dataclasses.dataclass(eq=False)
class Position:
    """Where a run is, and how far it goes."""

    total_steps: float
    evaluate_every: int  # steps; 0 is only at the end
    step: int = 0
    batch: Batch | None = None  # that of the step in progress, until the weights change
    # Loss [], epoch and batch of each step since the log point.
    recent: list[tuple[Tensor, int, int]] = dataclasses.field(default_factory=list)
    last_loss: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(torch.nan))  # [] of the latest step
    stop_signal: int = 0  # that asks the run to stop
    stop_agreed: bool = False  # it stops after this step: found out at a log point, where several ranks agree on it

    def evaluates(self) -> bool:
        """Return whether the step that was just made is followed by an evaluation."""
        due = self.evaluate_every and self.step % self.evaluate_every == 0
        return bool(due) or self.step == self.total_steps


@dataclasses.dataclass(eq=False)
class Reporting:
    """What a run tells: its history, its progress, its files."""

    history: History
    progress: Progress
    on_log: Callable[[dict[str, float]], object] | None
    writer: CheckpointWriter | None = None
    log: TextIO | None = None  # history.jsonl
    lap_s: float = 0.0  # when a lap began

    def lap(self) -> float:
        """Return the seconds since it was last called, and add them to those of the history."""
        now_s = time.perf_counter()
        elapsed_s = now_s - (self.lap_s or now_s)
        self.lap_s = now_s
        self.history.seconds += elapsed_s
        return elapsed_s

    def close(self) -> None:
        """End the progress bar, and the writing of a checkpoint that was begun."""
        if self.writer is not None:
            self.writer.executor.shutdown()
        if self.log is not None:
            self.log.close()
        self.progress.close()


@dataclasses.dataclass(eq=False)
class TrainingRun:
    """A training run, ready for its first step as `setup.setup_run` returns it."""

    workload: Workload
    recipe: Recipe
    effective: EffectivePlan
    device: torch.device
    ranks: Ranks
    out: Path | None
    learner: Learner
    data: Data
    position: Position
    reporting: Reporting
    cleanup: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)  # what `close` does

    @property
    def plan(self) -> Plan:
        """The effective plan."""
        return self.effective.plan

    @functools.cached_property
    def job(self) -> dict[str, Any]:
        """What two runs have in common that are one."""
        recipe = dataclasses.asdict(self.recipe)
        del recipe["on_nonfinite"]  # a run that a bad step has ended goes on without such steps
        return {
            "workload": self.workload.name,
            "train_items": len(self.workload.train),
            "validation_items": len(self.workload.validation),
            "names of items and classes": names_in(self.workload),
            **recipe,
        }

    def close(self) -> None:
        """End loader processes, progress bar and the writing of a checkpoint; put back what was set for the process."""
        self.cleanup.close()


def names_in(workload: Workload) -> str:
    """Return a hash of the names of classes and of items that have a path, wherever the folder with all of them is."""
    items = (*workload.train, *workload.validation) if workload.own_loader is None else ()
    paths = [str(item.path) for item in items if hasattr(item, "path")]
    folder = os.path.commonprefix(paths)  # noqa: RUF071 (by characters, for a path may be any text)
    names = [*workload.classes, *(path.removeprefix(folder) for path in paths)]
    return xxh3_64_hexdigest(os.fsencode("\n".join(names)))
