"""Recovery: training goes back to good weights and ends well; running out of memory costs a repeated step, no more."""

import dataclasses
import functools
import json
import math
import signal
import statistics

import pytest
import torch
from faults import limited, strike
from test_guard import dropping, everything, nan_for, normed
from test_resume import outcome
from tiny import emulating, jitter, points
from torch import nn

from speedkit.data.sampler import shuffled
from speedkit.errors import SpeedkitError
from speedkit.plan import Fallback, Plan
from speedkit.recipe import learning_rates
from speedkit.train.loop import begin, close, finish, fit, steps

RECOVER = {"on_nonfinite": "recover", "log_every": 5}


@pytest.fixture(autouse=True)
def every_number_format(monkeypatch):
    monkeypatch.setattr("speedkit.train.run.this_machine", emulating)


def recovering(workload, at=0, harm=lambda run: None, **plan):
    """The history of a run and its losses; `harm(run)` is done to it after step `at`."""
    run = begin(workload, plan=Plan(**(RECOVER | plan)), device="cpu", progress=False)
    losses = []
    for step in steps(run):
        losses.append(float(run.last_loss))
        if step == at:
            harm(run)
    close(run)
    return finish(run), losses


@torch.no_grad()
def multiply(run, factor, layers=slice(None)):
    for weight in run.parameters[layers]:
        weight.mul_(factor)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_that_became_nan_are_replaced_by_the_last_good_ones(optimizer, fused):
    workload = dataclasses.replace(points(epochs=None, steps=40, optimizer=optimizer), model=normed)
    harm = functools.partial(multiply, factor=math.nan)
    history, losses = recovering(workload, 22, harm, fused_optimizer=fused)
    (recovery,) = history.recoveries
    assert recovery["step"] == 30  # the second log point after it: five in a row
    assert "the weights, 0.weight first" in recovery["why"]
    assert (
        "went back to the state after step 15, learning rate times 0.5" in recovery["action"]
    )  # 20 was not proven yet
    assert [one["step"] for one in history.skipped] == list(range(23, 31))
    assert history.steps == 15 + 10  # those up to the state gone back to, and those after
    assert all(math.isfinite(loss) for loss in losses[30:])
    assert statistics.fmean(losses[35:]) < statistics.fmean(losses[:5])


def test_a_spike_that_lasts_is_gone_back_from():
    workload = points(epochs=None, steps=80, schedule="constant")
    kicked, losses = recovering(workload, 50, functools.partial(multiply, factor=-30.0, layers=slice(-2, None)))
    (recovery,) = kicked.recoveries
    assert "losses of 5 steps in a row are far above those before, step 51 first" in recovery["why"]
    assert recovery["step"] == 55
    assert statistics.fmean(losses[50:55]) > 10 * statistics.fmean(losses[40:50])
    assert statistics.fmean(losses[55:]) < 2 * statistics.fmean(losses[40:50])


def test_training_as_usual_is_no_spike():
    assert recovering(points(epochs=None, steps=200, learning_rate=0.05, augment=jitter))[0].recoveries == []


def test_what_is_gone_back_to_is_the_state_of_its_step_bit_by_bit():
    run = begin(dataclasses.replace(points(epochs=None, steps=30), model=normed), plan=Plan(**RECOVER), device="cpu")
    seen = {}
    for step in steps(run):
        seen[step] = everything(run)
        if step == 12:
            multiply(run, math.nan)
        if run.history.recoveries:
            break
    assert run.history.recoveries[0]["action"].startswith("went back to the state after step 5,")
    assert all(torch.equal(value, seen[5][name]) for name, value in everything(run).items())
    close(run)


