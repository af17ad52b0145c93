"""The ledger: its rules on traces with known answers, and on real runs rows that add up and find what was planted."""

import dataclasses
import gzip
import json
import random
import time
from pathlib import Path

import pytest
import torch
from tiny import loss, points

from speedkit import clock
from speedkit.errors import SpeedkitError
from speedkit.measure.ledger import StepFacts, ledger_of, make_ledger, unprofiled
from speedkit.measure.trace import CAUSES, Span, Trace, Work, classify, read_trace

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TRACES = Path(__file__).parent / "traces"
MS = 1e-3


def rows(trace):
    busy, gaps = classify(trace)
    found = {cause: busy.get(cause, 0.0) + gaps.get(cause, 0.0) for cause in CAUSES if cause in busy or cause in gaps}
    return {cause: round(seconds / MS, 6) for cause, seconds in found.items()}


def kernel(begin_ms, end_ms, launch_ms=0.0, name="kernel"):
    return Work(begin_ms * MS, end_ms * MS, name, launch_s=launch_ms * MS)


# Each is 10 ms long; a kernel from 0 to 2 and one from 6 to 10 leave a gap of 4 ms.
def gap(launch_ms=5.0, **more):
    return Trace(10 * MS, (kernel(0, 2), kernel(6, 10, launch_ms)), calls=(Span(0, 10 * MS),), **more)


def span(begin_ms, end_ms, name=""):
    return (Span(begin_ms * MS, end_ms * MS, name),)


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (gap(), {"launch-bound": 4}),
        (gap(launch_ms=1.0), {"idle": 4}),  # it was launched in time: what came before it kept it waiting
        (gap(syncs=span(1, 3)), {"sync-bound": 4}),
        (gap(syncs=span(3, 7)), {"launch-bound": 4}),  # that call ends elsewhere
        (gap(parts=span(1, 6, "data wait")), {"data wait": 4}),
        (gap(parts=span(1, 5, "data wait"), syncs=span(1, 3)), {"data wait": 3, "sync-bound": 1}),
        (
            gap(parts=span(3, 4, "compilation") + span(1, 5, "data wait")),
            {"compilation": 1, "data wait": 2, "launch-bound": 1},
        ),
        (
            gap(parts=span(1, 7, "evaluation and checkpoint")),  # with the kernel that was launched in it
            {"bandwidth-bound": 2, "evaluation and checkpoint": 8},
        ),
        (dataclasses.replace(gap(), calls=span(0, 2) + span(5, 6)), {"other host work": 4}),
        (dataclasses.replace(gap(), calls=span(0, 4) + span(4.05, 6)), {"launch-bound": 4}),  # 0.05 ms is no work
    ],
)
def test_a_gap_is_what_the_first_rule_that_fits_says(trace, expected):
    assert rows(trace) == {"bandwidth-bound": 6} | expected


def test_what_runs_side_by_side_counts_once_and_a_copy_only_where_nothing_computes():
    copies = (
        Work(1 * MS, 4 * MS, "copy", "host to device"),
        Work(3.5 * MS, 5 * MS, "copy", "host to device"),
        Work(5 * MS, 6 * MS, "copy", "device to host"),
    )
    trace = Trace(8 * MS, (kernel(0, 2), kernel(1, 3), *copies, kernel(6, 8, 5.5)))
    assert rows(trace) == {"bandwidth-bound": 5, "host-to-device copy": 2, "sync-bound": 1}


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("sm90_xmma_gemm_bf16bf16", "compute-bound"),  # out of a CUDA graph, as all here: no operator is known
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "compute-bound"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816_256x128>", "compute-bound"),
        ("flash_fwd_kernel", "compute-bound"),
        ("triton_tem_fused_addmm_3", "compute-bound"),
        ("triton_poi_fused_convolution_relu_0", "bandwidth-bound"),  # what Inductor fuses is in the name
        ("vectorized_elementwise_kernel", "bandwidth-bound"),
    ],
)
def test_kernels_are_told_by_name_and_those_of_an_update_by_their_launch(name, cause):
    assert rows(Trace(MS, (kernel(0, 1, name=name),))) == {cause: 1}
    in_optimizer = Trace(MS, (kernel(0, 1, 0.5, name=name),), parts=span(0, 1, "optimizer"))
    assert rows(in_optimizer) == {"optimizer": 1}


