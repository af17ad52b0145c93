"""How long training stands still for a checkpoint."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import common

from speedkit.plan import Plan
from speedkit.train import checkpoint, checkpoint_file


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the seconds that training stands still for a checkpoint of 1 GB: weights and two averages of each."""
    hidden, saves = (64, 1) if quick else (20_480, 5)
    workload = common.perceptron(4096, hidden, 8)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        with common.training(workload, Plan(validate_every=0), out=out, progress=False) as (run, our_steps):
            stood_s = []
            for _ in itertools.islice(our_steps, saves):
                began_s = time.perf_counter()
                checkpoint.save(run)
                stood_s.append(time.perf_counter() - began_s)
                run.reporting.writer.wait()  # two in a row would wait for each other
            gigabytes = (out / checkpoint_file.NAME).stat().st_size / 1e9
    yield common.median_of(f"standing still for a checkpoint of {gigabytes:.2f} GB", stood_s, limit=0.2, unit=" s")


if __name__ == "__main__":
    common.main(measure)
