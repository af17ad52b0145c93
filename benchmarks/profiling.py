"""What `profile` costs somebody's own loop."""

import itertools
import statistics
from collections.abc import Iterator

import common
import torch

from speedkit.measure.profile import profile

CLOSER_LOOK = 60  # steps that are enough for it to be over


class Batches(list):
    """A loader of batches that are ready: a plain list cannot be profiled."""


def learner(features: int, hidden: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a perceptron and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = common.perceptron_model(features, hidden)
    return model, torch.optim.AdamW(model.parameters())


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the time of a loop under `profile`, after its closer look, over that of the same loop left alone."""
    pairs = 4 if quick else 100
    for features, hidden, batch_size in (common.MIDDLE, common.LARGE):
        targets = torch.arange(batch_size) % common.CLASSES
        batches = Batches((torch.randn(batch_size, features), targets) for _ in range(20))
        (model, optimizer), alone = learner(features, hidden), learner(features, hidden)
        with profile(model, optimizer, batches, show=False):
            loops = {
                "profiled": common.own_loop(model, optimizer, batches),
                "alone": common.own_loop(*alone, list(batches)),
            }
            for loop in loops.values():
                for _ in itertools.islice(loop, CLOSER_LOOK):
                    pass
            profiled_s, alone_s = common.windows_in_turns(loops, pairs, common.WINDOW)
        step_s = statistics.median(alone_s) / common.WINDOW
        yield common.ratio_of(f"profile, of a step of {step_s * 1e3:.2f} ms", profiled_s, alone_s, limit=1.02)


if __name__ == "__main__":
    common.main(measure)
