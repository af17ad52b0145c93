"""The repeated blocks of a model: what is compiled or checkpointed one at a time."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the repeated blocks of `model`, none inside another, in its order.

    A block has parameters, has children, is no plain container, and is of a class that `model` holds more than once.
    """
    found = Counter(type(module) for module in model.modules() if _is_block(module))
    repeated = {kind for kind, count in found.items() if count > 1}
    return list(_outermost(model, "", repeated, set()))


def _outermost(module: nn.Module, name: str, kinds: set[type], seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of these `kinds` that lie in no other; one that has several names comes once."""
    for child_name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{name}.{child_name}" if name else child_name
        if type(child) in kinds and _is_block(child):
            yield path, child
        else:
            yield from _outermost(child, path, kinds, seen)


def _is_block(module: nn.Module) -> bool:
    children = next(module.children(), None) is not None
    return children and type(module) not in CONTAINERS and next(module.parameters(), None) is not None
