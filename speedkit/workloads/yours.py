"""Your own model, data set and loss: `speedkit climb package.module:function` of what returns `from_dataset(...)`."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedkit.data.decode import BadItem
from speedkit.errors import UsageError
from speedkit.recipe import Recipe
from speedkit.workloads import residual
from speedkit.workloads.workload import Batch, Workload

Rule = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets


def from_dataset(
    model: nn.Module | Callable[[], nn.Module],
    train: Any,
    test: Any,
    loss: Rule = F.cross_entropy,
    score: Rule | None = None,
    *,
    recipe: Recipe | None = None,
    name: str = "yours",
    **others: Any,
) -> Workload:
    """Return the workload of a model and two map-style data sets whose items are (input tensor, target).

    `loss` gives one number, the mean over the batch; `score` one per sample [B], by default 1 where the largest output
    is that of the target. A module is copied for each training; a function that makes one gives each seed its own.
    `others` are fields of Workload. What is random belongs into `augment`: a cache would keep what a data set drew
    first. Raises UsageError for what cannot be trained on.
    """
    sides, firsts = [], []
    for side, data in (("train", train), ("test", test)):
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
            raise UsageError(f"the {side} set ({type(data).__name__}) has no items by index: give a map-style data set")
        samples = [types.SimpleNamespace(path=f"{side}/{at}", data=data, at=at) for at in range(len(data))]
        try:
            firsts.append((load(samples[0]), torch.as_tensor(target(samples[0]))))
        except BadItem as item:
            raise UsageError(str(item)) from item
        sides.append(samples)
    classes = all(first.ndim == 0 and not first.is_floating_point() for _, first in firsts)
    if score is None and not classes:
        raise UsageError("the targets are no class numbers: give score(outputs, targets), one number per sample")
    cacheable = classes and all(inputs.is_floating_point() for inputs, _ in firsts)
    fields: dict[str, Any] = {"cacheable": cacheable, "parameters": {"train": train, "test": test}} | others
    return Workload(
        name,
        recipe or Recipe(),
        sides[0],
        sides[1],
        load=load,
        features=torch.Tensor.contiguous,
        target=target,
        model=functools.partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model,
        loss=functools.partial(_loss, rule=loss),
        score=residual.score if score is None else functools.partial(_score, rule=score),
        **fields,
    )


def load(sample: Any) -> Tensor:
    """Return the sample's input, and keep its target for `target`. Raises BadItem for what is no such pair."""
    pair = sample.data[sample.at]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not hasattr(pair[0], "__array__"):
        raise BadItem(sample.path, f"it gives {type(pair).__name__}, not (input tensor, target)")
    sample.target = pair[1]
    return torch.as_tensor(pair[0])


def target(sample: Any) -> Any:
    """Return the sample's target: that which `load` kept, or the data set (as torchvision's do), else with its input.

    A class number is kept on: a cache that is opened asks for all of them, and to read them again takes as long as to
    build it.
    """
    if "target" not in vars(sample):
        known = None if getattr(sample.data, "target_transform", None) else getattr(sample.data, "targets", None)
        sample.target = sample.data[sample.at][1] if known is None else known[sample.at]
    value = sample.target
    if np.ndim(value):
        del sample.target
    return value


def _loss(model: nn.Module, batch: Batch, recipe: Recipe, rule: Rule) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    value = rule(outputs, batch[1])
    if getattr(value, "shape", None) != ():
        raise UsageError(f"the loss returned {value!r:.60}: let it return the mean over the batch, one number")
    return value, outputs


def _score(outputs: Tensor, batch: Batch, rule: Rule) -> Tensor:
    return rule(outputs, batch[1])
