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

    def __init__(self, name: str, total: int, batch_size: int, device: torch.device, show: bool | str):
        self.name, self.total, self.batch_size, self.device = name, total, batch_size, device
        self.show = wanted(show)
        self.last_line_s = 0.0
        self.bar: Any = None
        if self.show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=name, unit="batch")

    def update(self, step: int, step_s: float, loss: float, score: float, metric: str) -> None:
        """Show where the run is; `step_s` and `loss` are means since the last log point, `score` of the last batch."""
        rate = 1 / step_s
        shown = {"loss": f"{loss:.4f}", "acc" if metric == "accuracy" else metric: f"{score:.3f}"}
        shown |= {"batches/s": f"{rate:.1f}", "samples/s": f"{rate * self.batch_size:.0f}"}
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):  # NVML may be missing; the run does not depend on it
                shown["gpu"] = f"{torch.cuda.utilization(self.device)} %"
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(step - self.bar.n)
        elif time.perf_counter() - self.last_line_s >= 5 or step == self.total:  # a log file needs a sign of life only
            print(f"{self.name} step {step}/{self.total}:", ", ".join(map(" ".join, shown.items())), flush=True)
            self.last_line_s = time.perf_counter()

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
