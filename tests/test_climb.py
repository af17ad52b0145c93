"""The climb's judgement: what is tried, in which order, what is kept or rejected, and how equal quality is decided."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from speedkit import climb as climb_function
from speedkit import closing
from speedkit.climb import affordable
from speedkit.clock import compilations
from speedkit.errors import Interrupted, SpeedkitError, UsageError
from speedkit.files import read_json, write_json
from speedkit.hardware import Hardware, this_machine
from speedkit.ladder import LADDER, candidates
from speedkit.measure.compare import compare
from speedkit.measure.ledger import CAUSES
from speedkit.measure.parity import parity, payback, quality_of, time_to_quality
from speedkit.measure.schema import validate_record
from speedkit.measure.stages import NAME, Stages
from speedkit.plan import Plan, resolve
from speedkit.predict import EFFECTS, Profile, affordable_pairs, affordable_training, plan_of
from speedkit.recipe import Recipe

CPU = Hardware(device=torch.device("cpu"), cores=2, cpu_flags=("avx512_bf16",), compiler="g++", python_headers=True)
GPU = dataclasses.replace(CPU, device=torch.device("cuda"), gpu="H200", compute_capability=(9, 0), triton=True)
# A step of 200 ms, half of which is loading.
PROFILE = Profile(
    {"data wait": 0.1, "forward": 0.03, "backward": 0.06, "optimizer": 0.01}, {"fp32": 1e11, "bf16": 3e11}
)
CONTROL = {"step_s": 0.2, "set_up_s": 2.0, "shapes": 1}


def stages(budget_s=1000.0, work=None, hardware=CPU, **options):
    work = work or tiny.points(train=3200, test=2, epochs=1)
    state = {"stages": {}, "spent_s": 0.0}
    return Stages(work, work.recipe, hardware, options, 20, 0.1, 3, budget_s, None, lambda text: None, state)


def left_to_try(best=None, profile=PROFILE, rows=(), names=None, job=None, **control):
    chosen = [rung for rung in LADDER if names is None or rung.name in names]
    return candidates(job or stages(), chosen, best or Plan(), profile, CONTROL | control, list(rows))


# ---- prediction ----


@pytest.mark.parametrize(
    ("hardware", "without"),
    [(CPU, {"decoder", "features_on", "prefetch", "attention", "fp8"}), (GPU, {"decoder"})],
    ids=["cpu", "gpu"],
)
def test_every_rung_changes_plans_that_resolve_and_predicts_an_interval(hardware, without):
    assert {rung.name for rung in LADDER if not rung.changes(Plan(), Recipe(), hardware)} == without
    assert EFFECTS.keys() <= vars(Plan()).keys()
    for rung in LADDER:
        for change in rung.changes(Plan(), Recipe(), hardware):
            assert resolve(Plan(**change), hardware).plan == Plan(**change)
            low, high = PROFILE.predict(change)
            assert 0 < low <= high and math.isfinite(high)


def test_a_prediction_goes_by_the_share_of_the_step_that_a_change_acts_on():
    assert PROFILE.predict({"cache": "disk"}) == pytest.approx((0.2 / (0.1 + 0.1 / 3), 2.0))
    assert PROFILE.predict({"fused_optimizer": True})[1] == pytest.approx(0.2 / (0.19 + 0.01 / 4))
    assert PROFILE.predict({"precision": "bf16"})[1] == pytest.approx(0.2 / (0.11 + 0.09 / 3))
    assert PROFILE.predict({"workers": 2})[1] == pytest.approx(0.2 / 0.15), "workers compete for a CPU's cores"
    beside = dataclasses.replace(PROFILE, on_cpu=False)
    assert beside.predict({"workers": 2})[1] == pytest.approx(2.0), "beside a GPU they hide all loading"
    assert PROFILE.predict({"log_every": 50}) == (1.0, 1.0), "nothing waits"


def test_what_is_kept_changes_what_the_others_are_predicted_to_gain():
    after = PROFILE.after({"cache": "disk"}, 1.9)
    assert after.step_s == pytest.approx(0.2 / 1.9)
    assert after.parts["data wait"] < 0.1 * after.step_s < PROFILE.parts["data wait"]
    assert after.predict({"channels_last": True})[1] > PROFILE.predict({"channels_last": True})[1]
    measured = PROFILE.after({"cache": "disk"}, 1.5, data_s=0.001)
    assert measured.parts["data wait"] == 0.001 and measured.step_s == pytest.approx(0.2 / 1.5)
    assert PROFILE.after({"precision": "bf16"}, 1.2).predict({"precision": "bf16"}) == (1.0, 1.0)


def test_the_most_promising_is_tried_first_and_the_hopeless_not_at_all():
    found = left_to_try()
    tried = [row["rung"] for row in found if not row["why"]]
    assert tried[:2] == ["cache", "cache"] and tried.index("channels_last") < tried.index("host_syncs")
    assert "speedkit" not in tried and {row["rung"] for row in found} == {rung.name for rung in LADDER}
    loaded = Profile({"data wait": 0.0001, "forward": 0.1}, {})
    why = {row["rung"]: row["why"] for row in left_to_try(profile=loaded)}
    assert why["cache"] == "not tried: it could gain 1.001 at most" and not why["channels_last"]
    assert "nothing to try on top of cache=ram" in left_to_try(Plan(cache="ram"), names=["workers"])[0]["why"]


def test_compiling_is_not_tried_where_each_batch_has_another_shape():
    assert "5 shapes" in left_to_try(names=["compile"], shapes=5)[0]["why"]
    assert not left_to_try(names=["compile"])[0]["why"]


def test_a_rejected_rung_is_tried_once_more_when_it_promises_more():
    (first,) = left_to_try(names=["channels_last"])
    slow = first | {"ratio": 1.01, "low": 0.99, "noise_floor": 1.02}
    assert left_to_try(names=["channels_last"], rows=[slow]) == []
    computing = Profile({"data wait": 0.001, "forward": 0.03, "backward": 0.06}, {})
    (again,) = left_to_try(profile=computing, names=["channels_last"], rows=[slow])
    assert again["stage"] == first["stage"] + " again"
    assert left_to_try(profile=computing, names=["channels_last"], rows=[slow, again]) == []
    unequal = slow | {"low": 1.05}
    assert left_to_try(profile=computing, names=["channels_last"], rows=[unequal]) == [], "it was fast enough"


# ---- time ----


def test_comparisons_share_what_is_left_but_none_is_left_out_for_the_sake_of_later_ones():
    found = [affordable_pairs(left_s, [2.0, 2.0, 50.0], 0.2, 12, 60) for left_s in range(120)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 60 and 12 < found[75] < 60
    alone = [affordable_pairs(left_s, [2.0], 0.2, 12, 60) for left_s in range(120)]
    assert [pairs > 0 for pairs in found] == [pairs > 0 for pairs in alone]


def test_what_takes_too_long_to_set_up_gives_way_to_what_does_not():
    slow, quick = ({"set_up_s": set_up_s, "predicted_low": 1.0, "predicted_high": 1.5} for set_up_s in (400.0, 2.0))
    assert affordable(stages(1000.0), [slow, quick], [], CONTROL, PROFILE)[0] is slow
    assert affordable(stages(500.0), [slow, quick], [], CONTROL, PROFILE)[0] is quick
    job, large = dataclasses.replace(stages(500.0), pairs=60), quick | {"predicted_high": 3.0}
    assert affordable(job, [quick], [], CONTROL, PROFILE)[1] == 60
    assert affordable(job, [large], [], CONTROL, PROFILE)[1] == 24, "a large gain is seen sooner"
    assert affordable(stages(4.0), [quick], [{"kept": False}], CONTROL, PROFILE) == (None, 0)


def test_a_training_too_long_for_the_budget_gets_fewer_steps_and_test_items():
    assert affordable_training(100.0, 400, 0.1, 20.0) == (400, 1)
    steps, every = affordable_training(10.0, 400, 0.1, 20.0)
    assert every > 1 and steps * 0.1 + 20.0 / every == pytest.approx(10.0, abs=0.2)
    assert affordable_training(-5.0, 400, 0.1, 20.0)[0] == 1


def test_closing_takes_precedence_but_no_more_than_half_of_the_budget():
    short, long = (closing.closing_s(stages(budget_s), CONTROL, 3, 0.1) for budget_s in (100.0, 10_000.0))
    assert short == 50.0 and 200 * 3 * 0.3 < long < 1000
    assert closing.closing_s(stages(10_000.0), CONTROL, 1, 0.1) < long, "one rung has nothing to interact with"


# ---- parity, quality, payback ----


def test_parity_is_strict_where_bits_are_promised_and_fair_where_losses_are():
    reference, other = [1.0, 0.9, 0.8], [1.1, 1.0, 0.6]
    assert parity("bit-equal", reference, reference, other).passed
    nudged = [1.0, 0.9, 0.8 + 1e-9]
    assert not parity("bit-equal", nudged, reference, other).passed
    assert parity("loss-equal", nudged, reference, other).passed
    assert not parity("loss-equal", [2.0, 1.9, 1.8], reference, other).passed
    assert parity("order-equal", reference[::-1], reference, [1.1, 1.0, 0.7]).passed
    assert not parity("order-equal", [2.0, 0.9, 0.8], reference, [1.1, 1.0, 0.7]).passed


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


def test_payback_counts_what_it_takes_to_prepare():
    found = payback(8, 100.0, 25.0, {"cache": 10.0, "compile": 20.0})
    assert found["final_s"] == 55.0 and found["saved_s"] == 45.0
    at_s = found["pays_back_after_s"]
    assert (at_s - 30) / 25.0 == pytest.approx(at_s / 100.0), "as much of the training is done by then"
    assert payback(8, 100.0, 25.0, {"compile": 80.0})["pays_back_after_s"] is None
    assert payback(8, 100.0, 101.0, {"cache": 0.0})["pays_back_after_s"] is None


# ---- the climb itself ----


def test_compare_finds_a_planted_slowdown_and_keeps_the_losses():
    work = tiny.points(train=256, size=32, hidden=128)
    slow = tiny.slowed(work, seconds=0.003)
    found = compare(work, Plan(), Plan(), workload_b=slow, pairs=16, window_s=0.04, names=("plain", "slowed"))
    assert found.slower and found.ratio < 1 and not found.faster
    assert found.losses_a == found.losses_b
    assert len(found.seconds_a) == len(found.seconds_b) == 16


OPTIONS = {"pairs": 6, "window_s": 0.01, "seeds": 2}


def test_climb_keeps_only_what_is_proven_and_leaves_all_of_its_sections(tmp_path, capsys):
    work = tiny.points(train=64, test=32, epochs=2)
    options = {"out": tmp_path / "climb", "cache_dir": tmp_path / "cache", **OPTIONS}
    record = climb_function(work, rungs=("workers", "cache", "host_syncs"), **options)
    assert validate_record(record) == []
    for row in record["rungs"]:
        assert row["why"]
        if row["kept"]:
            assert row["low"] > row["noise_floor"] >= 1
    assert [row["rung"] for row in record["dropped"]] == [row["rung"] for row in record["rungs"] if row["kept"]]
    for side in ("baseline", "final"):
        rows = record["ledgers"][side]["rows"]
        assert {row["cause"] for row in rows} <= set(CAUSES) and sum(row["share"] for row in rows) == pytest.approx(1)
        assert record["roofline"][side]["flops_per_step"] > 0
    assert record["payback"]["epochs"] == 2 and record["payback"]["baseline_s"] > 0
    shown = capsys.readouterr().out
    assert "A/A noise floor" in shown and "times as fast as plain PyTorch" in shown
    assert climb_function(work, resume=True, **options) == record
    with pytest.raises(UsageError, match="another workload, data set or recipe"):
        climb_function(tiny.points(train=80), resume=True, **options)
    with pytest.raises(UsageError, match="already holds a climb run"):
        climb_function(work, **options)
    write_json(tmp_path / "climb" / NAME, read_json(tmp_path / "climb" / NAME) | {"version": 1})
    with pytest.raises(UsageError, match=r"another version of speedkit \(format 1"):
        climb_function(work, resume=True, **options)


def test_what_does_not_lose_by_being_dropped_is_dropped(tmp_path):
    job = stages(work=tiny.points(train=256, size=64, hidden=128), device="cpu", cache_dir=tmp_path)
    job = dataclasses.replace(job, window_s=0.01, pairs=12)
    changes = ({"micro_batch": 1}, {"validate_every": 3}, {"micro_batch": None}, {"validate_every": 0})
    kept = [{"rung": "", "change": str(fields), "fields": fields, "kept": True} for fields in changes]
    found = closing.recheck(job, kept, CONTROL, 0.001)
    replaced, useless, worth, last = (row["why"] for row in found)
    assert replaced == useless == "another rung has replaced it"
    assert worth == "slower without it" and found[2]["high"] < 1
    assert "kept last" in last
    found = closing.recheck(job, [kept[1], kept[2], kept[2] | {"fields": {"log_every": 10}}], CONTROL, 0.001)
    assert found[0]["why"].startswith("dropped") and found[0]["high"] >= 1
    assert plan_of([row for row in found if row["kept"]]) == Plan()


@pytest.mark.slow
@pytest.mark.skipif(not this_machine().supports("compile"), reason="nothing can be compiled here")
def test_compiling_is_measured_cold_and_paid_back(tmp_path):
    """Also after the naive plan's ledger, whose look into each operator must not leave compiled code switched off."""
    work, before = tiny.points(train=256, size=64, hidden=64, batch_size=32), compilations()
    options = {**OPTIONS, "cache_dir": tmp_path, "pairs": 6}
    record = climb_function(work, rungs=("compile",), progress=False, **options)
    assert compilations() > before
    tried = [row for row in record["rungs"] if row["ratio"]]
    assert tried and all(row["compile_s"] > 0.5 for row in tried)
    assert not any(row["compiled_in_windows"] for row in record["measurements"])
    kept = [row["compile_s"] for row in tried if row["kept"]]
    assert record["payback"]["prepare_s"]["compile"] == max(kept, default=0.0)


