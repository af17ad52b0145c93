"""The diagnosis: each cause by what gives it away, nothing on a healthy run, and switches that cost."""

import dataclasses
import json

import pytest
import torch
from tiny import busy, points
from torch import nn

from speedkit.hardware import Hardware
from speedkit.measure.diagnose import as_text, costly_switches, diagnose, rank
from speedkit.measure.ledger import StepFacts, make_ledger
from speedkit.measure.syncs import Sync
from speedkit.measure.trace import Trace
from speedkit.plan import Plan

CPU = Hardware(cores=4, threads=1, compiler="/usr/bin/g++", python_headers=True, cpu_flags=("avx512_bf16",))
GPU = dataclasses.replace(
    CPU, device=torch.device("cuda"), gpu="a GPU", compute_capability=(9, 0), cores=16, triton=True, cpu_flags=()
)
RATES = {"fp32": 1e12, "tf32": 4e12, "bf16": 8e12, "fp8": 16e12}
STEP_S = 0.1
READ = Sync("train.py", 7, "total += loss.item()", 2, 0.001)
PRINT = dataclasses.replace(READ, code="print(loss.item())")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speedkit.ceilings.BUDGET_S", 0.01)
        yield


@pytest.fixture
def known_ceilings(monkeypatch):
    monkeypatch.setattr("speedkit.measure.diagnose.matmul_rates", lambda hardware: dict(RATES))


def ranked(hardware, shares, trace=None, **facts):
    """The causes in a step of which the ledger has these shares; the rest of a GPU's computes, a CPU's goes forward."""
    rest = "compute-bound" if hardware.device.type == "cuda" else "forward"
    shares = shares | {rest: shares.get(rest, 0.0) + 1 - sum(shares.values())}
    host = {part: share * STEP_S * 10 for part, share in shares.items()}
    known = StepFacts(trace=trace or Trace(products_s={"bf16": 0.01}), **facts)
    return rank(make_ledger(hardware.device, host, steps=10, facts=known), hardware)


CASES = [
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "collate_s": 0.001}, "slow decode", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.001, "collate_s": 0.06}, "slow collate", "workers"),
    (GPU, {"data wait": 0.5}, {}, "slow loader", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "workers": 16}, "slow decode", "cache"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "cacheable": True}, "slow decode", "cache"),
    (GPU, {"host-to-device copy": 0.4}, {}, "large copies", "pin_memory"),
    (GPU, {"sync-bound": 0.5}, {"syncs": [READ]}, "host read each step", "log_every"),
    (GPU, {"sync-bound": 0.5}, {"syncs": [PRINT]}, "printing each step", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [PRINT]}, "printing each step", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [READ]}, "other host work", None),
    (GPU, {"launch-bound": 0.6}, {}, "many small operators", "compile"),
    (CPU, {}, {"trace": Trace(calls=10_000, small_s=0.2, passes_s=0.02)}, "many small operators", "compile"),
    (GPU, {}, {"trace": Trace(products_s={"fp32": 0.01})}, "compute-bound", "precision"),
    (CPU, {}, {"trace": Trace(products_s={"fp32": 0.08}, passes_s=0.02)}, "compute-bound", "precision"),
    (GPU, {"bandwidth-bound": 0.7}, {}, "bandwidth-bound", "compile"),
    (CPU, {}, {"trace": Trace(products_s={"fp32": 0.02}, passes_s=0.08)}, "bandwidth-bound", "compile"),
    (CPU, {"compilation": 0.5}, {}, "new shapes", "bucket"),
    (GPU, {"evaluation and checkpoint": 0.5}, {}, "validation too often", "validate_every"),
]


@pytest.mark.parametrize(
    ("hardware", "shares", "facts", "cause", "field"),
    CASES,
    ids=[f"{case[0].device} {case[3]} {case[4]}" for case in CASES],
)
def test_a_cause_is_named_first_by_what_gives_it_away(hardware, shares, facts, cause, field, known_ceilings):
    first = ranked(hardware, shares, **facts)[0]
    assert (first["cause"], first["field"]) == (cause, field)
    assert 1 <= first["predicted_speedup_low"] <= first["predicted_speedup_high"]
    assert "ms" in first["evidence"] and first["change"]
    if shares:
        assert first["seconds"] == pytest.approx(sum(shares.values()) * STEP_S, rel=0.05)


