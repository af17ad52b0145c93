"""The climb's judgement: what is tried, in which order, what is kept or rejected, and how equal quality is decided."""

import dataclasses
import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from speedkit import climb as climb_function
from speedkit import proof, trials
from speedkit.climb import measure_control
from speedkit.climb_state import NAME, ClimbState, measured
from speedkit.clock import compilations
from speedkit.errors import Interrupted, UsageError
from speedkit.files import read_json, write_json
from speedkit.hardware import Hardware, this_machine
from speedkit.ladder import EFFECTS, LADDER, acts_on, plan_of, predict
from speedkit.measure.compare import compare
from speedkit.measure.quality import NaiveCurves, fold, parity, payback, quality_of, time_to_quality
from speedkit.measure.schema import validate_record
from speedkit.measure.trace import CAUSES
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.trials import candidate

CPU = Hardware(device=torch.device("cpu"), cores=2, cpu_flags=("avx512_bf16",), compiler="g++", python_headers=True)
GPU = dataclasses.replace(CPU, device=torch.device("cuda"), gpu="H200", compute_capability=(9, 0), triton=True)
# Of a step of 200 ms, half of which is loading.
SHARES = {"data wait": 0.5, "forward": 0.15, "backward": 0.3, "optimizer": 0.05}
MATMUL = {"fp32": 1e11, "bf16": 3e11}
CONTROL = {"step_s": 0.2, "shapes": 1}


def job(work=None, hardware=CPU, horizon=10_000, cache_dir=None, **options):
    work = work or tiny.points(train=3200, test=2, epochs=1)
    settings = {"budget_s": 1000.0, "pairs": 20, "seeds": 3, "device": "cpu", "out": None} | options
    state = {"stages": {}, "spent_s": 0.0}
    return ClimbState(
        workload=work,
        recipe=work.recipe,
        hardware=hardware,
        horizon=horizon,
        cache_dir=cache_dir,
        say=lambda text: None,
        state=state,
        **settings,
    )


def candidates(rung, best=None, of=None, **control):
    """Return the rows of what the rung of this name would change on top of `best`."""
    of, best = of or job(), best or Plan()
    (rung,) = [one for one in LADDER if one.name == rung]
    return [
        candidate(of, rung, change, best, shares=SHARES, control=CONTROL | control, matmul=MATMUL)
        for change in rung.changes(best, of.recipe, of.hardware) or [{}]
    ]


# ---- prediction ----


@pytest.mark.parametrize(
    ("hardware", "without"),
    [(CPU, {"decoder", "features_on", "prefetch", "attention", "fp8"}), (GPU, {"decoder", "micro_batch", "fp8"})],
    ids=["cpu", "gpu"],
)
def test_every_rung_changes_plans_that_resolve_and_predicts_an_interval(hardware, without):
    assert {rung.name for rung in LADDER if not rung.changes(Plan(), Recipe(), hardware)} == without
    assert EFFECTS.keys() <= vars(Plan()).keys()
    for rung in LADDER:
        for change in rung.changes(Plan(), Recipe(), hardware):
            assert resolve(Plan(**change), hardware).plan == Plan(**change)
            low, high = predict(change, SHARES, matmul=MATMUL)
            assert 0 < low <= high and math.isfinite(high)


def test_a_prediction_goes_by_the_share_of_the_step_that_a_change_acts_on():
    assert predict({"cache": "disk"}, SHARES, matmul=MATMUL) == pytest.approx((1 / (0.5 + 0.5 / 3), 2.0))
    assert predict({"fused_optimizer": True}, SHARES, matmul=MATMUL)[1] == pytest.approx(1 / (0.95 + 0.05 / 4))
    assert predict({"precision": "bf16"}, SHARES, matmul=MATMUL)[1] == pytest.approx(1 / (0.55 + 0.45 / 3**0.3))
    assert predict({"bucket": True}, SHARES, matmul=MATMUL, frames=2.0) == pytest.approx((1 / 0.775, 1 / 0.775))
    assert predict({"workers": 2}, SHARES, matmul=MATMUL)[1] == pytest.approx(1 / 0.75), "they take a CPU's own cores"
    assert predict({"workers": 2}, SHARES, matmul=MATMUL, on_cpu=False)[1] == pytest.approx(2.0), "all is hidden"
    assert predict({"log_every": 50}, SHARES, matmul=MATMUL) == (1.0, 1.0), "nothing waits"


