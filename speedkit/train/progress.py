"""The progress of a run: a live panel in a notebook, a bar on a terminal, plain lines in a log, or nothing."""

import html
import math
import os
import sys
import time
from typing import Any

# Seconds between updates; plain lines, a sign of life in a log file, are rarer.
UPDATE_EVERY_S = {"panel": 0.5, "bar": 0.5, "lines": 5.0}


def wanted(show: bool | str) -> bool:
    """Return whether to show progress: "auto" means yes unless SPEEDKIT_PROGRESS=off."""
    return os.environ.get("SPEEDKIT_PROGRESS") != "off" if show == "auto" else bool(show)


def display_mode(show: bool | str) -> str:
    """Return how to show progress here: "panel", "bar", "lines" or "off"."""
    if not wanted(show):
        return "off"
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    # JupyterLab, Notebook and VS Code name the cell that they ask to run. Papermill, nbval and nbconvert, whose outputs
    # are kept and compared, do not.
    if kernel and (show == "panel" or "cellId" in kernel.get_parent().get("metadata", {})):
        return "panel"
    return "bar" if sys.stderr.isatty() else "lines"


class Progress:
    """Shows loss, score and rates at log points, from numbers that were read there anyway: it never waits for a GPU."""

    def __init__(self, name: str, total: int | None, batch_size: int, *, show: bool | str):
        self.name, self.total, self.batch_size = name, total, batch_size
        self.mode = display_mode(show)
        self.next_s = 0.0  # time of the next update
        self.losses: list[float] = []  # one per update
        if self.mode == "bar":
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=name, unit="batch", mininterval=0)
        elif self.mode == "panel":
            from IPython.display import HTML, display

            self.panel: Any = display(HTML("not begun"), display_id=True)

    def due(self, step: int) -> bool:
        """Return whether to show `step`."""
        return self.mode != "off" and (time.perf_counter() >= self.next_s or step == self.total)

    def update(self, step: int, step_s: float, loss: float, *, score: float, metric: str) -> None:
        """Show where the run is; `step_s` and `loss` are means since the last log point, `score` of the last batch."""
        self.next_s = time.perf_counter() + UPDATE_EVERY_S[self.mode]
        text = f"loss {loss:.4f}, {metric} {score:.3f}, {self.batch_size / step_s:.0f} samples/s"
        if self.mode == "bar":
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
            return
        text = f"{self.name} step {step}/{self.total}: {text}"
        if self.mode == "lines":
            print(text, flush=True)
            return
        from IPython.display import HTML

        self.losses += [loss] if math.isfinite(loss) else []
        self.panel.update(HTML(f"{html.escape(text)}<br>{curve(self.losses)}"))

    def say(self, text: str) -> None:
        """Print a line; a bar stays below it."""
        if self.mode == "bar":
            self.bar.write(text)
        elif self.mode != "off":
            print(text, flush=True)

    def close(self) -> None:
        """Leave bar or panel as it stands."""
        if self.mode == "bar":
            self.bar.close()


def curve(losses: list[float]) -> str:
    """Return an SVG picture of `losses` in their order, the highest at the top."""
    low = min(losses, default=0.0)
    height = max(losses, default=0.0) - low or 1.0
    points = (f"{400 * i / len(losses):.1f},{60 - 56 * (loss - low) / height:.1f}" for i, loss in enumerate(losses))
    line = f"<polyline points='{' '.join(points)}' fill='none' stroke='#0072B2' stroke-width='1.5'/>"
    return f"<svg width='400' height='64' role='img' aria-label='loss'>{line}</svg>"
