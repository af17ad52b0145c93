"""A widget for notebooks: a panel of a plan's fields, and a button that measures the chosen plan."""

from contextlib import suppress
from typing import Any

import ipywidgets
import pandas
from IPython.display import display

from speedkit.config import from_mapping, settings_of
from speedkit.errors import PlanError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure.compare import compare
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.show import figures
from speedkit.workloads.workload import Workload

FIELDS = settings_of(Plan)
# What a dropdown offers beside a field's words.
VALUES: tuple[Any, ...] = (False, True, None, 0, 1, 2, 4, 8, 10, 16, 32, 50, 64, 128)


def choices(name: str) -> list[str]:
    """Return the values, as texts, that a dropdown offers for a field of Plan."""
    offered = []
    for value in (*FIELDS[name].takes, *VALUES):
        with suppress(PlanError):  # no value of this field
            offered.append(str(getattr(Plan(**{name: value}), name)).lower())
    return offered


class PlanPanel(ipywidgets.VBox):
    """A plan by hand: a dropdown per field, what this machine makes of the choice, and a button that measures it.

    `panel.plan` is the chosen plan. The button compares it with plain PyTorch for about `seconds`; the comparisons are
    kept in `panel.measurements`.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        hardware: Hardware | None = None,
        recipe: Recipe | None = None,
        seconds: float = 5.0,
    ):
        self.workload, self.hardware, self.recipe = workload, hardware or this_machine(), recipe
        self.plan, self.seconds = Plan(), seconds
        self.measurements: list[dict[str, Any]] = []  # rows as in a record
        self.fields = {
            name: ipywidgets.Dropdown(
                options=choices(name),
                value=str(field.default).lower(),
                description=name,
                tooltip=field.help,
                style={"description_width": "11em"},
            )
            for name, field in FIELDS.items()
        }
        grid = ipywidgets.GridBox([*self.fields.values()], layout={"grid_template_columns": "repeat(auto-fill, 26em)"})
        fallbacks = ipywidgets.interactive_output(self.choose, self.fields)
        self.run, self.results = ipywidgets.Button(description="Run", icon="play"), ipywidgets.Output()
        self.run.on_click(lambda _: self.measure())
        super().__init__([grid, fallbacks, self.run, self.results])

    def choose(self, **values: str) -> None:
        """Take the plan of these values, and print which of them this machine cannot honour, and why."""
        self.plan = from_mapping(Plan, values)
        try:
            fallbacks = resolve(self.plan, self.hardware, workload=self.workload).fallbacks
            print(*fallbacks or ["this machine honours every field"], sep="\n")
        except PlanError as error:
            print(error)

    def measure(self) -> None:
        """Compare the plan with plain PyTorch and show all comparisons so far."""
        changes = [f"{name}={value}" for name, value in vars(self.plan).items() if value != FIELDS[name].default]
        with self.results:
            comparison = compare(
                self.workload,
                Plan(),
                self.plan,
                recipe=self.recipe,
                device=self.hardware.device,
                max_s=self.seconds,
                name=f"{len(self.measurements) + 1}. {', '.join(changes) or 'the baseline itself'}",
                names=("baseline", "chosen"),
            )
            self.measurements.append(comparison.as_measurement())
            self.results.clear_output(wait=True)
            display(pandas.DataFrame(self.measurements)[["name", "ratio", "low", "high", "decision"]].round(4))
            figures.show(figures.ratios(self.measurements, title="Chosen plans against the baseline"))
