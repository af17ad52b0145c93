"""The clock: what it measures, and when it calls a step steady."""

import time

import pytest
import torch
from tiny import DEVICES

from speedkit import clock


@pytest.mark.parametrize("device", DEVICES)
def test_stopwatch_reads_no_more_than_passed_around_it_and_no_less_than_within(device):
    stopwatch, matrix = clock.Stopwatch(device), torch.randn(256, 256, device=device)
    outside_s = -time.perf_counter()
    stopwatch.start()
    inside_s = -time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    inside_s += time.perf_counter()
    reading_s = stopwatch.stop()
    outside_s += time.perf_counter()
    assert 0 < reading_s <= outside_s + 1e-6  # a CUDA event counts in half microseconds
    assert reading_s >= inside_s or device == "cuda"  # where the host runs ahead of the work it has queued


def test_a_recompiling_step_is_counted_and_not_called_steady_too_early():
    torch._dynamo.reset()
    before, calls = clock.compilations(), []
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)

    def step():
        calls.append(1)
        compiled(torch.ones(min(len(calls), 5)))  # five shapes, one per call: each compiles anew

    steady = clock.run_until_steady(step, "cpu", window_s=0.005, max_s=30.0, tolerance=10.0)
    assert steady.steady and steady.steps == len(calls) > 5
    torch._dynamo.reset()
    assert clock.compilations() - before == 5  # a reset must not look like fewer compilations
    assert not clock.run_until_steady(lambda: None, "cpu", window_s=0.002, max_s=0.05, tolerance=-1.0).steady
