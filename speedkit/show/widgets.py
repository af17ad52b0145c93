"""Widgets for notebooks: a panel of a plan's options, and an explorer of recorded runs.

Each is drawn from a function that gives the same as a table and a figure, for where no widget lives (a page, a print).
"""

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets
import pandas
from IPython.core.pylabtools import print_figure
from matplotlib.figure import Figure

from speedkit.config import from_mapping, settings_of
from speedkit.errors import PlanError, SpeedkitError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure.compare import compare
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.schema import load_record, validate_record
from speedkit.measure.stats import paired_interval
from speedkit.plan import PRESETS, Plan, resolve
from speedkit.show import figures

FIELDS = settings_of(Plan)
VALUES = {
    name: (False, True) if "boolean" in about.kinds else () if "integer" in about.kinds else about.choices
    for name, about in FIELDS.items()
}  # all that a field takes; () where it takes numbers
COLUMNS = ("machine", "name", "ratio", "low", "high", "decision", "loss_difference")
Record = Mapping[str, Any]
png = partial(print_figure, fmt="png", bbox_inches=None, dpi=90)  # figure -> bytes
as_html = partial(pandas.DataFrame.to_html, index=False, border=0, justify="left", na_rep="", col_space="5em")


def plan_rows(plan: Plan, hardware: Hardware | None = None, workload: Any = None) -> list[dict[str, Any]]:
    """Return rows `{field, asked, got, why, impossible, help}`, one per field of `plan`: the plan panel as data.

    `why` is the reason where `hardware` (and the data of `workload`) makes something else of what is asked;
    `impossible` holds, by value, the reason for each other value that could not be had beside the rest of the plan.
    """
    hardware = hardware or this_machine()
    effective, rows = resolve(plan, hardware, workload=workload), []
    for name, about in FIELDS.items():
        asked = getattr(plan, name)
        others = [value for value in VALUES[name] or (int(about.default or 1) + 1,) if value != asked]
        whys = {value: _why_not(plan, name, value, hardware, workload) for value in others}
        rows.append(
            {
                "field": name,
                "asked": asked,
                "got": getattr(effective.plan, name),
                "why": "; ".join(found.why for found in effective.fallbacks if found.field == name),
                "impossible": {value: why for value, why in whys.items() if why},
                "help": about.help,
            }
        )
    return rows


def _why_not(plan: Plan, name: str, value: Any, hardware: Hardware, workload: Any) -> str:
    """Return why `hardware` cannot honour `value` in the field `name` of `plan`, or "" where it can."""
    try:
        found = resolve(dataclasses.replace(plan, **{name: value}), hardware, workload=workload).fallbacks
    except PlanError as error:
        return str(error)
    return next((one.why for one in found if one.field == name and one.got != one.asked), "")


