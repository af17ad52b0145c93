"""Ten causes of slow training, each planted in a small plain loop at a known cost: what a diagnosis has to find."""

import contextlib
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from speedkit.clock import timed
from speedkit.errors import UsageError
from speedkit.hardware import Hardware, this_machine

# What can be planted, by the name that the diagnosis gives it; and the plan's field that mends it.
CAUSES = {
    "slow decode": "workers",
    "slow collate": "workers",
    "large copies": "pin_memory",
    "host read each step": "log_every",
    "printing each step": "log_every",
    "many small operators": "compile",
    "compute-bound": "precision",
    "bandwidth-bound": "compile",
    "new shapes": "bucket",
    "validation too often": "validate_every",
}
NOT_ON_CPU = {
    "large copies": "the batch is in the model's memory already: nothing is copied",
    "host read each step": "a CPU has computed the loss before `.item()` asks: nobody waits",
}
SIZES = (2, 512, 128), (32, 256, 2048)  # on a CPU, on a GPU: clips per batch, tokens per clip, width of the model
REPEATS = 9  # timings of what is planted, by itself; the median counts


def why_not(cause: str, hardware: Hardware) -> str:
    """Return why this machine cannot have `cause`, "" where it can. Raises UsageError for one that does not exist."""
    if cause not in ("healthy", *CAUSES):
        raise UsageError(f"{cause!r} cannot be planted: take healthy, {', '.join(CAUSES)}")
    if cause == "compute-bound" and not hardware.supports("bf16"):
        return f"float32 is as fast as it gets: {hardware.why_not('bf16')}"
    return NOT_ON_CPU.get(cause, "") if hardware.device.type == "cpu" else ""


def busy(seconds: float) -> None:
    """Keep a processor core busy for so long: unlike sleeping, which would let others use it."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


class Pool(nn.Module):
    """The mean over time, [B, T, C] -> [B, C]; `more` is frozen work on it, in float32, that makes a model dearer."""

    more: Callable[[Tensor], Any] = staticmethod(lambda hidden: None)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            self.more(hidden)
        return hidden.mean(dim=1)


class Planted(Dataset):
    """A training loop, and the million short clips that it learns from, with one cause of slowness in them."""

    def __init__(self, cause: str, device: torch.device):
        torch.manual_seed(0)
        self.size = batch_size, length, width = SIZES[device.type == "cuda"]
        self.cause, self.expected, self.device = cause, (cause, CAUSES.get(cause)), device
        self.planted_s = self.decode_s = self.collate_s = 0.0
        self.stopped_s: list[float] = []  # what a stopwatch says of real work that was planted, step by step
        self.clips = torch.randint(256, (64, 16 * length))
        self.lengths: Iterator[int] = itertools.repeat(length)
        self.context = torch.zeros(1)  # goes to the device with each batch
        layers = ((nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2))
        body = itertools.chain.from_iterable(layers)
        self.model: Any = nn.Sequential(nn.Embedding(256, width), *body, Pool(), nn.Linear(width, 10)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.loader = DataLoader(self, batch_size, collate_fn=self.collate, pin_memory=device.type == "cuda")
        self.after: Callable[[int, Tensor], Any] = lambda number, loss: None  # what a step ends with
        self.number_format = torch.autocast(device.type, torch.bfloat16, this_machine(device).supports("bf16"))
        self.settings: Any = contextlib.nullcontext()

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        busy(self.decode_s)
        return self.clips[index % 64], index % 10

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        busy(self.collate_s)
        tokens, labels = default_collate(samples)
        return tokens[:, : next(self.lengths)], labels, self.context

    @property
    def injected_s_per_step(self) -> float:
        """The seconds that were planted into each step; real work was timed in the very steps that met it."""
        return statistics.median(self.stopped_s) if self.stopped_s else self.planted_s

    def train(self, steps: int, around: Callable[[nn.Module], Any] = contextlib.nullcontext) -> None:
        """Make so many steps; `around(model)` is a context for each, as some tools want one."""
        self.model.train()
        for number, batch in enumerate(itertools.islice(self.loader, steps)):
            with around(self.model), self.settings:
                tokens, labels, _ = (tensor.to(self.device, non_blocking=True) for tensor in batch)
                self.optimizer.zero_grad(set_to_none=True)
                with self.number_format:
                    loss = nn.functional.cross_entropy(self.model(tokens), labels)
                loss.backward()
                self.optimizer.step()
                self.after(number, loss)

    def step_s(self, steps: int = 10) -> float:
        """Return the seconds of a step by the stopwatch alone."""
        return alone_s(lambda: self.train(steps), self.device) / steps


def alone_s(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that `work()` takes by itself."""
    return statistics.median(timed(work, device, REPEATS, warmup=2))


