"""The training loop: clipping, safe loss scaling, no reads by the host, what is kept and where it ends."""

import dataclasses
import itertools
import os
import signal

import pytest
import torch
from test_nonfinite import rate, spoiled
from tiny import DEVICES, calling, jitter, opened, points, trained
from torch import nn

from speedkit.errors import Interrupted, SpeedkitError
from speedkit.plan import Plan
from speedkit.train.fit import fit
from speedkit.train.loop import steps

pytestmark = pytest.mark.usefixtures("every_format")


# Clipping.


def first_gradients(workload, **plan):
    """The gradients that the optimizer sees in the first step, as one tensor."""
    gradients = []
    with opened(workload, plan=Plan(**plan)) as run:
        run.learner.optimizer.register_step_pre_hook(
            lambda *_: gradients.extend(weight.grad.flatten().clone() for weight in run.learner.parameters)
        )
        next(steps(run))
    return torch.cat(gradients)


@pytest.mark.parametrize("precision", ["default", "fp16"])
def test_clipping_sees_unscaled_gradients(precision):
    free = first_gradients(points())
    clipped = first_gradients(points(clip_norm=0.1), precision=precision)
    assert free.norm() > 0.2 and float(clipped.norm()) == pytest.approx(0.1, rel=1e-3)
    torch.testing.assert_close(clipped, free * 0.1 / free.norm(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("plan", [{}, {"precision": "fp16"}], ids=str)
def test_a_run_that_never_ends_stays_at_the_last_learning_rate(plan):
    workload = points(steps=3, epochs=None)
    with opened(workload, plan=Plan(**plan), endless=True) as run:
        rates = [rate(run) for _ in itertools.islice(steps(run), 5)]
    assert rates == pytest.approx([*run.learner.learning_rates, *2 * run.learner.learning_rates[-1:]])


# What the host reads.


def reads_between_log_points(workload, count=15, device="cpu", **plan):
    """How many scalars the host reads in `count` steps that hold two ends of an epoch and no log point.

    A profiler counts them, for a dispatch mode does not see those that C++ makes. On a CPU the fused optimizers' own
    kernels read the rate and the step counts so, host and device being one; those are not counted.
    """
    workload = dataclasses.replace(workload, recipe=dataclasses.replace(workload.recipe, epochs=20))
    plan = Plan(log_every=10_000, validate_every=0, **plan)
    with opened(workload, plan=plan, device=device) as run:
        training = steps(run)
        next(training)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(count):
                next(training)
    events = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    readers = [event.cpu_parent and event.cpu_parent.cpu_parent for event in events]  # above aten::item
    return sum(not (device == "cpu" and reader and reader.name.startswith("aten::_fused_")) for reader in readers)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_counter_of_reads_sees_them():
    planted = calling(points(train=100), lambda model, batch: batch.targets[0].item())
    assert reads_between_log_points(planted, cache="ram", fused_optimizer=True) == 15


@pytest.mark.parametrize(
    ("on_nonfinite", "plan"),
    [("raise", {}), ("skip", {"precision": "fp16"}), ("raise", {"micro_batch": 6}), ("skip", {})],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_host_reads_nothing_between_log_points(device, optimizer, on_nonfinite, plan):
    recipe = {"clip_norm": 1.0, "optimizer": optimizer, "on_nonfinite": on_nonfinite}
    workload = points(train=100, augment=jitter, **recipe)
    workload = dataclasses.replace(workload, model=lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    cache = "ram" if device == "cpu" else "device"
    assert reads_between_log_points(workload, device=device, cache=cache, fused_optimizer=True, **plan) == 0


# What is kept and shown, and where it ends.


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tmp_path):
    workload = spoiled(points(), {8}, "input")  # of 6 steps an epoch: in the second
    with pytest.raises(SpeedkitError, match=r"loss of step 9 is nan.*learning_rate"):
        trained(workload, plan=Plan(log_every=1000), out=tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert all(weight.isfinite().all() for weight in state["model"].values())
    patient = dataclasses.replace(workload.recipe, on_nonfinite="skip")
    assert trained(workload, patient, out=tmp_path, resume=True).resumed_from == 6


def test_no_progress_is_shown_where_it_is_off(monkeypatch, capfd):
    monkeypatch.setenv("SPEEDKIT_PROGRESS", "off")
    fit(points(), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_a_second_signal_stops_at_once():
    def impatient(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped by SIGINT before there was a result"):
        trained(calling(points(), impatient))
