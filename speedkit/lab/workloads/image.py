"""The image workload: photographs of any size, classified by a small residual convolutional net."""

import functools
import math
import operator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.io import ImageReadMode, decode_image

from speedkit.errors import BadItem
from speedkit.lab.sources import Item
from speedkit.lab.tars import TarMember
from speedkit.lab.workloads.augmentations import rand_augment
from speedkit.lab.workloads.generated import find_or_generate
from speedkit.lab.workloads.patterns import patterns
from speedkit.lab.workloads.residual import class_probabilities, residual_net
from speedkit.lab.workloads.sizes import NetSize
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Workload, right_class

# Channels of the stem, and residual blocks in each stage.
SIZES = {
    "tiny": NetSize(16, 1, growth=(2, 3, 4), inputs=48),
    "small": NetSize(32, 1, growth=(2, 3, 4), inputs=48),
    "medium": NetSize(64, 2, growth=(2, 4, 8), inputs=128),
}
RECIPE = Recipe(batch_size=32, epochs=6, learning_rate=1e-2, weight_decay=0.05, clip_norm=1.0, label_smoothing=0.1)


def image(data_dir: str | Path | None = None, *, size: NetSize = SIZES["small"], **options: Any) -> Workload:
    """Return the workload on the images under `data_dir`, or on generated photographs without one.

    All images are brought to one square, whose side follows from `size`. `options` are those of `find_items`, and
    `clips`. Raises UsageError for unusable data.
    """
    files = find_or_generate(data_dir, patterns, kind="image", **options)
    return Workload(
        "image",
        RECIPE,
        **vars(files),  # train, test, classes, quarantined
        load=functools.partial(load, side=size.inputs),
        features=in_unit_range,
        target=operator.attrgetter("label"),
        model=functools.partial(ImageNet, len(files.classes), size),
        loss=loss,
        score=right_class,
        augment=rand_augment,
        honours=("label_smoothing", "focal_gamma", "mixup"),
        # Two standard errors of an accuracy of 0.9 on the generated test files.
        margin=0.02 if data_dir or options.get("labels") else 0.03,
        kept_as="uint8",
        parameters={"side": size.inputs},
    )


def load(item: Item, side: int) -> Tensor:
    """Return the item's image as RGB, the square in its middle scaled to `side` pixels: [3, side, side] uint8.

    A camera's note of how it was held (EXIF) is honoured. Raises BadItem when the file cannot be read.
    """
    try:
        data = item.path.read() if isinstance(item.path, TarMember) else Path(item.path).read_bytes()
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = decode_image(encoded, ImageReadMode.RGB, apply_exif_orientation=True)  # [3, H, W]
        height, width = pixels.shape[1:]
        short = min(height, width)
        top = (height - short) // 2
        left = (width - short) // 2
        square = pixels[None, :, top : top + short, left : left + short]
        # Raises RuntimeError for 16 bits per channel.
        return F.interpolate(square, (side, side), mode="bilinear", antialias=True)[0].contiguous()
    except (RuntimeError, OSError, ValueError) as error:
        raise BadItem(item.path, f"it cannot be decoded ({error})") from error


def in_unit_range(image: Tensor) -> Tensor:
    """Return images [..., 3, H, W] of 0..255 as float32 in 0..1, where augmentation works; the net standardises."""
    return image.to(torch.float32) / 255


class ImageNet(nn.Module):
    """Images [B, 3, H, W] in 0..1 -> logits [B, K]."""

    def __init__(self, classes: int, size: NetSize):
        super().__init__()
        widths = [round(size.width * multiple) for multiple in size.growth]
        self.blocks = residual_net(nn.Conv2d(3, size.width, 3, 1, 1, bias=False), widths, size.depth)
        self.head = nn.Linear(2 * widths[-1], classes)
        nn.init.zeros_(self.head.bias)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                # He et al. 2015. Cut off at two standard deviations, a normal distribution keeps 0.8796 of its own.
                deviation = math.sqrt(2 / layer.weight[0].numel()) / 0.8796
                nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)

    def forward(self, x: Tensor) -> Tensor:
        # Light and colour tell little about what is seen: each channel of each image is brought to mean 0, variance 1.
        x = x - x.mean(dim=(2, 3), keepdim=True)
        variance = x.square().mean(dim=(2, 3), keepdim=True)
        x = self.blocks(x * torch.rsqrt(variance + 1e-4))  # [B, C, H / 8, W / 8]
        mean = x.mean(dim=(2, 3))
        largest = x.flatten(2).max(dim=2).values  # max and not amax: see AudioNet
        return self.head(torch.cat((mean, largest), dim=1))


def loss(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return (mean over the batch of -sum_k q_k (1 - p_k) ** focal_gamma log p_k, logits [B, K]).

    p is the softmax of the logits; q the target's distribution: one class, mixed with mixup's other one, then
    `label_smoothing` of it spread evenly. With `focal_gamma` alone it is the focal loss of Lin et al. (2017).
    """
    logits = model(batch.inputs)
    classes = logits.shape[1]
    log_p = F.log_softmax(logits.float(), dim=1)  # [B, K]
    q = class_probabilities(batch, classes)
    q = torch.lerp(q, torch.full_like(q, 1 / classes), recipe.label_smoothing)
    if recipe.focal_gamma:
        wrong = -torch.expm1(log_p)  # 1 - p
        # Away from 0, where a power below 1 has an infinite slope.
        q = q * wrong.clamp_min(1e-6) ** recipe.focal_gamma
    return -(q * log_p).sum(dim=1).mean(), logits
