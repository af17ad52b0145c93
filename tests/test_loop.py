"""The training loop: the same losses whatever the plan, exact accumulation, safe loss scaling, no reads by the host."""

import dataclasses
import itertools
import math
import os
import sys
import termios
import threading

import pytest
import torch
from tiny import emulating, jitter, loss, points
from torch import nn

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import learning_rates
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def every_number_format(monkeypatch):
    monkeypatch.setattr("speedkit.train.setup.this_machine", emulating)


def course(workload, **plan):
    """Losses of every step, the final weights and the evaluations of a run on the CPU."""
    run = setup_run(workload, plan=Plan(**plan), device="cpu", progress=False)
    try:
        losses = [float(run.last_loss) for _ in steps(run)]
        history = run.finish()
        evaluations = [(result["step"], result["value"]) for result in history.evaluations]
        return losses, [weight.detach().clone() for weight in run.model.parameters()], evaluations
    finally:
        run.close()


@pytest.fixture(scope="module")
def lively():
    """Augmentation, dropout, clipping, a schedule, and a last batch smaller than the others: 7 steps an epoch."""
    return points(train=100, augment=jitter, dropout=0.2, clip_norm=1.0)


@pytest.fixture(scope="module")
def plain_course(lively):
    return course(lively)


@pytest.mark.parametrize(
    "plan",
    [
        {"workers": 2, "persistent_workers": True},
        {"cache": "ram"},
        {"cache": "disk"},
        {"log_every": 1},
        {"validate_every": 3},
    ],
    ids=str,
)
def test_plans_that_only_move_data_or_read_it_give_bit_identical_training(lively, plain_course, plan):
    losses, weights, evaluations = course(lively, **plan)
    assert losses == plain_course[0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, plain_course[1], strict=True))
    assert evaluations[-1] == plain_course[2][-1]


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ({"fused_optimizer": True}, 1e-5),  # the order of float32 operations
        ({"channels_last": True}, 1e-5),
        ({"cache": "ram", "cache_dtype": "float16"}, 2e-3),  # inputs rounded to 11 bits
        ({"precision": "fp16"}, 1e-2),  # products rounded to 11 bits
        ({"precision": "bf16"}, 5e-2),  # products rounded to 8 bits
    ],
    ids=str,
)
def test_plans_that_round_differently_stay_near(lively, plain_course, plan, tolerance):
    losses, _, _ = course(lively, **plan)
    assert losses == pytest.approx(plain_course[0], abs=tolerance)


# Accumulation: dropout off, for every way to cut a batch draws another mask.


def masked_loss(model, batch, recipe):
    """Cross-entropy over the samples whose first feature is positive: few or many of a batch."""
    inputs, targets = batch
    outputs = model(inputs)
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    valid = (inputs[:, 0] > 0).float()
    return (each * valid).sum() / valid.sum().clamp(min=1), outputs


def valid_items(batch):
    return (batch[0][:, 0] > 0).sum()


def first_gradients(workload, **plan):
    """The gradients that the optimizer sees in the first step, and that step's loss."""
    run = setup_run(workload, plan=Plan(**plan), device="cpu", progress=False)
    seen = []
    run.optimizer.register_step_pre_hook(
        lambda *_: seen.append([weight.grad.clone() for weight in run.model.parameters()])
    )
    next(steps(run))
    run.close()
    return seen[-1], float(run.last_loss)


@pytest.mark.parametrize("masked", [False, True], ids=["every item valid", "unequal valid items"])
@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batch, masked):
    workload = points(train=16, schedule="constant")
    if masked:
        workload = dataclasses.replace(workload, loss=masked_loss, count=valid_items)
    whole, whole_loss = first_gradients(workload)
    parts, parts_loss = first_gradients(workload, micro_batch=micro_batch)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole)
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-6)


# Loss scaling.


def exploding(at):
    """The workload's loss, whose gradient is infinite at the calls in `at`; the loss itself stays finite."""
    calls = iter(range(10**6))

    def loss_with_infinite_gradient(model, batch, recipe):
        value, outputs = loss(model, batch, recipe)
        if model.training and next(calls) in at:
            value.register_hook(lambda gradient: gradient * math.inf)
        return value, outputs

    return loss_with_infinite_gradient


