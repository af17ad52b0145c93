"""The workbench of a notebook: switches of a plan on the left, and on the right what they do to the training here."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import textwrap
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ipywidgets
from IPython.display import HTML, display

from speedkit.config import Setting, from_mapping, settings_of, to_yaml
from speedkit.display import table
from speedkit.errors import PlanError
from speedkit.fallbacks import resolve
from speedkit.lab import figures
from speedkit.lab.exploration import News, as_bytes, explore_in_process
from speedkit.lab.frameworks import in_words
from speedkit.machine import Hardware, this_machine
from speedkit.measure.compare import pair_table
from speedkit.measure.words import ratio_text
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

NOT_HERE = ("ranks", "strategy", "allocator", "validate_every")  # of several processes, or of no single step
SWITCH = "true | false"  # as `settings_of` calls a field that is one
LINE = ipywidgets.Layout(width="32em")
WIDE = {"description_width": "10em"}


def explore(workload: Workload, *, recipe: Recipe | None = None, device: str = "auto") -> "Workbench":
    """Return a workbench for `workload`: set switches, compare with plain PyTorch in turns, take the plan over.

    It measures in a process of its own, so that the notebook stays usable; it learns nothing.
    """
    return Workbench(dataclasses.replace(workload, recipe=recipe or workload.recipe), this_machine(device))


class Workbench:
    """The widgets, and what is `known` of the plan that was compared last."""

    def __init__(self, workload: Workload, hardware: Hardware):
        self.workload = workload
        self.hardware = hardware
        self.known: News = {}
        self.process: Any = None
        fields = {name: setting for name, setting in settings_of(Plan).items() if name not in NOT_HERE}
        self.switches = {name: self._switch(name, setting) for name, setting in fields.items()}
        self.compare = ipywidgets.Button(description="Compare", button_style="primary")
        self.stop = ipywidgets.Button(description="Stop", disabled=True)
        self.take = ipywidgets.Dropdown(options=["take over as ...", "YAML", *self._words(Plan())])
        self.shown = ipywidgets.HTML()
        self.taken = ipywidgets.HTML()
        self.compare.on_click(lambda _: self.start())
        self.stop.on_click(lambda _: self.interrupt())
        self.take.observe(lambda _: self._take_over(), "value")

    def _ipython_display_(self) -> None:
        left = ipywidgets.VBox([*self.switches.values()], layout=ipywidgets.Layout(flex="0 0 auto"))
        buttons = ipywidgets.HBox([self.compare, self.stop, self.take])
        display(ipywidgets.HBox([left, ipywidgets.VBox([buttons, self.shown, self.taken])]))
        # A page without a kernel shows no widgets: there the picture stays.
        self.picture = display(HTML(self._repr_html_()), display_id=True)

    # ---- the plan ----

    def plan(self) -> Plan:
        """Return the plan that the switches say. Raises PlanError for a value that a field cannot take."""
        return from_mapping(Plan, {name: switch.value for name, switch in self.switches.items()})

    def _switch(self, name: str, setting: Setting) -> Any:
        """Return the switch of a field, disabled where this machine and these data leave only the default."""
        options: dict[str, Any] = {"description": name, "tooltip": setting.help, "style": WIDE, "layout": LINE}
        if setting.takes == (SWITCH,):
            why = self._why_not(name, True).partition(";")[0]
            options["description"] = f"{name}: {why}" if why else name
            return ipywidgets.Checkbox(value=setting.default, disabled=bool(why), **options)
        if any(" " in value for value in setting.takes):
            hint = " | ".join(setting.takes)
            return ipywidgets.Text(value=str(setting.default).lower(), placeholder=hint, **options)
        reasons = {value: self._why_not(name, value) for value in setting.takes}
        labels = [(f"{value}: not here, {why}" if why else value, value) for value, why in reasons.items()]
        options["disabled"] = all(why for value, why in reasons.items() if value != setting.default)
        options["tooltip"] = "; ".join(filter(None, reasons.values())) or setting.help
        return ipywidgets.Dropdown(options=labels, value=setting.default, **options)

    def _why_not(self, name: str, value: Any) -> str:
        """Return why a field cannot have a value on this machine with these data, or ""."""
        plan = from_mapping(Plan, {name: value})
        batch_size = self.workload.recipe.batch_size
        effective = resolve(plan, self.hardware, workload=self.workload, batch_size=batch_size)
        return "; ".join(fallback.why for fallback in effective.lost if fallback.field == name)

    def _words(self, plan: Plan) -> dict[str, str]:
        return in_words(plan, self.workload.recipe)

    def _take_over(self) -> None:
        """Show the plan as YAML, or as the lines that do the same in a framework."""
        framework = self.take.value
        with self._told():
            words = {"YAML": to_yaml(self.plan()), **self._words(self.plan())}
            self.taken.value = table(framework, (), (), below=words.get(framework, ""))

    # ---- measuring ----

    def start(self) -> None:
        """Compare the plan with the baseline in a process of its own."""
        with self._told():
            sent = as_bytes(self.workload, self.plan(), {"device": str(self.hardware.device)})
            self.known = {"plan": self.plan()}
            here, there = multiprocessing.Pipe(duplex=False)
            self.process = multiprocessing.get_context("spawn").Process(target=explore_in_process, args=(sent, there))
            self.process.start()
            there.close()
            self.compare.disabled = True
            self.stop.disabled = False
            threading.Thread(target=self._listen, args=(here,), daemon=True).start()

    def interrupt(self) -> None:
        """Stop measuring; what is known stays."""
        if self.process is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)

    def _listen(self, connection: Any) -> None:
        """Show all news until the process ends."""
        with contextlib.suppress(EOFError):
            while True:
                self.known |= connection.recv()
                self.shown.value = self._repr_html_()
        self.process.join()
        if self.process.exitcode:
            self.known["state"] = "stopped"
            self.shown.value = self._repr_html_()
        self.compare.disabled = False
        self.stop.disabled = True
        if "breakdowns" in self.known:
            figure = figures.breakdowns(self.known["breakdowns"])
            figure.suptitle(textwrap.fill(self.headline(), 90), x=0.01, ha="left")
            self.picture.update(figure)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Show what is wrong with the switches where they are, and not in the notebook's log."""
        try:
            yield
        except PlanError as error:
            self.shown.value = table(str(error), (), ())

    # ---- what is seen ----

    def headline(self) -> str:
        """Return the result so far in one line."""
        known = self.known
        if "ratio" not in known:
            return str(known.get("state", "nothing was compared yet"))
        return f"{known['plan']!r}: {ratio_text(known)} against plain PyTorch, {known.get('decision', known['state'])}"

    def _repr_html_(self) -> str:
        known = self.known
        rows = []
        if "predicted" in known:
            rows.append(("predicted", "{:.2f} to {:.2f} times as fast".format(*known["predicted"])))
        if "ratio" in known:
            rows.append(("measured", ratio_text(known)))
        if "bytes" in known:
            before, after = known["bytes"]
            rows.append(("peak memory of a step", f"{after / 1e6:.3g} MB; baseline {before / 1e6:.3g} MB"))
        html = table(self.headline(), ("", ""), rows, below="\n".join(known.get("notes", ())))
        if "ratio" in known:
            html += pair_table("", {"a": "baseline", "b": "plan", **known})
        if "breakdowns" in known:
            html += table("ms per step", ("cause", *known["breakdowns"]), beside(known["breakdowns"]))
        return html


def beside(breakdowns: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for each cause: what it is called, and its milliseconds of a step in each of the breakdowns."""
    rows: dict[str, list[Any]] = {}
    for number, breakdown in enumerate(breakdowns.values(), 1):
        for row in breakdown["rows"]:
            cells = rows.setdefault(row["cause"], [row["cause"], *[0.0] * len(breakdowns)])
            cells[number] = 1e3 * row["seconds"] / breakdown["steps"]
    return [*rows.values()]