def test_what_need_not_be_tried_says_why():
    assert "nothing to try on top of cache=disk" in candidates("workers", Plan(cache="disk"))[0]["why"]
    assert candidates("precision", Plan(precision="bf16"))[0]["why"].startswith("nothing to try")
    (syncs,) = candidates("host_syncs", Plan(fused_optimizer=True))
    assert syncs["why"] == "not tried: it could gain 1.000 at most"
    assert "5 shapes" in candidates("compile", shapes=5)[0]["why"]
    assert not candidates("compile")[0]["why"]
    (short,) = candidates("compile", of=job(horizon=100))
    assert "would save 2 s of 100 steps at most" in short["why"] and "--horizon" in short["why"]


# ---- parity, quality, payback ----


def test_parity_is_strict_where_bits_are_promised_and_fair_where_losses_are():
    reference, other = [1.0, 0.9, 0.8], [1.1, 1.0, 0.6]
    assert parity("bit-equal", reference, reference, other).passed
    nudged = [1.0, 0.9, 0.8 + 1e-9]
    assert not parity("bit-equal", nudged, reference, other).passed
    assert parity("loss-equal", nudged, reference, other).passed
    assert not parity("loss-equal", [2.0, 1.9, 1.8], reference, other).passed
    # Other batches scatter more than another seed does; what moves their mean is another matter.
    falling = [2.0 - 0.1 * step for step in range(16)]
    shuffled = [loss + (0.2 if step % 2 else -0.18) for step, loss in enumerate(falling)]
    assert parity("order-equal", shuffled, falling, falling).passed
    assert not parity("order-equal", [loss + 0.3 for loss in shuffled], falling, falling).passed


def curves(baseline, final, step_s=(1.0, 0.25), loss=0.1):
    def runs(values, each_s):
        return [
            {"seed": seed, "points": [[each_s, value / 2], [2 * each_s, value]], "value": value, "loss": loss}
            for seed, value in enumerate(values)
        ]

    return {"baseline": runs(baseline, step_s[0]), "final": runs(final, step_s[1])}


