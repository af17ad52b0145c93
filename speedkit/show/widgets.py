"""Widgets for notebooks: a panel of a plan's fields, and an explorer of recorded runs.

Each shows what a function returns as a table or a figure, for where no widget lives (a page, a print).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ipywidgets
import pandas
from IPython.display import display
from matplotlib.figure import Figure

from speedkit.config import from_mapping, settings_of
from speedkit.errors import PlanError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure.compare import compare
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.schema import load_record
from speedkit.measure.stats import paired_interval
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.show import figures
from speedkit.workloads.workload import Workload

FIELDS = settings_of(Plan)
# What a dropdown offers beside a field's words.
VALUES: tuple[Any, ...] = (False, True, None, 0, 1, 2, 4, 8, 10, 16, 32, 50, 64, 128)
COLUMNS = ("machine", "name", "ratio", "low", "high", "decision")
Record = Mapping[str, Any]


def plan_rows(plan: Plan, hardware: Hardware | None = None, workload: Workload | None = None) -> list[dict[str, Any]]:
    """Return rows `{field, asked, got, why, help}`, one per field of `plan`, for `hardware` and a workload's data."""
    effective = resolve(plan, hardware or this_machine(), workload=workload)
    return [
        {
            "field": name,
            "asked": getattr(plan, name),
            "got": getattr(effective.plan, name),
            "why": "; ".join(fallback.why for fallback in effective.fallbacks if fallback.field == name),
            "help": field.help,
        }
        for name, field in FIELDS.items()
    ]


def choices(name: str) -> list[str]:
    """Return the values, as texts, that a dropdown offers for a field of Plan."""
    offered = []
    for value in (*FIELDS[name].takes, *VALUES):
        with suppress(PlanError):  # no value of this field
            offered.append(str(getattr(Plan(**{name: value}), name)).lower())
    return offered


class PlanPanel(ipywidgets.VBox):
    """A plan by hand: a dropdown per field, what this machine makes of the choice, and a button that measures it.

    `panel.plan` is the chosen plan. The button, which there is with a `workload`, compares it with plain PyTorch for
    about `seconds`; the comparisons are kept in `panel.rows`.
    """

    def __init__(
        self,
        workload: Workload | None = None,
        plan: Plan | None = None,
        *,
        hardware: Hardware | None = None,
        recipe: Recipe | None = None,
        seconds: float = 5.0,
    ):
        self.workload, self.hardware, self.recipe = workload, hardware or this_machine(), recipe
        self.plan, self.seconds = plan or Plan(), seconds
        self.rows: list[dict[str, Any]] = []  # as a record's `measurements`
        self.fields = {
            name: ipywidgets.Dropdown(
                options=[*dict.fromkeys([*choices(name), str(getattr(self.plan, name)).lower()])],
                value=str(getattr(self.plan, name)).lower(),
                description=name,
                tooltip=field.help,
                style={"description_width": "11em"},
            )
            for name, field in FIELDS.items()
        }
        grid = ipywidgets.GridBox([*self.fields.values()], layout={"grid_template_columns": "repeat(auto-fill, 26em)"})
        told = ipywidgets.interactive_output(self.choose, self.fields)
        self.run, self.results = ipywidgets.Button(description="Run", icon="play"), ipywidgets.Output()
        self.run.on_click(lambda _: self.measure())
        super().__init__([grid, told, *([self.run, self.results] if workload is not None else [])])

    def choose(self, **values: str) -> None:
        """Take the plan of these values, and print which of them this machine cannot honour, and why."""
        plan = from_mapping(Plan, values)
        try:
            fallbacks = resolve(plan, self.hardware, workload=self.workload).fallbacks
        except PlanError as error:
            print(error)
            return
        self.plan = plan
        print(*fallbacks or ["this machine honours every field"], sep="\n")

    def measure(self) -> None:
        """Compare the plan with plain PyTorch and show all comparisons so far."""
        with self.results:
            changes = [f"{name}={value}" for name, value in vars(self.plan).items() if value != FIELDS[name].default]
            assert self.workload is not None, "without one there is no button"
            result = compare(
                self.workload,
                Plan(),
                self.plan,
                recipe=self.recipe,
                device=self.hardware.device,
                max_s=self.seconds,
                name=f"{len(self.rows) + 1}. {', '.join(changes) or 'the baseline itself'}",
                names=("baseline", "chosen"),
            )
            self.rows.append(result.as_measurement())
            self.results.clear_output(wait=True)
            display(ratio_table(self.rows))
            figures.show(figures.ratios(self.rows, title="Chosen plans against the baseline"))


def ratio_table(rows: Sequence[Record]) -> pandas.DataFrame:
    """Return measured ratios (rows of `measurements`) as a table, each with what its 99 % interval says."""
    table = []
    for row in rows:
        says = "faster" if row["low"] > 1 else "slower" if row["high"] < 1 else "not shown"
        table.append({key: row[key] for key in COLUMNS if key in row} | {"pairs": len(row["seconds_a"]), "says": says})
    return pandas.DataFrame(table).round(4)


def explored(
    records: Sequence[Record], names: Sequence[str] = (), pairs: int | None = None
) -> tuple[pandas.DataFrame, Figure]:
    """Return table and figure of the measurements called `names` (without: all of the first record) in `records`.

    With `pairs`, ratios and intervals are computed anew from so many pairs of windows, the first ones.
    """
    names = names or [row["name"] for row in records[0]["measurements"]]
    shown = [
        {**record, "measurements": [_of_pairs(row, pairs) for row in record["measurements"] if row["name"] in names]}
        for record in records
    ]
    rows = [{"machine": figures.device_name(record)} | row for record in shown for row in record["measurements"]]
    return ratio_table(rows), figures.ratios(shown[0], shown[1:], names=names, title=records[0]["notebook"])


def _of_pairs(row: Record, pairs: int | None) -> dict[str, Any]:
    a_s, b_s = row["seconds_a"][:pairs], row["seconds_b"][:pairs]
    interval = vars(paired_interval(a_s, b_s)) if 2 <= len(a_s) < len(row["seconds_a"]) else {}
    return {**row, **interval, "seconds_a": a_s, "seconds_b": b_s}


def explorer(sources: Iterable[Record] | None = None) -> ipywidgets.interactive:
    """Return a widget that looks through records by notebook, measurement, and how many pairs of windows are believed.

    By default through all records that are published; `explored` shows the same without widget.
    """
    records = defaultdict[str, list[Record]](list)
    for record in sources or map(load_record, sorted(notebooks_folder().glob("records/*/*.json"))):
        records[record["notebook"]].append(record)

    def open_notebook(notebook: str) -> None:
        rows = [row for record in records[notebook] for row in record["measurements"]]
        names, most = list(dict.fromkeys(row["name"] for row in rows)), max(len(row["seconds_a"]) for row in rows)

        def look(measured: Sequence[str], pairs: int) -> None:
            table, figure = explored(records[notebook], measured, pairs)
            figures.show(figure)
            display(table)

        select = ipywidgets.SelectMultiple(options=names, value=names[:4], layout={"width": "36em"})
        ipywidgets.interact(look, measured=select, pairs=ipywidgets.IntSlider(most, 2, most, continuous_update=False))

    return ipywidgets.interactive(open_notebook, notebook=sorted(records))
