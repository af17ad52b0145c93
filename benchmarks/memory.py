"""Peak memory of a fresh process that calls `fit` against one with a bare loop: one workload, its data in memory."""

import statistics
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from speedkit import Batch, Recipe, load_workload

if TYPE_CHECKING:
    import common  # the bare side must not load what it brings along

STEPS = 20
# Prints the peak of one of the functions below.
CODE = "import memory, resource, sys; getattr(memory, sys.argv[1])(sys.argv[2]); print(resource.getrusage(0).ru_maxrss)"


def run_fit(cache_dir: str) -> None:
    """Train by `fit`, its features in memory as the bare loop has them."""
    from speedkit import Plan, fit

    recipe = Recipe(steps=STEPS, epochs=None, schedule="constant", clip_norm=1.0)
    plan = Plan(cache="ram", validate_every=0)
    fit(load_workload("audio", clips=400), recipe, plan, device="cpu", progress=False, cache_dir=cache_dir)


def run_bare(_folder: str) -> None:
    """Train by hand: shuffle, gather, zero_grad, forward, backward, clip, step; evaluate at the end."""
    workload, recipe = load_workload("audio", clips=400), Recipe()
    inputs, test_inputs = (
        torch.stack([workload.features(workload.load(item)) for item in items])
        for items in (workload.train, workload.test)
    )
    targets = torch.tensor([workload.target(item) for item in workload.train])
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    assert workload.augment is not None
    for _ in range(STEPS):
        chosen = torch.randperm(len(inputs))[: recipe.batch_size]
        batch = workload.augment(Batch(inputs[chosen], targets[chosen]), torch.Generator())
        optimizer.zero_grad()
        loss, _ = workload.loss(model, batch, recipe)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        for part in test_inputs.split(recipe.batch_size):
            model.eval()(part)


def measure(quick: bool) -> "Iterator[common.Result]":
    """Measure the ratio of the peaks of resident memory."""
    times = 1 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        common.in_fresh_process(CODE, "run_fit", folder)  # makes the clips and builds the cache
        ours, bare = (
            [int(common.in_fresh_process(CODE, side, folder)) for _ in range(times)] for side in ("run_fit", "run_bare")
        )
    what = f"peak memory, audio (bare {statistics.median(bare) / 1024:.0f} MB)"
    yield common.median_of(what, [mine / other for mine, other in zip(ours, bare, strict=True)], limit=1.05)


if __name__ == "__main__":
    import common

    common.main(measure)
