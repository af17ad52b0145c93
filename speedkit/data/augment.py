"""Augmentation of a batch on its device: every sample has its own draws from the given generator."""

import dataclasses

import torch
from torch import Generator

from speedkit.errors import UsageError
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Workload


def seed_step(generator: Generator, seed: int, step: int) -> None:
    """Seed the draws of a step (0-based): a resumed run draws what an uninterrupted one would have drawn."""
    generator.manual_seed(seed * 1_000_003 + step)


def augment_batch(batch: Batch, workload: Workload, recipe: Recipe, *, step: int, generator: Generator) -> Batch:
    """Return `batch`, tensors [B, ...], augmented for step number `step` (0-based)."""
    if workload.augment is not None or recipe.mixup:
        seed_step(generator, recipe.seed, step)
    if workload.augment is not None:
        batch = workload.augment(batch, generator)
        if not isinstance(batch, Batch):
            what = f"augment of {workload.name} returns a {type(batch).__name__}"
            raise UsageError(f"{what}: it has to return a Batch, as dataclasses.replace(batch, inputs=...) does")
    if recipe.mixup:
        batch = mixup(batch, recipe.mixup, generator)
    return batch


def mixup(batch: Batch, alpha: float, generator: Generator) -> Batch:
    """Return the batch with each of its inputs mixed with another; `extra` is (the other's targets [B], weight [B]).

    The loss is `weight` times that of the targets plus the rest times that of the other's (Zhang et al. 2018). It is
    drawn per sample from Beta(alpha, alpha); where it is below 1/2 the two change places, so `targets` weigh more.
    """
    inputs = batch.inputs
    alphas = torch.full((2, len(inputs)), alpha, device=generator.device)
    # A Beta of two Gammas; torch.distributions takes no generator. A small alpha may give two zeros: half and half.
    first, second = torch._standard_gamma(alphas, generator).clamp_min_(torch.finfo(alphas.dtype).tiny)
    weight = (torch.maximum(first, second) / (first + second)).to(inputs.device)  # [B]
    partner = torch.randperm(len(inputs), generator=generator, device=generator.device).to(inputs.device)
    per_sample = weight.view(-1, *[1] * (inputs.ndim - 1))  # [B, 1, ...]
    mixed = torch.lerp(inputs[partner], inputs, per_sample)
    return dataclasses.replace(batch, inputs=mixed, extra=(batch.targets[partner], weight))
