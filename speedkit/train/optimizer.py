"""Optimizers whose learning rate moves without making the host wait."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedkit.recipe import Recipe


def build(parameters: Iterable[nn.Parameter], recipe: Recipe, fused: bool, tensor_rate: bool = False) -> Optimizer:
    """Return the recipe's optimizer. Fused, or with `tensor_rate`, its learning rate is a 0-dimensional tensor.

    It lies on the parameters' device: neither a kernel nor compiled code then depends on its value.
    """
    parameters, rate = list(parameters), recipe.learning_rate
    options: dict[str, Any] = {"lr": rate, "weight_decay": recipe.weight_decay, "fused": fused}
    if fused or tensor_rate:
        options["lr"] = torch.tensor(rate, device=parameters[0].device)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    optimizer = torch.optim.SGD(parameters, momentum=recipe.momentum, **options)
    if fused and recipe.momentum:
        # Left to itself, a first step that float16 overflow skips leaves uninitialised momentum behind, which the next
        # good step multiplies into the weights. A first step from zero momentum is the same step.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, in the tensor that a fused optimizer reads it from."""
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def schedule(optimizer: Optimizer, table: list[float], steps_done: Tensor | None) -> Callable[[int], Any]:
    """Return what sets the learning rate of the step after `step` steps, from a `table` of one entry per real step.

    `steps_done` counts those on the device, where (fused) steps can be skipped; it is None elsewhere. A run that never
    ends outlasts its table, and stays at the last rate.
    """
    last = len(table) - 1
    if len(set(table)) == 1:
        return lambda step: None
    if steps_done is not None:
        on_device, rate = torch.tensor(table, device=steps_done.device), optimizer.param_groups[0]["lr"]
        return lambda step: torch.take(on_device, steps_done.clamp(max=last), out=rate)
    return lambda step: set_rate(optimizer, table[min(step, last)])
