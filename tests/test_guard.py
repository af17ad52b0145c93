"""The non-finite guard: a bad step leaves nothing behind, is told with its cause, and the host waits for none."""

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from speedkit.train.guard import Guard
from test_loop import exploding, reads_between_log_points
from test_resume import interrupting, outcome
from tiny import emulating, jitter, load, points
from torch import nn

from speedkit.data.decode import BadItem
from speedkit.errors import Interrupted, SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import learning_rates
from speedkit.train.loop import fit, steps
from speedkit.train.setup import setup_run

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SKIP = {"on_nonfinite": "skip", "fused_optimizer": True}


@pytest.fixture(autouse=True)
def every_number_format(monkeypatch):
    monkeypatch.setattr("speedkit.train.setup.this_machine", emulating)


def normed(size=8, hidden=16):
    """A net that keeps running statistics."""
    return nn.Sequential(nn.Linear(size, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2))


def spoiled(workload, at, where, value=math.nan):
    """The workload, spoiled in the forward passes `at`, from 0: an "input", the "loss", or the "gradient" alone."""
    calls = iter(range(10**6))

    def spoiled_loss(model, batch, recipe):
        now = model.training and next(calls) in at
        if now and where == "input":
            batch = (batch[0].clone(), *batch[1:])
            batch[0][1, 2] = value
        result, outputs = workload.loss(model, batch, recipe)
        if now and where == "loss":
            result = result + value  # its gradient is as good as ever
        if now and where == "gradient":
            result.register_hook(lambda gradient: gradient * value)
        return result, outputs

    return dataclasses.replace(workload, loss=spoiled_loss)


def everything(run):
    """All that a step may change, as copies."""
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    for index, parameter in enumerate(run.parameters):
        for name, value in run.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{index}.{name}"] = value.clone()
    return state