def test_seconds_add_up_and_busy_time_is_a_union_whatever_the_trace():
    for seed in range(200):
        draw = random.Random(seed).randint

        def spans(count, *names, draw=draw):
            begins = [draw(0, 90) for _ in range(draw(0, count))]
            return tuple(Span(begin, begin + draw(1, 10), names[draw(0, len(names) - 1)]) for begin in begins)

        kinds = ("kernel", "kernel", "host to device", "device to host")
        work = tuple(Work(*one[:2], "", one.name, draw(0, 100)) for one in spans(15, *kinds))
        parts = spans(6, "data wait", "optimizer", "compilation", "evaluation and checkpoint")
        trace = Trace(100.0, work, parts, spans(6, ""), spans(20, ""))
        busy_s, gaps_s = classify(trace)
        assert sum(busy_s.values()) + sum(gaps_s.values()) == pytest.approx(100)
        busy = {second for one in work for second in range(int(one.begin_s), int(one.end_s))}
        assert sum(busy_s.values()) == pytest.approx(len(busy))
        waits = {second for part in parts if part.name == "data wait" for second in range(int(part[0]), int(part[1]))}
        others = {
            second
            for part in parts
            if part.name not in ("data wait", "optimizer")
            for second in range(int(part[0]), int(part[1]))
        }
        assert gaps_s.get("data wait", 0.0) == pytest.approx(len(waits - busy - others))


def test_a_trace_of_a_gpu_is_read_with_what_launched_its_kernels():
    """A synthetic one, of 10 ms, in the form that Kineto writes: every kind of row, made to measure."""
    trace = read_trace(TRACES / "gpu_synthetic.json.gz")
    assert rows(trace) == {
        "data wait": 2.0,
        "host-to-device copy": 0.75,
        "launch-bound": 0.2,
        "sync-bound": 0.4,
        "compute-bound": 1.5,
        "bandwidth-bound": 0.85,
        "optimizer": 0.9,
        "evaluation and checkpoint": 1.1,
        "compilation": 0.8,
        "other host work": 1.4,
        "idle": 0.1,
    }
    assert list(rows(trace)) == [cause for cause in CAUSES if cause in rows(trace)]
    assert set(trace.costs.products_s) == {"bf16", ""}, "what was replayed from a graph has no operator"


def test_a_trace_recorded_on_a_cpu_has_its_parts_and_operators_and_no_work_on_a_device():
    trace = read_trace(TRACES / "cpu_recorded.json.gz")  # a step of a small net, in the window, after another
    assert trace.work == () and {part.name for part in trace.parts} == {"data wait", "optimizer"}
    events = json.loads(gzip.decompress((TRACES / "cpu_recorded.json.gz").read_bytes()))["traceEvents"]
    [window] = [event for event in events if event["name"] == "speedkit window"]
    assert trace.end_s == pytest.approx(window["dur"] * 1e-6)
    assert 30 < trace.costs.calls <= len(trace.calls)


