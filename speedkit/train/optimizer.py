"""Optimizers whose learning rate moves without making the host wait."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.recipe import Recipe

PLAN_OPTIONS = ("lr", "fused", "foreach")  # of an optimizer: what a plan decides, and no checkpoint


def build_optimizer(parameters: Iterable[nn.Parameter], recipe: Recipe, *, fused: bool) -> Optimizer:
    """Return the recipe's optimizer, fused or as PyTorch has it by default (foreach on a GPU, a loop on a CPU).

    Fused, its learning rate is a tensor []: it moves without making the host wait.
    """
    parameters = list(parameters)
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    optimizer: Optimizer
    if recipe.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, **options)
    else:
        optimizer = torch.optim.SGD(parameters, momentum=recipe.momentum, **options)
    if fused:
        fuse(optimizer)
        rate = torch.tensor(recipe.learning_rate, device=parameters[0].device)
        optimizer.param_groups[0]["lr"] = rate  # now: the constructor would read it back
    return optimizer


def fuse(optimizer: Optimizer) -> None:
    """Switch `optimizer`, before its first step, to its fused kernel."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # for a GradScaler, as its constructor
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"] = True
        options["foreach"] = False
    for group in optimizer.param_groups:
        if group.get("momentum") and not group["dampening"]:
            # A first step that is left out would leave it uninitialised. From zero it is the same step.
            for weight in group["params"]:
                optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any], load: Callable[..., None] | None = None) -> None:
    """Load `state`, perhaps that of another plan, by `load` if not by its own method; the switches are of this plan."""
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in PLAN_OPTIONS if name in group}
    # Before: `fused` decides on which device step counts are put. After: loading has made copies.
    state["param_groups"][0].update(options)
    (load or optimizer.load_state_dict)(state)
    optimizer.param_groups[0].update(options)
