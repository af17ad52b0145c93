"""The user's own model, data and loss, for `speedkit tune package.module:function` of what returns these workloads."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedkit.data.own_loader import WITHOUT_LENGTH, loader_items
from speedkit.errors import BadItem, UsageError
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Loss, Workload, right_class

ModelOrMaker = nn.Module | Callable[[], nn.Module]
OfOutputs = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets
Step = Callable[[nn.Module, Any], Tensor]  # model, batch -> loss
Evaluate = Callable[[nn.Module], float]


@dataclasses.dataclass(eq=False)
class Sample:
    """One item of a map-style data set; `target` is what came with the input when that was loaded."""

    path: str
    data: Any
    index: int
    target: Any = None


def from_dataset(
    model: ModelOrMaker,
    train: Any,
    test: Any,
    *,
    validation: Any = (),
    loss: OfOutputs = F.cross_entropy,
    score: OfOutputs | None = None,
    recipe: Recipe | None = None,
    name: str = "yours",
    **others: Any,
) -> Workload:
    """Return the workload of a model and map-style data sets whose items are (input tensor, target).

    Of outputs and targets `loss` gives one number, the mean over the batch, and `score` one per sample [B], by default
    1 where the largest output is that of the target. A module is copied for each training; a function that makes one
    gives each seed its own. `others` are fields of Workload. What is random belongs in `augment`: a cache would keep
    what a data set drew first. Raises SpeedkitError for what cannot be trained on.
    """
    samples = samples_of(train, "train")
    test_samples = samples_of(test, "test")
    if not samples or not test_samples:
        raise UsageError("a data set is empty")
    inputs = load(samples[0])
    label = torch.as_tensor(target(samples[0]))
    class_numbers = label.ndim == 0 and not label.is_floating_point()
    if score is None and not class_numbers:
        raise UsageError("the targets are no class numbers: give score(outputs, targets), one number per sample")

    fields: dict[str, Any] = {
        "cacheable": class_numbers and inputs.is_floating_point(),
        "parameters": {"train": train, "test": test},
    }
    return Workload(
        name,
        recipe or Recipe(),
        samples,
        test_samples,
        load=load,
        features=Tensor.contiguous,  # nothing to do
        target=target,
        model=own_model(model),
        loss=functools.partial(batch_loss, loss=loss),
        score=right_class if score is None else functools.partial(batch_score, score=score),
        validation=samples_of(validation, "validation"),
        **fields | others,
    )


def batch_loss(model: nn.Module, batch: Batch, recipe: Recipe, *, loss: OfOutputs) -> tuple[Tensor, Tensor]:
    """Return `loss` of the outputs and targets of a batch, and the outputs."""
    outputs = model(batch.inputs)
    return loss(outputs, batch.targets), outputs


def batch_score(outputs: Tensor, batch: Batch, *, score: OfOutputs) -> Tensor:
    """Return `score` of the outputs and targets of a batch [B]."""
    return score(outputs, batch.targets)


def samples_of(data: Any, side: str) -> list[Sample]:
    """Return the items of a map-style data set."""
    return [Sample(f"{side}/{index}", data, index) for index in range(len(data))]


def own_model(model: ModelOrMaker) -> Callable[[], nn.Module]:
    """Return what makes a model for each training: a module is copied."""
    if isinstance(model, nn.Module):
        return functools.partial(copy.deepcopy, model)
    return model


def from_loader(
    model: ModelOrMaker,
    loader: Any,
    step: Step,
    *,
    test: Any = None,
    evaluate: Evaluate | None = None,
    recipe: Recipe | None = None,
    name: str = "yours",
    **others: Any,
) -> Workload:
    """Return the workload of a model, its loader, and `step(model, batch)`, which returns the loss of a batch, [].

    `loader` is a DataLoader or anything else whose batches can be gone over, or better a function that makes one from a
    seed: then plans that are compared have one each. A batch is any nesting of tensors in tuples, lists and dicts; it
    arrives on the model's device. What is random in it is torch's random numbers: those of others differ from run to
    run. The recipe's batch size is the loader's. Without a length the recipe has to say `steps`.

    `evaluate(model)` returns the metric, of which `others`, fields of Workload, say `metric`, `higher_is_better` and
    `margin`. Without it quality is the loss on `test`, a loader too, or without that on some training batches; without
    a margin, losses within 2 % count as equal. Raises UsageError for what gives no batch of tensors.
    """
    recipe = recipe or Recipe()
    train = loader_items(loader, recipe.seed, recipe.steps)
    if train.batches is None:
        raise UsageError("the loader has no length: say how far to train, as recipe=Recipe(steps=1000, epochs=None)")
    metric = "training loss"
    tested = dataclasses.replace(train, batches=min(train.batches, WITHOUT_LENGTH))
    if evaluate is not None:
        metric = "score"
        tested = loader_items([torch.zeros(1)])  # something to evaluate on once
    elif test is not None:
        metric = "test loss"
        tested = loader_items(test)
    fields: dict[str, Any] = {
        "metric": metric,
        "higher_is_better": evaluate is not None,
        "margin": None,
        "cacheable": False,
    }
    return Workload(
        name,
        dataclasses.replace(recipe, batch_size=train.batch_size),
        train,  # type: ignore[arg-type]  # stands for the items
        tested,  # type: ignore[arg-type]
        load=train.__getitem__,
        features=Tensor.contiguous,
        target=train.__getitem__,
        model=own_model(model),
        loss=own_loss(step, evaluate),
        score=lambda loss, batch: loss.expand(len(batch.inputs)),
        **fields | others,
    )


def own_loss(step: Step, evaluate: Evaluate | None) -> Loss:
    """Return the loss of a workload by its author's `step`, and in evaluation what `evaluate` says of the model."""

    def batch_loss(model: nn.Module, batch: Any, recipe: Recipe) -> tuple[Tensor, Tensor]:
        if evaluate is not None and not model.training:
            loss = torch.tensor(float(evaluate(model)))
        else:
            loss = step(model, batch.value)
        if not isinstance(loss, Tensor) or loss.ndim:
            what = type(loss).__name__
            if isinstance(loss, Tensor):
                what = f"a tensor {list(loss.shape)}"
            raise UsageError(f"step returned {what}: it has to return the loss, a tensor of one number")
        return loss, loss

    return batch_loss


def load(sample: Sample) -> Tensor:
    """Return the sample's input, and keep its target for `target`. Raises BadItem for what is no such pair."""
    pair = sample.data[sample.index]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
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
        labels = getattr(sample.data, "targets", None)
        if labels is None or getattr(sample.data, "target_transform", None):
            value = sample.data[sample.index][1]
        else:
            value = labels[sample.index]
    sample.target = value if np.ndim(value) == 0 else None
    return value
