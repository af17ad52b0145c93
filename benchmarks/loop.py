"""The loop of `fit` against a bare loop with the same data in memory, model and optimizer."""

import contextlib
import dataclasses
import io
import statistics
from collections.abc import Iterator

import common
import torch
from torch import Tensor


class Shuffled:
    """The batches of a bare loop: shuffled anew in each epoch, gathered out of memory."""

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int):
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size  # [N, F], [N]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.inputs)).split(self.batch_size):
            yield self.inputs[chosen], self.targets[chosen]


def step_seconds(sizes: tuple[int, int, int], everything_off: bool, pairs: int) -> tuple[float, float]:
    """Return the seconds of a step of `fit`'s loop and of a bare loop: geometric means over windows in turns."""
    size, hidden, batch_size = sizes
    workload = common.perceptron(*sizes, schedule="constant" if everything_off else "onecycle")
    plan = dataclasses.replace(common.IN_MEMORY, log_every=common.NEVER) if everything_off else common.IN_MEMORY
    terminal = io.StringIO()  # writing to a real one, ten times a second, would cost as good as nothing
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with (
        contextlib.redirect_stderr(terminal),
        common.training(workload, plan, progress=not everything_off) as (_, our_steps),
    ):
        inputs = torch.stack([workload.load(item) for item in workload.train])
        targets = torch.tensor([workload.target(item) for item in workload.train])
        torch.manual_seed(0)
        model = common.perceptron_model(size, hidden)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        bare_steps = common.own_loop(model, optimizer, Shuffled(inputs, targets, batch_size))
        ours_s, bare_s = common.windows_in_turns({"ours": our_steps, "bare": bare_steps}, pairs, common.WINDOW)
    return statistics.geometric_mean(ours_s) / common.WINDOW, statistics.geometric_mean(bare_s) / common.WINDOW


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the time of `fit`'s loop over that of a bare loop, on one thread.

    The interval is of fresh instances of both: where memory happens to lie moves a ratio too.
    """
    instances, pairs = (2, 2) if quick else (5, 60)
    for what, sizes, everything_off, limit in (
        ("every option off", common.SMALL, True, 1.05),
        ("defaults: bar, loss, accuracy", common.SMALL, False, 1.10),
        ("defaults, 10 ms or more", common.LARGE, False, 1.01),
    ):
        measured = [step_seconds(sizes, everything_off, pairs) for _ in range(instances)]
        ours_s, bare_s = zip(*measured, strict=True)
        what = f"loop, {what} (bare step {statistics.median(bare_s) * 1e3:.2f} ms)"
        yield common.ratio_of(what, ours_s, bare_s, limit=limit)


if __name__ == "__main__":
    common.main(measure)
