"""What the guides promise (notebooks/claims.csv), and the rule by which a measurement answers it."""

import csv
from collections.abc import Mapping
from typing import Any

from speedkit.errors import UsageError
from speedkit.measure.provenance import notebooks_folder

ONE_FIGURE_TOLERANCE = 0.10  # a promise such as "1.9x" came from one run somewhere: read as 1.9 give or take this


def read_claim(claim_id: str) -> dict[str, str]:
    """Return the row of one claim. Raises UsageError when there is none."""
    with (notebooks_folder() / "claims.csv").open(encoding="utf-8", newline="") as stream:
        known = {row["id"]: row for row in csv.DictReader(stream)}
    if claim_id not in known:
        raise UsageError(f'there is no claim "{claim_id}" in notebooks/claims.csv: it has {", ".join(known)}')
    return known[claim_id]


def promised(claim_id: str) -> tuple[float, float]:
    """Return the promised speed-up of a claim as (low, high). Raises UsageError for a promise of something else."""
    claim = read_claim(claim_id)
    if claim["metric"] != "speedup" or claim["low"] in ("", "linear"):
        raise UsageError(f"{claim_id} ({claim['technique']}: {claim['metric']}) promises no range of speed-up that a "
                         "ratio could answer: decide in the notebook and record it with run.verdict()")
    low, high = float(claim["low"]), float(claim["high"])
    spread = ONE_FIGURE_TOLERANCE if low == high else 0.0
    return low * (1 - spread), high * (1 + spread)


def judge(promise: tuple[float, float], measurement: Mapping[str, Any]) -> str:
    """Return confirmed, smaller, larger or wrong: how a measured ratio answers a promised range of speed-up.

    - wrong: the 99 % interval does not clear the noise floor of its A/A control in the promised direction, which for
      a promise below 1, a stated cost, is below the floor's reciprocal;
    - smaller, larger: the effect is there, and the whole interval lies below or above the promised range;
    - confirmed: otherwise, so interval and promise overlap.
    """
    low, high, floor = measurement["low"], measurement["high"], measurement["noise_floor"] or 1.0
    if not (low > floor if promise[1] >= 1 else high < 1 / floor):
        return "wrong"
    return "smaller" if high < promise[0] else "larger" if low > promise[1] else "confirmed"
