"""Where a step first went non-finite: in which module, and for which samples."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.workloads.workload import Batch

MANY = 8  # bad samples of a batch; there is no need to find more


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first that is not finite, in words, and the samples of the batch that it happens with by themselves."""

    where: str
    samples: list[int]
    in_data: bool = False  # the batch itself holds it


def find(model: nn.Module, loss_of: Callable[..., Any], batch: Batch, recipe: Any) -> Finding | None:
    """Learn from `batch`, tensors `[B, ...]`, once more with hooks on; return None when all of it is finite.

    The model, its buffers and the random state stay as they are; gradients are gone. The samples are found by halving
    the batch, in evaluation mode: there they do not depend on each other. This waits for the device again and again.
    """
    rows = [~tensor.flatten(1).isfinite().all(1) if tensor.dim() > 1 else ~tensor.isfinite() for tensor in batch]
    bad = torch.stack(rows).any(0).nonzero().flatten().tolist()
    if bad:
        return Finding("the batch itself", bad[:MANY], in_data=True)
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        return Finding(f"the weights, {broken[0]} first", [])
    with _as_it_was(model, batch[0].device):
        where = _first(model, loss_of, batch, recipe)
        if not where:
            return None
        model.eval()

        def is_bad(chosen: list[int]) -> bool:
            return bool(_first(model, loss_of, tuple(tensor[chosen] for tensor in batch), recipe))

        return Finding(where, _culprits(is_bad, len(batch[0])))


def _first(model: nn.Module, loss_of: Callable[..., Any], batch: Batch, recipe: Any) -> str:
    """Return the first output of a module or, where the loss is finite, the first gradient that is not; "" for none."""
    outputs: list[str] = []
    gradients: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        """Return the forward hook that notes when the outputs of module `name` are the first not to be finite."""
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    if not tensor.isfinite().all():
                        outputs.append(f"the output of {name}")
                    if tensor.requires_grad:
                        tensor.register_hook(lambda gradient: note(gradient, f"the gradient at the output of {name}"))

        return look

    def note(gradient: Tensor, what: str) -> None:
        if not gradient.isfinite().all():
            gradients.append(what)

    modules = [(name or type(module).__name__, module) for name, module in model.named_modules()]
    handles = [module.register_forward_hook(watch(name)) for name, module in modules]
    try:
        loss, _ = loss_of(model, batch, recipe)
        if not loss.isfinite():
            return [*outputs, "the loss"][0]
        loss.backward()
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                note(weight.grad, f"the gradient of {name}")
        norm = nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
        return gradients[0] if gradients else "" if norm.isfinite() else "the norm of the gradients"
    finally:
        model.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()


def _culprits(is_bad: Callable[[list[int]], bool], count: int) -> list[int]:
    """Return the first `MANY` of the samples 0 to `count` that are bad by themselves."""
    found: list[int] = []
    waiting = [list(range(count))]
    while waiting and len(found) < MANY:
        chosen = waiting.pop()
        if not is_bad(chosen):
            continue
        half = len(chosen) // 2
        if half:
            waiting += [chosen[half:], chosen[:half]]
        else:
            found += chosen
    return found


@contextlib.contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put modes, buffers and the random state back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for buffer, kept in buffers:
                buffer.copy_(kept)
