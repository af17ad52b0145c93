"""What a script's optimizers update, and which modules own it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def has_own_methods(module: nn.Module) -> bool:
    """Return whether a loop calls a module by methods of its own: it has no `forward`, or it is one of Lightning's."""
    return hasattr(module, "training_step") or type(module).forward is nn.Module.forward


def weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all tensors that an optimizer updates."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def weight_count(optimizer: Optimizer) -> int:
    """Return how many numbers an optimizer updates."""
    return sum(weight.numel() for weight in weights_of(optimizer))


def models_of(optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of all `modules` that a loop calls: the outermost with weights of the optimizers.

    These may be two, of networks that learn in turns. The children of a module that is called by other methods than
    `forward` are called too.
    """
    weights = {id(weight) for optimizer in optimizers for weight in weights_of(optimizer)}
    owners = [module for module in modules if any(id(weight) in weights for weight in module.parameters())]
    inner = {child for module in owners for child in module.modules() if child is not module}
    models = [module for module in owners if module not in inner]
    for module in models:  # which grows meanwhile: a child may be a list of modules
        if has_own_methods(module):
            models += [child for child in module.children() if child in owners]
    return models
