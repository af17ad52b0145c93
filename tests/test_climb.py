"""The climb's judgement: what is kept, what is rejected, and how equal quality is decided."""

import dataclasses
import math

import pytest
import tiny
import torch

from speedkit import climb as climb_function
from speedkit.climb import affordable_window_s
from speedkit.errors import UsageError
from speedkit.hardware import Hardware
from speedkit.ladder import LADDER, Profile, amdahl
from speedkit.measure.compare import compare
from speedkit.measure.parity import parity, quality_of, time_to_quality
from speedkit.measure.schema import validate_record
from speedkit.measure.stages import Stages
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe

CPU = Hardware(device=torch.device("cpu"), cores=2, cpu_flags=("avx512_bf16",), compiler="g++", python_headers=True)
GPU = dataclasses.replace(CPU, device=torch.device("cuda"), gpu="H200", compute_capability=(9, 0), triton=True)
COMPILE = [rung for rung in LADDER if rung.name == "compile"]


@pytest.mark.parametrize(("hardware", "without"), [(CPU, {"attention", "fp8"}), (GPU, set())], ids=["cpu", "gpu"])
def test_every_rung_changes_plans_that_resolve_and_predicts_an_interval(hardware, without):
    profile = Profile(step_s=0.2, data_s=0.1, matmul={"fp32": 1e11, "bf16": 3e11})
    assert {rung.name for rung in LADDER if not rung.changes(Plan(), Recipe(), hardware)} == without
    for rung in LADDER:
        for change in rung.changes(Plan(), Recipe(), hardware):
            assert resolve(Plan(**change), hardware).plan == Plan(**change)
            low, high = rung.predict(profile, change)
            assert 0 < low <= high and math.isfinite(high)


def test_amdahl():
    assert amdahl(0.5, 1e12) == pytest.approx(2.0)
    assert amdahl(1.0, 3.0) == pytest.approx(3.0)


def test_parity_is_strict_where_bits_are_promised_and_fair_where_losses_are():
    reference, other = [1.0, 0.9, 0.8], [1.1, 1.0, 0.6]
    assert parity("bit-equal", reference, reference, other).passed
    nudged = [1.0, 0.9, 0.8 + 1e-9]
    assert not parity("bit-equal", nudged, reference, other).passed
    assert parity("loss-equal", nudged, reference, other).passed
    assert not parity("loss-equal", [2.0, 1.9, 1.8], reference, other).passed


def curves(baseline, final, step_s=(1.0, 0.25)):
    def runs(values, each_s):
        return [
            {"seed": seed, "points": [[each_s, value / 2], [2 * each_s, value]], "value": value, "seconds": 2 * each_s}
            for seed, value in enumerate(values)
        ]

    return {"baseline": runs(baseline, step_s[0]), "final": runs(final, step_s[1])}


def test_quality_is_shown_not_assumed():
    work = tiny.points()
    assert quality_of(work, curves([0.90, 0.91, 0.90], [0.90, 0.91, 0.91]))["passed"]
    assert not quality_of(work, curves([0.90, 0.91, 0.90], [0.85, 0.86, 0.86]))["passed"]
    assert not quality_of(work, curves([0.90, 0.91, 0.90], [0.99, 0.80, 0.92]))["passed"], "too noisy to show it"
    assert not quality_of(work, curves([0.90], [0.90]))["passed"], "one seed shows nothing"


def test_time_to_quality_counts_to_the_first_evaluation_that_reaches_the_target():
    found = time_to_quality(tiny.points(), curves([0.90, 0.90, 0.90], [0.90, 0.90, 0.90]))
    assert found["baseline_s"] == 2.0 and found["final_s"] == 0.5 and found["ratio"] == 4.0
    missed = time_to_quality(tiny.points(), curves([0.90, 0.90, 0.90], [0.5, 0.5, 0.5]))
    assert missed["final_s"] is None and missed["ratio"] is None


def test_compare_finds_a_planted_slowdown_and_keeps_the_losses(tmp_path):
    work = tiny.points(train=256, size=32, hidden=128)
    slow = tiny.slowed(work, seconds=0.02)
    found = compare(work, Plan(), Plan(), workload_b=slow, pairs=8, window_s=0.02, names=("plain", "slowed"))
    assert found.slower and found.ratio < 1 and not found.faster
    assert found.losses_a == found.losses_b
    assert len(found.seconds_a) == len(found.seconds_b) == 8


def test_climb_keeps_only_what_is_proven_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    work = tiny.points(train=64, test=32, epochs=2)
    options = {"out": tmp_path / "climb", "cache_dir": tmp_path / "cache", "pairs": 6, "window_s": 0.01, "seeds": 2}
    record = climb_function(work, rungs=("workers", "cache", "host_syncs"), **options)
    assert validate_record(record) == []
    for row in record["rungs"]:
        assert row["why"]
        if row["kept"]:
            assert row["low"] > row["noise_floor"] >= 1
    shown = capsys.readouterr().out
    assert "A/A noise floor" in shown and "final plan" in shown
    again = climb_function(work, rungs=("workers", "cache", "host_syncs"), resume=True, **options)
    assert again["rungs"] == record["rungs"] and again["speedup"] == record["speedup"]
    with pytest.raises(UsageError, match="another workload, data set or recipe"):
        climb_function(tiny.points(train=80), resume=True, **options)
    with pytest.raises(UsageError, match="already holds a climb run"):
        climb_function(work, **options)


def windows_s(rungs, best_s=0.01):
    """The window that a rung gets 100 s into a climb, for growing budgets; 200 steps are trained to close it."""
    work, state = tiny.points(train=3200, test=2, epochs=1), {"stages": {}, "spent_s": 100.0}
    profile, control = Profile(best_s, 0.0, {}), {"step_s": 0.04, "set_up_s": 2.0}
    return [
        affordable_window_s(Stages(work, work.recipe, CPU, {}, 10, 0.25, 3, budget_s, None, print, state),
                            rungs, profile, control)
        for budget_s in range(140, 300)
    ]  # fmt: skip


def no_longer(some, others):
    return some != others and all(one <= other for one, other in zip(some, others, strict=True))


def test_windows_shrink_before_a_rung_is_left_out_for_want_of_time():
    found = windows_s(LADDER)
    assert found == sorted(found) and found[0] == 0 and found[-1] == 0.25
    assert min(window for window in found if window) == pytest.approx(0.1)
    assert any(0.11 < window < 0.24 for window in found)


def test_time_is_kept_for_the_rungs_to_come_but_none_is_left_out_for_their_sake():
    alone, first = windows_s(LADDER[:1]), windows_s(LADDER)
    assert no_longer(first, alone)
    assert [window > 0 for window in first] == [window > 0 for window in alone]


def test_a_slower_plan_and_compiling_leave_less_time():
    assert no_longer(windows_s(LADDER[:1], best_s=0.04), windows_s(LADDER[:1]))
    assert no_longer(windows_s(COMPILE), windows_s(LADDER[:1]))


def test_a_climb_without_time_tries_nothing_and_says_so(tmp_path):
    work = tiny.points(train=64, test=32, epochs=1)
    record = climb_function(work, budget_s=0.1, pairs=6, window_s=0.01, seeds=2, rungs=("host_syncs",), progress=False)
    assert all("not tried" in row["why"] and not row["kept"] for row in record["rungs"])
    with pytest.raises(UsageError, match="did you mean cache"):
        climb_function(work, rungs=("cahce",))