@pytest.mark.slow
def test_a_killed_climb_goes_on_where_it_stopped(tmp_path):
    """SIGKILL after the first rung: what was measured is neither lost nor measured again."""
    out = tmp_path / "climb"
    program = (
        "import sys, tiny; from speedkit import climb; "
        "print(climb(tiny.points(train=64, test=32), out=sys.argv[1], cache_dir=sys.argv[2], resume=True, "
        "device='cpu', rungs=('host_syncs', 'micro_batch', 'channels_last'), progress=True, pairs=6, "
        "window_s=0.01, seeds=2)['spent_s'])"
    )
    words = [sys.executable, "-u", "-c", program, str(out), str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        rungs = 0
        for line in process.stdout:
            rungs += line.startswith("rung ")
            if rungs == 2:  # the first has been noted down
                process.send_signal(signal.SIGKILL)
                break
    before = read_json(out / NAME)
    assert any(stage.startswith("rung ") for stage in before["stages"]) and not (out / "record.json").exists()
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    record, after = read_json(out / "record.json"), read_json(out / NAME)
    assert validate_record(record) == []
    assert all(after["stages"][stage] == result for stage, result in before["stages"].items())
    assert float(done.stdout.splitlines()[-1]) > before["spent_s"]
    assert "naive baseline" not in done.stdout


# ---- bad input ----


def raising(model, batch, recipe):
    raise ValueError("no such class: 7")


def no_tensor(model, batch, recipe):
    return 1.0, model(batch[0])


def frozen():
    return tiny.make_model(8, 16, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"loss": raising}, "ValueError: no such class: 7; its loss"),
        ({"loss": no_tensor}, "a tensor of one number"),
        ({"model": frozen}, "no trainable parameter"),
    ],
    ids=["raises", "no-tensor", "frozen"],
)
def test_a_workload_that_cannot_be_trained_is_told_so_in_a_sentence(fault, message, tmp_path):
    with pytest.raises(SpeedkitError, match=message):
        climb_function(dataclasses.replace(tiny.points(), **fault), out=tmp_path / "climb", progress=False, **OPTIONS)


