"""Batched augmentations of spectrograms and images; every sample has its own draws from the given generator.

torchaudio's and torchvision's transforms draw from the global random state, most of them once for a whole batch.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from speedkit.workload import Batch


def uniform(count: int, inputs: Tensor, generator: Generator) -> Tensor:
    """Return uniform numbers in 0..1 on the device of `inputs` [B, ...]: [count, B, 1]."""
    return torch.rand(count, len(inputs), 1, generator=generator, device=generator.device).to(inputs.device)


def stretch(length: int, place: Tensor, share: Tensor) -> Tensor:
    """Return a mask [B, length] of one stretch per sample: `share` [B, 1] of the axis, at `place` [B, 1] in 0..1."""
    axis = torch.arange(length, device=place.device)
    start = place * (1 - share) * length
    return (axis >= start) & (axis < start + share * length)


def spec_augment(batch: Batch, generator: Generator) -> Batch:
    """Return the batch with each spectrogram [B, 1, M, F] turned in time and partly masked, after Park et al. (2019).

    Masked is up to a sixth of either axis: it is set to the mean, 0.
    """
    inputs = batch.inputs
    frames = inputs.shape[-1]
    shift = (uniform(1, inputs, generator)[0] * frames).long()
    turned = (torch.arange(frames, device=inputs.device) + shift) % frames  # [B, F]
    inputs = inputs.gather(-1, turned[:, None, None].expand_as(inputs))
    at_frame, width_frame, at_band, width_band = uniform(4, inputs, generator)
    times = stretch(frames, at_frame, width_frame / 6)[:, None, None, :]
    bands = stretch(inputs.shape[-2], at_band, width_band / 6)[:, None, :, None]
    return dataclasses.replace(batch, inputs=inputs.masked_fill(times | bands, 0.0))


def rand_augment(batch: Batch, generator: Generator, strength: float = 0.3) -> Batch:
    """Return the batch with each image [B, C, H, W] of 0..1 moved, relit and with a rectangle cut out, by `strength`.

    After RandAugment (Cubuk et al. 2020) and Cutout (DeVries and Taylor 2017), except that every image goes through all
    changes by random amounts instead of a few drawn ones: on a device that is one pass over the batch.
    """
    images = batch.inputs
    amounts = strength * (2 * uniform(8, images, generator) - 1)  # [8, B, 1]
    images = moved(images, amounts[:5])
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = relit(images, mean, amounts[5:])
    row, column, height, width = uniform(4, images, generator)
    rows = stretch(images.shape[2], row, strength * height / 3)[:, None, :, None]
    columns = stretch(images.shape[3], column, strength * width / 3)[:, None, None, :]
    return dataclasses.replace(batch, inputs=torch.where(rows & columns, mean, images).clamp_(0, 1))


def moved(images: Tensor, amounts: Tensor) -> Tensor:
    """Return squares turned, zoomed, sheared and shifted in one resampling, by `amounts` [5, B, 1] within -1..1."""
    angle, zoom, shear, right, down = amounts
    angle = angle * math.radians(30)
    zoom = (0.2 * zoom).exp()
    shear = 0.3 * shear
    cos = angle.cos()
    sin = angle.sin()
    to_x = torch.cat((zoom * cos, zoom * (shear * cos - sin), 0.2 * right), dim=1)
    to_y = torch.cat((zoom * sin, zoom * (shear * sin + cos), 0.2 * down), dim=1)
    grid = F.affine_grid(torch.stack((to_x, to_y), dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def relit(images: Tensor, mean: Tensor, amounts: Tensor) -> Tensor:
    """Return images of this `mean` in another light, contrast and colour, by `amounts` [3, B, 1] within -1..1."""
    light, contrast, colour = 1 + 0.5 * amounts[..., None, None]  # [B, 1, 1, 1] each
    grey = images.mean(dim=1, keepdim=True)
    coloured = grey + colour * (images - grey)
    return light * (mean + contrast * (coloured - mean))
