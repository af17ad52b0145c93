"""Does a plan still learn the same? Losses of the first steps, from the same seed, side by side."""

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Parity:
    """How near two courses of losses are: `promised` is bit-equal or loss-equal; both numbers are mean |difference|."""

    promised: str
    difference: float
    seed_noise: float
    passed: bool

    def __str__(self) -> str:
        if self.promised == "bit-equal":
            return "losses bit-equal" if self.passed else f"losses differ by {self.difference:.2g}, should be bit-equal"
        side = "within" if self.passed else "beyond"
        return f"losses differ by {self.difference:.2g}, {side} the {self.seed_noise:.2g} of another seed"


def parity(promised: str, losses: Sequence[float], reference: Sequence[float], other_seed: Sequence[float]) -> Parity:
    """Return whether `losses` keep what is `promised` of them against `reference`.

    bit-equal: every loss is the same number. loss-equal: the mean absolute difference is below that between the
    reference and the same plan from `other_seed`; a change of number format that moves losses less than another
    shuffle of the data does is one that training cannot feel.
    """
    difference, noise = (
        statistics.fmean(abs(x - y) for x, y in zip(course, reference, strict=True)) for course in (losses, other_seed)
    )
    passed = list(losses) == list(reference) if promised == "bit-equal" else difference <= noise
    return Parity(promised, difference, noise, passed)
