"""A tuning's judgement: what is tried, in which order, what is kept or rejected, and how equal quality is decided."""

import dataclasses
import functools
import os
import re
import signal
import subprocess
import time
import types

import pytest
import tiny
import torch
from faults import limited
from tiny import CPU_BF16 as CPU
from tiny import H100 as GPU
from torch import nn

from speedkit import tune as tune_function
from speedkit.busy import others, threads_beside
from speedkit.errors import BadItem, Interrupted, TooManyBad, UsageError
from speedkit.files import claim_folder, folder_held, read_json
from speedkit.lab.records import validate_record
from speedkit.lab.workloads import load_workload
from speedkit.machine import this_machine
from speedkit.measure import tune as tune_module
from speedkit.measure.candidates import Trial, candidates, horizon_of
from speedkit.measure.checked_file import read_checked, write_checked
from speedkit.measure.optimizations import OPTIMIZATIONS, changed, named, text
from speedkit.measure.predict import EFFECTS, computing_gains, predict
from speedkit.measure.quality import same_losses
from speedkit.measure.roofline import Operators
from speedkit.measure.stages import NAME, Stage, Tuning
from speedkit.measure.trials import measure
from speedkit.measure.tune import ablate, final_comparison, payback, stalled
from speedkit.measure.warm_up import compilations
from speedkit.plan import Plan

# Of a step of 200 ms, half of which is loading.
SHARES = {"data wait": 0.5, "forward": 0.15, "backward": 0.3, "optimizer": 0.05}
OPTIONS = {"pairs": 12, "seeds": 2, "progress": False}


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch):
    """Trainings of one test's baseline are not another's."""
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))


def job(work=None, **options):
    work, where = work or tiny.points(train=3200, test=2, epochs=1), {"device": "cpu", "cache_dir": None}
    limits = {"budget_s": 1000.0, "pairs": 20, "seeds": 3, "horizon": 10_000, "hardware": CPU, "out": None} | options
    return Tuning(workload=work, recipe=work.recipe, options=where, say=lambda text: None, **limits)


def trial(fields, promises="loss-equal"):
    prediction = {"predicted_low": 1.0, "predicted_high": 2.0}
    return Trial(optimization="", change=str(fields), fields=fields, promises=promises, why="", kept=True, **prediction)


# ---- candidates ----


@pytest.mark.parametrize(
    ("hardware", "no_candidates"),
    [(dataclasses.replace(CPU, threads=4), {"fp8", "features_on"}), (tiny.H100, {"fp8", "threads"})],
)
def test_every_optimization_changes_fields_of_the_plan(hardware, no_candidates):
    changes = {optimization.name: optimization.changes(Plan(), hardware) for optimization in OPTIMIZATIONS}
    assert {name for name in changes if not changes[name]} == no_candidates
    assert all(Plan(**change) != Plan() for several in changes.values() for change in several)
    assert EFFECTS.keys() <= vars(Plan()).keys()


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        ({"cache": "disk", "workers": 0}, 1 / (0.5 + 0.5 / 3), 2.0),
        ({"precision": "bf16"}, 1 / (0.55 + 0.45 / 1.5), 1 / (0.55 + 0.45 / 3)),
        ({"precision": "fp16"}, 1.0, 1 / (0.55 + 0.45 / 2)),
        ({"cache": "disk", "cache_dtype": "float16"}, 1 / (0.5 + 0.5 / 3), 1 / (0.05 + 0.45 / 1.1)),
        ({"workers": 2}, 1 / (0.5 + 0.5 / 0.7), 1 / 0.75),
    ],
    ids=str,
)
def test_a_prediction_goes_by_the_share_of_the_step_that_a_change_acts_on(change, low, high):
    assert predict(change, SHARES, frames=2.0, gains={"bf16": (1.5, 3.0)}) == pytest.approx((low, high))


