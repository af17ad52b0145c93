"""The breakdown: its rules on known traces, and on real runs rows that add up and find what was planted."""

import dataclasses
import warnings
from pathlib import Path

import pytest
from tiny import DEVICES, busy, load, points, slowed

from speedkit.measure.breakdown import StepFacts, breakdown_of, make_breakdown
from speedkit.measure.trace import CAUSES, Trace, classify, trace_of
from speedkit.measure.trace_file import Span, read_window, window_of

TRACES = Path(__file__).parents[1] / "traces"
MS = 1e-3


def rows(busy, gaps):
    return {cause: round((busy.get(cause, 0) + gaps.get(cause, 0)) / MS, 6) for cause in CAUSES if cause in busy | gaps}


def work(begin_ms, end_ms, launch_ms=0.0, name="kernel"):
    return Span(begin_ms * MS, end_ms * MS, name, launch_ms * MS)


def span(begin_ms, end_ms, name=""):
    return (Span(begin_ms * MS, end_ms * MS, name),)


def gap(launch_ms=5.0, calls=((0, 10),), **more):
    """10 ms; a kernel from 0 to 2 and one from 6 to 10 leave a gap of 4."""
    called = [Span(begin_ms * MS, end_ms * MS) for begin_ms, end_ms in calls]
    return classify(10 * MS, (work(0, 2), work(6, 10, launch_ms)), calls=called, **more)


# All else is in the synthetic trace below.
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (gap(launch_ms=1.0), {"idle": 4}),  # it was launched in time: what came before it kept it waiting
        (gap(syncs=span(3, 7)), {"launch-bound": 4}),  # that call ends elsewhere
        (gap(parts=span(1, 5, "data wait"), syncs=span(1, 3)), {"data wait": 3, "sync-bound": 1}),
        (gap(calls=((0, 4), (4.05, 6))), {"launch-bound": 4}),  # 0.05 ms is no work
        (classify(10 * MS, (work(0, 6), work(6, 10, name="Memcpy DtoH"))), {"sync-bound": 4}),
    ],
)
def test_a_gap_is_what_the_first_rule_that_fits_says(seconds, expected):
    assert rows(*seconds) == {"bandwidth-bound": 6} | expected


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "compute-bound"),
        ("flash_fwd_kernel", "compute-bound"),
        ("triton_tem_fused_addmm_3", "compute-bound"),
        ("triton_poi_fused_convolution_relu_0", "bandwidth-bound"),  # what Inductor fuses is in the name
    ],
)
def test_kernels_are_told_by_name_and_those_of_an_update_by_their_launch(name, cause):
    assert rows(*classify(MS, (work(0, 1, name=name),))) == {cause: 1}
    in_optimizer = classify(MS, (work(0, 1, 0.5, name),), parts=span(0, 1, "optimizer"))
    assert rows(*in_optimizer) == {"optimizer": 1}


def test_a_trace_of_a_gpu_is_read_with_what_launched_its_kernels():
    """A synthetic one, of 10 ms, in the form that Kineto writes: every kind of row, made to measure."""
    trace = trace_of(read_window(TRACES / "gpu_synthetic.json.gz"))
    assert rows(trace.busy_s, trace.gaps_s) == {
        "data wait": 2.0,
        "host-to-device copy": 0.75,
        "launch-bound": 0.4,
        "sync-bound": 0.4,
        "compute-bound": 1.5,
        "bandwidth-bound": 0.85,
        "optimizer": 0.9,
        "evaluation": 1.1,
        "compilation": 0.8,
        "other host work": 1.2,
        "idle": 0.1,
    }
    assert set(trace.products_s) == {"bf16", ""}, "what was replayed from a graph has no operator"


def test_a_trace_recorded_on_a_cpu_has_its_operators_and_no_work_on_a_device():
    trace = trace_of(
        read_window(TRACES / "cpu_recorded.json.gz")
    )  # a step of a small net, in the window, after another
    assert trace.busy_s == {} and 30 < trace.calls < 178
    assert 0 < trace.small_s < 10 * MS and trace.products_s.keys() == {"fp32"}