def in_words(value: Any) -> str:
    """Return a value of a setting as one word."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value).lower()


def ratio_table(rows: Sequence[Record]) -> pandas.DataFrame:
    """Return measured ratios (rows of `measurements`) as a table, each with what its 99 % interval says."""
    shown = []
    for row in rows:
        floor = max(row.get("noise_floor") or 1.0, 1.0)
        says = "faster" if row["low"] > floor else "slower" if row["high"] < 1 / floor else "not beyond the noise"
        shown.append({key: row[key] for key in COLUMNS if key in row} | {"pairs": len(row["seconds_a"]), "says": says})
    return pandas.DataFrame(shown).round(4)


def course(history: Any) -> pandas.DataFrame:
    """Return loss and seconds per step of a run (what `fit` returns) by log point, as its live panel showed them."""
    return pandas.DataFrame({"step": history.log_steps, "loss": history.loss, "step_s": history.log_step_s})


def button(word: str, clicked: Callable[[], Any], **more: Any) -> ipywidgets.Button:
    """Return a button as wide as its `word`, which calls `clicked`."""
    made = ipywidgets.Button(description=word, layout={"width": "auto"}, **more)
    made.on_click(lambda _: clicked())
    return made


class PlanPanel(ipywidgets.VBox):
    """A plan by hand: a row per field, what this machine cannot do greyed out with the reason, a button that measures.

    `panel.plan` is the chosen plan and `panel.set(precision="bf16")` chooses, with what is impossible told in `told`.
    The button, which there is with a `workload`, compares it with `baseline` on that for about `seconds`. `plan_rows`,
    `ratio_table(panel.rows)` and `figures.ratios(panel.rows)` show the same.
    """

    def __init__(
        self,
        workload: Any = None,
        plan: Plan | None = None,
        *,
        baseline: Plan | None = None,
        hardware: Hardware | None = None,
        recipe: Any = None,
        seconds: float = 5.0,
    ):
        self.workload, self.hardware, self.recipe = workload, hardware or this_machine(), recipe
        self.plan, self.baseline, self.seconds = Plan(), baseline or Plan(), seconds
        self.rows: list[dict[str, Any]] = []  # results, as a record's `measurements`
        self.choices = {
            name: {value: button(in_words(value), partial(self.set, **{name: value})) for value in values}
            for name, values in VALUES.items()
        }
        self.texts = {
            name: ipywidgets.Text(continuous_update=False, layout={"width": "7em"})
            for name, values in VALUES.items()
            if not values
        }
        for name, text in self.texts.items():
            text.observe(lambda change, name=name: self.set(**{name: change["new"]}), "value")
        self.notes = {name: ipywidgets.HTML(layout={"flex": "1 1 18em"}) for name in FIELDS}
        self.run_button = button("Run", self.run, icon="play", tooltip="measure this plan now")
        self.message, self.table = ipywidgets.HTML(), ipywidgets.HTML()
        self.figure = ipywidgets.Image(format="png", layout={"display": "none", "max_width": "100%"})
        presets = [button(word, partial(self.set, **vars(make(self.hardware)))) for word, make in PRESETS.items()]
        head = ipywidgets.HBox([*presets, *([self.run_button] if workload is not None else [])])
        wraps = ipywidgets.Layout(flex_flow="row wrap", align_content="flex-start", width="28em")
        fields = [
            ipywidgets.HBox(
                [
                    ipywidgets.HTML(f"<b>{name}</b>", layout={"width": "10em"}),
                    ipywidgets.Box([*self.choices[name].values()] or [self.texts[name]], layout=wraps),
                    self.notes[name],
                ]
            )
            for name in FIELDS
        ]
        scrolls = ipywidgets.VBox(fields, layout={"max_height": "28em", "overflow": "auto", "display": "block"})
        super().__init__([head, self.message, scrolls, self.table, self.figure])
        self.set(**vars(plan or self.plan))

    def set(self, **values: Any) -> None:
        """Choose values by field, typed or as text; what cannot be is told in the panel, and the plan stays."""
        told = []
        for name, value in values.items():
            try:
                plan = from_mapping(Plan, vars(self.plan) | {name: value})
                resolve(plan, self.hardware, workload=self.workload)  # refuses what is not in this version
                self.plan = plan
            except PlanError as error:
                told.append(str(error))
        self._refresh()
        self._tell("; ".join(told))

    def run(self) -> None:
        """Measure the plan and add what came out to the results; whatever goes wrong is told in the panel."""
        self.run_button.disabled = True
        self._tell("measuring: both plans are warmed up, then they take turns")
        try:
            row = self.compared(self.plan)
            rows = [*self.rows, row | {"name": f"{len(self.rows) + 1}. {row['name']}"}]
            self.table.value = as_html(ratio_table(rows))
            self.figure.value = png(figures.ratios(rows, title="Chosen plans against the baseline"))
            self.figure.layout.display, self.rows = "", rows
            self._tell(f"result {len(rows)} added")
        except (Exception, KeyboardInterrupt) as error:  # a widget has nobody to raise it to
            self._tell(f"nothing was added: {type(error).__name__}: {error}")
        finally:
            self.run_button.disabled = False

    def compared(self, plan: Plan) -> dict[str, Any]:
        """Return the row of a short comparison of `plan` with the baseline, with how far the first losses differ."""
        changed = [
            f"{name}={in_words(value)}" for name, value in vars(plan).items() if value != getattr(self.baseline, name)
        ]
        found = compare(
            self.workload,
            self.baseline,
            plan,
            recipe=self.recipe,
            device=self.hardware.device,
            max_s=self.seconds,
            name=", ".join(changed) or "the baseline itself",
            names=("baseline", "chosen"),
        )
        difference = max(abs(a - b) for a, b in zip(found.losses_a, found.losses_b, strict=True))
        return found.as_measurement() | {"loss_difference": difference}

    def _refresh(self) -> None:
        for row in plan_rows(self.plan, self.hardware, self.workload):
            name, asked, got, whys = row["field"], row["asked"], row["got"], dict[str, list[str]]()
            for value, why in row["impossible"].items():
                whys.setdefault(why, []).append(in_words(value))
            for value, choice in self.choices[name].items():
                why = row["impossible"].get(value, "")
                choice.disabled, choice.tooltip = bool(why), why or row["help"]
                choice.button_style = "primary" if value == asked else ""
            if name in self.texts:
                self.texts[name].value, self.texts[name].disabled = in_words(asked), bool(whys) and asked == got
            quiet = [f"asked {in_words(asked)}, got {in_words(got)}: {row['why']}"] if row["why"] else []
            quiet += [f"{', '.join(values)}: {why}" for why, values in whys.items()]
            self.notes[name].value = (
                f"<div style='line-height: 1.4; padding: 0.5em 0'>{html.escape(row['help'])}"
                f"<br><i>{'<br>'.join(map(html.escape, quiet))}</i></div>"
            )

    def _tell(self, text: str) -> None:
        self.told, self.message.value = text, f"<b>{html.escape(text)}</b>"


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
    found = vars(paired_interval(a_s, b_s)) if 2 <= len(a_s) < len(row["seconds_a"]) else {}
    return {**row, **found, "seconds_a": a_s, "seconds_b": b_s}


def read_records(sources: Sequence[Record | str | Path] | None = None) -> tuple[dict[str, list[Record]], str]:
    """Return records, or files of such, by notebook, and what was left out because it is no record of this version.

    By default all that are published. A run that is not saved yet lacks what is known at its end only.
    """
    found, left_out = dict[str, list[Record]](), []
    for source in sorted(notebooks_folder().glob("records/*/*.json")) if sources is None else sources:
        try:
            record = load_record(source) if isinstance(source, str | Path) else source
            if problems := validate_record({"power": None, "clocks": None, "energy_j": None, **record}):
                raise SpeedkitError(f"a record of {record.get('notebook')} is not valid ({problems[0]})")
        except SpeedkitError as error:
            left_out.append(str(error))
        else:
            found.setdefault(record["notebook"], []).append(record)
    return found, "; ".join(left_out)


class Explorer(ipywidgets.VBox):
    """Looks through records by notebook, machine, measurement, and how many pairs of windows are believed.

    `records` are as `read_records` takes them; `told` says what was left out. `explored` shows the same without widget.
    """

    def __init__(self, records: Sequence[Record | str | Path] | None = None):
        self.records, self.told = read_records(records)
        self.notebook = ipywidgets.Dropdown(options=sorted(self.records), description="notebook")
        self.machines = ipywidgets.SelectMultiple(description="machines", layout={"width": "24em"})
        self.measurements = ipywidgets.SelectMultiple(description="measured", layout={"width": "36em"})
        self.pairs = ipywidgets.IntSlider(description="pairs", min=2, max=2, continuous_update=False)
        self.message, self.table, self.figure = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.Image(format="png")
        self.notebook.observe(lambda _: self._open(), "value")
        for control in (self.machines, self.measurements, self.pairs):
            control.observe(lambda _: self._refresh(), "value")
        head = ipywidgets.HBox(
            [ipywidgets.VBox([self.notebook, self.pairs]), self.machines, self.measurements],
            layout={"flex_flow": "row wrap"},
        )
        super().__init__([head, self.message, self.figure, self.table])
        self._open()

    def _open(self) -> None:
        records = self.records.get(self.notebook.value, [])
        rows = [row for record in records for row in record["measurements"]]
        self.opening = True  # nothing is drawn of what is half changed
        self.machines.options = [(f"{at + 1}. {figures.device_name(record)}", at) for at, record in enumerate(records)]
        self.machines.value = tuple(range(len(records)))
        self.pairs.max = self.pairs.value = max([2, *(len(row["seconds_a"]) for row in rows)])
        self.measurements.options = list(dict.fromkeys(row["name"] for row in rows))
        self.measurements.value = self.measurements.options[:4]
        self.opening = False
        self._refresh()

    def _refresh(self) -> None:
        if self.opening:
            return
        names, records = self.measurements.value, self.records.get(self.notebook.value, [])
        chosen = [records[place] for place in self.machines.value]
        there = any(row["name"] in names for record in chosen for row in record["measurements"])
        self.figure.layout.display, self.table.value = "" if there else "none", ""
        self.message.value = html.escape(f"{'' if there else 'choose a machine and what it measured'} {self.told}")
        if there:
            table, figure = explored(chosen, names, self.pairs.value)
            self.table.value, self.figure.value = as_html(table), png(figure)
