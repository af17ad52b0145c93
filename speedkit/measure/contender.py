"""A plan in training that takes turns with another one: between its turns it stands still."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedkit.clock import Stopwatch
from speedkit.data.batches import set_running
from speedkit.data.sampler import BatchSampler
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.checkpoint import get_random_state, set_random_state
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

WARM_UP = 4  # pairs: autotuning, CUDA graphs, buffers that filled while a loader started
TURN_S = 0.05  # of a turn on a GPU, where a step after a switch is slower; on a CPU one step does


def padded_frames(sampler: BatchSampler, lengths: Tensor) -> int:
    """Return the frames of an epoch's batches, padding included, for clips of `lengths` [N]."""
    frames = 0
    for batch in sampler.batches():
        longest = int(lengths[batch].max())
        frames += len(batch) * sampler.padded_to(longest)
    return frames


class Contender:
    """One plan in training, able to take a turn and to stand still. `options` are those of `setup_run`."""

    def __init__(self, workload: Workload, recipe: Recipe, plan: Plan, *, loss_steps: int, **options: Any):
        self.run = setup_run(workload, recipe, plan, endless=True, **options)
        self.steps = steps(self.run)
        self.stopwatch = Stopwatch(self.run.device)
        self.random = get_random_state(self.run.device)
        self.loss_steps = loss_steps
        self.losses: list[Tensor] = []  # of the first `loss_steps` steps, read on the host at the end
        self.warmup_s = 0.0
        stream = self.run.data.train
        self.mean_frames = 0.0  # padded, of a batch of the first epoch, where lengths differ
        if stream.lengths is not None:
            self.mean_frames = padded_frames(stream.sampler, stream.lengths) / len(stream)

    def turn(self, steps: int = 1) -> float:
        """Return the seconds of so many steps, scaled to the padded frames of so many on average.

        What the other plan has left in the caches of a CPU would be 1 to 3 % of a turn of one step: another, which is
        not timed, goes before it.
        Only in its turn are a plan's process-wide switches set and may its loader processes work: between turns these
        stand still, buffers and all, so that they steal no time from the other plan. Each plan has the global random
        state (dropout's) to itself.
        """
        stream = self.run.data.train
        self.run.learner.precision.set_switches()
        set_random_state(self.random, self.run.device)
        set_running(stream.loader.detector.processes, True)
        if steps == 1 and self.run.device.type == "cpu":
            self.step()
        frames_before = stream.frames
        self.stopwatch.start()
        for _ in range(steps):
            self.step()
        seconds = self.stopwatch.stop()
        set_running(stream.loader.detector.processes, False)
        self.random = get_random_state(self.run.device)
        frames = stream.frames - frames_before
        if frames:
            seconds *= steps * self.mean_frames / frames
        return seconds

    def step(self) -> None:
        """Make one step."""
        next(self.steps)
        if len(self.losses) < self.loss_steps:
            self.losses.append(self.run.position.last_loss.detach().clone())

    def close(self) -> None:
        """End the run."""
        self.steps.close()
        self.run.close()


def warm_up(a: Contender, b: Contender) -> int:
    """Let both make their first turns, and time them; return the steps of a turn.

    A turn is one step on a CPU, and TURN_S on a GPU. With loader processes it takes all that they have buffered, or
    what they buffered between turns would be measured as if it cost nothing.
    """
    count = 1
    for side in (a, b):
        count = max(count, side.run.plan.workers * side.run.plan.prefetch_factor)
    turns_s = []
    for side in (a, b) * WARM_UP:
        began_s = time.perf_counter()
        turns_s.append(side.turn(count))
        side.warmup_s += time.perf_counter() - began_s
    return steps_per_turn(a.run.device, count, turns_s)


def steps_per_turn(device: torch.device, count: int, turns_s: Sequence[float]) -> int:
    """Return the steps of a turn, by the seconds of turns of `count` steps."""
    if device.type == "cpu":
        return count
    return count * math.ceil(TURN_S / min(turns_s[-2:]))
