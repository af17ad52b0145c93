"""What is trained, as plain functions, with the pipeline cut where a cache can cut it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.data.batch import Batch as Batch
from speedkit.data.own_loader import LoaderItems
from speedkit.display import table
from speedkit.errors import PlanError
from speedkit.recipe import Recipe

# model, batch, recipe -> (mean over the batch's valid items [], outputs)
Loss = Callable[[nn.Module, Batch, Recipe], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Model, data and loss. A sample's life is load, [augment_waveform], features, augment, loss.

    What comes out of `load` or of `features` may be cached; what is random comes after the cache, batched, on the
    device. `load`, `features` and `target` run in worker processes too, so they are functions of a module or partials
    of such.
    """

    name: str
    recipe: Recipe  # the default, by which this workload is learned well
    train: Sequence[Any]  # items: whatever `load` and `target` take
    test: Sequence[Any]
    load: Callable[[Any], Tensor]  # item -> waveform [T] or image; raises errors.BadItem
    features: Callable[[Tensor], Tensor]  # [T] or [B, T] -> [...] or [B, ...] for the model; deterministic, any device
    target: Callable[[Any], int]
    model: Callable[[], nn.Module]
    loss: Loss
    score: Callable[[Tensor, Batch], Tensor]  # outputs, batch -> [B], one score per sample; the metric is their mean
    metric: str = "accuracy"
    higher_is_better: bool = True
    margin: float | None = 0.02  # results that differ by less count as equally good; None: a share of what they are
    augment_waveform: Callable[[Tensor, torch.Generator], Tensor] | None = None  # random, of [B, T]
    augment: Callable[[Batch, torch.Generator], Batch] | None = None  # random, of features
    length: Callable[[Any], int] | None = None  # of an item's features, last dimension, undecoded; None: all the same
    cacheable: bool = True  # False: items lie in memory as the model takes them, or are not what a cache keeps
    rows: Tensor | None = None  # [N, ...] what the model takes of all items, where these are its row numbers
    decoders: tuple[str, ...] = ()  # values of the plan's `decoder`, beyond soundfile, that `load` takes as `decoder=`
    kept_as: str = "int16"  # number format in which a cache keeps what `load` returns: int16 of -1..1, uint8 as it is
    count: Callable[[Batch], int | Tensor] | None = None  # valid items in a batch, where they are not its samples
    honours: tuple[str, ...] = ()  # of the recipe's label_smoothing, focal_gamma and mixup, those that `loss` applies
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # all that load and features depend on
    sources: tuple[Any, ...] = ()  # functions and modules whose source the cached features depend on
    classes: tuple[str, ...] = ()
    quarantined: Mapping[str, str] = dataclasses.field(default_factory=dict)  # path -> why of files left out before
    validation: Sequence[Any] = ()  # items evaluated during training; the test set is then left to its end

    def __repr__(self) -> str:
        return f"<Workload {self.name}: {len(self.train):,} training items, {len(self.test):,} test items>"

    def _repr_html_(self) -> str:
        return table(repr(self), ("left out", "why"), self.quarantined.items(), below=repr(self.recipe))

    def load_by(self, decoder: str) -> Callable[[Any], Tensor]:
        """Return `load` with that decoder. Raises PlanError where it does not take it."""
        if decoder == "soundfile":
            return self.load
        if decoder not in self.decoders:
            raise PlanError(f"decoder={decoder} is not one that workload {self.name} can use: leave it at soundfile")
        return functools.partial(self.load, decoder=decoder)  # type: ignore[call-arg]

    @property
    def own_loader(self) -> LoaderItems | None:
        """What stands for the items where their author's loader makes the batches; None where there are items."""
        if isinstance(self.train, LoaderItems):
            return self.train
        return None

    @property
    def of_frames(self) -> bool:
        """Whether a batch of buckets holds equally many frames, not samples: where the loss is a mean over frames."""
        return self.count is not None


def right_class(outputs: Tensor, batch: Batch) -> Tensor:
    """Return 1 where the largest of the outputs [B, K] is the target's, else 0: [B]."""
    return (outputs.argmax(dim=1) == batch.targets).float()
