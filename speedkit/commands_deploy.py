"""`speedkit deploy CHECKPOINT`: a trained model, made small, tested and exported."""

import statistics
import warnings
from pathlib import Path
from typing import Any

import click
import torch

from speedkit.deploy import load
from speedkit.deploy.quantize import METHODS
from speedkit.errors import SpeedkitError, UsageError
from speedkit.options import DATA, run_options
from speedkit.train import checkpoint
from speedkit.workloads import BUILT_IN, load_workload


@click.command()
@click.argument("checkpoint_file", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("workload", required=False)
@run_options
@click.option("--method", default="int8-dynamic", show_default=True, metavar=" | ".join(METHODS).upper())
@click.option("--max-drop", default=0.01, show_default=True, help="what the metric may lose on the test set")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(2), help="beside a single sample")
@click.option("--pairs", default=10, show_default=True, type=click.IntRange(4), help="windows of each model")
@click.option("--compile/--no-compile", "compiled", default=True, help="measure compiled models too")
def deploy(checkpoint_file: Path, workload: str | None, out: Path, **values: Any) -> None:
    """Make the trained model in CHECKPOINT small and fast: quantize, test and export it. WORKLOAD is found in it."""
    from speedkit.deploy import trial

    state = read_checkpoint(checkpoint_file)
    name = workload or state["job"]["workload"]
    if not workload and name not in BUILT_IN:
        raise UsageError(f"{checkpoint_file} is of your workload {name}: name it as package.module:function")
    data = {key: values.pop(key) for key in DATA}
    work = load_workload(name, max_duration_s=state["job"].get("max_duration_s"), **data)
    with warnings.catch_warnings(action="ignore"):  # export's and torchao's, of what they do themselves
        found = trial.deploy(work, restored(work, state), out, say=click.echo, **values)
    click.echo(
        "{metric} {before:.4f}, {method} {after:.4f} on {n} test items: a drop of {drop:.4f} ({low:.4f} to "
        "{high:.4f})".format(method=found["method"], **found["quality"])
    )
    click.echo("{size_bytes} bytes for {float32_size_bytes}; {quantized_share:.1%} has 8 bits".format(**found))
    for row in found["measurements"]:
        a_ms, b_ms = (1e3 * statistics.median(row[side]) for side in ("seconds_a", "seconds_b"))
        click.echo(
            f"{row['name']}: {row['a']} {a_ms:.3g} ms, {row['b']} {b_ms:.3g} ms, "
            "ratio {ratio:.2f} ({low:.2f} to {high:.2f})".format(**row)
        )
    click.echo(f"{trial.MODEL}, {trial.LOADER} and {trial.FACTS} in {out}")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, named by its file or folder. Raises UsageError where there is none."""
    path = path / checkpoint.NAME if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}: speedkit train leaves one in its --out folder")
    if about := load.facts(path):
        raise UsageError(f"{path} is exported already, by {about['method']}: give the checkpoint that it was made from")
    try:
        return checkpoint.read(path, torch.device("cpu"))
    except Exception as error:  # torch raises whatever its unpickler does
        raise SpeedkitError(f"{path} cannot be read ({error}): take {checkpoint.PREVIOUS[0]} beside it") from error


def restored(workload: Any, state: dict[str, Any]) -> torch.nn.Module:
    """Return the model of `workload` with the weights of a checkpoint. Raises UsageError for that of another."""
    job, items, model = state["job"], len(workload.train), workload.model()
    if job["workload"] != workload.name:
        raise UsageError(f"the checkpoint is of workload {job['workload']}, not of {workload.name}: name that one")
    if job["train_items"] != items:
        raise UsageError(f"the checkpoint is of {job['train_items']} training items, here are {items}: name its data")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UsageError(f"the checkpoint holds another {workload.name} model: name its --size") from error
    return model
