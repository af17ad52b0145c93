"""Augmentation: batched, by the given generator alone, each sample by draws of its own."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny import jitter, points, trained

from speedkit.data.augment import mixup
from speedkit.errors import UsageError
from speedkit.lab.workloads import audio
from speedkit.lab.workloads.augmentations import rand_augment
from speedkit.plan import Plan
from speedkit.workload import Batch


def generator():
    return torch.Generator().manual_seed(0)


def test_mixup_mixes_inputs_by_the_weights_it_returns():
    inputs, targets = torch.eye(400), torch.arange(400)  # a mixed row shows who is in it, and how much
    batch = mixup(Batch(inputs, targets), 0.4, generator())
    mixed, own, (others, weight) = batch.inputs, batch.targets, batch.extra
    expected = weight[:, None] * F.one_hot(own, 400) + (1 - weight[:, None]) * F.one_hot(others, 400)
    torch.testing.assert_close(mixed, expected)
    assert torch.equal(own, targets) and torch.equal(others.sort().values, targets)
    assert weight.min() >= 0.5 and weight.max() <= 1 and len(weight.unique()) > 300
    # Changing places keeps the distance from a half: Beta(a, a) has the variance 1 / (4 (2 a + 1)).
    for alpha in (0.05, 1.0, 8.0):
        weight = mixup(Batch(torch.zeros(40_000, 1), torch.zeros(40_000)), alpha, generator()).extra[1].double()
        assert abs((weight - 0.5).square().mean() * 4 * (2 * alpha + 1) - 1) < 0.03


@pytest.mark.slow
def test_training_mixes_what_the_recipe_says_in_parts_of_a_batch_too():
    def losses(mixup=0.0, **plan):
        workload = dataclasses.replace(points(augment=jitter, mixup=mixup), loss=audio.loss, honours=("mixup",))
        return trained(workload, plan=Plan(log_every=1, **plan)).loss

    plain, mixed = losses(), losses(0.4)
    assert plain != mixed and mixed == losses(0.4)
    torch.testing.assert_close(losses(0.4, micro_batch=5), mixed)


def test_images_stay_in_range_and_no_strength_leaves_them_alone():
    batch = Batch(torch.rand(8, 3, 30, 30), torch.arange(8))
    changed = rand_augment(batch, generator(), strength=2.0).inputs
    assert changed.min() >= 0 and changed.max() <= 1
    kept = rand_augment(batch, generator(), strength=0.0)
    torch.testing.assert_close(kept.inputs, batch.inputs, atol=1e-5, rtol=0)


def test_an_augmentation_that_returns_no_batch_is_told_what_to_return():
    workload = points(augment=lambda batch, generator: (batch.inputs, batch.targets))
    with pytest.raises(UsageError, match="augment of points returns a tuple: it has to return a Batch"):
        trained(workload)
