"""Where a step first went non-finite: in which module, and for which samples."""

import contextlib
import dataclasses
import functools
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
    finite = torch.stack([tensor.reshape(len(tensor), -1).isfinite().all(1) for tensor in batch]).all(0)  # [B]
    if bad := finite.logical_not().nonzero().flatten().tolist():
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

        return Finding(where, _culprits(is_bad, list(range(len(batch[0]))))[:MANY])


def _first(model: nn.Module, loss_of: Callable[..., Any], batch: Batch, recipe: Any) -> str:
    """Return the first output of a module or, where the loss is finite, the first gradient that is not; "" for none."""
    found: list[str] = []

    def note(tensor: Tensor, what: str) -> None:
        if not tensor.isfinite().all():
            found.append(what)

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                note(tensor, f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(note, what=f"the gradient at the output of {name}"))

    handles = [
        module.register_forward_hook(functools.partial(look, name or type(module).__name__))
        for name, module in model.named_modules()
    ]
    try:
        loss, _ = loss_of(model, batch, recipe)
        if not loss.isfinite():
            return [*found, "the loss"][0]
        found.clear()  # no output that the loss does not depend on
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for name, gradient in gradients.items():
            note(gradient, f"the gradient of {name}")
        note(nn.utils.get_total_norm(gradients.values()), "the norm of the gradients")
        return next(iter(found), "")
    finally:
        model.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()


def _culprits(is_bad: Callable[[list[int]], bool], chosen: list[int]) -> list[int]:
    """Return the first of the `chosen` samples that are bad by themselves, `MANY` of them at least where there are."""
    if not is_bad(chosen):
        return []
    if len(chosen) == 1:
        return chosen
    half = len(chosen) // 2
    found = _culprits(is_bad, chosen[:half])
    return found if len(found) >= MANY else found + _culprits(is_bad, chosen[half:])


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
