"""The guard against steps that are not finite: told and left out on the device, without the host waiting."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from speedkit.plan import Plan
from speedkit.train.precision import LossScale

GOOD, OVERFLOW, BAD = 0, 1, 2  # what a step can be; of several ranks the worst counts


class Guard:
    """What one run knows of its bad steps, those whose loss or gradient norm is not finite.

    With `on_nonfinite` skip or recover a bad step leaves weights, optimizer state and buffers bit by bit as they were.
    A fused optimizer reads `found_inf` and leaves the step out by itself; for another one the host reads it. Gradients
    that overflow float16 while the loss is finite are no bad step: their loss scale is too large, and comes down.
    `steps` counts the real steps on the device.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: LossScale | None,
        ranks: bool = False,
    ):
        device = next(model.parameters()).device
        self.skips, self.fused, self.scale = plan.on_nonfinite != "raise", plan.fused_optimizer, scale
        self.found_inf = torch.zeros((), device=device) if scale is None else scale.found_inf
        self.steps = torch.zeros((), dtype=torch.int64, device=device) if scale is None else scale.steps
        if self.skips and self.fused:
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.ranks = ranks  # whether this run is of several
        self.buffers = list(model.buffers())
        self.kept = [buffer.clone() for buffer in self.buffers]
        self.left_out = 0  # steps that the host left out, where it reads the flag
        self.flag = self.found_inf  # of the latest step
        self.flags: list[Tensor] = []  # of the steps since the last log point, where bad ones are skipped
        self.places: list[int] = []  # the batches of the stream that they learned from, the first being 1

    @property
    def steps_done(self) -> Tensor | None:
        """The real steps for the schedule, where only the device knows them."""
        return self.steps if self.scale is not None or (self.skips and self.fused) else None

    def made(self, step: int) -> int:
        """Return how many of `step` steps changed the weights. The host waits for the device where it must ask it."""
        return int(self.steps) if self.scale is not None or self.skips else step

    def keep(self) -> None:
        """Keep what the forward pass changes in the model: BatchNorm's running statistics."""
        if self.kept:
            torch._foreach_copy_(self.kept, self.buffers)

    def put_back(self) -> None:
        """Make the buffers those that were kept."""
        if self.kept:
            torch._foreach_copy_(self.buffers, self.kept)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> bool:
        """Tell a good step from a bad one by its `loss []` and gradient `norm []`, unscaled and not clipped yet.

        Return whether the optimizer may be called: a fused one always, for it asks `found_inf`.
        """
        if self.scale is None:
            flag = _not_finite(loss + norm) * float(BAD)
        else:
            # No scale is too large at 1: what overflows there is not the scale's fault.
            at_fault = (self.scale.scale > 1) & _not_finite(loss).logical_not()
            flag = torch.where(at_fault, self.found_inf, BAD * torch.max(self.found_inf, _not_finite(loss)))
        if self.ranks:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        self.found_inf.copy_(flag != GOOD)
        self.flag = flag
        if self.fused or not flag:  # the host waits for the device here, unless a fused optimizer does the asking
            return True
        self.left_out += 1
        return False

    @torch.no_grad()
    def settle(self) -> None:
        """Count the step if it was good, else put the buffers back; the loss scale moves by overflows alone."""
        self.flags.append(self.flag)
        good = self.found_inf == 0
        for kept, buffer in zip(self.kept, self.buffers, strict=True):
            torch.where(good, buffer, kept, out=buffer)
        if self.scale is None:
            self.steps.add_(good)
            return
        before = self.scale.scale.clone()
        self.scale.update()
        torch.where(self.flag == BAD, before, self.scale.scale, out=self.scale.scale)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, all of it taken between two steps."""
        return {"steps": self.steps, "flags": list(self.flags), "places": list(self.places), "left_out": self.left_out}

    def load(self, state: dict[str, Any], step: int) -> None:
        """Go on from `state`; from {}, that of a run without a guard, as if all its `step` steps had been good."""
        self.steps.fill_(state.get("steps", step)) if self.scale is None else None
        self.left_out = state.get("left_out", 0)
        self.flags = [flag.to(self.found_inf.device) for flag in state.get("flags", ())]
        self.places = list(state.get("places", ()))


def _not_finite(value: Tensor) -> Tensor:
    """Return 1.0 where `value []` is NaN or infinite, else 0.0, as float32."""
    return value.isfinite().logical_not().float()
