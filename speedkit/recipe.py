"""Recipe: what a model learns from. Changing it changes what is learned; how fast is the business of the Plan."""

import math
from typing import Annotated, Literal

from pydantic import Field

from speedkit.config import settings
from speedkit.errors import PlanError

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@settings
class Recipe:
    """What is learned from: every workload has its own default."""

    batch_size: Count = 32
    """Samples behind each optimizer step [samples]."""
    learning_rate: NotNegative = 1e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The update rule."""
    schedule: Literal["onecycle", "constant", "cosine"] = "onecycle"
    """How the learning rate moves over the steps."""
    epochs: Count | None = 8
    """Passes over the training set; none where steps is given."""
    steps: Count | None = None
    """Optimizer steps; none where epochs is given [steps]."""
    clip_norm: NotNegative | None = None
    """Largest norm of all gradients together; none clips nothing."""
    weight_decay: NotNegative = 0.01
    """Weight decay: decoupled for adamw, L2 for sgd."""
    momentum: Share = 0.9
    """Momentum of sgd; adamw has its own two."""
    label_smoothing: Share = 0.0
    """Share of the target that is spread over all classes."""
    focal_gamma: NotNegative = 0.0
    """How much easy samples are discounted; 0 is plain cross-entropy."""
    mixup: NotNegative = 0.0
    """Alpha of the Beta distribution that samples are mixed by; 0 mixes nothing."""
    max_duration_s: Annotated[float, Field(ge=0.01)] | None = None
    """Longest clip learned from; none takes all [s]."""
    drop_last: bool = False
    """Leave an epoch's last, smaller batch out."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a step whose loss or gradient is NaN or infinite does: end the run, or be left out."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of weights, order and augmentation."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise PlanError(f"give epochs or steps, one of the two; got epochs={self.epochs}, steps={self.steps}")

    def total_steps(self, train_items: int) -> int:
        """Return how many optimizer steps the recipe makes over `train_items` samples."""
        return self.steps or (self.epochs or 0) * steps_per_epoch(train_items, self.batch_size, self.drop_last)


def steps_per_epoch(train_items: int, batch_size: int, drop_last: bool) -> int:
    """Return the batches in one pass; at least one, for a set smaller than a batch is one small batch."""
    batches = train_items / batch_size
    return max(1, math.floor(batches) if drop_last else math.ceil(batches))


def learning_rates(recipe: Recipe, total_steps: int) -> list[float]:
    """Return the learning rate of each optimizer step, `[total_steps]`.

    onecycle: up over the first 30 % from 1/25 of the peak, down to almost nothing, both along a cosine (Smith and
    Topin 2018, the shape of torch.optim.lr_scheduler.OneCycleLR). cosine: down to 0 (Loshchilov and Hutter 2017).
    """

    def cosine(start: float, end: float, share: float) -> float:
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

    peak = recipe.learning_rate
    last = max(1, total_steps - 1)
    if recipe.schedule == "constant":
        return [peak] * total_steps
    if recipe.schedule == "cosine":
        return [cosine(peak, 0.0, step / last) for step in range(total_steps)]
    top = max(1.0, 0.3 * total_steps - 1)
    fall = max(1.0, last - top)
    rates = []
    for step in range(total_steps):
        if step <= top:
            rates.append(cosine(peak / 25, peak, step / top))
        else:
            rates.append(cosine(peak, peak / 250_000, (step - top) / fall))
    return rates
