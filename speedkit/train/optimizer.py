"""Optimizers whose learning rate moves without making the host wait."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.recipe import Recipe


def build(parameters: Iterable[nn.Parameter], recipe: Recipe, fused: bool) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. Fused, its learning rate is a 0-dimensional tensor on the parameters' device."""
    parameters = list(parameters)
    rate: Any = recipe.learning_rate
    if fused:
        rate = torch.tensor(rate, dtype=torch.float32, device=parameters[0].device)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=recipe.weight_decay, fused=fused)
    optimizer = torch.optim.SGD(
        parameters, lr=rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay, fused=fused
    )
    if fused and recipe.momentum:
        # Left to itself, a first step that float16 overflow skips leaves uninitialised momentum behind, which the next
        # good step multiplies into the weights. A first step from zero momentum is the same step.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class LearningRate:
    """Sets an optimizer's learning rate from a table, one entry per optimizer step that really happened."""

    def __init__(self, optimizer: torch.optim.Optimizer, table: list[float], steps_done: Tensor | None):
        """`steps_done`: the count of real steps on the device, where steps can be skipped; None where none can."""
        self.optimizer = optimizer  # and not its groups: loading a checkpoint replaces them
        self.table = table
        self.steps_done = steps_done
        self.constant = len(set(table)) == 1
        self.rate: Tensor | None = None
        self.on_device: Tensor | None = None
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            self.rate = rate
            self.on_device = torch.tensor(table, dtype=torch.float32, device=rate.device)
            for group in optimizer.param_groups:
                group["lr"] = self.rate

    def set(self, step: int) -> None:
        """Set the rate of the step after `step` steps; skipped ones are left out where the device counts them."""
        if self.constant:
            return
        if self.rate is None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.table[min(step, len(self.table) - 1)]
        elif self.steps_done is not None:
            assert self.on_device is not None
            # A run that never ends outlasts its table, and stays at the last rate.
            torch.take(self.on_device, self.steps_done.clamp(max=len(self.table) - 1), out=self.rate)
        else:
            self.rate.fill_(self.table[min(step, len(self.table) - 1)])
