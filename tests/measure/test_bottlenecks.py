"""The bottlenecks: each cause by what gives it away, nothing on a healthy run, and switches that cost."""

import dataclasses
import json

import pytest
import torch
from tiny import CPU_BF16, DEVICES, H100, busy, points

from speedkit.measure.bottlenecks import costly_switches, rank
from speedkit.measure.breakdown import StepFacts, make_breakdown
from speedkit.measure.loading import time_loader
from speedkit.measure.profile_report import as_text, gpu_advice, profile_workload
from speedkit.measure.trace import Trace
from speedkit.measure.waits import Sync
from speedkit.plan import Plan

CPU, GPU = dataclasses.replace(CPU_BF16, cores=4, threads=1), dataclasses.replace(H100, cores=16, threads=1)
RATES = {"fp32": 1e12, "tf32": 4e12, "bf16": 8e12, "fp8": 16e12}
STEP_S = 0.1
READ = Sync("train.py", 7, "total += loss.item()", 2, 0.001)
PRINT = dataclasses.replace(READ, code="print(loss.item())")


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch):
    monkeypatch.setattr("speedkit.measure.bottlenecks.matmul_rates", lambda hardware: dict(RATES))


def ranked(hardware, shares, trace=None, **facts):
    """The bottlenecks of a step with these shares; the rest of a GPU's computes, a CPU's goes forward."""
    rest = "compute-bound" if hardware.device.type == "cuda" else "forward"
    shares = shares | {rest: shares.get(rest, 0.0) + 1 - sum(shares.values())}
    host = {part: share * STEP_S * 10 for part, share in shares.items()}
    known = StepFacts(trace=trace or Trace(products_s={"bf16": 0.01}), **facts)
    return rank(make_breakdown(hardware.device, host, steps=10, facts=known), hardware)


CASES = [
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "collate_s": 0.001}, "slow decode", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.001, "collate_s": 0.06}, "slow collate", "workers"),
    (GPU, {"data wait": 0.5}, {}, "slow loader", "workers"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "workers": 16}, "slow decode", "cache"),
    (GPU, {"data wait": 0.5}, {"items_s": 0.06, "cacheable": True}, "slow decode", "cache"),
    (GPU, {"host-to-device copy": 0.4}, {}, "large copies", "pin_memory"),
    (GPU, {"sync-bound": 0.5}, {"syncs": [READ], "audited": 100}, "host-device sync", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [PRINT]}, "printing each step", "log_every"),
    (CPU, {"other host work": 0.5}, {"syncs": [READ]}, "other host work", None),
    (GPU, {"launch-bound": 0.6}, {}, "many small operators", "compile"),
    (CPU, {}, {"trace": Trace(calls=10_000, small_s=0.2, passes_s=0.02)}, "many small operators", "compile"),
    (GPU, {}, {"trace": Trace(products_s={"fp32": 0.01})}, "compute-bound", "precision"),
    (CPU, {}, {"trace": Trace(products_s={"fp32": 0.08}, passes_s=0.02)}, "compute-bound", "precision"),
    (GPU, {"bandwidth-bound": 0.7}, {}, "bandwidth-bound", "compile"),
    (CPU, {}, {"trace": Trace(products_s={"fp32": 0.02}, passes_s=0.08)}, "bandwidth-bound", "compile"),
    (CPU, {"compilation": 0.5}, {}, "new shapes", "bucket"),
    (CPU, {"compilation": 0.5}, {"guard": "size mismatch"}, "new shapes", "bucket"),
    (CPU, {"compilation": 0.5}, {"guard": "scale == 1"}, "failing guards", None),
    (CPU, {"forward": 1.0}, {"broken": "train.py:7: if x.sum() > 0:"}, "broken graphs", None),
    (GPU, {"evaluation": 0.5}, {}, "validation too often", "validate_every"),
    (GPU, {"checkpoint": 0.5}, {}, "checkpoints too often", None),
    (GPU, {"launch-bound": 0.6}, {"items_at_once": 2}, "small batch", None),
    (CPU, {"optimizer": 0.5}, {"items_at_once": 2}, "small batch", None),
    (CPU, {"evaluation": 0.5}, {"graphs": 9}, "validation without no_grad", None),
    (CPU, {}, {"trace": Trace(products_s={"fp64": 0.06}, passes_s=0.02)}, "float64", None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].device} {case[3]} {case[4]}")