def test_what_computes_is_predicted_by_the_operators_of_a_step_and_the_peaks():
    """100 FLOP at 10 or 40 a second in products, 30 bytes at 10 a second elsewhere; convolutions move 5 more."""
    operators = Operators({"convolution": 80, "attention": 20}, {"convolution": 5, "attention": 5, "add": 30})
    limits = {"matmul_fp32": 10.0, "matmul_bf16": 40.0, "memory_bandwidth": 10.0}
    gains = computing_gains(operators, limits, "fp32")
    assert gains["bf16"] == pytest.approx((13 / 11.5, 13 / 4))  # only fewer bytes, and faster products too
    assert gains["compile"] == pytest.approx((0.9, 13 / 11))  # a third of the bytes outside of products
    assert gains["attention"] == pytest.approx((0.95, 13 / 12))  # half of its two seconds
    assert gains["channels_last"] == pytest.approx((0.95, 13 / 12))  # twice what a convolution moves
    assert computing_gains(operators, limits, "bf16")["bf16"] == pytest.approx((1.0, 1.0))


def candidates_of(of, optimization, best, shares=SHARES, step_s=0.2):
    """The candidates of an optimization of the `best` plan, a step of which takes `step_s` in these shares."""
    rows = [{"cause": cause, "share": share} for cause, share in shares.items()]
    of.results |= {
        Stage("computing", plan=best.precision): {},
        Stage("breakdown", plan=text(changed(best))): {"rows": rows, "step_s": step_s},
    }
    return candidates(of, named([optimization]), best)


CONVOLUTION = dataclasses.replace(tiny.points(), model=lambda: nn.Conv2d(1, 4, 3))
CACHED, WITHOUT_BF16 = Plan(cache="disk"), dataclasses.replace(CPU, cpu_flags=())


@pytest.mark.parametrize(
    ("optimization", "best", "options", "why"),
    [
        ("compile", Plan(), {}, ""),
        ("workers", CACHED, {}, "a cached batch is one gather from memory; .*"),
        ("channels_last", Plan(), {}, "the model has no two-dimensional convolution"),
        ("precision", Plan(), {"hardware": WITHOUT_BF16}, "bf16 needs a CPU with avx512_bf16 or .*"),
        ("channels_last", Plan(), {"work": CONVOLUTION}, ""),
        ("fp8", Plan(precision="bf16", compile="default"), {"hardware": GPU}, "the model has no linear layer that .*"),
        ("host_syncs", Plan(fused_optimizer=True), {}, "not tried: it could gain 1.000 at most"),
        ("compile", Plan(), {"horizon": 100}, ""),  # measured all the same: somebody trains longer
        (
            "compile",
            Plan(),
            {"budget_s": 60.0},
            "not tried: compiling takes about 45 s; --budget 8[2-6] has room for it",
        ),
    ],
)
def test_what_need_not_be_tried_says_why(optimization, best, options, why):
    proposed = candidates_of(job(**options), optimization, best)
    (candidate,) = [trial for trial in proposed if not trial.joint and "compile_scope" not in trial.fields]
    assert re.fullmatch(why, candidate.why)


def test_what_compiling_takes_is_known_once_something_was_compiled():
    of = job(horizon=1000, budget_s=300.0)
    assert [(trial.why, trial.may_pay) for trial in candidates_of(of, "compile", Plan(), step_s=0.5)[1:]] == [
        ("", True)
    ]
    of.results[Stage("trial", "compile", "compile_scope=blocks")] = {"compile_s": 200.0}
    last = candidates_of(of, "compile", Plan(), step_s=0.5)[-1]
    assert "about 200 s" in last.why and not last.may_pay


@pytest.mark.parametrize(("horizon", "kept"), [(200, True), (199, False)])
def test_what_compiling_takes_is_earned_from_a_step_on_and_by_then_it_is_kept(horizon, kept):
    """A step of 0.2 s takes half as long, and 20 s more are spent before the first."""
    of, losses = job(horizon=horizon), {"losses_a": [1.0], "losses_b": [1.0]}
    told = {"faster": True, "decision": "faster", "ratio": 2.0, "low": 1.9, "high": 2.1, "step_s": (0.2, 0.1)}
    shown = types.SimpleNamespace(warmup_s_a=1.0, warmup_s_b=21.0, **told, **losses)
    of.attempt = lambda name, plans: shown
    row = measure(of, trial({"compile": "default"}), Plan(), noise=0.0)
    assert (row["pays_from_step"], row["kept"]) == (200, kept)
    assert kept or row["why"] == "faster, but pays from 200 steps on; this training has 199"


