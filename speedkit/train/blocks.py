"""The repeated blocks of a model: what is compiled or checkpointed one at a time."""

from collections import Counter

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the repeated blocks of `model`, none inside another, in its order.

    A block has parameters, has children, is no plain container, and is of a class that `model` holds more than once.
    """
    could = [
        (name, module)
        for name, module in model.named_modules()
        if [*module.children()] and [*module.parameters()] and type(module) not in CONTAINERS
    ]
    count = Counter(type(module) for _, module in could)
    found: list[tuple[str, nn.Module]] = []
    for name, module in could:  # outer ones come first
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and count[type(module)] > 1 and not inside:
            found.append((name, module))
    return found
