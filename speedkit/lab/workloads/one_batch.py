"""The workload of a model and one batch: what its steps take, without any data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from speedkit.errors import UsageError
from speedkit.own_workload import from_loader
from speedkit.workload import Workload


def of_sample(model: nn.Module, sample: Any) -> Workload:
    """Return the workload that learns from one batch over and over: what a step of `model` takes, without any data.

    `sample` is a tensor, or a tuple or mapping of what the model takes. The loss is the `loss` of what the model
    returns, or else the mean square of all its outputs.
    """

    def step(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            outputs = model(**batch)
        elif isinstance(batch, Tensor):
            outputs = model(batch)
        else:
            outputs = model(*batch)
        loss = getattr(outputs, "loss", None)
        if loss is not None:
            return loss
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise UsageError(f"{type(model).__name__} returns no tensor that can be learned from")
        return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()

    return from_loader(model, [sample] * 1000, step, name=type(model).__name__)
