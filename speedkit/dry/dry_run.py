"""What a training would do on a GPU that nobody has rented yet: `speedkit dry-run`."""

import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from speedkit.dry.gpus import Gpu, find_gpu
from speedkit.dry.predict import CLOSE, ERRORS, gains, prediction
from speedkit.dry.process import run
from speedkit.errors import UsageError
from speedkit.measure.breakdown import StepFacts
from speedkit.measure.profile_report import time_samples
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

TIMEOUT_S = 1800.0  # compiling a large model takes minutes
SAMPLES = 16  # that are loaded to see how long one takes


def dry_run(
    workload: Workload, plan: Plan | str = "fast", gpu: Gpu | str = "H100", *, recipe: Recipe | None = None
) -> dict[str, Any]:
    """Return what a step takes on a GPU: its memory in bytes, what it launches, and its predicted seconds.

    `plan` may be a word, which means what that GPU can do. Raises UsageError for what does not fit there.
    """
    if isinstance(gpu, str):
        gpu = find_gpu(gpu)
    recipe = recipe or workload.recipe
    try:
        counted = run("speedkit.dry.step:counted_step", gpu, TIMEOUT_S, workload=workload, recipe=recipe, plan=plan)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"{workload.name} cannot be handed to another process"
        raise UsageError(f"{why}: install cloudpickle, or put it into a module ({error})") from error
    if counted is None:
        raise UsageError(f"{workload.name} does not fit on {gpu.name}, not a sample: take checkpointing=blocks")
    found = row_of(workload.name, plan, gpu, counted=counted)
    if found["seconds"]:
        found["hours"] = found["seconds"] * recipe.total_steps(len(workload.train)) / 3600
        if workload.own_loader is None:
            found["sample_s"] = time_samples(StepFacts(), workload, SAMPLES)
            found["workers"] = math.ceil(recipe.batch_size * found["sample_s"] / found["seconds"])
    return found


def row_of(name: str, plan: Plan | str, gpu: Gpu, *, counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was counted of a step on a GPU, with what is predicted from it."""
    found = {"workload": name, "plan": plan, "gpu": gpu.name, "gpu_bytes": gpu.mib << 20, **counted}
    return found | prediction(counted, gpu) | {"gains": gains(counted, gpu)}


def dry_runs(
    name: str,
    find: Callable[..., dict[str, Any]],
    plans: Sequence[str],
    *,
    gpus: Sequence[Gpu],
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return what `find` finds for each GPU and plan; `tell` is told of what does not fit.

    Raises UsageError where nothing fits.
    """
    rows = []
    for gpu, plan in itertools.product(gpus, dict.fromkeys(plans)):
        try:
            rows.append(find(plan=plan, gpu=gpu))
        except UsageError as error:
            tell(str(error))
    if not rows:
        raise UsageError(f"{name} runs on none of these GPUs")
    return rows


def as_page(rows: list[dict[str, Any]], name: str = "page.html.j2") -> str:
    """Return what several `dry_run` have found as a page with a picture, or as `text.j2`."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=name == "page.html.j2", trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(rows=rows, close=CLOSE, errors=ERRORS)