def changed(before, now):
    """The names of what differs; state that the optimizer has just made is no difference while it is zero."""
    return [name for name, value in now.items() if not torch.equal(before.get(name, torch.zeros_like(value)), value)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("where", "value", "micro_batch", "at"),
    [
        ("input", math.nan, None, {0, 5}),  # the steps
        ("loss", math.inf, None, {3}),
        ("gradient", math.inf, None, {0}),
        ("input", math.nan, 4, {1, 22}),  # four parts a step: one part each of steps 0 and 5
        ("gradient", math.nan, 4, {0}),
    ],
)
def test_a_bad_step_leaves_nothing_behind(device, fused, optimizer, where, value, micro_batch, at):
    workload = dataclasses.replace(points(optimizer=optimizer, epochs=None, steps=8, clip_norm=1.0), model=normed)
    bad = {call // (4 if micro_batch else 1) for call in at}
    plan = Plan(fused_optimizer=fused, on_nonfinite="skip", micro_batch=micro_batch, log_every=3)
    table = learning_rates(workload.recipe, 8)
    run = setup_run(spoiled(workload, at, where, value), plan=plan, device=device, progress=False)
    run.recovery.explained = 10**6  # looking for a cause calls the loss again, which counts its calls
    before, real = everything(run), 0
    for step in steps(run):
        now = everything(run)
        assert bool(changed(before, now)) == (step - 1 not in bad), step
        assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(table[real])
        before, real = now, real + (step - 1 not in bad)
    assert all(value.isfinite().all() for value in before.values())
    history = run.finish()
    run.close()
    assert history.steps == real == 8 - len(bad)
    assert [one["step"] - 1 for one in history.skipped] == sorted(bad)
    assert all(math.isfinite(loss) for loss in history.loss)


def test_without_the_guard_the_same_faults_would_be_seen():
    run = setup_run(spoiled(dataclasses.replace(points(), model=normed), {1}, "input"), device="cpu", progress=False)
    training = steps(run)
    next(training), next(training)
    assert not all(value.isfinite().all() for value in run.model.state_dict().values())
    run.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mode", ["skip", "recover"])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_with_a_fused_optimizer_the_guard_reads_nothing_between_log_points(mode, optimizer, precision):
    workload = dataclasses.replace(points(augment=jitter, clip_norm=1.0, optimizer=optimizer), model=normed)
    plan = SKIP | {"on_nonfinite": mode, "cache": "ram", "precision": precision}
    assert reads_between_log_points(workload, **plan) == 0


@pytest.mark.parametrize("plan", [{"fused_optimizer": True}, {}, {"precision": "fp16"}, {"micro_batch": 5}], ids=str)
def test_a_run_without_bad_steps_is_bit_identical_with_the_guard(plan):
    def weights(mode):
        workload = points(train=100, augment=jitter, dropout=0.2, clip_norm=1.0)
        history = fit(workload, plan=Plan(on_nonfinite=mode, **plan), device="cpu", progress=False)
        return history.loss, [weight.tolist() for weight in history.model.parameters()]

    assert weights("raise") == weights("skip") == weights("recover")


# float16: a scale that is too large is not a loss that diverges.


def trained(workload, **plan):
    """A run at its end, with its history."""
    run = setup_run(workload, plan=Plan(**(SKIP | {"precision": "fp16"} | plan)), device="cpu", progress=False)
    run.recovery.explained = 10**6
    for _ in steps(run):
        pass
    run.close()
    return run, run.finish()


def test_an_overflow_of_float16_lowers_the_scale_and_is_no_bad_step():
    run, history = trained(dataclasses.replace(points(), loss=exploding({2, 5})))
    assert (history.overflows, history.skipped, history.steps) == (2, [], 10)
    assert float(run.scale.scale) == 2.0**12


def test_a_loss_that_is_not_finite_is_a_bad_step_in_float16_and_leaves_the_scale_alone():
    run, history = trained(spoiled(points(), {2, 5}, "input"))
    assert (history.overflows, history.steps) == (0, 10)
    assert [one["step"] for one in history.skipped] == [3, 6]
    assert float(run.scale.scale) == 2.0**14


def test_gradients_that_no_scale_makes_finite_are_bad_steps_in_the_end():
    workload = spoiled(points(epochs=None, steps=40), set(range(100)), "gradient")
    with pytest.raises(SpeedkitError, match="steps in a row are not finite, step 15 first"):
        trained(workload)  # after 14 halvings the scale is 1


# What is said.


def nan_for(item, size, paths):
    return load(item, size) * (math.nan if item.path in paths else 1)


def with_bad_items(workload, *paths):
    return dataclasses.replace(workload, load=functools.partial(nan_for, size=8, paths=paths))


class LogOfNegative(nn.Module):
    def forward(self, inputs):
        return torch.log(6 + inputs)


class SquareRootOfZero(nn.Module):
    def forward(self, inputs):
        return inputs + torch.sqrt(inputs * 0)


def told(workload, **plan):
    """What the history says of the first bad step, and what the error says of it where bad steps raise."""
    history = fit(workload, plan=Plan(on_nonfinite="skip", **plan), device="cpu", progress=False)
    with pytest.raises(SpeedkitError) as raised:
        fit(workload, plan=Plan(**plan), device="cpu", progress=False)
    return history.skipped[0], str(raised.value)


@pytest.mark.parametrize("plan", [{}, {"workers": 1}, {"log_every": 1}], ids=str)
def test_samples_that_are_not_finite_are_named(plan):
    skipped, raised = told(with_bad_items(points(augment=jitter), "17", "40"), **plan)
    assert "the batch itself is not finite first for" in skipped["why"]
    assert {"17", "40"} & set(skipped["why"].replace(",", "").split())
    assert f"step {skipped['step']} is nan: {skipped['why']}" in raised


def unreadable_for(item, size, path):
    if item.path == path:
        raise BadItem(path, "torn")
    return load(item, size)


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}, {"workers": 2}, {"features_on": "device"}], ids=str)
def test_a_batch_is_made_again_as_it_was_and_its_items_named(plan):
    workload = points(train=40, augment=jitter)  # 16, 16 and 8; one item is unreadable
    workload = dataclasses.replace(workload, load=functools.partial(unreadable_for, size=8, path="21"))
    run = setup_run(workload, plan=Plan(**plan), device="cpu", progress=False)
    for _ in range(7):
        batch = run.train_batches.next()
        again, names = run.train_batches.again(run.train_batches.epoch, run.train_batches.position)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, batch, strict=True))
        items = torch.stack([load(item, 8) * 2 for name in names for item in workload.train if item.path == name])
        assert torch.equal(items, batch[0])
    run.close()


def net_of(module):
    return nn.Sequential(nn.Flatten(), module(), nn.Linear(8, 2))


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}], ids=str)
def test_the_module_and_the_samples_where_it_begins_are_named(plan):
    workload = dataclasses.replace(points(), model=functools.partial(net_of, LogOfNegative))
    batch_of = {item.path: load(item, 8) * 2 for item in workload.train}
    bad = {path for path, sample in batch_of.items() if (6 + sample).min() <= 0}
    assert 0 < len(bad) < 16
    skipped, raised = told(workload, **plan)
    words = skipped["why"].replace(",", "").split()
    assert "the output of 1 is not finite first for" in skipped["why"]
    assert set(words) & set(batch_of) - {"1"} <= bad
    assert "the output of 1 is not finite first for" in raised  # though by then all weights are NaN