def test_clipping_sees_unscaled_gradients():
    workload = points(clip_norm=0.1)
    free, _ = first_gradients(points())
    clipped, _ = first_gradients(workload)
    half, _ = first_gradients(workload, precision="fp16")

    def norm(gradients):
        return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

    assert norm(free) > 0.2
    assert norm(clipped) == pytest.approx(0.1, rel=1e-3)
    assert norm(half) == pytest.approx(0.1, rel=1e-3)
    for mine, theirs in zip(half, clipped, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_overflow_skips_exactly_its_steps_and_the_schedule_waits(optimizer):
    bad = {0, 1, 5}
    workload = points(optimizer=optimizer, epochs=None, steps=10, clip_norm=1.0)
    workload = dataclasses.replace(workload, loss=exploding(bad))
    table = learning_rates(workload.recipe, 10)
    run = setup_run(workload, plan=Plan(precision="fp16"), device="cpu", progress=False)
    scale_before = run.scaler.get_scale()
    real = 0
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    for step in steps(run):
        unchanged = all(torch.equal(before[name], weight) for name, weight in run.model.state_dict().items())
        assert unchanged == (step - 1 in bad)
        assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(table[real])
        real += step - 1 not in bad
        before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        assert all(weight.isfinite().all() for weight in before.values())
    assert run.finish().steps == real == 10 - len(bad)
    assert run.scaler.get_scale() == scale_before / 2 ** len(bad)
    state = [value for slot in run.optimizer.state.values() for value in slot.values()]
    assert state
    assert all(value.isfinite().all() for value in state)
    run.close()


def test_float16_outlasts_its_schedule_in_a_run_that_never_ends():
    run = setup_run(points(steps=3, epochs=None), plan=Plan(precision="fp16"), device="cpu", endless=True)
    training = steps(run)
    for _ in range(8):
        next(training)
    run.close()
    assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(learning_rates(run.recipe, 3)[-1])


# What the host reads.


def reads_between_log_points(workload, count=15, device="cpu", **plan):
    """How many scalars the host reads in `count` steps that hold two ends of an epoch and no log point.

    A profiler counts them, for a dispatch mode does not see those that C++ makes. On a CPU the fused optimizers' own
    kernels read the rate and the step counts so, host and device being one; those are not counted.
    """
    workload = dataclasses.replace(workload, recipe=dataclasses.replace(workload.recipe, epochs=20))
    run = setup_run(workload, plan=Plan(log_every=10_000, validate_every=0, **plan), device=device, progress=False)
    training = steps(run)
    next(training)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(count):
            next(training)
    run.close()
    count = 0
    for event in profile.events():
        if event.name == "aten::_local_scalar_dense":
            reader = event.cpu_parent and event.cpu_parent.cpu_parent  # above aten::item
            count += not (device == "cpu" and reader and reader.name.startswith("aten::_fused_"))
    return count


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_counter_of_reads_sees_them(lively):
    planted = dataclasses.replace(lively, loss=planted_read)
    assert reads_between_log_points(planted, cache="ram", fused_optimizer=True) == 15
    assert reads_between_log_points(lively, cache="ram") >= 15  # the unfused optimizer reads its own step count


def planted_read(model, batch, recipe):
    value, outputs = loss(model, batch, recipe)
    value.item()
    return value, outputs


@pytest.mark.parametrize("plan", [{}, {"precision": "fp16"}, {"micro_batch": 5}], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_host_reads_nothing_between_log_points(lively, device, optimizer, plan):
    recipe = dataclasses.replace(lively.recipe, optimizer=optimizer)
    workload = dataclasses.replace(lively, recipe=recipe)
    cache = "ram" if device == "cpu" else "device"
    assert reads_between_log_points(workload, device=device, cache=cache, fused_optimizer=True, **plan) == 0


# Failure, and what is shown.


def turning_nan(at):
    calls = iter(range(10**6))

    def loss_turning_nan(model, batch, recipe):
        value, outputs = loss(model, batch, recipe)
        return (value * math.nan if model.training and next(calls) == at - 1 else value), outputs

    return loss_turning_nan


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_loss_that_is_not_finite_names_its_step(log_every):
    workload = dataclasses.replace(points(), loss=turning_nan(7))
    with pytest.raises(SpeedkitError, match=r"loss of step 7 is nan.*learning_rate"):
        fit(workload, plan=Plan(log_every=log_every), device="cpu", progress=False)


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tmp_path):
    workload = dataclasses.replace(points(), loss=turning_nan(9))  # of 6 steps an epoch: in the second
    with pytest.raises(SpeedkitError, match="step 9"):
        fit(workload, plan=Plan(log_every=1000), device="cpu", progress=False, out=tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert all(weight.isfinite().all() for weight in state["model"].values())


def test_log_points_hold_the_mean_of_the_steps_between(lively, plain_course):
    history = fit(lively, plan=Plan(log_every=4), device="cpu", progress=False)
    assert history.log_steps == [4, 7, 8, 12, 14]  # every fourth, and before an evaluation
    bounds = [0, *history.log_steps]
    means = [sum(plain_course[0][a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    assert history.loss == pytest.approx(means)


def test_progress_is_plain_lines_where_there_is_no_terminal(capfd, monkeypatch):
    monkeypatch.delenv("SPEEDKIT_PROGRESS", raising=False)
    fit(points(), device="cpu", plan=Plan(log_every=2))
    out, err = capfd.readouterr()
    last = next(line for line in out.splitlines() if "step 12/12" in line)
    assert all(name in last for name in ("loss ", "accuracy ", "samples/s"))
    assert "\r" not in out + err


def test_progress_can_be_turned_off(capfd, monkeypatch):
    fit(points(), device="cpu", progress=False)
    monkeypatch.setenv("SPEEDKIT_PROGRESS", "off")
    fit(points(), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.delenv("SPEEDKIT_PROGRESS", raising=False)
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 160))
    shown = bytearray()

    def read_all():
        try:
            while chunk := os.read(master, 4096):
                shown.extend(chunk)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read_all)
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fit(points(), device="cpu", plan=Plan(log_every=2))
        monkeypatch.undo()
    reader.join()
    os.close(master)
    last = [part for part in bytes(shown).decode().split("\r") if part.strip()][-1]
    assert "12/12" in last
    assert all(name in last for name in ("loss ", "accuracy ", "samples/s"))
