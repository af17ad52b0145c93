"""Steps whose loss or gradients are not finite, left out on the device without making the host wait."""

import torch
from torch import Tensor, nn

from speedkit.recipe import Recipe
from speedkit.train.precision import Precision


class StepGuard:
    """Keeps a step whose loss or gradient norm is not finite from changing weights, optimizer state or buffers.

    A fused optimizer reads `found_inf` and leaves the step out by itself, so the host never waits; for another one the
    host reads the verdict and drops the gradients. Gradients that overflow float16 while the loss is finite are no bad
    step: GradScaler leaves the step out and lowers the scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        *,
        precision: Precision,
        fused: bool,
    ):
        device = next(model.parameters()).device
        self.scaled = precision.scaler.is_enabled()
        self.active = self.scaled or recipe.on_nonfinite != "raise"  # else no step is ever left out
        self.fused = fused
        self.optimizer = optimizer
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), device=device)
        if self.active and self.fused and not self.scaled:  # GradScaler sets its own
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.buffers = list(model.buffers()) if self.active else []
        self.buffers_before = [buffer.clone() for buffer in self.buffers]

    def before_step(self) -> None:
        """Remember what even a bad forward pass changes: BatchNorm's statistics."""
        if self.buffers:
            torch._foreach_copy_(self.buffers_before, self.buffers)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Find out whether the step is finite, by its `loss []` and gradient `norm []`, neither scaled nor clipped.

        Return the loss, NaN where the step is bad.
        """
        self.found_inf.copy_((loss + norm).isfinite().logical_not())
        if not self.fused and self.found_inf:  # the host waits for the device here
            self.optimizer.zero_grad(set_to_none=True)  # the optimizer finds nothing to do
        return loss if self.scaled else torch.where(self.found_inf == 0, loss, torch.nan)

    def after_step(self) -> None:
        """Count the step if it was good, else put the buffers back."""
        if not self.active:
            return
        with torch.no_grad():
            good = self.found_inf == 0
            self.good_steps += good
            for before, buffer in zip(self.buffers_before, self.buffers, strict=True):
                torch.where(good, buffer, before, out=buffer)
