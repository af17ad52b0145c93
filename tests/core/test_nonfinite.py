"""Steps that are not finite, and steps that run out of memory: left out, explained, repeated."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from faults import limited, strike
from tiny import DEVICES, jitter, load, opened, outcome, points, trained
from torch import nn

from speedkit.errors import SpeedkitError
from speedkit.fallbacks import Fallback
from speedkit.plan import Plan
from speedkit.train import nonfinite
from speedkit.train.fit import finish
from speedkit.train.loop import steps

pytestmark = pytest.mark.usefixtures("every_format")


def normed():
    """A net that keeps running statistics."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def spoiled(workload, at, where, value=math.nan):
    """The workload, spoiled in the forward passes `at`, from 0: an "input", the "loss", or the "gradient" alone."""
    calls = itertools.count()

    def spoiled_loss(model, batch, recipe):
        now = model.training and next(calls) in at
        if now and where == "input":
            batch = dataclasses.replace(batch, inputs=batch.inputs.clone())
            batch.inputs[1, 2] = value
        result, outputs = workload.loss(model, batch, recipe)
        if now and where == "loss":
            result = result + value  # its gradient is as good as ever
        if now and where == "gradient":
            result.register_hook(lambda gradient: gradient * value)
        return result, outputs

    return dataclasses.replace(workload, loss=spoiled_loss)


def everything(run):
    """All that a step may change, as copies."""
    state = {name: value.clone() for name, value in run.learner.model.state_dict().items()}
    for index, values in run.learner.optimizer.state_dict()["state"].items():
        state |= {f"{index}.{key}": value.clone() for key, value in values.items() if value is not None}
    return state


def rate(run):
    """The learning rate of the step that was made last."""
    return float(run.learner.optimizer.param_groups[0]["lr"])


def changed(before, now):
    """The names of what differs; state that the optimizer has just made is no difference while it is zero."""
    return [name for name, value in now.items() if not torch.equal(before.get(name, torch.zeros_like(value)), value)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("where", "value", "plan", "at"),
    [
        ("input", math.nan, {}, {0, 5}),  # the steps
        ("gradient", math.inf, {}, {0}),
        ("input", math.nan, {"micro_batch": 4}, {1, 22}),  # four parts a step: one part each of steps 0 and 5
        ("gradient", math.inf, {"precision": "fp16"}, {0, 1, 5}),  # an overflow, for which the scale was too large
    ],
)
def test_a_bad_step_leaves_nothing_behind_and_the_schedule_waits(device, fused, optimizer, where, value, plan, at):
    overflows = "precision" in plan
    recipe = {"optimizer": optimizer, "epochs": None, "steps": 8, "clip_norm": 1.0}
    workload = dataclasses.replace(points(**recipe, on_nonfinite="raise" if overflows else "skip"), model=normed)
    bad = {call // (4 if "micro_batch" in plan else 1) for call in at}
    plan = Plan(fused_optimizer=fused, log_every=3, **plan)
    with opened(spoiled(workload, at, where, value), plan=plan, device=device) as run:
        before, scale, made = everything(run), run.learner.precision.scaler.get_scale(), 0
        for step in steps(run):
            now, good = everything(run), step - 1 not in bad
            assert bool(changed(before, now)) == good, step
            assert rate(run) == pytest.approx(run.learner.learning_rates[made])
            before, made = now, made + good
        history = finish(run)
        assert run.learner.precision.scaler.get_scale() == scale / 2 ** (overflows * len(bad))
    assert all(value.isfinite().all() for value in before.values())
    assert history.steps == 8 - len(bad)
    assert overflows or [step["step"] - 1 for step in history.skipped] == sorted(bad)
    assert all(map(math.isfinite, history.loss))


# What is said.


def nan_for(item, size, paths):
    return load(item, size) * (math.nan if item.path in paths else 1)


def with_bad_items(workload, *paths):
    return dataclasses.replace(workload, load=functools.partial(nan_for, size=8, paths=paths))


def test_samples_that_are_not_finite_are_named_and_looking_for_them_changes_nothing(monkeypatch):
    workload = with_bad_items(points(augment=jitter, dropout=0.5), "17", "40")
    skipping = dataclasses.replace(workload.recipe, on_nonfinite="skip")
    history = trained(workload, skipping)
    skipped = history.skipped[0]
    assert "its batch is not finite for" in skipped["why"]
    assert {"17", "40"} & set(skipped["why"].replace(",", "").split())
    monkeypatch.setattr(nonfinite, "EXPLAINED", 0)
    assert outcome(history) == outcome(trained(workload, skipping))
    with pytest.raises(SpeedkitError, match=f"step {skipped['step']} is nan: {skipped['why']}"):
        trained(workload)


def test_bad_steps_that_do_not_end_end_the_run():
    options = {"epochs": None, "steps": 60, "schedule": "constant", "on_nonfinite": "skip"}
    workload = spoiled(points(**options), range(2, 100), "loss")
    says = r"8 steps in a row are not finite, step 3 first: its batch is finite; torch\.autograd\.set_detect_anomaly"
    with pytest.raises(SpeedkitError, match=says):
        trained(workload, plan=Plan(log_every=5))


# Out of memory.


@pytest.mark.parametrize(("kind", "where"), [("cuda", "backward"), ("host", "forward")])
def test_out_of_memory_repeats_the_step_as_if_the_micro_batch_had_been_smaller(kind, where):
    workload = points(train=100, augment=jitter, clip_norm=1.0)
    smaller = trained(workload, plan=Plan(micro_batch=4, log_every=1))
    history = trained(limited(workload, 4, kind, where), plan=Plan(log_every=1))
    assert outcome(history) == outcome(smaller) and history.loss == smaller.loss
    assert history.effective.fallbacks == (Fallback("micro_batch", 16, 4, "out of memory at step 1"),)


def test_what_cannot_be_repeated_ends_the_run_with_what_to_do():
    with pytest.raises(SpeedkitError, match=r"out of memory at step 1: .*checkpointing=blocks"):
        trained(limited(points(), 0))
    with opened(points()) as run:
        run.learner.optimizer.register_step_post_hook(lambda *_: strike("cuda"))  # weights have changed by then
        with pytest.raises(SpeedkitError, match="out of memory at step 1: "):
            next(steps(run))


def test_evaluation_takes_no_larger_parts_than_training():
    history = trained(limited(points(), 5, where="evaluation"), plan=Plan(micro_batch=5))
    assert history.evaluation["n"] == 32