def test_a_gradient_that_is_not_finite_is_told_from_an_output():
    layers = nn.Linear(8, 8), SquareRootOfZero(), nn.Linear(8, 2)
    workload = dataclasses.replace(points(epochs=None, steps=3), model=lambda: nn.Sequential(*layers))
    history = fit(workload, plan=Plan(log_every=1, on_nonfinite="skip"), device="cpu", progress=False)
    assert "the gradient at the output of 0 is not finite first" in history.skipped[0]["why"]  # what 1 sends back


def test_gradients_too_large_to_have_a_norm_are_told():
    def loss(model, batch, recipe):
        value, outputs = points().loss(model, batch, recipe)
        return value * 1e25, outputs  # finite, as its gradients are; their squares are not

    workload = dataclasses.replace(points(epochs=None, steps=3), loss=loss)
    history = fit(workload, plan=Plan(log_every=1, on_nonfinite="skip"), device="cpu", progress=False)
    assert history.skipped[0]["why"].startswith("the norm of the gradients is not finite first")
    assert history.steps == 0


def test_looking_for_the_cause_changes_nothing_of_the_run():
    workload = with_bad_items(points(train=100, augment=jitter, dropout=0.2), "17")
    courses = []
    for limit in (0, 10**6):
        run = setup_run(dataclasses.replace(workload, model=dropping), plan=Plan(log_every=1, **SKIP), device="cpu")
        run.recovery.explained = limit  # beyond the number that are looked for
        courses.append([str(float(run.last_loss)) for _ in steps(run)])
        run.close()
    assert courses[0] == courses[1]
    assert "nan" in courses[0]


def dropping():
    return nn.Sequential(*normed(), nn.Dropout(0.5))


def test_steps_that_are_all_bad_end_the_run():
    with pytest.raises(SpeedkitError, match=r"7 steps in a row are not finite, step 3 first: .*on_nonfinite=recover"):
        fit(spoiled(points(), set(range(2, 100)), "loss"), plan=Plan(log_every=3, **SKIP), device="cpu", progress=False)


# Going on, and several ranks.


@pytest.mark.parametrize("at", [2, 5, 9])
@pytest.mark.parametrize("plan", [{}, SKIP, SKIP | {"precision": "fp16"}, {"on_nonfinite": "recover"}], ids=str)
def test_a_resumed_run_keeps_count_of_bad_steps(tmp_path, plan, at):
    workload = with_bad_items(dataclasses.replace(points(train=100, augment=jitter), model=normed), "17", "40")
    options = {"plan": Plan(**({"on_nonfinite": "skip", "log_every": 4} | plan)), "device": "cpu", "progress": False}
    whole = fit(workload, **options)
    assert 0 < len(whole.skipped) < 14
    stopping = interrupting(workload, at)
    with pytest.raises(Interrupted):
        fit(stopping, out=tmp_path, **options)
    resumed = fit(workload, out=tmp_path, resume=True, **options)
    assert outcome(resumed) == outcome(whole)
    assert resumed.skipped == whole.skipped


RANK = """
import os, sys
import torch, torch.distributed as dist
sys.path[:0] = [sys.argv[1]]
from test_guard import everything, spoiled
from tiny import points
from speedkit.plan import Plan
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
rank = int(sys.argv[2])
os.environ['WORLD_SIZE'] = '2'
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
for fused in (True, False):
    workload = spoiled(points(epochs=None, steps=6), {4} if rank else set(), "gradient")  # 1 is the rehearsal
    plan = Plan(fused_optimizer=fused, on_nonfinite="skip", ranks=2)
    run = setup_run(workload, plan=plan, device="cpu", progress=False)
    for step in steps(run):
        pass
    history = run.finish()
    print(history.steps, [one["step"] for one in history.skipped])
dist.destroy_process_group()
"""


def test_all_ranks_leave_out_what_is_bad_in_one(tmp_path):
    arguments = [sys.executable, "-c", RANK, str(Path(__file__).parent)]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split("\n")[:2] for rank in ranks] == [["5 [4]"] * 2] * 2


def test_the_flag_of_a_step_needs_no_norm_that_fits_in_float32():
    model = nn.Linear(2, 2)
    guard = Guard(Plan(on_nonfinite="skip"), model, torch.optim.SGD(model.parameters()), None)
    assert guard.judge(torch.tensor(1e38), torch.tensor(1e38))
    assert not guard.judge(torch.tensor(1.0), torch.tensor(math.inf))
