"""The diagnosis: each cause by what gives it away, nothing on a healthy run, and a sentence for what cannot be run."""

import dataclasses
import json
import time

import pytest
import torch
from tiny import make_model, points
from torch import nn

from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import Hardware
from speedkit.measure.diagnose import FOUND, as_text, diagnose, of_loop, rank
from speedkit.measure.ledger import CAUSES, ledger
from speedkit.measure.loading import facts_of_loader
from speedkit.plan import Plan

CPU = Hardware(cores=4, threads=1, compiler="/usr/bin/g++", python_headers=True, cpu_flags=("avx512_bf16",))
GPU = Hardware(
    device=torch.device("cuda"),
    gpu="a GPU",
    compute_capability=(9, 0),
    cores=16,
    threads=8,
    triton=True,
    compiler="/usr/bin/gcc",
    python_headers=True,
)
RATES = {
    "matmul_fp32": 1e12,
    "matmul_tf32": 4e12,
    "matmul_bf16": 8e12,
    "memory_bandwidth": 1e12,
    "host_to_device_pageable": 5e9,
    "host_to_device_pinned": 20e9,
}
STEP_S = 0.1
WORK = {
    "operators": 400,
    "small": 100,
    "compute_s": 0.0,
    "bandwidth_s": 0.0,
    "compute_roof_s": 0.01,
    "dtype": "fp32",
    "compute_top": "mm",
    "bandwidth_top": "mul",
    "fusible": 0.75,
}
READ = {"file": "train.py", "line": 7, "code": "total += loss.item()", "count": 1, "seconds": 0.001}
PRINT = READ | {"code": "print(loss.item())"}


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (
            ("ceilings.BUDGET_S", 0.01),
            ("measure.counterfactual.WINDOW_S", 0.02),
            ("measure.counterfactual.WARM_UP_S", 0.1),
        ):
            patch.setattr(f"speedkit.{name}", seconds)
        yield


def ranked(hardware, shares, facts=None, measured=()):
    """The causes in a step of which the ledger has these shares; the rest of a GPU's computes, a CPU's goes forward."""
    rest = "compute-bound" if hardware is GPU else "forward"
    shares = shares | {rest: shares.get(rest, 0.0) + 1 - sum(shares.values())}
    found = ledger(hardware.device, {part: share * STEP_S * 10 for part, share in shares.items()}, STEP_S * 10, 10, 1.0)
    known = {"operator_cost_s": 4e-6, "ceilings": RATES, "work": WORK | {"dtype": "bf16"}} | (facts or {})
    return rank(found, known, list(measured), hardware)


CASES = [
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "collate_s": 0.001}, "slow decode", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.001, "collate_s": 0.06}, "slow collate", "workers"),
    (GPU, {"data wait": 0.5}, {}, "slow loader", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "workers": 16}, "slow decode", "cache"),
    (GPU, {"host-to-device copy": 0.4}, {"copies_bytes": 2e8, "pinned": False}, "large copies", "pin_memory"),
    (GPU, {"host-to-device copy": 0.4}, {"copies_bytes": 2e8, "pinned": True}, "large copies", "prefetch"),
    (GPU, {"sync-bound": 0.5}, {"syncs": [READ]}, "host read each step", "log_every"),
    (GPU, {"sync-bound": 0.5}, {"syncs": [PRINT]}, "printing each step", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [PRINT]}, "printing each step", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [READ]}, "other host work", None),
    (GPU, {"launch-bound": 0.6}, {}, "many small operators", "compile"),
    (CPU, {}, {"work": WORK | {"small": 10_000, "compute_s": 0.02}}, "many small operators", "compile"),
    (GPU, {}, {"work": WORK}, "compute-bound", "precision"),
    (CPU, {}, {"work": WORK | {"compute_s": 0.08, "bandwidth_s": 0.02}}, "compute-bound", "precision"),
    (GPU, {"bandwidth-bound": 0.7}, {}, "bandwidth-bound", "compile"),
    (CPU, {}, {"work": WORK | {"compute_s": 0.02, "bandwidth_s": 0.08}}, "bandwidth-bound", "compile"),
    (CPU, {"compilation": 0.5}, {"recompiles": 10, "shapes_seen": 10}, "new shapes", "bucket"),
    (GPU, {"evaluation and checkpoint": 0.5}, {"evaluations": 10}, "validation too often", "validate_every"),
]


@pytest.mark.parametrize(
    ("hardware", "shares", "facts", "cause", "field"),
    CASES,
    ids=[f"{case[0].device} {case[3]} {case[4]}" for case in CASES],
)
def test_a_cause_is_named_first_by_what_gives_it_away(hardware, shares, facts, cause, field):
    first = ranked(hardware, shares, facts)[0]
    assert (first["cause"], first["field"], first["part"]) == (cause, field, FOUND[cause])
    assert 1 <= first["predicted_speedup_low"] <= first["predicted_speedup_high"]
    assert "ms" in first["evidence"]
    assert first["change"]
    if shares:
        assert first["seconds"] == pytest.approx(sum(shares.values()) * STEP_S, rel=0.05)


