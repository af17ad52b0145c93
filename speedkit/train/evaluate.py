"""Evaluation: the workload's metric over its test set, read by the host once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def evaluate(
    workload: Any, model: nn.Module, batches: Iterator[tuple[Tensor, ...]], recipe: Any, autocast: Any
) -> dict[str, Any]:
    """Return `{metric, value, n}`: the mean of `workload.score` over all samples of `batches`.

    The model runs in evaluation mode, uncompiled (its other mode would be compiled once more), in the precision that
    `autocast` gives, and is put back as it was.
    """
    was_training = model.training
    model.eval()
    total: Tensor | None = None
    count = 0
    for batch in batches:
        with autocast or contextlib.nullcontext():
            _, outputs = workload.loss(model, batch, recipe)
        scores = workload.score(outputs, batch).float().sum()
        total = scores if total is None else total + scores
        count += len(batch[0])
    model.train(was_training)
    value = float(total) / count if total is not None else None
    return {"metric": workload.metric, "value": value, "n": count}
