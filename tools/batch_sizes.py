"""What a batch takes: `python tools/batch_sizes.py` counts it, and the page of records shows it by GPU memory."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch

from speedkit import files
from speedkit.data.loader import make_sample
from speedkit.dry.gpus import GPUS
from speedkit.dry.predict import ERRORS
from speedkit.dry.process import run
from speedkit.lab.provenance import notebooks_folder
from speedkit.lab.workloads import BUILT_IN, load_workload
from speedkit.plan import Plan
from speedkit.train.micro_batch import ROOM, micro_batch_for, with_longest_first
from speedkit.train.setup import setup_run

COUNTED = "records/batch_sizes.json"
GPUS_GB = (4, 8, 16, 24, 80)
ABOUT = f"""The largest batch, a power of two, that trains in nine tenths of a GPU's memory, by the allocations of
steps in float32 on the longest clips of the generated data, with AdamW's state. What CUDA takes for itself is not in
it, nor the workspaces of convolutions. They are counted by PyTorch's CUDA code on a GPU that is not there (an H100), by
`python tools/batch_sizes.py`. The typical error of memory that is counted so is {ERRORS["memory"]}x
([how near](../../docs/dry-run.md#how-near-predictions-come)). In 16 bits (`precision`) or recomputed (`checkpointing`)
more fits, and `micro_batch=auto` finds by trying what suits your data and your GPU."""


def count(name: str, size: str) -> dict[str, Any]:
    """Return the bytes that the net of a workload and size trains in on a GPU: a constant, and so many per sample."""
    work = load_workload(name, size=size)
    recipe = dataclasses.replace(work.recipe, batch_size=8)
    peaks = micro_batch_for(work, recipe, Plan(), device=torch.device("cuda"), make_run=setup_run).peak_bytes
    items = with_longest_first(work).test
    sample, _ = make_sample(0, items=items, load=work.load, features=work.features, target=work.target)
    passed_bytes = (peaks[4] - peaks[1]) / 3
    model = work.model()
    state_bytes = sum(buffer.nbytes for buffer in model.buffers())
    state_bytes += sum(3 * weights.nbytes for weights in model.parameters())  # AdamW keeps two numbers for each
    return {
        "workload": name,
        "size": size,
        "sample": list(sample.shape),
        "fixed_bytes": round(state_bytes + peaks[1] - passed_bytes),
        "sample_bytes": round(sample.nbytes + passed_bytes),
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

    nets = itertools.product(BUILT_IN, ("tiny", "small", "medium"))
    rows = [run("batch_sizes:count", GPUS["H100"], name=name, size=size) for name, size in nets]
    files.write_json(notebooks_folder() / COUNTED, rows)
    update_readme(notebooks_folder().parent / "README.md")
