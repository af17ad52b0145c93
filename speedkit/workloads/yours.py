"""The user's own model, data set and loss: `speedkit climb package.module:function` of what returns `from_dataset`."""

import copy
import dataclasses
import functools
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


@dataclasses.dataclass(eq=False)
class Sample:
    """One item of a map-style data set."""

    path: str
    data: Any
    index: int
    target: Any = None  # what came with the input when that was loaded


def from_dataset(
    model: nn.Module | Callable[[], nn.Module],
    train: Any,
    test: Any,
    *,
    loss: Rule = F.cross_entropy,
    score: Rule | None = None,
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
    sides = {}
    for side, data in (("train", train), ("test", test)):
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
            raise UsageError(f"the {side} set ({type(data).__name__}) has no items by index: give a map-style data set")
        sides[side] = [Sample(f"{side}/{index}", data, index) for index in range(len(data))]
    try:
        firsts = [(load(samples[0]), torch.as_tensor(target(samples[0]))) for samples in sides.values()]
    except BadItem as item:
        raise UsageError(str(item)) from item
    classes = all(label.ndim == 0 and not label.is_floating_point() for _, label in firsts)
    if score is None and not classes:
        raise UsageError("the targets are no class numbers: give score(outputs, targets), one number per sample")
    cacheable = classes and all(inputs.is_floating_point() for inputs, _ in firsts)
    fields: dict[str, Any] = {"cacheable": cacheable, "parameters": {"train": train, "test": test}} | others
    return Workload(
        name,
        recipe or Recipe(),
        sides["train"],
        sides["test"],
        load=load,
        features=torch.Tensor.contiguous,
        target=target,
        model=functools.partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model,
        loss=functools.partial(apply_loss, rule=loss),
        score=residual.score if score is None else functools.partial(apply_score, rule=score),
        **fields,
    )


def load(sample: Sample) -> Tensor:
    """Return the sample's input, and keep its target for `target`. Raises BadItem for what is no such pair."""
    pair = sample.data[sample.index]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not hasattr(pair[0], "__array__"):
        raise BadItem(sample.path, f"it gives {type(pair).__name__}, not (input tensor, target)")
    sample.target = pair[1]
    return torch.as_tensor(pair[0])


def target(sample: Sample) -> Any:
    """Return the sample's target: the one that `load` kept, or one of the data set's `targets`, as torchvision's have.

    A class number is kept for good: a cache asks for all of them when it is opened, and reading them from the data set
    again takes as long as building it.
    """
    value = sample.target
    if value is None:
        labels = None if getattr(sample.data, "target_transform", None) else getattr(sample.data, "targets", None)
        value = sample.data[sample.index][1] if labels is None else labels[sample.index]
    sample.target = None if np.ndim(value) else value
    return value


def apply_loss(model: nn.Module, batch: Batch, recipe: Recipe, *, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return (loss [], outputs)."""
    outputs = model(batch[0])
    return rule(outputs, batch[1]), outputs


def apply_score(outputs: Tensor, batch: Batch, *, rule: Rule) -> Tensor:
    """Return the score of each sample, [B]."""
    return rule(outputs, batch[1])
