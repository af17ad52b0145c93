"""Optimizers whose learning rate moves without making the host wait."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.recipe import Recipe


def build(parameters: Iterable[nn.Parameter], recipe: Recipe, fused: bool) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. Fused, its learning rate is a 0-dimensional tensor on the parameters' device."""
    parameters = list(parameters)
    rate = torch.tensor(recipe.learning_rate, device=parameters[0].device) if fused else recipe.learning_rate
    options: dict[str, Any] = {"lr": rate, "weight_decay": recipe.weight_decay, "fused": fused}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    optimizer = torch.optim.SGD(parameters, momentum=recipe.momentum, **options)
    if fused and recipe.momentum:
        # Left to itself, a first step that float16 overflow skips leaves uninitialised momentum behind, which the next
        # good step multiplies into the weights. A first step from zero momentum is the same step.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class LearningRate:
    """Sets an optimizer's learning rate from a table, one entry per optimizer step that really happened."""

    def __init__(self, optimizer: torch.optim.Optimizer, table: list[float], steps_done: Tensor | None):
        """`steps_done`: the count of real steps on the device, where (fused) steps can be skipped; None elsewhere."""
        self.optimizer, self.table, self.steps_done = optimizer, table, steps_done
        self.constant = len(set(table)) == 1
        self.rate = optimizer.param_groups[0]["lr"]  # the tensor to write into, where the optimizer is fused
        self.on_device = None if steps_done is None else torch.tensor(table, device=steps_done.device)

    def set(self, step: int) -> None:
        """Set the rate of the step after `step` steps; skipped ones are left out where the device counts them."""
        if self.constant:
            return
        last = len(self.table) - 1  # a run that never ends outlasts its table, and stays at the last rate
        if self.on_device is not None and self.steps_done is not None:
            torch.take(self.on_device, self.steps_done.clamp(max=last), out=self.rate)
        elif isinstance(self.rate, Tensor):
            self.rate.fill_(self.table[min(step, last)])
        else:
            self.optimizer.param_groups[0]["lr"] = self.table[min(step, last)]