def test_beside_programs_that_use_a_core_both_plans_take_a_thread_less():
    said, hardware = [], dataclasses.replace(CPU, threads=4)
    of = job(hardware=hardware, others=lambda: {"encoder": 0.9, "indexer": 0.6})
    of.say = said.append
    assert [plan.threads for plan in of.beside_others(Plan(), Plan(threads=1), Plan(threads=4))] == [2, 1, 2]
    of.beside_others(Plan())
    assert of.state["busy"] == {"encoder": 0.9, "indexer": 0.6}
    assert said == [
        "this machine is busy: encoder (0.9 cores), indexer (0.6 cores); while it is, both plans compute with threads=2"
    ]
    quiet = job(hardware=hardware, others=lambda: {"editor": 0.2})
    assert quiet.beside_others(Plan()) == [Plan()] and not quiet.state["busy"]


def test_what_others_use_is_seen_and_what_this_process_has_started_is_not():
    def spins(command):
        return subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True, text=True)

    child = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    orphan = int(spins("bash -c 'while :; do :; done' >&- 2>&- & echo $!").stdout)
    try:
        seen = others()
    finally:
        os.kill(orphan, signal.SIGKILL)
        child.kill()
        child.wait()
    assert seen["bash"] > 0.1 and "sh" not in seen
    assert [threads_beside(used, 4) for used in (0.0, 0.3, 0.4, 1.3, 2.0, 9.0)] == [4, 4, 3, 3, 2, 1]


# Of a GPU's steps, each of 5 ms.
ON_GPU = {
    "data wait": 0.2,
    "host-to-device copy": 0.1,
    "launch-bound": 0.2,
    "sync-bound": 0.1,
    "compute-bound": 0.2,
    "bandwidth-bound": 0.1,
    "optimizer": 0.1,
}
# The optimizations that a GPU's tuning can never try, by workload.
NOT_FOR = {
    "audio": {"threads", "bucket", "attention", "fp8"},
    "image": {"threads", "bucket", "attention", "fp8", "decoder"},
    "speech": {"threads", "features_on", "channels_last"},
    "text": {"threads", "features_on", "channels_last", "bucket", "decoder"},
}
MODES = ["compile=default", "compile=reduce-overhead", "compile_scope=blocks", "compile_scope=model"]
NO_BLOCKS = {"audio", "image"}  # whose blocks have shapes of their own: compiled alone they share no code
JOINT = ["precision=bf16, compile=reduce-overhead", "channels_last=True, compile=default"]


def tried(of, *, keeps):
    """The trials of a tuning on a GPU that keeps all of them, or none."""
    trials = []
    best = Plan()
    while True:
        proposed = []
        for optimization in OPTIMIZATIONS:
            proposed += candidates_of(of, optimization.name, best, ON_GPU, step_s=0.005)
        waiting = [trial for trial in proposed if not trial.why and trial.stage not in of.results]
        if not waiting:
            return trials
        trials.append(min(waiting, key=lambda trial: trial.joint))
        of.results[trials[-1].stage] = {}
        if keeps:
            best = dataclasses.replace(best, **trials[-1].fields)


@pytest.mark.parametrize("name", NOT_FOR)
def test_a_tuning_on_a_gpu_can_try_each_optimization(name):
    work = load_workload(name, size="tiny", **({} if name == "text" else {"clips": 40}))
    steps = horizon_of(work.recipe, len(work.train), GPU)
    assert steps == 20_000 > horizon_of(work.recipe, len(work.train), CPU)
    kernels = [] if "attention" in NOT_FOR[name] else ["math"]

    def tuning(keeps):
        of = job(work, hardware=dataclasses.replace(GPU, torchcodec=True), horizon=steps)
        of.results |= {Stage("attention", plan=form): kernels for form in ("default", "bf16", "fp8")}
        of.results[Stage("frames saved by buckets")] = 1.5
        return tried(of, keeps=keeps)

    kept, rejected = tuning(True), tuning(False)
    names = {trial.optimization for trial in kept + rejected}
    assert {optimization.name for optimization in OPTIMIZATIONS} - names == NOT_FOR[name]
    changes = {part for trial in kept for part in trial.change.split(", ")}
    assert {mode for mode in MODES if mode not in changes} == set(MODES[2:] if name in NO_BLOCKS else [])
    # What does not show by itself, for the GPU waits for launches or eager layers undo it.
    joint = {trial.change for trial in rejected if trial.joint}
    assert joint == {change for change in JOINT if change.partition("=")[0] not in NOT_FOR[name]}