def test_a_cause_is_named_first_by_what_gives_it_away(case):
    hardware, shares, facts, cause, field = case
    first = ranked(hardware, shares, **facts)[0]
    assert (first["cause"], first["field"]) == (cause, field)
    assert 1 <= first["predicted_speedup_low"] <= first["predicted_speedup_high"]
    assert "ms" in first["evidence"] and first["change"]
    if shares:
        assert first["seconds"] == pytest.approx(sum(shares.values()) * STEP_S, rel=0.05)


@pytest.mark.parametrize(
    ("cause", "operators"),
    [
        ("many small operators", {"calls": 9000, "small_s": 0.036}),
        ("compute-bound", {"products_s": {"fp32": 0.1}}),
        ("bandwidth-bound", {"passes_s": 0.12}),
    ],
)
def test_a_burst_of_load_in_the_timed_steps_hides_nothing(cause, operators):
    """Three profiled steps took 50 ms each, the timed ones 100 ms."""
    [row] = ranked(CPU, {}, Trace(steps=3, window_s=0.15, **operators))
    assert row["cause"] == cause and ranked(CPU, {}, Trace(steps=3, **operators)) == []


def test_nothing_is_reported_on_a_healthy_run():
    little = {"data wait": 0.03, "launch-bound": 0.08, "sync-bound": 0.02, "evaluation": 0.08}
    assert ranked(GPU, little) == ranked(CPU, {"data wait": 0.03}, Trace(products_s={"bf16": 0.09})) == []
    assert ranked(GPU, {"bandwidth-bound": 0.45}) == [], "part of any model, and not most of a step"
    assert ranked(GPU, {}, Trace(products_s={"": 0.09})) == [], "replayed from a graph, in a format that nobody knows"


def test_a_machine_without_a_compiler_is_told_nothing_it_cannot_do(monkeypatch):
    monkeypatch.setattr("speedkit.measure.bottlenecks.matmul_rates", lambda hardware: {"fp32": 1e12})
    slow = dataclasses.replace(CPU, compiler="", cpu_flags=())
    assert ranked(slow, {}, Trace(products_s={"fp32": 0.09})) == ranked(slow, {}, Trace(passes_s=0.09)) == []
    [row] = ranked(slow, {}, Trace(calls=10_000, small_s=0.2))
    assert row["field"] is None and "compiler" in row["change"]


def test_a_disk_that_is_slower_than_what_comes_after_it_is_named():
    for wait_s, read, told in ((0.05, 1e6, True), (0.03, 1e6, False), (0.05, 0, False)):
        row = ranked(CPU, {"data wait": wait_s / STEP_S}, items_s=0.018, collate_s=0.002, read_bytes=read)[0]
        assert ("slow disk" in row["evidence"]) == told


def test_causes_come_by_what_their_change_would_give():
    shares = {"data wait": 0.3, "evaluation": 0.5}
    causes = ranked(CPU, shares, items_s=0.02, collate_s=0.02)
    assert [row["cause"] for row in causes] == ["validation too often", "slow decode", "slow collate"]
    assert [row["predicted_speedup_high"] for row in causes] == pytest.approx([1 / 0.5, 1 / 0.85, 1 / 0.85])
    # A worker hides half of the wait at least, and all of it at best.
    assert causes[1]["predicted_speedup_low"] == pytest.approx(1 / (0.85 + 0.15 / 2))


@pytest.mark.parametrize(
    ("facts", "change"),
    [
        ({}, "workers=3, persistent_workers=True"),
        ({"workers": 1, "items_s": 0.1}, "workers=4, persistent_workers=True"),  # the machine has no more cores
        ({"workers": 1, "collate_s": 0.0}, "workers=3, persistent_workers=True"),
        ({"workers": 2, "items_s": 0.01}, "workers=0"),  # less than handing them over
        ({"cores_used": 3.8}, "cache=ram"),
        ({"cores_used": 3.8, "why_not_kept": "drawn at random"}, "make a batch at once"),
        ({"workers": 4}, "cache=ram"),
        ({"workers": 4, "why_not_kept": "drawn at random"}, "make a batch at once"),
    ],
)
def test_of_workers_and_a_cache_what_helps_is_advised(facts, change):
    """A step of 100 ms waits 70: batches, made in 71 ms, are taken every 30."""
    row = ranked(CPU, {"data wait": 0.7}, **({"items_s": 0.07, "collate_s": 0.001, "batch_bytes": 10**6} | facts))[0]
    assert row["change"].startswith(change)
    assert ("2 batches, 2 MB" in row["evidence"]) == change.startswith(("workers=3", "workers=4"))
    assert facts.get("why_not_kept", "") in row["evidence"]
    assert "disk" not in row["evidence"]


