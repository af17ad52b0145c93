"""What a training would do on a GPU that nobody has rented yet: `speedkit dry-run`."""

import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from speedkit.dry.gpus import Gpu, find_gpu
from speedkit.dry.predict import CLOSE, gains, prediction
from speedkit.dry.process import run
from speedkit.errors import UsageError
from speedkit.plan import Plan, as_plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

TIMEOUT_S = 1800.0  # compiling a large model takes minutes


def dry_run(
    workload: Workload, plan: Plan | str = "fast", gpu: Gpu | str = "H100", *, recipe: Recipe | None = None
) -> dict[str, Any]:
    """Return what a step takes on a GPU: its memory in bytes, what it launches, and its predicted seconds.

    `plan` may be a word, which means what that GPU can do. Raises UsageError for what does not fit there.
    """
    if isinstance(gpu, str):
        gpu = find_gpu(gpu)
    recipe = recipe or workload.recipe
    step = "speedkit.dry.step:counted_step"
    try:
        counted = run(step, gpu, TIMEOUT_S, workload=workload, recipe=recipe, plan=plan)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"{workload.name} cannot be handed to another process"
        raise UsageError(f"{why}: install cloudpickle, or put it into a module ({error})") from error
    if counted is None:
        raise UsageError(f"{workload.name} does not fit on {gpu.name}, not a sample: take checkpointing=blocks")
    found: dict[str, Any] = {"workload": workload.name, "plan": plan, "gpu": gpu.name, "gpu_bytes": gpu.mib << 20}
    found |= counted | prediction(counted, gpu) | {"gains": gains(counted, gpu)}
    if found["seconds"]:
        found["hours"] = found["seconds"] * recipe.total_steps(len(workload.train)) / 3600
    return found


def dry_runs(
    workload: Workload, recipe: Recipe, gpus: list[Gpu], *, plans: Sequence[str], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return what `dry_run` finds for each GPU and plan; `tell` is told of what does not fit.

    Raises UsageError where nothing fits.
    """
    for plan in plans:
        as_plan(plan)  # a word that names no plan is refused before anything is counted
    rows = []
    for gpu, plan in itertools.product(gpus, dict.fromkeys(plans)):
        try:
            rows.append(dry_run(workload, plan, gpu, recipe=recipe))
        except UsageError as error:
            tell(str(error))
    if not rows:
        raise UsageError(f"{workload.name} runs on none of these GPUs")
    return rows


def as_page(rows: list[dict[str, Any]], name: str = "page.html.j2") -> str:
    """Return what several `dry_run` have found as a page with a picture, or as `text.j2`."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=name == "page.html.j2", trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(rows=rows, close=CLOSE)