HEALTHY = [
    (GPU, {"data wait": 0.03, "launch-bound": 0.08, "sync-bound": 0.02, "evaluation and checkpoint": 0.08}, None),
    (GPU, {"bandwidth-bound": 0.45}, None),  # part of any model, and compiled less: but not most of a step
    (CPU, {"data wait": 0.03, "other host work": 0.03}, Trace(products_s={"bf16": 0.09})),
    (CPU, {}, Trace(small_s=0.001)),  # nothing known of the rest: the model's own Python, say
    (GPU, {}, Trace(products_s={"": 0.09})),  # replayed from a graph: nobody knows the number format
]


@pytest.mark.parametrize(("hardware", "shares", "trace"), HEALTHY, ids=range(len(HEALTHY)))
def test_nothing_is_reported_on_a_healthy_run(hardware, shares, trace, known_ceilings):
    assert ranked(hardware, shares, trace) == []


def test_a_machine_without_a_compiler_is_told_nothing_it_cannot_do(monkeypatch):
    monkeypatch.setattr("speedkit.measure.diagnose.matmul_rates", lambda hardware: {"fp32": 1e12})
    slow = dataclasses.replace(CPU, compiler="", cpu_flags=())
    assert ranked(slow, {}, Trace(products_s={"fp32": 0.09})) == ranked(slow, {}, Trace(passes_s=0.09)) == []
    [row] = ranked(slow, {}, Trace(calls=10_000, small_s=0.2))
    assert row["field"] is None and "compiler" in row["change"]


def test_a_disk_that_is_slower_than_what_comes_after_it_is_named(known_ceilings):
    for wait_s, told in ((0.05, True), (0.03, False)):
        row = ranked(CPU, {"data wait": wait_s / STEP_S}, items_s=0.018, collate_s=0.002)[0]
        assert ("slow disk" in row["evidence"]) == told


def test_causes_come_by_what_their_change_would_give(known_ceilings):
    shares = {"data wait": 0.3, "evaluation and checkpoint": 0.5}
    causes = ranked(CPU, shares, items_s=0.02, collate_s=0.02)
    assert [row["cause"] for row in causes] == ["validation too often", "slow decode", "slow collate"]
    assert [row["predicted_speedup_high"] for row in causes] == pytest.approx([1 / 0.5, 1 / 0.85, 1 / 0.85])
    # Four workers share out the wait at least, and hide it at best.
    assert causes[1]["predicted_speedup_low"] == pytest.approx(1 / (0.85 + 0.15 / 4))


# For real.


def busy_features(waveform):
    busy(1e-3)
    return waveform


def length_of(item):
    return 4 + int(item.path) % 5


def clips(item):
    return torch.ones(8, length_of(item))


def masked_loss(model, batch, recipe):
    inputs, lengths, targets = batch
    outputs = model(inputs.sum(dim=-1) / lengths[:, None])
    return nn.functional.cross_entropy(outputs, targets), outputs


@pytest.mark.parametrize("device", DEVICES)
def test_a_slow_pipeline_is_found_by_the_ledger_and_said_in_words(device, tmp_path):
    """Batches of any length, from a worker."""
    slow = dataclasses.replace(points(), features=busy_features, load=clips, loss=masked_loss, length=length_of)
    plan, trace = Plan(validate_every=0, workers=1, persistent_workers=True), tmp_path / "trace.json"
    report = diagnose(slow, plan=plan, device=device, trace=trace)
    first = report["diagnosis"][0]
    assert (first["cause"], first["field"]) == ("slow decode", "cache")
    assert first["seconds"] > 0.5 * 16e-3  # 16 items of 1 ms, some of which pass while the step computes
    assert sum(row["share"] for row in report["rows"]) == pytest.approx(1)
    assert report["notes"][0].startswith("each of 1 loader workers uses")
    assert report["roofline"]["flops_per_step"] > 0
    assert any(event["name"] == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])

    text = as_text(json.loads(json.dumps(report, allow_nan=False)))
    for words in ("data wait", "slow decode", "GFLOP", "cache=ram", "loader workers"):
        assert words in text
    assert "no cause to report" in as_text(report | {"diagnosis": []})


def test_debugging_switches_that_cost_are_named(monkeypatch):
    assert costly_switches(torch.device("cuda")) == []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert costly_switches(torch.device("cpu")) == [], "they are switches of a GPU"
    with torch.autograd.detect_anomaly(check_nan=False), torch.profiler.profile(acc_events=True):
        torch.use_deterministic_algorithms(True)
        try:
            notes = " ".join(costly_switches(torch.device("cuda")))
        finally:
            torch.use_deterministic_algorithms(False)
    for words in ("LAUNCH_BLOCKING", "MEMORY_CACHING", "anomaly detection", "deterministic", "profiler"):
        assert words in notes