def test_a_learning_rate_that_is_far_too_high_comes_down_until_training_works():
    workload = points(epochs=None, steps=60, optimizer="sgd", learning_rate=1e30, schedule="constant")
    with pytest.raises(SpeedkitError, match=r"after 5 recoveries \(.*times 0.5; .*times 0.25; .*times 0.125; .*\)"):
        recovering(workload)
    cured = dataclasses.replace(points(epochs=None, steps=120, optimizer="sgd", schedule="constant"), loss=steep)
    with pytest.raises(SpeedkitError, match="loss of step"):
        fit(cured, plan=Plan(), device="cpu", progress=False)
    history, losses = recovering(cured)
    assert history.recoveries
    assert all(math.isfinite(loss) for loss in losses[-10:])


def steep(model, batch, recipe):
    """A parabola so steep that momentum diverges on it with a rate of 0.01 or half of it, and not with a quarter."""
    outputs = model(batch[0])
    height = sum((weight**2).sum() for weight in model.parameters())
    return 600 * height, outputs


def test_batches_that_hold_nan_are_passed_by_with_the_learning_rate_as_it_was():
    order = shuffled(96, 0, 0)  # the first epoch: 6 batches, of which the last five are bad
    bad = {str(int(index)) for index in order.view(6, 16)[1:, 0]}
    load = functools.partial(nan_for, size=8, paths=bad)
    history, _ = recovering(dataclasses.replace(points(epochs=1), load=load), log_every=6)
    (recovery,) = history.recoveries
    assert recovery["action"].endswith(", past the batches that hold it")
    assert any(f"the batch itself is not finite first for {path}" in recovery["why"] for path in bad)


class Large(nn.Module):
    """What comes out is beyond 65504, the largest float16, and nothing for the other formats."""

    def forward(self, inputs):
        return (inputs.abs() + 1) * 300 * 1000 * 1e-6


def test_float16_gives_way_to_bfloat16_where_it_is_the_cause():
    layers = nn.Linear(8, 16), Large(), nn.Linear(16, 2)
    workload = dataclasses.replace(points(epochs=None, steps=20), model=lambda: nn.Sequential(*layers))
    history, losses = recovering(workload, precision="fp16")
    (recovery,) = history.recoveries
    assert "precision fp16 became bf16" in recovery["action"]
    assert "the output of 1 is not finite first" in recovery["why"]
    assert (history.steps, len(history.skipped), history.overflows) == (15, 5, 0)
    assert all(math.isfinite(loss) for loss in losses[5:])


def test_the_schedule_goes_back_with_the_weights():
    run = begin(points(epochs=None, steps=30), plan=Plan(**RECOVER, fused_optimizer=True), device="cpu")
    table = learning_rates(run.recipe, 30)
    for step in steps(run):
        if step == 12:
            multiply(run, math.nan)
        if run.history.recoveries:
            real = 5 + step - run.history.recoveries[0]["step"]  # the rate shown is that of the step just made
            if step > run.history.recoveries[0]["step"]:
                assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(table[real - 1] / 2)
    close(run)
    assert run.history.recoveries


def test_a_run_resumed_before_and_after_a_recovery_goes_the_same_way(tmp_path):
    order = shuffled(96, 0, 0)
    load = functools.partial(nan_for, size=8, paths={str(int(index)) for index in order.view(12, 8)[3:9, 0]})
    workload = dataclasses.replace(points(batch_size=8, dropout=0.2, augment=jitter), load=load)
    options = {"plan": Plan(**(RECOVER | {"log_every": 4})), "device": "cpu", "progress": False}
    whole = fit(workload, **options)
    assert len(whole.recoveries) == 1
    for at in (5, 7, 10):
        run = begin(workload, out=tmp_path / str(at), **options)
        for step in steps(run):
            run.stop = signal.SIGINT if step == at - 1 else 0
        finish(run), close(run)
        resumed = fit(workload, out=tmp_path / str(at), resume=True, **options)
        assert str(outcome(resumed)) == str(outcome(whole))  # a mean of no good step is NaN
        assert (resumed.skipped, resumed.recoveries) == (whole.skipped, whole.recoveries)
    written = json.loads((tmp_path / "10" / "history.json").read_text())
    assert (written["skipped"], written["recoveries"]) == (whole.skipped, whole.recoveries)