def test_no_worker_is_advised_for_less_than_handing_a_batch_over():
    host = {"data wait": 0.008, "forward": 0.008}
    [row] = rank(make_breakdown("cpu", host, steps=10, facts=StepFacts(items_s=8e-4, trace=Trace())), CPU)
    assert "workers" not in row["change"] and "cache" not in row["change"]


def test_what_a_loader_draws_at_random_is_seen():
    class Crops(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(3)

    breakdown = make_breakdown("cpu", {"data wait": 1.0}, steps=1, facts=StepFacts(cores_used=4.0))
    time_loader(breakdown.facts, torch.utils.data.DataLoader(Crops()))
    [row] = rank(breakdown, CPU)[:1]
    assert "at random" in row["evidence"] and "cache" not in row["change"]


SAMPLERS = {"PyTorch's": torch.utils.data.BatchSampler(range(16), 8, drop_last=False), "own": [[*range(8)]] * 2}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_batch_of_a_batch_sampler_counts_with_all_its_items(sampler):
    data = torch.utils.data.TensorDataset(torch.ones(16, 3))
    breakdown = make_breakdown("cpu", {"data wait": 1.0}, steps=1, facts=StepFacts(items_at_once=8))
    time_loader(breakdown.facts, torch.utils.data.DataLoader(data, batch_sampler=sampler))
    assert breakdown.facts.batch_bytes == 8 * 12
    # In a loop that gives no inputs to a model nobody knows how many an own one joins.
    breakdown = make_breakdown("cpu", {"data wait": 1.0}, steps=1, facts=StepFacts())
    time_loader(breakdown.facts, torch.utils.data.DataLoader(data, batch_sampler=sampler))
    assert breakdown.facts.batch_bytes >= 12


# For real.


def busy_features(waveform):
    busy(1e-3)
    return waveform


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_slow_pipeline_is_found_by_the_breakdown_and_said_in_words(device, tmp_path):
    slow, trace = dataclasses.replace(points(), features=busy_features), tmp_path / "trace.json"
    plan = Plan(validate_every=0, workers=1, persistent_workers=True)
    report = profile_workload(slow, plan=plan, device=device, trace=trace)
    first = report["bottlenecks"][0]
    assert (first["cause"], first["field"]) == ("slow decode", "cache")
    assert first["seconds"] > 0.5 * 16e-3  # 16 items of 1 ms, some of which pass while the step computes
    assert report["notes"][0].startswith("each of 1 loader workers uses")
    assert report["roofline"]["flops_per_step"] > 0
    assert any(event["name"] == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])

    text = as_text(json.loads(json.dumps(report, allow_nan=False)))
    assert all(words in text for words in ("data wait", "slow decode", "GFLOP", "cache=ram", "loader workers"))
    assert "no bottleneck to report" in as_text(report | {"bottlenecks": []})


def test_debugging_switches_that_cost_are_named(monkeypatch):
    assert costly_switches(torch.device("cuda")) == []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert costly_switches(torch.device("cpu")) == [], "they are switches of a GPU"
    with torch.autograd.detect_anomaly(check_nan=False):
        notes = " ".join(costly_switches(torch.device("cuda")))
    assert all(words in notes for words in ("LAUNCH_BLOCKING", "anomaly detection"))


def test_a_small_gpu_is_told_how_to_make_room():
    assert gpu_advice(GPU) == gpu_advice(CPU) == []
    assert "less than 4 GB" in gpu_advice(dataclasses.replace(GPU, gpu_memory_bytes=2 << 30))[0]


def test_beside_a_gpu_that_is_not_used_a_cpu_says_why(monkeypatch):
    monkeypatch.setattr("speedkit.measure.profile_report.unusable_gpu", lambda: "an old driver")
    assert gpu_advice(CPU) == ["an old driver"] and "an old driver" not in gpu_advice(GPU)
