"""What a batch takes: `python tools/batch_sizes.py` counts it, and the page of records shows it by GPU memory."""

import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.lab.provenance import notebooks_folder
from speedkit.lab.workloads import BUILT_IN, load_workload
from speedkit.plan import Plan
from speedkit.train.loop import train
from speedkit.train.memory import peak_bytes
from speedkit.train.micro_batch import ROOM, trial_plan, with_longest_first
from speedkit.train.setup import setup_run

COUNTED = "records/batch_sizes.json"
GPUS_GB = (4, 8, 16, 24, 80)
ABOUT = """The largest batch, a power of two, that trains in nine tenths of a GPU's memory, by the allocations of
steps in float32 on the longest clips of the generated data, with AdamW's state. What CUDA takes for itself is not in
it. They are counted on a CPU, by `python tools/batch_sizes.py`. In 16 bits (`precision`) or recomputed
(`checkpointing`) more fits, and `micro_batch=auto` finds by trying what suits your data and your GPU."""


def count(name: str, size: str) -> dict[str, Any]:
    """Return the bytes that the net of a workload and size trains in: a constant, and so many per sample."""
    work = with_longest_first(load_workload(name, size=size))
    recipe = dataclasses.replace(work.recipe, batch_size=8)
    run = setup_run(work, recipe, trial_plan(Plan()), device="cpu", endless=True, progress=False)
    learner = run.learner
    peaks: dict[int, int] = {}
    with contextlib.closing(run):
        batch = next(run.data.test.one_epoch())
        for samples in (1, 1, 4):  # the first step makes the optimizer's state
            learner.micro_batch = samples
            run.position.batch = batch
            peaks[samples] = peak_bytes(functools.partial(next, train(run)), run.device)
            learner.optimizer.zero_grad()  # gradients are a part of a step's memory
        state = [value for values in learner.optimizer.state.values() for value in values.values()]
        tensors = (*learner.model.parameters(), *learner.model.buffers(), *state)
        state_bytes = sum(tensor.nbytes for tensor in tensors)
    sample_bytes = (peaks[4] - peaks[1]) / 3
    return {
        "workload": name,
        "size": size,
        "sample": list(batch.inputs.shape[1:]),
        "fixed_bytes": round(state_bytes + peaks[1] - sample_bytes),
        "sample_bytes": round(sample_bytes),
    }


def section(folder: Path) -> str:
    """Return the Markdown section on batch sizes, from what was counted; "" where nothing was."""
    if not (folder / COUNTED).exists():
        return ""
    head = ["workload", "size", "a sample", "MB per sample", *(f"{gb} GB" for gb in GPUS_GB)]
    rows = []
    for row in files.read_json(folder / COUNTED):
        sample = " x ".join(map(str, row["sample"]))
        cells = [row["workload"], row["size"], sample, f"{row['sample_bytes'] / 1e6:.3g}"]
        for gb in GPUS_GB:
            samples = (ROOM * gb * 1e9 - row["fixed_bytes"]) / row["sample_bytes"]
            cells.append(str(2 ** int(math.log2(samples))) if samples >= 1 else "none")
        rows.append(cells)
    return f"\n## Batch sizes by GPU memory\n\n{' '.join(ABOUT.split())}\n\n{markdown_table(head, rows)}\n"


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    from publish import update_readme

    sizes = ("tiny", "small", "medium")
    files.write_json(notebooks_folder() / COUNTED, [count(name, size) for name in BUILT_IN for size in sizes])
    update_readme(notebooks_folder().parent / "README.md")
