"""Traces of other people's: what they show, and what is said of files that are none."""

import gzip
import json
from pathlib import Path

import pytest

from speedkit.errors import UsageError
from speedkit.measure.profile_report import as_text, profile_trace

TRACES = Path(__file__).parents[1] / "traces"


@pytest.mark.parametrize(("workers", "waiting", "cause"), [(0, 0.34, "slow loader"), (4, 0.01, "many small operators")])
def test_a_trace_of_an_old_pytorch_on_a_v100_says_whether_its_steps_waited_for_data(workers, waiting, cause):
    report = profile_trace(TRACES / f"resnet50_workers_{workers}.json.gz")
    shares = {row["cause"]: row["share"] for row in report["rows"]}
    assert shares.get("data wait", 0.0) == pytest.approx(waiting, abs=0.01)
    assert sum(shares.values()) == pytest.approx(1) and shares["compute-bound"] > 0.25
    assert report["bottlenecks"][0]["cause"] == cause
    assert "V100" in as_text(report) and report["steps"] == 1


def event(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def written(path, *events):
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return profile_trace(path)


def milliseconds(report):
    return {row["cause"]: round(1e3 * row["seconds"], 6) for row in report["rows"] if row["seconds"] > 1e-9}


def test_steps_of_the_profiler_are_the_window_on_a_cpu_too(tmp_path):
    report = written(
        tmp_path / "cpu.json",
        event("aten::mm", 0, 5000),  # before the first step
        event("ProfilerStep#3", 10_000, 10_000, "user_annotation"),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10_000, 2000, "user_annotation"),
        event("aten::stack", 10_500, 1000),  # of the data
        event("aten::linear", 12_000, 3000),
        event("aten::addmm", 12_500, 2000),
        event("autograd::engine::evaluate_function: AddmmBackward0", 15_000, 4000),
        event("Optimizer.step#SGD.step", 19_000, 500, "user_annotation"),
        event("ProfilerStep#4", 20_000, 10_000, "user_annotation"),
    )
    assert report["steps"] == 2 and report["device"] == "cpu"
    parts = {"data wait": 2, "forward": 3, "backward": 4, "optimizer": 0.5, "other host work": 10.5}
    assert milliseconds(report) == parts


def test_communication_is_a_bottleneck_where_no_other_kernel_runs_beside_it(tmp_path):
    report = written(
        tmp_path / "ddp.json",
        event("ProfilerStep#3", 0, 10_000, "user_annotation"),
        event("void gemm_kernel", 0, 6000, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4000, 6000, "kernel"),
    )
    assert milliseconds(report) == {"compute-bound": 6, "communication": 4}
    assert report["bottlenecks"][0]["cause"] == "communication"


NO_TRACES = {
    "text": b"no JSON",
    "deep": b"[" * 100_000,
    "list": b"[]",
    "number for a name": b'{"traceEvents": [{"dur": 1, "cat": "cpu_op", "name": 2}]}',
    "cut.gz": gzip.compress(b'{"traceEvents": []}')[:-9],
    "no operators": b'{"traceEvents": []}',
}


@pytest.mark.parametrize("name", [*NO_TRACES, "missing"])
def test_what_is_no_trace_is_one_sentence_with_its_name(name, tmp_path):
    if name != "missing":
        (tmp_path / name).write_bytes(NO_TRACES[name])
    with pytest.raises(UsageError, match=name) as caught:
        profile_trace(tmp_path / name)
    assert "\n" not in str(caught.value)