def test_an_attention_kernel_is_tried_where_pytorch_runs_another_by_itself():
    """As on any CPU, told that it is a GPU."""
    without = "no layer of the model takes the lengths of clips"
    for work, whys in (
        (tiny.points(train=64), ["left alone, PyTorch runs no attention here"] * 2 + [without]),
        (load_workload("text", size="tiny", clips=16), ["", "left alone, PyTorch runs flash attention here", without]),
    ):
        found = candidates_of(job(work, hardware=GPU), "attention", Plan(precision="bf16"), {"forward": 1.0})
        assert [trial.why for trial in found] == whys


# ---- losses, payback, stalls ----


def test_same_losses_is_strict_where_bits_are_promised_and_fair_where_losses_are():
    falling = [2.0 - 0.1 * step for step in range(16)]
    # Other batches scatter more than another seed does; what moves their mean is another matter.
    shuffled = [loss + (0.2 if step % 2 else -0.18) for step, loss in enumerate(falling)]
    moves = [("bit-equal", falling, 1e-9), ("loss-equal", falling, 0.2), ("order-equal", shuffled, 0.3)]
    for promised, losses, moved in moves:
        assert same_losses(promised, losses, falling, noise=0.1).passed
        assert not same_losses(promised, [loss + moved for loss in losses], falling, noise=0.1).passed


@pytest.mark.parametrize(("compile_s", "pays_back_after_s"), [(15.0, 20.0), (75.0, 100.0), (80.0, None)])
def test_payback_counts_what_it_takes_to_prepare(compile_s, pays_back_after_s):
    of, step_s = job(horizon=100), {"baseline": 1.0, "final": 0.25}
    paid = payback(of, Plan(compile="default"), compile_s=compile_s, step_s=step_s)
    assert (paid["baseline_s"], paid["prepare_s"]["compile"]) == (100.0, compile_s)
    assert paid["pays_back_after_s"] == pays_back_after_s, "as much of both trainings is done by then"


@pytest.mark.parametrize(
    ("baseline_s", "final_s", "expected"),
    [(0.5, 0.27, False), (0.5, 0.28, True), (1.2, 0.32, False), (1.2, 0.33, True)],
    ids=["as long as allowed", "longer", "on a machine that became slower", "longer than that machine explains"],
)
def test_whole_trainings_are_stalled_that_take_longer_than_the_interval_of_short_turns_allows(
    baseline_s, final_s, expected
):
    final = {"step_s": {"baseline": 1.0, "final": 0.25}, "baseline": {"ratio": 4.0, "low": 3.75, "high": 4.2}}
    assert stalled(final, {"training_step_s": {"baseline": baseline_s, "final": final_s}}) == expected
    assert not stalled(final, {"training_step_s": None}), "nothing was trained"


@pytest.mark.slow
@pytest.mark.usefixtures("every_format")
def test_a_change_that_costs_now_and_then_is_dropped_when_each_is_confirmed(monkeypatch):
    """By a clock that stands still but in the loss, which takes long in each 20th step of a training in bfloat16."""
    now_s = 0.0
    steps = 0

    def loss(model, batch, recipe):
        nonlocal now_s, steps
        now_s += 0.010
        if torch.is_autocast_enabled("cpu"):
            steps += 1
            now_s -= 0.001
            now_s += 0.100 * (steps % 20 == 0)
        return tiny.loss(model, batch, recipe)

    monkeypatch.setattr("speedkit.clock.time", types.SimpleNamespace(perf_counter=lambda: now_s))
    of = job(dataclasses.replace(tiny.points(train=3200), loss=loss))
    changes = [{"validate_every": 3}, {"precision": "bf16"}]
    plan, rows = ablate(of, [trial(change) for change in changes], confirm=True)
    assert [row["change"] for row in rows if not row["kept"]][-1] == str(changes[1])
    assert plan.precision == "default" and of.state["measurements"][1]["long_seconds_b"]


