"""The course of a run as it is left: log points, a validation set beside the test set, and a quality to end at."""

import contextlib
import dataclasses
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import termios

import pytest
import tiny
from faults import largest_file
from test_nonfinite import spoiled
from tiny import outcome, points, trained

from speedkit.files import finite
from speedkit.plan import Plan

EVERY_STEP = {"plan": Plan(log_every=1)}


def lines(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / "history.jsonl").open()]


def test_each_log_point_is_a_line_of_finite_numbers_and_a_call(tmp_path):
    calls, work = [], spoiled(points(on_nonfinite="skip"), {0}, "loss", math.nan)  # 6 steps an epoch, 12 in all
    history = trained(work, out=tmp_path, on_log=calls.append, **EVERY_STEP)
    assert lines(tmp_path) == finite(calls) and [call["loss"] for call in calls[1:]] == history.loss[1:]
    assert [call["step"] for call in calls] == history.log_steps and lines(tmp_path)[0]["loss"] is None
    look, last = (call for call in calls if "test/loss" in call)
    assert (look["epoch"], last["epoch"], last["test/accuracy"]) == (1.0, 2.0, history.evaluation["value"])
    assert last["learning_rate"] < look["learning_rate"] and look["samples_per_s"] == 16 / look["step_s"]


def test_what_on_log_raises_ends_the_run_and_going_on_doubles_no_step(tmp_path):
    with pytest.raises(ZeroDivisionError):
        trained(points(), out=tmp_path, on_log=lambda point: 1 / (point["step"] - 9), **EVERY_STEP)
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 10)]
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 1')  # cut short
    resumed, whole = trained(points(), out=tmp_path, resume=True, **EVERY_STEP), trained(points(), **EVERY_STEP)
    assert resumed.resumed_from == 6 and outcome(resumed) == outcome(whole)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [*enumerate(whole.loss, 1)]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder and the history of a run that came to its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(points(), out=folder, **EVERY_STEP)


@pytest.mark.parametrize("damaged", [b'{"step\xff": 2}', b'{"step": 2', b"[2]", b'{"stop": 2}', b'{"step": [2]}', b"2"])
def test_a_damaged_line_is_left_out_and_told_of(whole_run, tmp_path, capsys, damaged):
    folder, whole = whole_run
    path = shutil.copytree(folder, tmp_path, dirs_exist_ok=True) / "history.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([before[0], damaged + b"\n", *before[2:]]))
    trained(points(), out=tmp_path, resume=True, progress=True, **EVERY_STEP)
    assert "line 2 of" in capsys.readouterr().out and whole.log_steps == [*range(1, 13)]
    assert path.read_bytes().splitlines(keepends=True) == [before[0], *before[2:]]


def test_a_full_disk_is_the_systems_own_error(tmp_path):
    with contextlib.ExitStack() as limit, pytest.raises(OSError, match="File too large"):  # from step 2 on
        trained(points(), out=tmp_path, on_log=lambda _: limit.enter_context(largest_file(16)), **EVERY_STEP)


def with_validation(workload):
    """The workload, whose last 24 items of 96 to train on are to validate on."""
    return dataclasses.replace(workload, train=workload.train[:-24], validation=workload.train[-24:])


def test_looks_are_at_the_validation_set_and_the_verdict_at_the_test_set(tmp_path):
    seen, work = [], with_validation(points())  # 72 to train on, 24 to validate on, 32 to test on
    work = dataclasses.replace(work, load=lambda item: [seen.append(item), tiny.load(item, 8)][1])
    history = trained(work, out=tmp_path, **EVERY_STEP)
    assert {*seen[:72]} == {*work.train} == {*points().train} - {*work.validation} == {*seen[96:168]}
    assert seen[72:96] + seen[168:] == [*work.validation, *work.validation, *work.test]
    assert [(look["set"], look["n"]) for look in history.evaluations] == [("validation", 24)] * 2
    last, value = lines(tmp_path)[-1], history.evaluations[1]["value"]
    assert history.evaluation == {"metric": "accuracy", "value": last["test/accuracy"], "n": 32}
    assert last["test/accuracy"] != value == last["validation/accuracy"]


@pytest.mark.slow
def test_a_bar_says_how_much_time_is_left_and_there_is_none_of_nothing(request, tmp_path):
    code = "from tiny import points; from speedkit import fit, Plan; "
    code += f"[fit(points(), None, Plan(cache='ram'), device='cpu', cache_dir='{tmp_path}') for _ in range(2)]"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(request.path.parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, stdout=theirs, env=environment, check=True)
    shown = os.read(ours, 1 << 20).decode()
    assert re.search(r"12/12 \[00:0\d, 00:00 left, loss 0\.\d+, accuracy [01]\.\d+, test 0\.", shown), shown
    assert "caching" in shown and not re.search(r"\b0it", shown), "the second time nothing is left to cache"
