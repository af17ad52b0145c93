"""A training loop into which one cause of slowness can be planted, at a cost that is known without a profiler.

Lesson 02 has `speedkit.profile` find each cause; tests/lessons/test_planted.py holds it to that.
"""

import contextlib
import functools
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from speedkit.clock import timed
from speedkit.machine import Hardware, this_machine

# What can be planted, by the name that a profile gives it; and the plan's field that mends it.
CAUSES = {
    "slow decode": "workers",
    "large copies": "pin_memory",
    "host-device sync": "log_every",
    "printing each step": "log_every",
    "many small operators": "compile",
    "compute-bound": "precision",
    "bandwidth-bound": "compile",
    "validation too often": "validate_every",
}
ON_CPU = {
    "large copies": "the batch is in the model's memory already: nothing is copied",
    "host-device sync": "a CPU has computed the loss before `.item()` asks: nobody waits",
}


def why_not(cause: str, hardware: Hardware) -> str:
    """Return why this machine cannot have the cause, "" where it can."""
    if cause == "compute-bound" and not hardware.supports("bf16"):
        return f"float32 is as fast as it gets: {hardware.why_not('bf16')}"
    return "" if hardware.device.type == "cuda" else ON_CPU.get(cause, "")


def possible(causes: Sequence[str], hardware: Hardware) -> Iterator[str]:
    """Yield each of `causes`, all if there are none, that this machine can have; print why it cannot have another."""
    for cause in causes or CAUSES:
        if why := why_not(cause, hardware):
            print(f"not possible here: {cause} ({why})")
        else:
            yield cause


def busy(seconds: float) -> None:
    """Keep a processor core busy for so long: unlike sleeping, which would let others use it."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


class Pool(nn.Module):
    """The mean over time, [B, T, C] -> [B, C]; `extra` is work on the way that makes the model dearer."""

    extra: Callable[..., None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the mean over axis 1, after the extra work."""
        if self.extra is not None:
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                self.extra()
        return hidden.mean(dim=1)


