"""What a run shows while it runs: a panel in a notebook, a bar on a terminal, plain lines elsewhere, or nothing."""

import contextlib
import html
import math
import os
import sys
import time
from typing import Any

import torch

from speedkit.train.memory import fragmentation

LINE_S = 5.0  # between plain lines: a log file needs a sign of life only
PANEL_SHARE = 0.002  # of the time, at most, in which the panel is drawn; sending it takes about as much again
POINTS = 150  # of the loss that the panel draws, at most


def wanted(progress: bool | str) -> bool:
    """Whether to show progress: "auto" means yes unless SPEEDKIT_PROGRESS=off."""
    return os.environ.get("SPEEDKIT_PROGRESS") != "off" if progress == "auto" else bool(progress)


def in_notebook(progress: bool | str) -> bool:
    """Whether a notebook can show a panel ("panel"), or has a person before it as well ("auto").

    JupyterLab, Notebook and VS Code name the cell that they ask to run. Papermill, nbval and nbconvert, whose outputs
    are kept and compared, do not.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    person = kernel is not None and "cellId" in kernel.get_parent().get("metadata", {})
    return person if progress == "auto" else progress == "panel" and kernel is not None


class Progress:
    """Shows loss, accuracy, rates and what the device does, at log points only: a bar costs a short step 3 %."""

    def __init__(self, name: str, total: int, batch_size: int, device: torch.device, show: bool | str):
        self.name, self.total, self.batch_size, self.device = name, total, batch_size, device
        self.show = wanted(show)
        self.due_s = 0.0  # when lines and panel may change again
        self.waited_s, self.taken, self.trained_s = 0.0, 0, 0.0  # for data, batches, training: since it last changed
        self.follows = False
        self.bar: Any = None
        self.panel = Panel(name) if self.show and in_notebook(show) else None
        if self.show and self.panel is None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=name, unit="batch")

    def follow(self, batches: Any) -> None:
        """Let the panel know how long training waits in `batches.next()`."""
        if self.panel is None:
            return
        take, self.follows = batches.next, True

        def timed() -> Any:
            began_s = time.perf_counter()
            batch = take()
            self.waited_s += time.perf_counter() - began_s
            self.taken += 1
            return batch

        batches.next = timed

    def update(self, step: int, step_s: float, loss: float, score: float, metric: str) -> None:
        """Show where the run is; `step_s` and `loss` are means since the last log point, `score` of the last batch."""
        self.trained_s, self.taken = self.trained_s + step_s * self.taken, 0
        if self.panel is not None and math.isfinite(loss):
            self.panel.losses.append((step, loss))
        began_s = time.perf_counter()
        if self.bar is None and began_s < self.due_s and step != self.total:
            return
        rate = 1 / step_s
        shown = {"loss": f"{loss:.4f}", "acc" if metric == "accuracy" else metric: f"{score:.3f}"}
        shown |= {"batches/s": f"{rate:.1f}", "samples/s": f"{rate * self.batch_size:.0f}"}
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):  # NVML may be missing; the run does not depend on it
                shown["gpu busy"] = f"{torch.cuda.utilization(self.device)} %"
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(step - self.bar.n)
        elif self.panel is not None:
            self.panel.facts = {"step": f"{step} of {self.total}"} | shown | self._machine()
            self._draw(began_s)
        else:
            print(f"{self.name} step {step}/{self.total}:", ", ".join(map(" ".join, shown.items())), flush=True)
            self.due_s = time.perf_counter() + LINE_S

    def _draw(self, began_s: float) -> None:
        """Bring the panel up to date, and let it rest for so long that it takes the share of the time that it may."""
        assert self.panel is not None
        self.panel.draw()
        self.due_s = time.perf_counter() + (time.perf_counter() - began_s) / PANEL_SHARE

    def _machine(self) -> dict[str, str]:
        """Return the share of training that was spent waiting for data since this was last asked, and memory in use."""
        if self.device.type == "cuda":
            used = {"GPU memory, peak": torch.cuda.max_memory_allocated(self.device)}
        else:
            used = {"memory": fragmentation(self.device)["rss_bytes"] or 0}
        found = {name: f"{count / 1e9:.2f} GB" for name, count in used.items()}
        if self.follows and self.trained_s:
            found["data wait"] = f"{self.waited_s / self.trained_s:.1%}"
        self.waited_s = self.trained_s = 0.0
        return found

    def say(self, text: str) -> None:
        """Print a line without tearing the bar apart."""
        if self.bar is not None:
            self.bar.write(text)
        elif self.panel is not None:
            self.panel.lines.append(text.strip())
            if (began_s := time.perf_counter()) >= self.due_s:
                self._draw(began_s)
        elif self.show:
            print(text, flush=True)

    def tell(self, *notes: Any) -> None:
        """Print each note that says something, as a line."""
        for note in filter(None, notes):
            self.say(f"  {note}")

    def close(self) -> None:
        """Leave bar or panel as it stands."""
        if self.bar is not None:
            self.bar.close()
        if self.panel is not None:
            self.panel.close()


class Panel:
    """The live panel: one HTML widget, in whose place the same as plain HTML stays in the notebook when it closes."""

    def __init__(self, name: str):
        from IPython.display import display
        from ipywidgets import HTML

        self.name, self.widget = name, HTML()
        self.facts = {"step": "none yet"}
        self.losses: list[tuple[int, float]] = []  # (step, loss), one per log point
        self.lines: list[str] = []  # what was said
        self.draw()
        self.place = display(self.widget, display_id=True)

    def draw(self) -> None:
        """Show everything as it is now; of the lines the last ones, the rest after scrolling."""
        cells = "".join(
            f"<td style='padding: 0 1.2em 0 0; text-align: left'>{html.escape(name)}<br>"
            f"<b>{html.escape(value)}</b></td>"
            for name, value in self.facts.items()
        )
        lines = "<br>".join(map(html.escape, self.lines))
        scrolls = "display: flex; flex-direction: column-reverse; max-height: 8em; overflow: auto"
        self.widget.value = (
            f"<div><b>{html.escape(self.name)}</b><table><tr>{cells}</tr></table>{self._curve()}"
            f"<div style='{scrolls}'><div>{lines}</div></div></div>"
        )

    def _curve(self) -> str:
        """Return the losses so far as a drawing, the lowest at the bottom and the highest at the top."""
        points = self.losses[:: -(-len(self.losses) // POINTS)] if self.losses else [(0, 0.0)]
        steps, losses = zip(*points, strict=True)
        low, first = min(losses), steps[0]
        high, width = max(max(losses) - low, 1e-12), max(steps[-1] - first, 1)
        places = [f"{(step - first) / width * 400:.1f},{60 - (loss - low) / high * 56:.1f}" for step, loss in points]
        return (
            f"<svg viewBox='0 0 400 64' width='400' height='64' role='img' aria-label='loss'><polyline fill='none' "
            f"stroke='#0072B2' stroke-width='1.5' points='{' '.join(places)}'/></svg>"
        )

    def close(self) -> None:
        """Replace the widget, which lives as long as the kernel does, by what it shows."""
        from IPython.display import HTML

        self.draw()
        self.place.update(HTML(self.widget.value))
        self.widget.close()
