"""A model and data sets of one's own: what is learned of them, and what is said of what cannot be."""

import dataclasses

import pytest
import torch
from tiny import trained
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from speedkit.errors import SpeedkitError
from speedkit.fallbacks import resolve
from speedkit.machine import this_machine
from speedkit.own_workload import from_dataset
from speedkit.plan import Plan
from speedkit.recipe import Recipe


def points(count=40, size=6, seed=0):
    inputs = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def linear(size=6, outputs=2):
    return nn.Linear(size, outputs)


class Pairs(Dataset):
    """What `make(index)` gives; how often it was asked for each index is counted."""

    def __init__(self, make, count=20):
        self.make, self.asked = make, [0] * count

    def __len__(self):
        return len(self.asked)

    def __getitem__(self, index):
        self.asked[index] += 1
        return self.make(index)


def course(workload, steps=4, **plan):
    recipe = Recipe(batch_size=10, steps=steps, epochs=None, learning_rate=3e-2)
    history = trained(workload, recipe, Plan(log_every=1, **plan))
    return history.loss, history.evaluation["value"]


@pytest.mark.slow
def test_each_sample_is_made_once_and_targets_beside_the_inputs_are_not_computed_to_open_a_cache():
    data = Pairs(lambda index: (torch.full((6,), float(index)), index % 2))
    workload = from_dataset(linear, data, points(10))
    before = list(data.asked)
    course(workload, steps=2)  # an epoch
    assert [now - was for now, was in zip(data.asked, before, strict=True)] == [1] * 20
    data.targets = [index % 2 for index in range(20)]
    workload = dataclasses.replace(from_dataset(linear, data, points(10)), parameters={"version": 1})
    before = sum(data.asked)
    course(workload, cache="ram")
    course(workload, cache="ram")
    assert sum(data.asked) - before <= 20 + 8  # once each, and the pilot's


@pytest.mark.slow
def test_a_module_is_trained_from_its_own_weights_and_a_changed_data_set_never_served_from_the_old_cache():
    module = linear()
    for seed in (0, 5):
        work = from_dataset(module, points(seed=seed), points(10))
        assert course(work) == course(work, cache="disk")


def test_other_targets_than_classes_are_learned_and_never_cut_to_whole_numbers_by_a_cache():
    def make(index):
        return torch.full((6,), index / 20), torch.full((2,), index / 20)

    def distance(outputs, targets):
        return (outputs.float() - targets.view(len(targets), -1)).square().mean(dim=1)

    workload = from_dataset(
        linear,
        Pairs(make),
        Pairs(make),
        loss=lambda *both: distance(*both).mean(),
        score=distance,
        metric="squared error",
        higher_is_better=False,
    )
    effective = resolve(Plan(cache="ram"), this_machine("cpu"), workload=workload)
    assert effective.plan.cache == "off" and "whole-number targets" in effective.fallbacks[0].why
    losses, error = course(workload, steps=30)
    assert losses[-1] < losses[0] / 2 and error < losses[0]


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (Pairs(lambda index: torch.zeros(6)), r"train/0 cannot be used: it gives Tensor, not \(input tensor, target"),
        (Pairs(lambda index: (torch.zeros(6), 0.5)), "no class numbers: give score"),
        (Pairs(None, count=0), "a data set is empty"),
    ],
)
def test_a_data_set_that_cannot_be_trained_on_is_one_sentence(train, sentence):
    with pytest.raises(SpeedkitError, match=sentence):
        from_dataset(linear, train, points(10))
