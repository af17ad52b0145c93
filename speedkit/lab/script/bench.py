"""The bench of a script's tuning: plans take turns in its loop, in the script's own thread, between its steps."""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import nn
from torch.optim import Optimizer, optimizer

from speedkit.clock import synchronize
from speedkit.lab.script.feed import Candidate, Feed
from speedkit.lab.script.forward import Forward
from speedkit.lab.script.handover import Handover, SwitchFailed, Work
from speedkit.lab.script.learning import Learning, Row
from speedkit.lab.script.profile import ScriptProfile
from speedkit.lab.script.switches import Loop, Plugged
from speedkit.lab.script.updates import Gradients
from speedkit.machine import this_machine
from speedkit.measure.optimizations import Change
from speedkit.measure.roofline import OperatorCounter
from speedkit.measure.timeline import CHECKPOINT, RARE
from speedkit.measure.warm_up import compilations


class Bench:
    """The loop of a script's current run: `turn`, `memory` and `learns` are work that is done between its steps."""

    def __init__(self, handover: Handover, in_time: Callable[[], bool]) -> None:
        self.handover = handover
        self.in_time = in_time
        self.seen: ScriptProfile
        self.loop: Loop | None = None
        self.plugged = Plugged([])
        self.learning: Learning
        self.stack = contextlib.ExitStack()
        self.runs = 0
        self.run_steps = math.inf  # of a whole run, once it is known
        self.process = os.getpid()
        self.looked = False  # closely, at the loop of a run
        self.compiled = False  # by the script itself
        self.gradients = Gradients()
        self.plan: Change = {}  # that is switched on, or was when the run ended

    # ---- one run of the script ----

    @contextlib.contextmanager
    def installed(self, seen: ScriptProfile) -> Iterator[None]:
        """Be in a run of the script inside, whose loop `seen` finds."""
        self.seen = seen
        self.runs += 1
        backward = torch.autograd.backward

        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.loop is not None and self.learning.losses is not None:
                losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                self.learning.losses += [loss.detach().float().mean() for loss in losses]
            backward(tensors, *args, **kwargs)

        with self.stack, patch.object(torch.autograd, "backward", noted):
            for owner in (Optimizer, nn.Module):
                zero_grad: Any = self.gradients.seen(owner.zero_grad)
                self.stack.enter_context(patch.object(owner, "zero_grad", zero_grad))
            self.stack.callback(optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
            self.stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)
            self.stack.callback(self.close)
            yield

    def _before_step(self, stepped: Optimizer, *_: Any) -> None:
        if self.loop is not None and stepped is self.loop.profile.optimizer:
            self.learning.before_step()

    def _after_step(self, stepped: Optimizer, *_: Any) -> None:
        profile = self.seen.loop
        if os.getpid() != self.process:  # a fork of the script's trains, without the tuning's thread
            if profile is not None:
                profile.observation.close()  # a second profiler may hang in a fork
            return
        if not self.in_time():
            raise SystemExit(0)
        if profile is None or stepped is not profile.optimizer:
            return
        if self.loop is None:
            self._begin()
        self.learning.after_step()
        if inspect.getgeneratorstate(profile.observation) == inspect.GEN_CLOSED:  # it has been looked at closely
            self.looked = True
            self.handover.step_ended()
            if self.handover.decided:  # and the script runs on
                self.apply({})

    def _begin(self) -> None:
        """Get hold of the loop that was found. Only in the first run it is looked at closely."""
        profile = self.seen.loop
        assert profile is not None
        if self.looked:
            profile.observation.close()
        else:
            self.compiled = profile.compiled or compilations() > 0
        hardware = this_machine(str(profile.device))
        feed = Feed(profile, self.seen.loaders, hardware)
        self.stack.enter_context(feed.installed())
        self.loop = Loop(
            profile=profile,
            optimizers=list(dict.fromkeys(self.seen.optimizers)),
            feed=feed,
            hardware=hardware,
            operators={},
            gradients=self.gradients,
            compiled=self.compiled,
            forwards=[Forward(model, profile.timeline) for model in profile.models],
        )
        self.plugged = Plugged(self.loop.switches())
        self.learning = Learning(profile.models, self.loop.optimizers, feed, self.apply, run_steps=self.run_steps)

    def close(self) -> None:
        """Leave the loop as the script has it, and let go of it."""
        if self.loop is not None and os.getpid() == self.process:
            self.plugged.close()
            self.loop.feed.close()
            self.loop = None
            self.plugged = Plugged([])
            del self.learning  # which holds a copy of all weights

    # ---- work between steps ----

    def apply(self, plan: Change) -> bool:
        """Switch to `plan`; return whether anything has changed."""
        self.plan = plan
        return self.plugged.apply(plan)

    def count(self) -> Work[OperatorCounter]:
        """Return the counter of a step's operators; of compiled code nothing is counted."""
        counter = OperatorCounter()
        with contextlib.nullcontext() if self.compiled else counter:
            yield
        assert self.loop is not None
        self.loop.operators = dict(counter.flops)
        return counter

    def candidates(self) -> Work[list[Candidate]]:
        """Return all that can be tried, or why not."""
        yield from ()
        return [candidate for switch in self.plugged.switches for candidate in switch.candidates()]

    def turn(self, plan: Change, steps: int) -> Work[float]:
        """Return the seconds of so many steps under `plan`, after one that is not timed where something was switched.

        Evaluations, checkpoints, compiling and the start of a loader are none of them.
        """
        assert self.loop is not None
        if self.apply(plan):
            yield
        timeline = self.loop.profile.timeline
        synchronize(self.loop.hardware.device)
        timeline.take()
        for _ in range(steps):
            yield
        synchronize(self.loop.hardware.device)
        seconds = timeline.take()
        self._check()
        rare: Sequence[str] = RARE
        if not any(forward.calls for forward in self.loop.forwards):
            rare = (CHECKPOINT,)  # what looks like an evaluation is how it trains
        return sum(part_s for cause, part_s in seconds.items() if cause not in rare)

    def memory(self, plan: Change, steps: int) -> Work[int]:
        """Return the bytes that steps under `plan` take at most: of the GPU, or of the process without its workers."""
        assert self.loop is not None
        on_gpu = self.loop.hardware.device.type == "cuda"
        self.apply(plan)
        yield
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            yield
        self._check()
        return torch.cuda.max_memory_allocated() if on_gpu else psutil.Process(os.getpid()).memory_info().rss

    def learns(self, plan: Change) -> Work[Row]:
        """Return whether the script learns the same under `plan`."""
        row = yield from self.learning.test(plan)
        self._check()
        return row

    def _check(self) -> None:
        """Raise SwitchFailed where a forward pass did."""
        assert self.loop is not None
        for forward in self.loop.forwards:
            if forward.failure is not None:
                failure = forward.failure
                forward.failure = None
                raise SwitchFailed(f"{type(failure).__name__}: {failure}")