def test_what_holds_up_a_single_operator_of_a_cpu_counts_neither_for_it_nor_in_its_window():
    events = [
        {"name": "aten::mm", "cat": "cpu_op", "ts": ts, "dur": dur, "tid": 1, "args": {}}
        for ts, dur in ((0, 10_000), (12_000, 70_000), (84_000, 11_000))
    ]
    trace = trace_of(window_of({"traceEvents": events}))
    assert sum(trace.products_s.values()) == pytest.approx(33 * MS)
    assert trace.window_s == pytest.approx((95 - 58) * MS)


def test_gaps_of_a_profiled_run_shrink_to_what_is_left_of_the_unprofiled_one():
    busy_s, gaps_s = gap(parts=span(2, 4, "data wait"))  # 6 ms busy, 2 waiting for data, 2 launching

    def breakdown(steps, **host_ms):
        host = {part.replace("_", " "): part_ms * MS for part, part_ms in host_ms.items()}
        return make_breakdown("cuda", host, steps=steps, facts=StepFacts(trace=Trace(busy_s=busy_s, gaps_s=gaps_s)))

    ms = {row["cause"]: round(row["seconds"] / MS, 6) for row in breakdown(2, data_wait=3, forward=13).rows}
    assert ms == {"bandwidth-bound": 12, "data wait": 3, "launch-bound": 1, "unexplained": 0}
    assert breakdown(2, forward=16).busy_share == pytest.approx(12 / 16)
    # Gaps do not grow: what neither the profiler nor the host saw is unexplained.
    assert breakdown(1, data_wait=2, compilation=1, forward=12).share("unexplained") == pytest.approx(4 / 15)
    # And where kernels alone take longer than the steps did, that is told too.
    assert breakdown(1, forward=5).share("unexplained") == pytest.approx(-3 / 5)


def test_without_a_record_of_the_gpus_work_the_rows_are_said_to_be_the_hosts():
    breakdowns = [make_breakdown(device, {"forward": MS}, steps=1, facts=StepFacts()) for device in ("cuda:0", "cpu")]
    assert ["was not recorded" in str(breakdown) for breakdown in breakdowns] == [True, False]


def test_the_title_of_a_breakdown_names_the_unit_of_what_is_below_it():
    breakdown = make_breakdown("cpu", {"forward": 4 * MS, "backward": 12 * MS}, steps=2, facts=StepFacts())
    assert str(breakdown).startswith("2 steps of 8 ms (cpu), in ms per step:\n")
    html = breakdown._repr_html_()
    assert "<b>2 steps of 8 ms (cpu)</b>" in html and ">share<" in html and ">75.0%<" in html


def load_slowly(item):
    busy(0.25 * MS)
    return load(item, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_add_up_and_what_was_planted_is_in_its_row(device):
    """5 ms in the loss, and 0.25 ms in each of 16 items, or more where others have the processor meanwhile."""
    workload = slowed(dataclasses.replace(points(), load=load_slowly), 5 * MS)
    with warnings.catch_warnings(action="error"):  # of a profiler, say
        breakdown = breakdown_of(workload, device=device, window_s=0.5)
    assert sum(row["seconds"] for row in breakdown.rows) == pytest.approx(breakdown.window_s)
    assert breakdown.window_s == pytest.approx(breakdown.steps * breakdown.step_s)
    assert breakdown.rows[-1]["cause"] == "unexplained" and "unexplained" in str(breakdown)
    assert abs(breakdown.share("unexplained")) < 0.25  # 5 % on a quiet machine
    assert breakdown.share("data wait") * breakdown.step_s > 16 * 0.24 * MS
    assert breakdown.share("forward" if device == "cpu" else "other host work") * breakdown.step_s > 4.9 * MS
    if device == "cpu":
        assert breakdown.busy_share is None and breakdown.share("optimizer") > 0 and breakdown.share("backward") > 0
    else:
        assert 0 < breakdown.busy_share < 0.5
    assert breakdown.facts.trace.calls > 20 and breakdown.facts.syncs[0].count > 0