@pytest.mark.slow
def test_a_workload_that_cannot_be_sent_to_another_process_is_compared_in_this_one():
    said = []
    of = job(dataclasses.replace(tiny.points(train=64), loss=lambda *arguments: tiny.loss(*arguments)))
    of.say = said.append
    row = of.compare_apart("both", {"baseline": Plan(), "final": Plan(log_every=5)}, pairs=2, looks=())
    assert len(row["seconds_a"]) == 2 and of.state["measurements"][0]["name"] == "both"
    assert "cannot be sent to a new process" in said[0] and "measured in this process" in said[0]


# ---- the tuning itself ----


def slowly(load, item):
    time.sleep(0.002)
    return load(item)


@pytest.mark.slow
def test_tuning_keeps_only_what_is_proven_and_leaves_all_of_its_sections(tmp_path, capsys):
    work, options = tiny.points(train=64, test=32, epochs=8), OPTIONS | {"out": tmp_path / "tune", "progress": True}
    work = dataclasses.replace(work, load=functools.partial(slowly, work.load))
    record = tune_function(work, optimizations=("cache", "host_syncs", "workers"), **options)
    assert validate_record(record) == [] and "baseline" in capsys.readouterr().out
    assert record["optimizations"][0]["optimization"] == "cache" and record["plan"]["cache"] == "disk"
    assert all(row["why"] and (not row["kept"] or row["low"] > 1) for row in record["optimizations"])
    assert [row["optimization"] for row in record["dropped"]] == [
        row["optimization"] for row in record["optimizations"] if row["kept"]
    ]
    assert {"baseline", "final"} == record["breakdowns"].keys() and record["speedup"]["low"] > 2
    assert record["payback"]["prepare_s"]["cache"] > 0 and record["speedup_again"]["low"] > 2

    assert tune_function(work, resume=True, **options) == record
    with pytest.raises(UsageError, match="another workload, data set, recipe or version"):
        tune_function(tiny.points(train=80), resume=True, **options)


class Less(nn.Module):
    """A net of what its inputs are above a number that is large for float16."""

    def __init__(self, make):
        super().__init__()
        self.net = make()

    def forward(self, inputs):
        return self.net(inputs - FAR)


FAR = 60_000.0


def far(features, waveform):
    return features(waveform) + FAR


@pytest.mark.slow
def test_a_plan_that_learns_worse_is_replaced_and_the_record_says_so(monkeypatch):
    """In a cache of float16 nothing of the points is left."""
    work = tiny.points(train=64, test=256, epochs=8)
    work = dataclasses.replace(
        work,
        load=functools.partial(slowly, work.load),
        features=functools.partial(far, work.features),
        model=functools.partial(Less, work.model),
    )
    halved = Plan(cache="ram", cache_dtype="float16")
    monkeypatch.setattr(tune_module, "ablate", lambda job, accepted: (halved, []))  # as if it had been kept
    record = tune_function(work, optimizations=("host_syncs",), **OPTIONS)
    quality = record["quality"]
    assert quality["replaced"]["decision"] == "worse" and quality["decision"] == "as good"
    assert quality["replaced"]["final"] != quality["final"] == quality["baseline"][: len(quality["final"])]
    assert quality["replaced"]["change"] == "cache=ram, cache_dtype=float16"
    assert record["plan"] == dataclasses.asdict(dataclasses.replace(halved, cache_dtype="float32"))


def test_an_optimization_is_held_against_the_best_plan_and_not_against_the_baseline():
    best, change = Plan(cache="disk", cache_dtype="float16"), trial({"validate_every": 3}, "bit-equal")
    assert measure(job(tiny.points(train=256)), change, best, noise=0.0)["same_losses"].startswith(
        "losses differ by 0,"
    )


