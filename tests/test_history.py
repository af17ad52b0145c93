"""The course of a run as it is left: log points, a validation set beside the test set, and a quality to end at."""

import contextlib
import dataclasses
import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import tiny
from test_nonfinite import spoiled
from tiny import outcome, points

from speedkit.measure.quality import curve
from speedkit.plan import Plan
from speedkit.train.fit import fit, open_log, report
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workloads.workload import hold_out

OPTIONS = {"plan": Plan(log_every=1), "device": "cpu", "progress": False}


def lines(folder):
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "history.jsonl").read_text().splitlines()
    ]


def test_each_log_point_is_a_line_and_a_call(tmp_path):
    calls, work = [], spoiled(points(), {4}, "loss", math.nan)  # 6 steps an epoch, 12 in all
    plan = Plan(log_every=5, on_nonfinite="skip")
    history = fit(work, plan=plan, device="cpu", progress=False, out=tmp_path, on_log=calls.append)
    assert [call["step"] for call in calls] == history.log_steps == [5, 6, 10, 12] and lines(tmp_path) == calls
    assert [call["loss"] for call in calls] == history.loss and calls[0]["epoch"] == pytest.approx(5 / 6)
    first, look, _, last = calls
    assert last["test/accuracy"] == history.evaluation["value"] and last["learning_rate"] < look["learning_rate"]
    assert look["test/loss"] == history.evaluations[0]["loss"] and "test/loss" not in first
    assert look["samples_per_s"] == pytest.approx(16 / look["step_s"]) and look["seconds"] < last["seconds"]
    assert json.loads((tmp_path / "history.json").read_text())["loss"] == history.loss


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    work = spoiled(points(), {0}, "loss", math.nan)
    fit(work, out=tmp_path, **OPTIONS | {"plan": Plan(log_every=1, on_nonfinite="skip")})
    assert [line["loss"] is None for line in lines(tmp_path)] == [True] + 11 * [False]


def test_what_on_log_raises_ends_the_run_and_going_on_doubles_no_step(tmp_path):
    error = KeyError("mine")

    def broken(point):
        if point["step"] == 9:
            raise error

    with pytest.raises(KeyError) as raised:
        fit(points(), out=tmp_path, on_log=broken, **OPTIONS)
    assert raised.value is error and [line["step"] for line in lines(tmp_path)] == [*range(1, 10)]
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 1')  # cut short
    resumed, whole = fit(points(), out=tmp_path, resume=True, **OPTIONS), fit(points(), **OPTIONS)
    assert resumed.resumed_from == 6 and outcome(resumed) == outcome(whole)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [*enumerate(whole.loss, 1)]


def test_a_full_disk_is_the_systems_own_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(setup_run(points(), out=tmp_path, **OPTIONS)) as run:
        log = open_log(run)
        next(steps(run))
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # writing more fails, as on a full disk
        with pytest.raises(OSError, match="File too large"):
            report(run, log)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.close()


# ---- validation ----


def test_validation_items_are_a_share_of_each_label_and_no_longer_trained_on():
    work = points(train=90)
    held = hold_out(work, 0.2)
    assert sorted(item.label for item in held.validation) == 9 * [0] + 9 * [1] and held.test is work.test
    assert {*held.train} | {*held.validation} == {*work.train} and len(held.train) == 72
    assert hold_out(work, 0.2) == held and held.train == sorted(held.train, key=work.train.index)
    assert len(hold_out(held, 0.001).validation) == 19, "one at least, beside those there are"


def recording_load(item, size, seen):
    seen.append(item)
    return tiny.load(item, size)


def test_looks_are_at_the_validation_set_and_the_verdict_at_the_test_set(tmp_path):
    seen, work = [], hold_out(points(), 0.25)  # 72 to train on, 24 to validate on, 32 to test on
    work = dataclasses.replace(work, load=lambda item: recording_load(item, 8, seen))
    history = fit(work, out=tmp_path, **OPTIONS)
    assert seen == [*seen[:72], *work.validation, *seen[96:168], *work.validation, *work.test]
    assert {*seen[:72]} == {*work.train} == {*seen[96:168]}
    assert [(look["set"], look["n"]) for look in history.evaluations] == [("validation", 24)] * 2
    assert history.evaluation == {"metric": "accuracy", "value": history.tested["value"], "n": 32}
    last = lines(tmp_path)[-1]
    assert (last["validation/accuracy"], last["test/loss"]) == (history.evaluations[1]["value"], history.tested["loss"])
    row = curve(work, work.recipe, Plan(), device="cpu")
    assert row["value"] == history.tested["value"] and len(row["points"]) == len(row["steps"]) == 10
    assert row["points"][-1][1] == history.evaluations[1]["value"] != row["value"]


@pytest.mark.parametrize("higher", [True, False], ids=["up", "down"])
def test_a_run_ends_at_a_quality_and_says_when(tmp_path, capsys, higher):
    work = dataclasses.replace(hold_out(points(epochs=30), 0.25), higher_is_better=higher)
    work = work if higher else dataclasses.replace(work, score=lambda outputs, batch: 1 - tiny.score(outputs, batch))
    until, options = 0.95 if higher else 0.05, OPTIONS | {"progress": True}
    history = fit(work, out=tmp_path, until=until, **options)
    *before, last = [look["value"] for look in history.evaluations]
    good = [value >= until if higher else value <= until for value in (*before, last)]
    assert good == [False] * len(before) + [True] and before and history.steps < 150
    kept = json.loads((tmp_path / "history.json").read_text())
    assert kept["until"] == until and kept["reached_s"] == history.evaluations[-1]["seconds"]
    assert kept["evaluation"]["n"] == 32 and f"accuracy {until:g} was reached after" in capsys.readouterr().out
    again = fit(work, out=tmp_path, until=until, resume=True, **options)
    assert again.steps == history.steps and again.reached_s == history.reached_s and again.tested == history.tested
    further = fit(work, out=tmp_path, until=2.0 if higher else -1.0, resume=True, **options)
    assert further.steps == 150 and further.reached_s is None and "was not reached" in capsys.readouterr().out


# ---- what is shown ----


def test_a_bar_says_how_much_time_is_left():
    code = (
        "from tiny import points; from speedkit import Plan, fit; fit(points(), plan=Plan(log_every=1), device='cpu')"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, stdout=theirs, env=environment, check=True)
    shown = os.read(ours, 1 << 20).decode()
    assert re.search(r"12/12 \[00:0\d, 00:00 left, loss 0\.\d+, accuracy [01]\.\d+, test 0\.", shown), shown