def test_every_part_named_is_a_row_of_the_ledger():
    assert set(FOUND.values()) <= set(CAUSES)


HEALTHY = [
    (GPU, {"data wait": 0.03, "launch-bound": 0.08, "sync-bound": 0.02, "evaluation and checkpoint": 0.08}, {}),
    (GPU, {"bandwidth-bound": 0.45}, {}),  # part of any model, and compiled less: but not most of a step
    (CPU, {"data wait": 0.03, "other host work": 0.03}, {"work": WORK | {"dtype": "bf16", "compute_s": 0.09}}),
    (CPU, {}, {"work": WORK | {"compute_s": 0.06, "bandwidth_s": 0.03, "dtype": "bf16"}}),  # at its best format
    (CPU, {}, {"work": WORK | {"bandwidth_s": 0.09, "fusible": 0.0}}),  # nothing to join
    (CPU, {}, {}),  # of a hundred small operators, nothing known of the others: the model's own Python, say
    (CPU, {}, {"work": None}),
]


@pytest.mark.parametrize(("hardware", "shares", "facts"), HEALTHY, ids=range(len(HEALTHY)))
def test_nothing_is_reported_on_a_healthy_run(hardware, shares, facts):
    assert ranked(hardware, shares, facts) == []


def test_a_machine_without_a_faster_format_or_a_compiler_is_told_nothing_it_cannot_do():
    slow = dataclasses.replace(CPU, compiler="", cpu_flags=())
    only = {"matmul_fp32": 1e12, "memory_bandwidth": 1e12}
    for work in ({"compute_s": 0.09}, {"bandwidth_s": 0.09}):
        assert ranked(slow, {}, {"work": WORK | work, "ceilings": only}) == []
    [row] = ranked(slow, {}, {"work": WORK | {"small": 10_000}, "ceilings": only})
    assert row["field"] is None
    assert "compiler" in row["change"]


def test_operators_slower_than_counted_are_believed_only_so_far():
    work = WORK | {"compute_s": 0.02, "bandwidth_s": 0.0}
    assert ranked(CPU, {}, {"work": work}) == []  # 80 % of the passes is neither: the model's own Python, say
    disturbed = {"compute_s": 0.06, "bandwidth_s": 0.0}
    assert ranked(CPU, {}, {"work": WORK | disturbed})[0]["seconds"] == pytest.approx(STEP_S, rel=0.05)


def test_causes_come_by_what_their_change_would_give():
    facts = {"items_s": 0.02, "collate_s": 0.02, "evaluations": 10}
    found = ranked(GPU, {"data wait": 0.3, "evaluation and checkpoint": 0.5}, facts)
    assert [row["cause"] for row in found] == ["validation too often", "slow decode", "slow collate"]
    highs = [row["predicted_speedup_high"] for row in found]
    assert highs[0] == pytest.approx(1 / (1 - 0.5))
    assert highs[1] == pytest.approx(1 / (1 - 0.15))


def test_workers_are_promised_less_where_they_share_the_cores_with_the_model():
    beside, busy = (
        ranked(dataclasses.replace(CPU, threads=threads), {"data wait": 0.5}, {"items_s": 1.0})[0] for threads in (0, 4)
    )
    assert beside["predicted_speedup_high"] == busy["predicted_speedup_high"] == pytest.approx(2)
    assert beside["predicted_speedup_low"] == pytest.approx(2)
    assert busy["predicted_speedup_low"] == pytest.approx(1 / (0.125 + 0.5))


def test_levers_of_the_loaders_own_doctor_are_taken_where_there_are_any():
    lever = {"field": "cache", "change": "cache=ram", "predicted_speedup_low": 1.5, "predicted_speedup_high": 2.0}
    [row] = ranked(GPU, {"data wait": 0.5}, {"items_s": 1.0, "levers": [lever]})
    assert (row["field"], row["predicted_speedup_low"], row["predicted_speedup_high"]) == ("cache", 1.5, 2.0)


def test_what_was_measured_replaces_what_was_predicted():
    row = {"name": "compiled", "ratio": 1.5, "low": 1.4, "high": 1.6, "noise_floor": 1.02}
    [found] = ranked(GPU, {"launch-bound": 0.6}, {}, [row])
    assert (found["predicted_speedup_low"], found["predicted_speedup_high"]) == (1.4, 1.6)
    fused = row | {"name": "fused optimizer"}
    found = ranked(GPU, {}, {}, [fused])
    assert [row["field"] for row in found] == ["fused_optimizer"]
    within_noise = ranked(GPU, {}, {}, [fused | {"low": 1.01}, {"name": "compiled", "left_out": "no time"}])
    assert within_noise == []


