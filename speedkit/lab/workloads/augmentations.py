"""Batched augmentations of spectrograms and images; every sample has its own draws from the given generator.

torchaudio's and torchvision's transforms draw from the global random state, most of them once for a whole batch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def uniform(count: int, inputs: Tensor, generator: Generator) -> Tensor:
    """Return uniform numbers in 0..1 on the device of `inputs` [B, ...]: [count, B, 1]."""
    return torch.rand(count, len(inputs), 1, generator=generator, device=generator.device).to(inputs.device)


def stretch(length: int, place: Tensor, share: Tensor) -> Tensor:
    """Return a mask [B, length] of one stretch per sample: `share` [B, 1] of the axis, at `place` [B, 1] in 0..1."""
    axis, start = torch.arange(length, device=place.device), place * (1 - share) * length
    return (axis >= start) & (axis < start + share * length)


def time_shift(inputs: Tensor, generator: Generator) -> Tensor:
    """Return waveforms or spectrograms [B, ..., T], each rolled in time by a shift of its own."""
    length = inputs.shape[-1]
    shift = (uniform(1, inputs, generator)[0] * length).long()
    turned = (torch.arange(length, device=inputs.device) + shift) % length  # [B, T]
    return inputs.gather(-1, turned.unflatten(0, (-1, *[1] * (inputs.ndim - 2))).expand_as(inputs))


def spec_augment(inputs: Tensor, generator: Generator) -> Tensor:
    """Return spectrograms [B, 1, M, F] with up to a sixth of either axis set to the mean, 0 (Park et al. 2019)."""
    at_frame, width_frame, at_band, width_band = uniform(4, inputs, generator)
    frames = stretch(inputs.shape[-1], at_frame, width_frame / 6)[:, None, None, :]
    bands = stretch(inputs.shape[-2], at_band, width_band / 6)[:, None, :, None]
    return inputs.masked_fill(frames | bands, 0.0)


def rand_augment(images: Tensor, generator: Generator, strength: float = 1.0) -> Tensor:
    """Return images [B, C, H, W] in 0..1, each moved, relit and with a rectangle cut out; `strength` scales it all.

    After RandAugment (Cubuk et al. 2020) and Cutout (DeVries and Taylor 2017), except that every image goes through all
    changes by random amounts instead of a few drawn ones: on a device that is one pass over the batch.
    """
    angle, zoom, shear, right, down, light, contrast, colour = strength * (2 * uniform(8, images, generator) - 1)

    # Turned, zoomed, sheared and shifted in one resampling; the axes of its grid both run from -1 to 1.
    aspect = images.shape[3] / images.shape[2]
    angle, zoom, shear = angle * math.radians(30), (0.2 * zoom).exp(), 0.3 * shear
    cos, sin = angle.cos(), angle.sin()
    to_x = torch.cat((zoom * cos, zoom * (shear * cos - sin) / aspect, 0.2 * right), dim=1)
    to_y = torch.cat((zoom * sin * aspect, zoom * (shear * sin + cos), 0.2 * down), dim=1)
    grid = F.affine_grid(torch.stack((to_x, to_y), dim=1), list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    # Light, contrast and colour; then the rectangle.
    light, contrast, colour = (1 + 0.5 * amount[:, :, None, None] for amount in (light, contrast, colour))
    grey, mean = images.mean(dim=1, keepdim=True), images.mean(dim=(1, 2, 3), keepdim=True)
    images = light * (mean + contrast * (grey + colour * (images - grey) - mean))
    row, column, height, width = uniform(4, images, generator)
    rows = stretch(images.shape[2], row, strength * height / 3)[:, None, :, None]
    columns = stretch(images.shape[3], column, strength * width / 3)[:, None, None, :]
    return torch.where(rows & columns, mean, images).clamp_(0, 1)