def test_gaps_of_a_profiled_run_shrink_to_what_is_left_of_the_unprofiled_one():
    trace = gap(parts=span(2, 4, "data wait"))  # 6 ms busy, 2 waiting for data, 2 launching
    found, busy = unprofiled(trace, {"data wait": 3 * MS}, 16 * MS, steps=2)
    assert {cause: round(seconds / MS, 6) for cause, seconds in found.items() if seconds} == {
        "bandwidth-bound": 12,
        "data wait": 3,
        "launch-bound": 1,
    }
    assert busy == pytest.approx(12 / 16)
    # Gaps do not grow: what neither the profiler nor the host saw is unexplained.
    found, _ = unprofiled(trace, {"data wait": 2 * MS, "compilation": 1 * MS}, 15 * MS, steps=1)
    assert make_ledger("cuda", found, 15 * MS, steps=1, facts=StepFacts()).share("unexplained") == pytest.approx(4 / 15)
    # And where kernels alone take longer than the steps did, that is told too.
    found, _ = unprofiled(trace, {}, 5 * MS, steps=1)
    assert make_ledger("cuda", found, 5 * MS, steps=1, facts=StepFacts()).share("unexplained") == pytest.approx(-3 / 5)


def waiting(function, seconds):
    """The function after so many seconds of work."""

    def waited(*args):
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            pass
        return function(*args)

    return waited


def add_up(found):
    assert sum(row["share"] for row in found.rows) == pytest.approx(1)
    assert sum(row["seconds"] for row in found.rows) == pytest.approx(found.window_s)
    assert found.window_s == pytest.approx(found.steps * found.step_s)
    assert found.rows[-1]["cause"] == "unexplained"
    causes = [row["cause"] for row in found.rows]
    assert causes == [cause for cause in CAUSES if cause in causes]
    json.dumps(found.as_dict(), allow_nan=False)
    assert "unexplained" in str(found)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_add_up_and_what_was_planted_is_in_its_row(device):
    """5 ms in the loss, and 0.25 ms in each of 16 items, or more where others have the processor meanwhile."""
    workload = points()
    workload = dataclasses.replace(workload, load=waiting(workload.load, 0.25 * MS), loss=waiting(loss, 5 * MS))
    backward = torch.autograd.backward
    found = ledger_of(workload, device=device, window_s=0.5)
    assert torch.autograd.backward is backward
    add_up(found)
    assert abs(found.share("unexplained")) < 0.25  # 5 % on a quiet machine
    assert found.share("data wait") * found.step_s > 16 * 0.24 * MS
    assert found.share("forward" if device == "cpu" else "other host work") * found.step_s > 4.9 * MS
    if device == "cpu":
        assert found.busy_share is None and found.share("optimizer") > 0 and found.share("backward") > 0
    else:
        assert 0 < found.busy_share < 0.5
    facts = found.facts
    assert facts.host_s["data wait"] > 0 and facts.host_s["forward"] >= 5 * MS
    assert facts.trace.costs.calls > 20 and facts.recompilations == 0 and facts.evaluations == 0
    assert facts.syncs[0].count > 0


def raising(model, batch, recipe):
    raise ValueError("the labels are from another set")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": raising}, "points failed in step 1: ValueError: the labels are from another set; its"),
        ({"loss": lambda *_: (1.5, None)}, "points failed in step 1: AttributeError: .* its loss has to give"),
        (
            {"model": lambda: torch.nn.Linear(8, 2).requires_grad_(False)},
            "its model needs a weight that is trained",
        ),
    ],
)
def test_a_workload_that_cannot_be_trained_is_told_in_a_sentence(change, message):
    with pytest.raises(SpeedkitError, match=message):
        ledger_of(dataclasses.replace(points(), **change), device="cpu", window_s=0.05)


def test_graphs_compiled_in_the_window_are_counted_and_are_a_row():
    """Each batch has a length of its own, for which the model is compiled anew."""
    lengths = iter(range(2, 10**6))
    torch._dynamo.reset()
    summed = torch.compile(lambda rows: rows.sum(), backend="eager", dynamic=False)

    def longer(model, batch, recipe):
        value, outputs = loss(model, batch, recipe)
        return value + 0 * summed(torch.ones(next(lengths))), outputs

    before = clock.compilations()
    with torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6):
        found = ledger_of(dataclasses.replace(points(), loss=longer), device="cpu", window_s=0.2)
    add_up(found)
    assert found.facts.recompilations == pytest.approx(1) and clock.compilations() > before
    assert found.share("compilation") > found.share("forward")
