"""A validation set taken from the training set, where the data brings none."""

import dataclasses

import torch

from speedkit.workload import Workload


def hold_out(workload: Workload, share: float) -> Workload:
    """Return `workload` with a share of its training items for validation, of each label alike, the same every time."""
    train = workload.train
    count = max(1, round(share * len(train)))
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(train), generator=generator).tolist()
    order = sorted(shuffled, key=lambda index: getattr(train[index], "label", 0))
    taken = {order[number * len(train) // count] for number in range(count)}
    rest = [item for index, item in enumerate(train) if index not in taken]
    held_out = [train[index] for index in sorted(taken)]
    return dataclasses.replace(workload, train=rest, validation=[*workload.validation, *held_out])