@pytest.mark.usefixtures("every_format")
@pytest.mark.parametrize(
    ("cost_s", "cost_in_bf16_s", "kept", "why"),
    [
        (0.010, 0.020, False, "dropped: not worth it any more"),
        (0.010, 0.010, False, "dropped: not worth it any more"),
        (0.020, 0.010, True, "slower without it"),
    ],
)
def test_an_optimization_is_left_out_only_where_a_later_one_may_have_taken_its_gain(
    cost_s, cost_in_bf16_s, kept, why, monkeypatch
):
    """By a clock that runs on in the loss and stands still elsewhere: no other load of the machine decides."""
    now_s = 0.0

    def loss(model, batch, recipe):
        nonlocal now_s
        now_s += cost_in_bf16_s if torch.is_autocast_enabled("cpu") else cost_s
        return tiny.loss(model, batch, recipe)

    monkeypatch.setattr("speedkit.clock.time", types.SimpleNamespace(perf_counter=lambda: now_s))
    changes = [{"channels_last": True}, {"validate_every": 3}, {"precision": "bf16"}, {"channels_last": True}]
    of = job(dataclasses.replace(tiny.points(train=256), loss=loss))
    plan, rows = ablate(of, [trial(change) for change in changes])
    assert rows[0]["why"] == rows[3]["why"] == "another optimization has replaced it"
    assert rows[1]["why"] == "no later optimization acts on the same part of a step"
    assert (rows[2]["kept"], rows[2]["why"]) == (kept, why)
    assert rows[2]["ratio"] == pytest.approx(cost_in_bf16_s / cost_s)
    assert plan == Plan(validate_every=3, channels_last=True, precision="bf16" if kept else "default")


