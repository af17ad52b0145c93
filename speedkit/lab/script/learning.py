"""Does a script learn the same under a plan? Losses of the same batches from the same weights, against other batches.

Weights, the optimizer's state and random states are put back between. A script that draws its batches draws them again;
those of a DataLoader are given again, each with the random states that it came with.
"""

import copy
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedkit.lab.script.feed import Feed
from speedkit.lab.script.handover import Work
from speedkit.lab.script.models import weights_of
from speedkit.lab.script.random_states import RandomStates, random_states, restore_random
from speedkit.measure.optimizations import Change
from speedkit.measure.quality import mean_difference, same_losses

STEPS = 16  # whose losses are compared, fewer where a run of the script has not as many for each phase
LEAST_STEPS = 6
AHEAD = 2  # before these: a loop may have fetched the batches of so many steps
PHASES = 4  # of a test: some batches, these again, others, and the first ones under a plan
FAITHFUL = 0.25  # of what other batches make of the losses, that a replay may miss them by
Row = dict[str, Any]


class Snapshot:
    """Weights, buffers, and the optimizers' state and options, to be put back in place."""

    def __init__(self, models: Sequence[nn.Module], optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        tensors: list[Tensor] = []
        for optimizer in optimizers:
            tensors += weights_of(optimizer)
        for model in models:
            tensors += [*model.parameters(), *model.buffers()]
        self.tensors = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}
        self.states = [copy.deepcopy({id(w): state for w, state in one.state.items()}) for one in optimizers]
        self.options = [[options_of(group) for group in optimizer.param_groups] for optimizer in optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back."""
        for tensor, value in self.tensors.values():
            tensor.copy_(value)
        for optimizer, states in zip(self.optimizers, self.states, strict=True):
            for weight, state in list(optimizer.state.items()):
                kept = states.get(id(weight))
                if kept is None:
                    del optimizer.state[weight]
                    continue
                for name, value in kept.items():
                    now = state.get(name)
                    if isinstance(now, Tensor) and isinstance(value, Tensor):
                        now.copy_(value)
                    else:
                        state[name] = copy.deepcopy(value)

    def hold_options(self) -> Callable[[], None]:
        """Let the optimizers have their learning rates of then; return what gives them back the schedule's."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        schedule = [options_of(group) for group in groups]
        for group, kept in zip(groups, itertools.chain(*self.options), strict=True):
            group.update(copy.deepcopy(kept))

        def give_back() -> None:
            for group, own in zip(groups, schedule, strict=True):
                group.update(own)

        return give_back


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that a schedule moves."""
    return {name: copy.copy(group[name]) for name in ("lr", "momentum", "betas", "weight_decay") if name in group}


@dataclasses.dataclass
class Learning:
    """The test of a script's run: `apply` switches to a plan, `losses` collects them while it is a list.

    `run_steps` is how many steps a run makes.
    """

    models: Sequence[nn.Module]
    optimizers: list[Optimizer]
    feed: Feed
    apply: Callable[[Change], Any]
    run_steps: float = math.inf
    losses: list[Tensor] | None = None
    give_back: Callable[[], None] | None = None  # the schedule's options, after a step
    snapshot: Snapshot | None = None
    batches: list[Any] = dataclasses.field(default_factory=list)
    states: list[RandomStates] = dataclasses.field(default_factory=list)  # random, at the begin of each step
    plain: list[float] = dataclasses.field(default_factory=list)
    others: list[float] = dataclasses.field(default_factory=list)  # of other batches
    why_not: str = ""

    @property
    def steps(self) -> int:
        """How many steps' losses are compared."""
        return max(LEAST_STEPS, int(min(STEPS, (self.run_steps - 1) / PHASES - AHEAD)))

    def before_step(self) -> None:
        """Hold the options of the snapshot, while losses are compared."""
        if self.losses is not None and self.snapshot is not None:
            self.give_back = self.snapshot.hold_options()

    def after_step(self) -> None:
        """Give the schedule's options back."""
        if self.give_back is not None:
            self.give_back()
            self.give_back = None

    def test(self, plan: Change) -> Work[Row]:
        """Return whether the script learns the same under `plan`: a row of `tune.json`."""
        if self.snapshot is None:
            yield from self._reference()
        if self.why_not:
            return {"tested": False, "why": self.why_not}
        losses = yield from self._phase(plan, again=True)
        assert self.snapshot is not None
        self.snapshot.restore()
        if len(losses) != len(self.plain):
            return {"tested": False, "why": "the number of backward passes differs from step to step"}
        same = same_losses("loss-equal", losses, self.plain, noise=mean_difference(self.others, self.plain))
        return {"tested": True, "passed": same.passed, "why": same.words, "losses": losses, "reference": self.plain}

    def _reference(self) -> Work[None]:
        """Train on some batches, on the same again, and on others, all as the script does."""
        self.apply({})
        yield
        self.snapshot = Snapshot(self.models, self.optimizers)
        self.plain = yield from self._phase({}, again=False)
        again = yield from self._phase({}, again=True)
        self.others = yield from self._phase({}, again=None)
        self.snapshot.restore()
        if not self.plain or not len(self.plain) == len(again) == len(self.others):
            self.why_not = "the number of backward passes differs from step to step"
            return
        missed = mean_difference(again, self.plain)
        usual = mean_difference(self.others, self.plain)
        if not usual:
            self.why_not = "all its batches are alike, so nothing tells how far losses may move"
        elif missed > FAITHFUL * usual:
            self.why_not = (
                f"the same weights and batches give other losses by {missed:.2g}: its steps cannot be repeated"
            )

    def _phase(self, plan: Change, *, again: bool | None) -> Work[list[float]]:
        """Return losses under `plan`: of new batches (None), of some that are kept (False), or of these `again`."""
        assert self.snapshot is not None
        self.apply(plan)
        if again is False:
            self.feed.record = []
        elif again:
            self.feed.replay = deque(self.batches)
        try:
            for step in range(AHEAD + self.steps):
                if step == AHEAD:
                    self.snapshot.restore()
                    self.losses = []
                if again is False:
                    self.states.append(random_states())
                elif again:
                    restore_random(self.states[step])
                yield
        finally:
            losses = self.losses or []
            self.losses = None
            if self.feed.record is not None:
                self.batches = self.feed.record
            self.feed.record = self.feed.replay = None
        return [float(loss) for loss in losses]