# A workload, for real.


def busy_features(waveform):
    until_s = time.perf_counter() + 1e-3
    while time.perf_counter() < until_s:
        pass
    return waveform


@pytest.fixture(scope="module", params=DEVICES)
def found(request):
    work = dataclasses.replace(points(), features=busy_features)
    return diagnose(work, plan=Plan(validate_every=0), device=request.param, budget_s=20)


def test_a_slow_pipeline_is_found_by_the_ledger_and_by_going_without(found):
    first, by_name = found["diagnosis"][0], {row["name"]: row for row in found["counterfactuals"]}
    assert (first["cause"], first["field"]) == ("slow decode", "cache")
    assert first["seconds"] > 0.9 * 16e-3  # 16 items of 1 ms, and what else the machine did meanwhile
    assert by_name["same batch"]["ratio"] > 3
    assert 0.7 < by_name["loader only"]["ratio"] < 2
    assert "budget" in by_name["compiled"]["left_out"]
    assert found["left_out"] == {}


def test_the_report_says_it_in_words_and_goes_into_json(found):
    text = as_text(json.loads(json.dumps(found, allow_nan=False)))
    for words in ("data wait", "slow decode", "GFLOP", "features", "cache=ram", "same batch", "left out: the budget"):
        assert words in text
    healthy = as_text(found | {"diagnosis": [], "left_out": {"roofline": "it failed"}})
    assert "no cause to report" in healthy
    assert "roofline left out: it failed" in healthy


def broken(model, batch, recipe):
    raise ValueError("labels are missing")


def number(model, batch, recipe):
    return 1.0, model(batch[0])


def frozen():
    return make_model(8, 16, 2).requires_grad_(False)


def ragged(waveform):
    return waveform[: 4 + int(abs(waveform[0]) * 10) % 4]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": broken}, "labels are missing"),
        ({"loss": number}, "a tensor of one number"),
        ({"model": frozen}, "no trainable parameter"),
        ({"features": ragged}, "different shapes"),
    ],
    ids=["loss raises", "no tensor", "nothing to train", "another shape in each sample"],
)
def test_a_workload_that_cannot_make_a_step_gets_a_sentence(changed, sentence):
    with pytest.raises(SpeedkitError, match=sentence):
        diagnose(dataclasses.replace(points(), **changed), device="cpu")


def test_a_budget_too_short_keeps_the_ledger_and_says_what_is_missing():
    found = diagnose(points(), device="cpu", budget_s=0.01)
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert set(found["left_out"]) == {"work", "roofline", "counterfactuals", "loading"}
    assert all("budget" in why for why in found["left_out"].values())
    assert "left out: the budget" in as_text(found)
    with pytest.raises(UsageError, match="measures nothing"):
        diagnose(points(), device="cpu", budget_s=0)


def test_what_was_measured_is_kept_where_a_later_run_fails():
    made = iter([make_model(8, 16, 2)])
    found = diagnose(dataclasses.replace(points(), model=lambda: next(made)), device="cpu", budget_s=20)
    assert {"work", "counterfactuals"} <= set(found["left_out"])
    assert "StopIteration" in found["left_out"]["work"]
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)


def length_of(item):
    return 4 + int(item.path) % 5


def clips(item):
    return torch.ones(8, length_of(item))


def masked_loss(model, batch, recipe):
    inputs, lengths, targets = batch
    outputs = model(inputs.sum(dim=-1) / lengths[:, None])
    return nn.functional.cross_entropy(outputs, targets), outputs


@pytest.mark.parametrize(
    "changed",
    [
        {"load": clips, "loss": masked_loss, "length": length_of, "score": lambda outputs, batch: outputs[:, 0]},
        {},
    ],
    ids=["a new shape in each step", "one batch an epoch"],
)
def test_batches_of_any_length_and_epochs_of_one_batch_are_diagnosed(changed):
    work = dataclasses.replace(points(train=96 if changed else 16), **changed)
    found = diagnose(work, plan=Plan(validate_every=0), device="cpu", budget_s=10)
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert found["left_out"] == {}
    assert found["roofline"]["flops_per_step"] > 0
    assert all(row.get("ratio", 0) > 0 or row["left_out"] for row in found["counterfactuals"])


def test_somebodys_loader_is_examined_and_draws_nothing_from_the_random_state():
    class Clips(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return busy_features(torch.rand(3)), index

    loader = torch.utils.data.DataLoader(Clips(), batch_size=4)
    before = torch.get_rng_state()
    facts = facts_of_loader(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert facts["items_s"] >= 4e-3 > facts["collate_s"] > 0
    assert facts_of_loader(iter(loader)) == facts_of_loader([1, 2]) == {}
    waits = ledger("cpu", {"data wait": 0.8}, 1.0, 10, 1.0)
    [row] = of_loop(waits, {}, loader, "cpu")
    assert row["cause"] == "slow decode"