@pytest.mark.slow
def test_nothing_slower_than_the_careful_plan_is_recommended():
    of = job(tiny.points(train=256, size=64, hidden=128, batch_size=64), pairs=10)
    final = final_comparison(of, Plan(micro_batch=1))
    assert final["plan"] == dataclasses.asdict(Plan.careful(CPU)) and final["careful"]["ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not this_machine().supports("compile"), reason="nothing can be compiled here")
def test_compiling_is_measured_cold_and_paid_back():
    """Also after the baseline's breakdown, whose look into each operator must not leave compiled code switched off."""
    work, before = tiny.points(train=256, size=64, hidden=64, batch_size=32), compilations()
    record = tune_function(work, optimizations=("compile",), horizon=10**7, **OPTIONS)
    tried = [row for row in record["optimizations"] if row["ratio"]]
    assert compilations() > before and tried[0]["compile_s"] > 0.5, "later ones may be held against a compiled plan"
    assert record["payback"]["prepare_s"]["compile"] == max([0.0, *(row["compile_s"] for row in tried if row["kept"])])


# ---- bad input ----


def test_being_stopped_is_no_reason_to_reject_an_optimization():
    stopped = limited(tiny.points(), 0, raises=Interrupted("stopped by SIGTERM", signal.SIGTERM))
    with pytest.raises(Interrupted):
        job(stopped).attempt("optimization", {"a": Plan(), "b": Plan()})


def test_a_plan_that_the_model_cannot_take_is_a_reason_and_no_end():
    of = job(limited(tiny.points(train=64), 8, raises=RuntimeError("not that many")))
    row = measure(of, trial({"micro_batch": 16}), Plan(micro_batch=8), noise=0.0)
    assert row["why"].startswith("failed: RuntimeError: not that many")


@pytest.mark.slow
def test_a_budget_too_short_for_one_optimization_says_so_and_a_longer_one_goes_on_from_what_was_measured(tmp_path):
    work, out = tiny.points(train=64, test=32, epochs=1), tmp_path / "tune"
    with pytest.raises(UsageError, match=r"too short to try one optimization: .* at least \d+ s; --resume goes on"):
        tune_function(work, budget_s=0.1, optimizations=("host_syncs",), out=out, **OPTIONS)
    before = read_checked(out / NAME, pytest.fail)
    assert [stage["result"]["resolution"] > 1 for stage in before["stages"] if stage["kind"] == "control"] == [True]
    assert before["spent_s"] > 0
    write_checked(out / NAME, before | {"spent_s": 1e4})
    record = tune_function(work, budget_s=1e5, resume=True, optimizations=("host_syncs",), out=out, **OPTIONS)
    after = read_json(out / NAME)
    assert after["stages"][: len(before["stages"])] == before["stages"] and record["spent_s"] > 1e4
    assert len(record["measurements"]) == len(after["measurements"]) > len(before["measurements"])


# ---- what is bad, and what is damaged ----


def tuned(work, out, *, resume=False, **options):
    return tune_function(work, optimizations=("host_syncs",), out=out, resume=resume, **OPTIONS | options)


def load_but(load, item):
    """Make some of the items bad: of the training set, and of the test set, which trainings alone look at."""
    if item.path in ("7", "95", "98"):
        raise BadItem(item.path, "it is not audio")
    return load(item)


BEST = Plan(cache="disk")


@pytest.fixture
def with_a_best_plan(monkeypatch):
    """As if one had been found, so that quality is tested."""
    monkeypatch.setattr(tune_module, "ablate", lambda job, accepted: (BEST, []))


@pytest.mark.slow
@pytest.mark.usefixtures("with_a_best_plan")
def test_a_tuning_and_what_it_is_resumed_to_name_what_was_left_out(tmp_path):
    work = tiny.points(epochs=1)
    bad = dict.fromkeys(("95", "98", "7"), "it is not audio") | {"caf\udce9.wav": "not recognised"}
    work = dataclasses.replace(
        work, load=functools.partial(load_but, work.load), quarantined={"caf\udce9.wav": "not recognised"}
    )
    record = tuned(work, tmp_path)
    assert record["quarantined"] == {path.replace("\udce9", "\\udce9"): why for path, why in bad.items()}
    lines = (tmp_path / "quarantine.csv").read_bytes().split()
    assert len(lines) > len(bad) and any(line.startswith(b"caf\xe9.wav,") for line in lines)
    state = read_checked(tmp_path / NAME, pytest.fail)
    state["stages"] = [stage for stage in state["stages"] if stage["kind"] != "record"]
    write_checked(tmp_path / NAME, state)  # as if it had been stopped at its end
    assert tuned(work, tmp_path, resume=True)["quarantined"] == record["quarantined"]


def test_too_many_bad_files_end_a_tuning_and_are_no_reason_against_an_optimization():
    work = tiny.points()
    of = job(dataclasses.replace(work, load=functools.partial(all_bad, work.load)))
    with pytest.raises(TooManyBad, match="96 of 96"):
        of.attempt("optimization", {"a": Plan(cache="ram"), "b": Plan()})


def all_bad(load, item):
    raise BadItem(item.path, "it is not audio")


@pytest.mark.slow
@pytest.mark.usefixtures("with_a_best_plan")
def test_damaged_files_of_a_tuning_are_set_aside_told_of_and_made_anew(tmp_path, capsys):
    work, out = tiny.points(epochs=1), tmp_path / "tune"
    record = tuned(work, out)
    kept = [*(tmp_path / "cache" / "quality").glob("*.json")]
    files = [out / "record.json", out / NAME, *kept]
    for path in files:
        path.write_text(path.read_text()[:-9])
    again = tuned(work, out, resume=True, progress=True)
    printed = capsys.readouterr().out
    assert all(f"{path} is not as" in printed for path in files), printed
    assert again["created"] >= record["created"] and read_json(files[0]) == again
    assert len(kept) == 2 and all(read_checked(path, pytest.fail) for path in files[1:])
    files[0].write_text("{")  # alone: it is made again from what was measured
    assert tuned(work, out, resume=True) == read_json(out / "record.json") == again


def test_a_second_tuning_in_the_same_folder_is_refused(tmp_path):
    with folder_held(claim_folder(tmp_path, "tune")), pytest.raises(UsageError, match="another run goes on"):
        tuned(tiny.points(), tmp_path, resume=True)