# Out of memory.


def stepped(workload, micro_batch=None, change_at=0, limit=None, **plan):
    """Losses of every step, and the final state; from step `change_at` on parts are of `limit`, or only those fit."""
    run = begin(workload, plan=Plan(micro_batch=micro_batch, **plan), device="cpu", progress=False)
    losses = []
    for step in steps(run):
        losses.append(float(run.last_loss))
        if step == change_at and limit:
            run.micro_batch = limit
    close(run)
    return losses, everything(run), finish(run)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["cuda", "host", "cudnn"])
def test_out_of_memory_repeats_the_step_as_if_the_micro_batch_had_been_smaller(kind, where):
    workload = dataclasses.replace(points(train=100, augment=jitter, clip_norm=1.0), model=dropping)
    losses, state, _ = stepped(workload, 4)
    found, final, history = stepped(limited(workload, 4, kind, where))
    assert found == losses
    assert all(torch.equal(value, state[name]) for name, value in final.items())
    assert history.steps == 14
    got = [(fallback.asked, fallback.got) for fallback in history.effective.fallbacks]
    assert got == [(16, 8), (8, 4)]
    assert history.effective.plan.micro_batch == 4


@pytest.mark.parametrize("plan", [{}, {"on_nonfinite": "skip"}, {"precision": "fp16"}], ids=str)
def test_out_of_memory_in_the_middle_of_a_run_costs_nothing_but_its_step(plan):
    workload = dataclasses.replace(points(augment=jitter), model=dropping)
    calls = iter(range(10**6))

    def loss(model, batch, recipe):
        if model.training and next(calls) == 6:  # the second part of the fourth step
            strike("cuda")
        return workload.loss(model, batch, recipe)

    found = stepped(dataclasses.replace(workload, loss=loss), 8, **plan)
    expected = stepped(workload, 8, change_at=3, limit=4, **plan)
    assert found[0] == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


def test_a_fallback_is_told_in_the_history_and_memory_is_written_down(tmp_path):
    fit(limited(points(), 8), device="cpu", progress=False, out=tmp_path)
    (fallback,) = json.loads((tmp_path / "history.json").read_text())["fallbacks"]
    assert fallback == dataclasses.asdict(Fallback("micro_batch", 16, 8, "out of memory at step 1"))
    assert list(tmp_path.glob("*memory*"))


def test_a_single_sample_that_does_not_fit_ends_the_run_with_what_to_do():
    with pytest.raises(SpeedkitError, match=r"out of memory at step 1 with a single sample.*checkpointing=blocks"):
        fit(limited(points(), 0), device="cpu", progress=False)


def test_an_update_that_ran_out_of_memory_is_not_repeated():
    run = begin(points(), device="cpu", progress=False)
    run.optimizer.register_step_post_hook(lambda *_: strike("cuda"))  # weights have changed by then
    with pytest.raises(SpeedkitError, match="out of memory at step 1 in the optimizer's update"):
        next(steps(run))
    assert run.micro_batch == 16
    close(run)


@pytest.mark.parametrize("fits", [0, 8])
def test_another_error_is_raised_as_it_is(fits):
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        fit(limited(points(), fits, raises=error), device="cpu", progress=False)
    assert raised.value is error


def test_evaluation_takes_no_larger_parts_than_training():
    workload, sizes = points(), []

    def loss(model, batch, recipe):
        sizes.append((model.training, len(batch[0])))
        return workload.loss(model, batch, recipe)

    history = fit(dataclasses.replace(workload, loss=loss), plan=Plan(micro_batch=5), device="cpu", progress=False)
    assert max(size for training, size in sizes if not training) == 5
    assert history.evaluation["n"] == 32
    assert history.evaluation["value"] == fit(workload, plan=Plan(micro_batch=5), device="cpu").evaluation["value"]
