"""What the workbench shows, measured in a process of its own: a plan beside the baseline, told as soon as known."""

import contextlib
import dataclasses
import functools
import pickle
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from speedkit.fallbacks import resolve
from speedkit.machine import this_machine
from speedkit.measure.breakdown import breakdown_of
from speedkit.measure.candidates import frames_saved, gains_of
from speedkit.measure.compare import Contender, warm_up
from speedkit.measure.optimizations import changed
from speedkit.measure.predict import predict
from speedkit.measure.process import process_kept
from speedkit.measure.stats import paired_interval
from speedkit.measure.turns import Turns, measure_pairs
from speedkit.plan import Plan
from speedkit.train.memory import peak_bytes
from speedkit.workload import Workload

News = dict[str, Any]  # what is known now and was not before, by name


def as_bytes(workload: Workload, plan: Plan, options: dict[str, Any]) -> bytes:
    """Return what `explore_in_process` takes: what a notebook's cells define goes along."""
    return cloudpickle.dumps((workload, plan, options))


def explore_in_process(sent: bytes, connection: Connection) -> None:
    """Measure what was `sent`; send all news through `connection`, the last with `state`: done, or why not.

    Ctrl-C ends the process, with an exit code.
    """
    try:
        workload, plan, options = pickle.loads(sent)
        explore_plan(workload, plan, tell=connection.send, **options)
        connection.send({"state": "done"})
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:  # whatever it is, the notebook shows it
        connection.send({"state": f"{type(error).__name__}: {error}"})


def explore_plan(workload: Workload, plan: Plan, *, tell: Callable[[News], Any], device: str = "auto") -> None:
    """Tell what falls back, both breakdowns, the gain predicted, the memory of a step, and pair by pair the ratio."""
    hardware = this_machine(device)
    recipe = workload.recipe
    effective = resolve(plan, hardware, workload=workload, batch_size=recipe.batch_size)
    tell({"state": "where the baseline's time goes", "notes": effective.notes(verbose=True)})
    before = breakdown_of(workload, device=device, progress=False)
    tell({"state": "what the plan should gain", "breakdowns": {"baseline": before.as_dict()}})
    gains = gains_of(workload, recipe, Plan(), hardware=hardware)
    shares = {row["cause"]: row["share"] for row in before.rows}
    predicted = predict(changed(effective.plan), shares, frames=frames_saved(workload, recipe), gains=gains)
    tell({"state": "where the plan's time goes", "predicted": predicted})
    after = breakdown_of(workload, plan=plan, device=device, progress=False)
    tell({"state": "warming up", "breakdowns": {"baseline": before.as_dict(), "plan": after.as_dict()}})
    compare_live(workload, plan, tell=tell, device=device)


def compare_live(workload: Workload, plan: Plan, *, tell: Callable[[News], Any], device: str) -> None:
    """Train both plans in turns, as `compare` does, and tell of each pair; then of the decision."""

    def seen(turns: Turns) -> None:
        a_s, b_s = turns.kept()
        if len(a_s) > 1:
            tell({"state": f"pair {len(a_s)}", **dataclasses.asdict(paired_interval(a_s, b_s))})

    with (
        process_kept(device),
        contextlib.closing(Contender(workload, workload.recipe, Plan(), loss_steps=0, device=device)) as a,
        contextlib.closing(Contender(workload, workload.recipe, plan, loss_steps=0, device=device)) as b,
    ):
        steps = warm_up(a, b)
        peaks_of_step = [peak_bytes(functools.partial(side.turn, steps=1), a.run.device) for side in (a, b)]
        tell({"bytes": peaks_of_step})
        measured = measure_pairs(a.turn, b.turn, rng=random.Random(0), steps=steps, on_pair=seen)
        tell({"decision": measured.decision, **dataclasses.asdict(measured.interval)})
