"""What becomes of a loop after the closer look: its first, middle and last steps, and the memory that it takes."""

import multiprocessing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import psutil
import torch

from speedkit.measure.bottlenecks import Bottleneck
from speedkit.measure.timeline import RARE

EVERY = 16  # steps there is a sample, at first
KEPT = 64  # samples at most: of more every other one is dropped, and from then on half as many are taken
WINDOW = 100  # steps, about, that are compared
GROWN = 1.3  # times as long are the last steps of a loop whose steps grow
CREEP_BYTES = 32 << 20  # and CREEP_SHARE of the memory at first, by which it has to grow over the loop
CREEP_SHARE = 0.05
HERE = psutil.Process()


class Sample(NamedTuple):
    """A loop after so many `steps`: the seconds so far by part, and the bytes that are taken, by who takes them."""

    steps: int
    seconds: Mapping[str, float]
    memory: Mapping[str, int]


class Growth:
    """Samples of a loop, a bounded number of them however long it goes on."""

    def __init__(self, device: torch.device):
        self.device = device
        self.samples: list[Sample] = []
        self.every = EVERY
        self.due = 0  # in steps

    def see(self, steps: int, seconds: Mapping[str, float]) -> None:
        """Take a sample if one is due."""
        if steps < self.due:
            return
        self.samples.append(Sample(steps, dict(seconds), memory_taken(self.device)))
        if len(self.samples) > KEPT:
            self.samples = self.samples[::2]
            self.every *= 2
        self.due = steps + self.every

    def windows(self) -> list[dict[str, float]]:
        """Return the seconds per step by part in the first, middle and last steps, [] of too short a loop.

        What is rare is left out: it would fall into one of them and not into another.
        """
        last = len(self.samples) - 1
        width = max(1, min(last // 3, round(WINDOW / self.every)))
        windows = []
        for first in (0, (last - width) // 2, last - width):
            if last < 3:
                break
            begin, end = self.samples[first], self.samples[first + width]
            steps = end.steps - begin.steps
            window = {}
            for part in end.seconds.keys() - set(RARE):
                window[part] = (end.seconds[part] - begin.seconds.get(part, 0.0)) / steps
            windows.append(window)
        return windows

    def as_dict(self) -> dict[str, Any]:
        """Return what `breakdown.json` holds of it, {} of too short a loop."""
        windows = self.windows()
        if not windows:
            return {}
        step_s = [sum(window.values()) for window in windows]
        middle = self.samples[len(self.samples) // 2]
        memory = [self.samples[1].memory, middle.memory, self.samples[-1].memory]
        return {"step_s": step_s, "parts_s": windows, "memory_bytes": memory}

    def bottlenecks(self, step_s: float) -> Iterator[Bottleneck]:
        """Yield what grows from the first steps to the last, in a loop whose steps take `step_s` on average."""
        seen = self.as_dict()
        if not seen:
            return
        for owner in seen["memory_bytes"][0]:
            first, middle, last = (memory.get(owner, 0) for memory in seen["memory_bytes"])
            creep = max(CREEP_BYTES, CREEP_SHARE * first)
            if min(middle - first, last - middle) > 0.25 * creep and last - first > creep:
                each = f"{1e-6 * first:.4g}, {1e-6 * middle:.4g} and {1e-6 * last:.4g} MB"
                evidence = f"early, in the middle and late {owner} takes {each}"
                yield Bottleneck("creeping memory", 0.0, "keep numbers (.item(), .detach()), no graphs", evidence)
        first_s, middle_s, last_s = seen["step_s"]
        if first_s < middle_s < last_s and last_s > GROWN * first_s:
            first, _, last = seen["parts_s"]
            grew = max(last, key=lambda part: last[part] - first.get(part, 0.0))
            by_s = last[grew] - first.get(grew, 0.0)
            evidence = f"{in_words(seen)}, and {1e3 * by_s:.3g} ms of that is {grew}"
            yield Bottleneck("growing steps", step_s - first_s, f"find what makes {grew} longer", evidence)


def in_words(seen: Mapping[str, Any]) -> str:
    """Return in a phrase what the first, middle and last steps take."""
    first_s, middle_s, last_s = (f"{1e3 * step_s:.4g}" for step_s in seen["step_s"])
    return f"the first, middle and last steps take {first_s}, {middle_s} and {last_s} ms"


def memory_taken(device: torch.device) -> dict[str, int]:
    """Return the bytes that this process takes, the largest of those that it has started, and its tensors on a GPU."""
    taken = {"this process": HERE.memory_info().rss}
    for worker in multiprocessing.active_children():
        try:
            bytes_taken = psutil.Process(worker.pid).memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        taken["a worker"] = max(taken.get("a worker", 0), bytes_taken)
    if device.type == "cuda":
        taken["the device"] = torch.cuda.memory_allocated(device)
    return taken
