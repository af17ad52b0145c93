"""What a run shows while it runs: a bar on a terminal, plain lines elsewhere, nothing when turned off."""

import contextlib
import os
import sys
import time
from typing import Any

import torch


def wanted(progress: bool | str) -> bool:
    """Whether to show progress: "auto" means yes unless SPEEDKIT_PROGRESS=off."""
    return os.environ.get("SPEEDKIT_PROGRESS") != "off" if progress == "auto" else bool(progress)


class Progress:
    """Shows loss, accuracy, rates and GPU utilisation, at log points only: a bar costs a short step 3 %."""

    def __init__(self, name: str, total: int, done: int, batch_size: int, device: torch.device, show: bool | str):
        self.bar: Any = None
        self.show = wanted(show)
        self.name, self.total, self.batch_size, self.device = name, total, batch_size, device
        self.last_s, self.last_line_s, self.last_step = time.perf_counter(), 0.0, done
        if self.show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, desc=name, unit="batch", leave=True)

    def update(self, step: int, loss: float, score: float | None, metric: str) -> None:
        """Show where the run is; `score` is the mean over the last batch."""
        if not self.show:
            return
        now_s = time.perf_counter()
        rate = (step - self.last_step) / max(now_s - self.last_s, 1e-9)
        shown = {"loss": f"{loss:.4f}"}
        if score is not None:
            shown["acc" if metric == "accuracy" else metric] = f"{score:.3f}"
        shown |= {"batches/s": f"{rate:.1f}", "samples/s": f"{rate * self.batch_size:.0f}"}
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):  # NVML may be missing; the run does not depend on it
                shown["gpu"] = f"{torch.cuda.utilization(self.device)} %"
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(step - self.last_step)
        elif now_s - self.last_line_s >= 5 or step == self.total:  # a log file needs a sign of life, not every point
            values = ", ".join(f"{key} {value}" for key, value in shown.items())
            print(f"{self.name} step {step}/{self.total}: {values}", flush=True)
            self.last_line_s = now_s
        self.last_s, self.last_step = now_s, step

    def say(self, text: str) -> None:
        """Print a line without tearing the bar apart."""
        if self.bar is not None:
            self.bar.write(text)
        elif self.show:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
