"""Peak memory of a fresh process that calls `fit` against one with a bare loop: one workload, its data in memory."""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

LIMIT = 1.05
CLIPS, STEPS = 400, 20


def run_fit(size: str, cache_dir: str) -> None:
    """Train by `fit`, its features in memory as the bare loop has them."""
    from speedkit import Plan, Recipe, fit, load_workload

    workload = load_workload("audio", size=size, clips=CLIPS)
    recipe = Recipe(steps=STEPS, epochs=None, schedule="constant", clip_norm=1.0)
    plan = Plan(cache="ram", validate_every=0)
    fit(workload, recipe, plan, device="cpu", progress=False, cache_dir=cache_dir)


def run_bare(size: str, cache_dir: str) -> None:
    """Train by hand: shuffle, gather, zero_grad, forward, backward, clip, step; evaluate at the end."""
    import torch

    from speedkit import Recipe, load_workload

    workload, recipe = load_workload("audio", size=size, clips=CLIPS), Recipe()
    inputs, test_inputs = (
        torch.stack([workload.features(workload.load(item)) for item in items])
        for items in (workload.train, workload.test)
    )
    targets = torch.tensor([workload.target(item) for item in workload.train])
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    for _ in range(STEPS):
        chosen = torch.randperm(len(inputs))[: recipe.batch_size]
        batch = workload.augment((inputs[chosen], targets[chosen]), torch.Generator())
        optimizer.zero_grad()
        loss, _ = workload.loss(model, batch, recipe)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        for part in test_inputs.split(recipe.batch_size):
            model.eval()(part)


def peak_bytes(side: str, size: str, cache_dir: str) -> int:
    """Return the peak resident memory of a fresh process that runs one `side`."""
    command = [sys.executable, __file__, "--run", side, "--size", size, "--cache-dir", cache_dir]
    return int(subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).split()[-1])


def main() -> None:
    """Print the ratio of the peaks, and its ends; exit with 1 when the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; the figures mean nothing")
    parser.add_argument("--size", default="small", help="of the audio workload: tiny or small")
    parser.add_argument("--run", choices=("fit", "bare"), help="run one side in this process, and print its peak")
    parser.add_argument("--cache-dir")
    options = parser.parse_args()
    if options.run:
        {"fit": run_fit, "bare": run_bare}[options.run](options.size, options.cache_dir)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # kB, on Linux
        return
    with tempfile.TemporaryDirectory() as folder:
        peak_bytes("fit", options.size, folder)  # makes the clips and builds the cache
        sides = [
            [peak_bytes(side, options.size, folder) for side in ("fit", "bare")]
            for _ in range(1 if options.quick else 5)
        ]
    ratios = [fit / bare for fit, bare in sides]
    measured = statistics.median(ratios)
    met = measured <= LIMIT
    bare_mb = statistics.median(bare for _, bare in sides) / 1e6
    print(
        f"peak memory, audio {options.size} (bare {bare_mb:.0f} MB): {measured:.3f}x "
        f"({min(ratios):.3f} to {max(ratios):.3f}), limit {LIMIT:g}x: {'met' if met else 'missed'}"
    )
    sys.exit(not met)


if __name__ == "__main__":
    main()
