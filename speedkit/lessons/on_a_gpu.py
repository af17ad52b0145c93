"""What the plans of a lesson ask of a GPU that nobody has rented: counted, and what is predicted from that.

`dry/` has the counts, a file for each GPU, from tests/dry/test_dry.py. Nothing here was measured.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from speedkit.dry.dry_run import as_page, dry_run
from speedkit.dry.predict import CLOSE, ERRORS
from speedkit.files import read_json
from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, add_caption, new_figure
from speedkit.lab.record import NotebookRun, Row
from speedkit.recipe import Recipe
from speedkit.workload import Workload

if TYPE_CHECKING:
    from pandas import DataFrame

GPUS = {"H100": "sm_90", "T4": "sm_75"}
UNITS = {
    "memory": (f"MB (counted; typical error {ERRORS['memory']}x)", 1e-6),
    "kernels": ("kernels (counted)", 1),
    "seconds_by_kind": ("ms (predicted)", 1e3),
}
FACTOR = "typical error (a factor)"
ROOM = 10  # how long each row of an order is

ASKED = {  # what, and whether on a stream of its own
    ("copy", False): (ORANGE, "a copy from the host"),
    ("copy", True): (GREEN, "a copy on a stream of its own"),
    ("wait", False): (GREY, "the host waits for it"),
    ("kernels", False): (BLUE, "kernels"),
}


def counts(what: str, gpu: str) -> Any:
    """Return what was counted on a GPU: its `steps`, `orders`, `layouts` or `attention_kernels`."""
    return read_json(Path(__file__).with_name("dry") / f"{GPUS[gpu]}.json")[what]


def table(run: NotebookRun, workload: str, *plans: str) -> "DataFrame":
    """Record and return a step of each plan on each GPU that has it: counts, and predictions with their typical error.

    Gains are over the first plan there. A launch-bound step is not predicted: its kernels are.
    """
    rows = []
    for gpu in GPUS:
        steps = counts("steps", gpu)[workload]
        known = [plan for plan in plans if plan in steps]
        rows += [{"GPU": gpu, "plan": plan, **told(steps[plan], steps[known[0]])} for plan in known]
    return run.table(f"{workload} on a GPU (counted, predicted)", rows)


def told(step: Row, first: Row) -> dict[str, Any]:
    """Return what a row says of a step, beside the first one of its GPU."""
    kernels_ms = 1e3 * sum(step["seconds_by_kind"].values())
    error = step["typical_error"]
    took = " to ".join(f"{float(f'{ms:.3g}'):,g}" for ms in (kernels_ms / error, kernels_ms * error))
    gain = ""
    if step["seconds"] is None:
        took = f"launch-bound; kernels {took}"
    elif first["seconds"] is not None and step is not first:
        ratio = first["seconds"] / step["seconds"]
        gain = "too close to call" if 1 / CLOSE < ratio < CLOSE else f"{ratio:.2g} (error {ERRORS['gain']}x)"
    counted = {"products in": step["number_format"], "launches": step["launches"], "host waits": step["waits"]}
    counted["peak, MB"] = round(step["memory"]["peak"] / 1e6)
    return counted | {"predicted step, ms": took, "predicted gain": gain, "typical error": f"{error}x"}


def on_each(run: NotebookRun, what: str) -> "DataFrame":
    """Record and return what was counted on each GPU by name: `what` is layouts or attention_kernels."""
    found = {gpu: counts(what, gpu) for gpu in GPUS}
    rows = [{"name": name} | {gpu: found[gpu][name] for gpu in GPUS} for name in found["H100"]]
    return run.table(f"{what} on a GPU (counted)", rows)


def parts(run: NotebookRun, workload: str, *plans: str, of: str = "kernels", gpu: str = "H100") -> "DataFrame":
    """Record and return the parts of a step, a column for each plan: `of` is memory, kernels or seconds_by_kind."""
    unit, factor = UNITS[of]
    steps = counts("steps", gpu)[workload]
    names = dict.fromkeys(name for plan in plans for name in steps[plan][of])
    rows: list[dict[str, Any]] = [{unit: name} for name in names]
    for plan in plans:
        known = steps[plan][of]
        other: float | str = 0.0
        if of == "kernels":  # only the most frequent have their names: any other is at most as frequent as the least
            other = f"≤ {min(known.values())}"
        for row in rows:
            row[plan] = factor * known[row[unit]] if row[unit] in known else other
            if of == "memory":
                row[plan] = round(row[plan])
    if of == "seconds_by_kind":
        rows = [row for row in rows if any(row[plan] for plan in plans)]  # of nets that have it
        rows.append({unit: FACTOR} | {plan: steps[plan]["typical_error"] for plan in plans})
    return run.table(f"{workload}, {gpu}: {unit}", rows).round(2)


def rented(workload: Workload, recipe: Recipe, gpu: str) -> None:
    """Print what a GPU would do with a workload, under plain PyTorch and the plan that is recommended there."""
    print(as_page([dry_run(workload, plan, gpu, recipe=recipe) for plan in ("baseline", "fast")], "text.j2"))


@style.context(STYLE)
def order(gpu: str = "H100") -> Figure:
    """Return what the host asks of a GPU in a step: copies, waits and kernels, in the order of its calls.

    No length is a time: kernels fill each row up, so that all rows end alike. A stream that only copies is drawn above
    the one that computes, for both run at once.
    """
    plans = counts("orders", gpu)
    figure, axes = new_figure(0.5 * len(plans) + 1.3, [*plans])
    for y, events in enumerate(plans.values()):
        ends = {False: 0.0, True: 0.0}  # of the stream that computes, and of the one that only copies
        for what, aside, number in events:
            lane = (y - 0.52, 0.25) if aside else (y - 0.24, 0.48)
            for _ in range(1 if what == "kernels" else number):
                width = ROOM - ends[aside] if what == "kernels" else 1
                axes.broken_barh([(ends[aside], width)], lane, facecolor=ASKED[what, aside][0], edgecolor="white")
                middle = ends[aside] + width / 2, lane[0] + lane[1] / 2
                axes.text(*middle, what, ha="center", va="center", color="white", fontsize=8)
                ends[aside] += width
    about = "the order of the host's calls, from left to right; no length is a time"
    axes.set(xlim=(0, ROOM), xticks=[], xlabel=about)
    marks = [Patch(color=colour, label=label) for colour, label in ASKED.values()]
    add_caption(figure, "As it comes the host waits after each copy, with pinned memory never", marks)
    return figure