class Loop(Dataset):
    """A small net that learns from a million short sequences of tokens; a cause can be planted into it."""

    def __init__(self, cause: str = "healthy", seconds: float = 0.0):
        torch.manual_seed(0)
        hardware = this_machine()
        self.device, self.planted_s, self.stopped_s = hardware.device, seconds, list[float]()
        batch_size, length, width = (32, 256, 2048) if self.device.type == "cuda" else (8, 128, 128)
        self.clips, self.beside = torch.randint(256, (64, length)), torch.zeros(1)
        self.pool = Pool()
        wide = [
            layer for _ in range(2) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
        self.model = nn.Sequential(nn.Embedding(256, width), *wide, self.pool, nn.Linear(width, 10)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        pinned = self.device.type == "cuda"
        self.loader: DataLoader = DataLoader(self, batch_size, collate_fn=self.collate, pin_memory=pinned)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, hardware.supports("bf16"))
        self.decode: Callable[[], Any] = lambda: None
        self.after_step: Callable[[Tensor], Any] = lambda loss: None
        if cause != "healthy":
            PLANT[cause](self, seconds)
            if self.device.type == "cuda":  # which hides part of what its host does: what the whole loop is longer by
                self.planted_s = self.step_s() - Loop().step_s()

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.decode()
        return self.clips[index % 64], index % 10

    def collate(self, samples: list) -> tuple[Tensor, ...]:
        """Return tokens [B, T], labels [B], and what else is copied with them."""
        return *default_collate(samples), self.beside

    def train(
        self, steps: int, around: Callable[[nn.Module], AbstractContextManager] = lambda model: contextlib.nullcontext()
    ) -> None:
        """Train so many steps, each inside `around(model)`."""
        for batch in itertools.islice(self.loader, steps):
            with around(self.model):
                tokens, labels, _ = (tensor.to(self.device, non_blocking=True) for tensor in batch)
                self.optimizer.zero_grad(set_to_none=True)
                with self.autocast:
                    loss = nn.functional.cross_entropy(self.model(tokens), labels)
                loss.backward()
                self.optimizer.step()
                self.after_step(loss)

    def step_s(self, steps: int = 10) -> float:
        """Return the median seconds of a step."""
        return statistics.median(timed(lambda: self.train(steps), self.device, 9, warmup=2)) / steps

    @property
    def injected_s_per_step(self) -> float:
        """The seconds that the planted cause takes in a step: those of its own stopwatch, else those asked for."""
        return statistics.median(self.stopped_s) if self.stopped_s and self.device.type == "cpu" else self.planted_s

    def repeated(self, unit: Callable[[], Any], seconds: float) -> Callable[..., None]:
        """Return a function that repeats `unit()` for about so long, with a stopwatch around it."""
        count = max(1, round(seconds / statistics.median(timed(unit, self.device, 9, warmup=2))))

        def work(*ignored: Any) -> None:
            began_s = time.perf_counter()
            for _ in range(count):
                unit()
            self.stopped_s.append(time.perf_counter() - began_s)

        return work


# ---- the causes ----


def slow_decode(loop: Loop, seconds: float) -> None:
    """Each sample takes its share of `seconds` to make."""
    loop.decode = functools.partial(busy, seconds / (loop.loader.batch_size or 1))


def large_copies(loop: Loop, seconds: float) -> None:
    """A tensor rides along with each batch from memory that is not page-locked."""
    one = torch.ones(2**22)
    copy_s = statistics.median(timed(lambda: one.to(loop.device), loop.device, 9, warmup=2))
    loop.loader.pin_memory, loop.beside = False, torch.ones(max(1, round(seconds / copy_s)) * 2**22)


def host_read(loop: Loop, seconds: float) -> None:
    """The loss is read in each step; then the host does something that a device at work would hide."""
    loop.after_step = lambda loss: busy(seconds + 0.0 * loss.item())


class SlowTerminal(io.StringIO):
    """A terminal that takes `seconds` to show a line."""

    seconds = 0.0

    def flush(self) -> None:
        """Show what was written."""
        busy(self.seconds)


def printing(loop: Loop, seconds: float) -> None:
    """The loss is printed in each step, on a slow terminal."""
    terminal = SlowTerminal()
    terminal.seconds = seconds
    loop.after_step = lambda loss: print(f"loss {loss.item():.4f}", file=terminal, flush=True)


def small_operators(loop: Loop, seconds: float) -> None:
    """Thousands of operators on one number each."""
    one = torch.ones(1, device=loop.device)
    loop.pool.extra = loop.repeated(lambda: [one.mul_(1.0) for _ in range(1000)], seconds)


def products(loop: Loop, seconds: float) -> None:
    """Products of matrices in float32, where bfloat16 would be quicker."""
    size = 4096 if loop.device.type == "cuda" else 512  # a call of a smaller one takes as long as its arithmetic
    matrix = torch.randn(size, size, device=loop.device)
    loop.pool.extra = loop.repeated(lambda: matrix @ matrix, seconds)


def passes_over_memory(loop: Loop, seconds: float) -> None:
    """Passes over 64 MiB and more, which no cache holds."""
    large = torch.ones(2 ** (28 if loop.device.type == "cuda" else 24), device=loop.device)
    loop.pool.extra = loop.repeated(lambda: large.mul_(1.0), seconds)


def validation(loop: Loop, seconds: float) -> None:
    """The model is evaluated after each step."""
    tokens = loop.clips[: loop.loader.batch_size].to(loop.device)

    def evaluate() -> None:
        loop.model.eval()
        with torch.no_grad(), loop.autocast:
            loop.model(tokens)
        loop.model.train()

    loop.after_step = loop.repeated(evaluate, seconds)


PLANT: dict[str, Callable[[Loop, float], None]] = dict(
    zip(
        CAUSES,
        (slow_decode, large_copies, host_read, printing, small_operators, products, passes_over_memory, validation),
        strict=True,
    )
)
