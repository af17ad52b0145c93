"""Optimizers whose learning rate moves without making the host wait."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.recipe import Recipe

PLAN_OPTIONS = ("lr", "fused", "foreach", "capturable")  # of an optimizer: what a plan decides, and no checkpoint


def build_optimizer(
    parameters: Iterable[nn.Parameter], recipe: Recipe, *, fused: bool, tensor_rate: bool = False
) -> Optimizer:
    """Return the recipe's optimizer, fused or as PyTorch has it by default (foreach on a GPU, a loop on a CPU).

    Fused, or with `tensor_rate`, its learning rate is a tensor []: no kernel and no compiled code depends on its value.
    """
    parameters = list(parameters)
    rate: Any = recipe.learning_rate
    if fused or tensor_rate:
        rate = torch.tensor(rate, device=parameters[0].device)
    options: dict[str, Any] = {"lr": rate, "weight_decay": recipe.weight_decay, "fused": fused or None}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    optimizer = torch.optim.SGD(parameters, momentum=recipe.momentum, **options)
    if fused and recipe.momentum:
        # A first step that is left out would leave uninitialised momentum behind. From zero it is the same step.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, perhaps that of another plan; compiled code keeps the tensor that the learning rate is in."""
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in PLAN_OPTIONS if name in group}
    # Before: `fused` decides on which device step counts are put. After: loading has made copies.
    state["param_groups"][0].update(options)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0].update(options)
