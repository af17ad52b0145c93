"""The progress of a run: a live line in a notebook, a bar on a terminal, plain lines in a log, or nothing."""

import math
import os
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from speedkit.machine import gpu_state

# Seconds between updates; plain lines, a sign of life in a log file, are rarer.
UPDATE_EVERY_S = {"panel": 0.5, "bar": 0.5, "lines": 5.0}


def wanted(show: bool | str) -> bool:
    """Return whether to show progress: "auto" means yes unless SPEEDKIT_PROGRESS=off."""
    return os.environ.get("SPEEDKIT_PROGRESS") != "off" if show == "auto" else bool(show)


def display_mode(show: bool | str) -> str:
    """Return how to show progress here: "panel", "bar", "lines" or "off"."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    # JupyterLab, Notebook and VS Code name the cell that they ask to run. Papermill, nbval and nbconvert, whose outputs
    # are kept and compared, do not.
    if wanted(show) and kernel and (show == "panel" or "cellId" in kernel.get_parent().get("metadata", {})):
        return "panel"
    return "off" if not wanted(show) else "bar" if sys.stderr.isatty() else "lines"


class Progress:
    """Shows loss, score and rates at log points, from numbers that were read there anyway: it never waits for a GPU."""

    def __init__(self, name: str, total: int, batch_size: int, *, device: torch.device, show: bool | str):
        self.name, self.total, self.batch_size, self.mode = name, total, batch_size, display_mode(show)
        self.device, self.gpu, self.look = device, dict[str, float](), ""  # of the last evaluation
        self.began: tuple[int, float] | None = None  # step and time of the first update: compiling lies before it
        self.next_s = 0.0  # time of the next update
        self.losses: list[float] = []  # one per update
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # without tqdm's own rate and time left
        self.bar = tqdm(total=total, desc=name, bar_format=form, mininterval=0, disable=self.mode != "bar")
        if self.mode == "panel":
            from IPython.display import display

            self.panel: Any = display({"text/plain": "not begun"}, raw=True, display_id=True)

    def due(self, step: int) -> bool:
        """Return whether to show `step`."""
        return self.mode != "off" and (time.perf_counter() >= self.next_s or step == self.total)

    def update(self, step: int, step_s: float, loss: float, *, score: float | None, metric: str) -> None:
        """Show where the run is; `step_s` and `loss` are means since the last log point, `score` of the last batch."""
        now_s = time.perf_counter()
        self.next_s = now_s + UPDATE_EVERY_S[self.mode]
        self.began = self.began or (step, now_s)
        steps, elapsed_s = step - self.began[0], now_s - self.began[1]
        left = tqdm.format_interval((self.total - step) * (elapsed_s / steps if steps else step_s)) + " left"
        scored = "" if score is None else f", {metric} {score:.3f}"
        text = f"loss {loss:.4f}{scored}{self.look}, {self.batch_size / step_s:.0f} samples/s"
        self.gpu = gpu_state(self.device, "power_w", "utilisation")  # {} where NVML does not tell both
        if self.gpu:
            text += f", {self.gpu['power_w']:.0f} W, GPU {self.gpu['utilisation']:.0%} busy"
        line = f"{self.name} step {step}/{self.total}: {text}, {left}"
        if self.mode == "bar":
            self.bar.set_postfix_str(f"{left}, {text}", refresh=False)  # a narrow terminal cuts off the end
            self.bar.update(step - self.bar.n)
        elif self.mode == "lines":
            print(line, flush=True)
        else:
            self.losses += [loss] if math.isfinite(loss) else []
            self.panel.update({"text/plain": f"{line}\n{curve(self.losses)}"}, raw=True)

    def say(self, text: str) -> None:
        """Print a line; a bar stays below it."""
        if self.mode == "bar":
            self.bar.write(text)
        elif self.mode != "off":
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()


def curve(losses: list[float]) -> str:
    """Return a line of at most 80 blocks, as high as the `losses` in their order."""
    losses = losses[:: len(losses) // 80 + 1]
    low, high = min(losses, default=0.0), max(losses, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (loss - low) / (high - low or 1.0))] for loss in losses)