@pytest.mark.parametrize(
    ("final", "decision"),
    [
        ([0.900, 0.905, 0.905], "as good"),
        ([0.85, 0.86, 0.86], "worse"),
        ([0.99, 0.80, 0.92], "not decided"),
        ([0.90], "not tested"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quality_is_shown_not_assumed(final, decision):
    quality = quality_of(tiny.points(test=400), curves([0.90, 0.905, 0.90], final))
    assert quality["decision"] == decision and quality["passed"] == (decision == "as good")
    assert (quality["seeds_needed"] or 0) > 3 or decision != "not decided"


def test_few_test_items_are_judged_in_folds_and_by_the_probability_of_the_right_class():
    work = tiny.points(train=80, test=20)
    folds = [fold(work, number) for number in range(6)]
    assert folds[0] is work is folds[5]
    everything = sorted(item.path for item in [*work.train, *work.test])
    assert sorted(item.path for one in folds[:5] for item in one.test) == everything
    assert all(sorted(item.path for item in [*one.train, *one.test]) == everything for one in folds)
    large = tiny.points(train=80, test=400)
    assert fold(large, 1) is large

    # Folds differ by more than plans do: pairs cancel that, and three are not enough to tell flips of single items.
    scores = [0.80, 0.95, 0.85]
    assert quality_of(work, curves(scores, [0.80, 0.95, 0.855]))["decision"] == "as good"
    flipped = curves(scores, [0.85, 0.90, 0.85])
    shown = quality_of(work, flipped)
    assert shown["decision"] == "as good" and shown["lower"] < -work.margin < shown["likelihood"]["lower"]
    for number, run in enumerate(flipped["final"]):
        run["loss"] = 0.05 + 0.05 * number
    undecided = quality_of(work, flipped)
    assert undecided["decision"] == "not decided" and undecided["items_needed"] > 60


def test_a_naive_plans_trainings_are_kept_for_the_same_recipe_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    work = tiny.points()
    naive = NaiveCurves(work, work.recipe, CPU)
    naive.add([{"seed": 0, "value": 0.5}])
    assert NaiveCurves(work, work.recipe, CPU).runs == [{"seed": 0, "value": 0.5}]
    longer = dataclasses.replace(work.recipe, epochs=9)
    other_loss = dataclasses.replace(work, loss=raising)
    assert NaiveCurves(work, longer, CPU).runs == NaiveCurves(other_loss, work.recipe, CPU).runs == []


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
    found = compare(work, Plan(), Plan(), workload_b=slow, names=("plain", "slowed"))
    assert found.slower and found.ratio < 1 and not found.faster
    assert found.losses_a == found.losses_b and len(found.losses_a) == 16
    assert len(found.seconds_a) == len(found.seconds_b) >= 10


OPTIONS = {"pairs": 12, "seeds": 2}


def test_climb_keeps_only_what_is_proven_and_leaves_all_of_its_sections(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))
    work = tiny.points(train=64, test=32, epochs=2)
    options = {"out": tmp_path / "climb", **OPTIONS}
    record = climb_function(work, rungs=("workers", "cache", "host_syncs"), **options)
    assert validate_record(record) == []
    for row in record["rungs"]:
        assert row["why"]
        assert not row["kept"] or row["low"] > 1
    assert [row["rung"] for row in record["dropped"]] == [row["rung"] for row in record["rungs"] if row["kept"]]
    for side in ("baseline", "final"):
        rows = record["ledgers"][side]["rows"]
        assert {row["cause"] for row in rows} <= set(CAUSES) and sum(row["share"] for row in rows) == pytest.approx(1)
        assert record["roofline"][side]["flops_per_step"] > 0
    assert record["payback"]["epochs"] == 2
    assert "naive baseline" in capsys.readouterr().out
    assert climb_function(work, resume=True, **options) == record
    with pytest.raises(UsageError, match="another workload, data set or recipe"):
        climb_function(tiny.points(train=80), resume=True, **options)
    with pytest.raises(UsageError, match="already holds a climb run"):
        climb_function(work, **options)
    write_json(tmp_path / "climb" / NAME, read_json(tmp_path / "climb" / NAME) | {"version": 1})
    with pytest.raises(UsageError, match=r"another version of speedkit \(format 1"):
        climb_function(work, resume=True, **options)


def slowly(load, item):
    time.sleep(0.002)
    return load(item)


def test_what_pays_is_kept_proven_and_trained_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    work = tiny.points(train=64, test=32, epochs=8)
    load = functools.partial(slowly, work.load)
    record = climb_function(dataclasses.replace(work, load=load), rungs=("cache",), out=tmp_path / "climb", **OPTIONS)
    assert [row["kept"] for row in record["rungs"]] == [True]
    assert (
        record["speedup"]["low"] > 2
        and record["plan"]["cache"] == "disk"
        and record["headline"] in ("baseline", "careful")
    )
    assert record["quality"]["decision"] in ("as good", "not decided") and len(record["quality"]["final"]) >= 2
    assert record["payback"]["prepare_s"]["cache"] > 0 and record["time_to_quality"]["ratio"] > 1


def test_a_rung_is_held_against_the_best_plan_and_not_against_what_the_naive_one_learned_from(tmp_path):
    of = job(tiny.points(train=256), cache_dir=tmp_path)
    elsewhere = {"losses": [9.0] * 16, "other_seed": [9.1] * 16, "step_s": 1.0, "shapes": 1}
    row = {"rung": "shards", "change": "", "fields": {"validate_every": 3}, "promises": "bit-equal", "stage": "x"}
    row |= {"predicted_low": 1.0, "predicted_high": 2.0, "compiles": False}
    assert trials._try(of, row, Plan(cache="disk", cache_dtype="float16"), elsewhere)["parity"] == "losses bit-equal"


def test_a_rung_is_left_out_only_where_a_later_one_may_have_taken_its_gain(tmp_path):
    of = job(tiny.points(train=256, size=64, hidden=128), cache_dir=tmp_path)
    fields = ({"channels_last": True}, {"validate_every": 3}, {"micro_batch": 2}, {"channels_last": True})
    kept = [{"rung": "", "change": str(one), "stage": str(one), "fields": one, "kept": True} for one in fields]
    assert acts_on(fields[2]) & acts_on(fields[3]) and not acts_on(fields[1])
    rows = proof.ablate(of, kept)
    assert rows[0]["why"] == rows[3]["why"] == "another rung has replaced it"
    assert rows[1]["why"] == "no later rung acts on the same part of a step"
    assert rows[2]["why"].startswith("dropped") and rows[2]["ratio"] > 1, "eight small parts take longer than one whole"
    assert plan_of([row for row in rows if row["kept"]]) == Plan(validate_every=3, channels_last=True)


def test_what_trains_the_naive_plans_scores_is_only_what_moves_data():
    fast = Plan(cache="disk", cache_dtype="float16", precision="bf16", channels_last=True, fused_optimizer=True)
    assert proof.same_bits(fast) == Plan(cache="disk", cache_dtype="float32")
    assert proof.safe(fast) == dataclasses.replace(fast, cache_dtype="float32", precision="default")


@pytest.mark.slow
@pytest.mark.skipif(not this_machine().supports("compile"), reason="nothing can be compiled here")
def test_compiling_is_measured_cold_and_paid_back(tmp_path):
    """Also after the naive plan's ledger, whose look into each operator must not leave compiled code switched off."""
    work, before = tiny.points(train=256, size=64, hidden=64, batch_size=32), compilations()
    options = {**OPTIONS, "cache_dir": tmp_path, "horizon": 10**7}
    record = climb_function(work, rungs=("compile",), progress=False, **options)
    assert compilations() > before
    tried = [row for row in record["rungs"] if row["ratio"]]
    assert tried[0]["compile_s"] > 0.5, "later rungs are held against a best plan that may be compiled too"
    kept = [row["compile_s"] for row in tried if row["kept"]]
    assert record["payback"]["prepare_s"]["compile"] == max(kept, default=0.0)


@pytest.mark.slow
def test_a_killed_climb_goes_on_where_it_stopped(tmp_path):
    """SIGKILL after the first rung: what was measured is neither lost nor measured again."""
    out = tmp_path / "climb"
    program = (
        "import sys, tiny; from speedkit import climb; "
        "print(climb(tiny.points(train=64, test=32), out=sys.argv[1], cache_dir=sys.argv[2], resume=True, "
        "device='cpu', rungs=('host_syncs', 'micro_batch', 'channels_last'), progress=True, pairs=12, "
        "seeds=2)['spent_s'])"
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


def interrupted(model, batch, recipe):
    raise Interrupted("stopped by SIGTERM", signal.SIGTERM)


def test_being_stopped_is_no_reason_to_reject_a_rung(tmp_path):
    of = job(dataclasses.replace(tiny.points(), loss=interrupted), cache_dir=tmp_path)
    with pytest.raises(Interrupted):
        measured(of, (Plan(), Plan(log_every=50)), ("a", "b"), "rung")


def in_another_shape(batch, generator):
    count = int(torch.randint(1, len(batch[0]) + 1, (), generator=generator))
    return tuple(tensor[:count] for tensor in batch)


def test_batches_whose_shapes_always_change_are_noticed(tmp_path):
    work = tiny.points(train=10, test=4, augment=in_another_shape)
    assert measure_control(job(work, cache_dir=tmp_path))["shapes"] > 2


def one_size(model, batch, recipe):
    batch[0].view(16, -1)  # RuntimeError for any other number of samples
    return tiny.loss(model, batch, recipe)


def test_a_plan_that_the_model_cannot_take_is_a_reason_and_no_end(tmp_path):
    of = job(dataclasses.replace(tiny.points(train=64), loss=one_size), cache_dir=tmp_path)
    why = measured(of, (Plan(), Plan(micro_batch=3)), ("a", "b"), "rung")
    assert why.startswith("failed: RuntimeError: shape '[16, -1]' is invalid")


def test_a_budget_too_short_for_one_rung_keeps_the_baseline_and_says_so(tmp_path):
    work, out = tiny.points(train=64, test=32, epochs=1), tmp_path / "climb"
    with pytest.raises(UsageError, match=r"too short to try one rung .* at least \d+ s; what was measured is kept"):
        climb_function(work, budget_s=0.1, rungs=("host_syncs",), out=out, progress=False, **OPTIONS)
    assert read_json(out / NAME)["stages"]["control"]["step_s"] > 0
    with pytest.raises(UsageError, match="did you mean cache"):
        climb_function(work, rungs=("cahce",))