def planted(cause: str, amount: float, device: str = "auto") -> Planted:
    """Return a loop with `cause` in it that takes about `amount` seconds of each step; "healthy" is the one without.

    What was injected is `injected_s_per_step`. On a CPU it is the time that was waited or, for real work, what a
    stopwatch finds it to take in the loop's steps. A GPU hides part of what the host does: there it is what a stopwatch
    finds steps to be longer by. Raises UsageError where this machine cannot have the cause.
    """
    hardware = this_machine(device)
    if reason := why_not(cause, hardware):
        raise UsageError(f"{cause!r} cannot be planted on {hardware.name}: {reason}")
    loop = Planted(cause, hardware.device)
    if amount and cause in CAUSES:
        loop.planted_s = _plant(loop, amount)
        if hardware.device.type != "cpu":
            loop.planted_s = loop.step_s() - Planted("healthy", hardware.device).step_s()
    return loop


def _plant(loop: Planted, amount: float) -> float:
    """Change the loop; return the seconds that were injected into each step."""
    if loop.cause == "slow decode":
        loop.decode_s = amount / loop.size[0]
    elif loop.cause == "slow collate":
        loop.collate_s = amount
    elif loop.cause == "host read each step":  # and then what else the host does, which a device at work would hide
        loop.after = lambda number, loss: busy(amount + 0.0 * loss.item())
    elif loop.cause == "printing each step":
        terminal = io.StringIO()
        terminal.flush = lambda: busy(amount)  # type: ignore[method-assign]  # it takes time to show a line
        loop.after = lambda number, loss: print(f"{number}: {loss.item():.4f}", file=terminal, flush=True)
    elif loop.cause == "new shapes":
        return _compile(loop, amount)
    else:
        unit = _unit(loop)
        count = max(1, round(amount / alone_s(unit, loop.device)))
        work = lambda *_: [unit() for _ in range(count)]  # noqa: E731
        if loop.cause == "large copies":
            loop.loader.pin_memory, loop.context = False, torch.ones(count * 2**22)
            return alone_s(work, loop.device)

        def stopped(*_: Any) -> None:  # by itself it would find the caches full of its own data
            began_s = time.perf_counter()
            work()
            loop.stopped_s.append(time.perf_counter() - began_s)

        there = stopped if loop.device.type == "cpu" else work
        if loop.cause == "validation too often":
            loop.after = there
        else:
            loop.model[-2].more = there
    return amount


def _unit(loop: Planted) -> Callable[[], Any]:
    """Return a piece of the work that makes up the cause; nothing that is learned depends on it."""
    one, large = (torch.ones(size, device=loop.device) for size in (1, 2 ** (28 if loop.device.type == "cuda" else 24)))
    hidden, weights = (torch.randn(*size, device=loop.device) for size in (loop.size, 2 * loop.size[-1:]))
    batch, tokens = torch.ones(2**22), loop.clips[: loop.size[0], : loop.size[1]].to(loop.device)

    def evaluate() -> None:
        loop.model.eval()
        with torch.no_grad(), loop.number_format:
            loop.model(tokens)
        loop.model.train()

    return {
        "many small operators": lambda: [one.mul_(1.0) for _ in range(1000)],
        "bandwidth-bound": lambda: large.mul_(1.0),  # 64 MiB and more, which no cache holds
        "compute-bound": lambda: hidden @ weights,
        "large copies": lambda: batch.to(loop.device),
        "validation too often": evaluate,
    }[loop.cause]


def _compile(loop: Planted, amount: float) -> float:
    """Compile a part for each length anew, by a compiler that takes `amount`; PyTorch's tracing comes on top."""

    def compiler(graph: Any, inputs: Any) -> Any:
        busy(amount)
        return graph.forward

    shorter, hidden = itertools.count(1), torch.zeros(loop.size, device=loop.device)
    loop.lengths = itertools.count(loop.size[1])
    loop.model[-2] = pool = torch.compile(loop.model[-2], backend=compiler, dynamic=False)
    # By default it would give up after eight, and go on without compiling.
    loop.settings = torch._dynamo.config.patch(recompile_limit=10**4, accumulated_recompile_limit=10**4)
    with loop.settings, loop.number_format:
        return statistics.median(timed(lambda: pool(hidden[:, : next(shorter)]), loop.device, REPEATS, warmup=2))