def interrupted(model, batch, recipe):
    raise Interrupted("stopped by SIGTERM", signal.SIGTERM)


def test_being_stopped_is_no_reason_to_reject_a_rung(tmp_path):
    job = stages(work=dataclasses.replace(tiny.points(), loss=interrupted), device="cpu", cache_dir=tmp_path)
    with pytest.raises(Interrupted):
        closing.measured(job, Plan(), Plan(log_every=50), ("a", "b"), 6, "rung")


def in_another_shape(batch, generator):
    count = int(torch.randint(1, len(batch[0]) + 1, (), generator=generator))
    return tuple(tensor[:count] for tensor in batch)


def test_a_workload_of_one_batch_whose_shape_always_changes_is_climbed(tmp_path):
    work = tiny.points(train=10, test=4, augment=in_another_shape)
    record = climb_function(work, rungs=("compile", "host_syncs"), out=tmp_path / "climb", progress=False, **OPTIONS)
    assert validate_record(record) == []
    why = [row["why"] for row in record["rungs"] if row["rung"] == "compile"]
    assert why and all("shapes, each of which would be compiled anew" in reason for reason in why)


def one_size(model, batch, recipe):
    batch[0].view(16, -1)  # RuntimeError for any other number of samples
    return tiny.loss(model, batch, recipe)


def test_a_plan_that_the_model_cannot_take_is_a_reason_and_no_end(tmp_path):
    job = stages(work=dataclasses.replace(tiny.points(train=64), loss=one_size), device="cpu", cache_dir=tmp_path)
    why = closing.measured(job, Plan(), Plan(micro_batch=3), ("a", "b"), 6, "rung")
    assert why.startswith("failed: RuntimeError: shape '[16, -1]' is invalid")


def test_a_budget_too_short_for_one_rung_keeps_the_baseline_and_says_so(tmp_path):
    work, out = tiny.points(train=64, test=32, epochs=1), tmp_path / "climb"
    with pytest.raises(UsageError, match=r"too short to try one rung .* at least \d+ s; what was measured is kept"):
        climb_function(work, budget_s=0.1, rungs=("host_syncs",), out=out, progress=False, **OPTIONS)
    assert read_json(out / NAME)["stages"]["control"]["step_s"] > 0
    with pytest.raises(UsageError, match="did you mean cache"):
        climb_function(work, rungs=("cahce",))
