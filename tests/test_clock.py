"""The clock: what it measures, when it calls a step steady, and that it never imports the compiler."""

import math
import subprocess
import sys
import time

import pytest
import torch

from speedkit import clock

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def matmul_on(device: str, size: int):
    matrix = torch.randn(size, size, device=device)
    return lambda: matrix @ matrix


@pytest.mark.parametrize("device", DEVICES)
def test_stopwatch_reads_no_more_than_passed_around_it_and_no_less_than_within(device):
    stopwatch, work = clock.Stopwatch(device), matmul_on(device, 256)
    work()
    clock.synchronize(device)
    outside_s = -time.perf_counter()
    stopwatch.start()
    inside_s = -time.perf_counter()
    for _ in range(20):
        work()
    inside_s += time.perf_counter()
    reading_s = stopwatch.stop()
    outside_s += time.perf_counter()
    assert 0 < reading_s <= outside_s + 1e-6  # a CUDA event counts in half microseconds
    if device == "cpu":  # on a GPU the host may run ahead of the work it has queued
        assert reading_s >= inside_s


def test_stopwatch_that_was_not_started_says_so():
    stopwatch = clock.Stopwatch("cpu")
    with pytest.raises(RuntimeError, match="call start"):
        stopwatch.stop()
    stopwatch.start()
    stopwatch.stop()
    with pytest.raises(RuntimeError, match="call start"):
        stopwatch.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_timed_calls_the_function_for_warmup_and_repeats(device):
    calls = []
    seconds = clock.timed(lambda: calls.append(1), device, repeats=4, warmup=2)
    assert len(calls) == 6
    assert len(seconds) == 4
    assert all(math.isfinite(s) and s >= 0 for s in seconds)


def test_counting_compilations_does_not_import_dynamo():
    code = (
        "import sys, torch; from speedkit import clock; "
        "assert clock.compilations() == 0; "
        "steady = clock.run_until_steady(lambda: torch.ones(8).sum(), 'cpu', window_s=0.001, max_s=1.0); "
        "assert steady.compilations == 0; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recompiling_step_is_counted_and_not_called_steady_too_early():
    import torch._dynamo

    torch._dynamo.reset()
    before = clock.compilations()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)
    calls = []

    def step():
        # Five shapes, one per call: each compiles anew; afterwards nothing does.
        calls.append(1)
        compiled(torch.ones(min(len(calls), 5)))

    steady = clock.run_until_steady(step, "cpu", window_s=0.005, max_s=30.0, tolerance=10.0)
    assert steady.steady
    assert steady.compilations == clock.compilations() - before == 5
    assert steady.steps == len(calls) > 5
    torch._dynamo.reset()
    assert clock.compilations() - before == 5  # a reset must not look like fewer compilations


def test_a_step_that_never_settles_ends_at_the_time_limit():
    calls = []

    def step():
        calls.append(1)
        torch.ones(len(calls) * 1000).sum()

    unsettled = clock.run_until_steady(step, "cpu", window_s=0.002, max_s=0.05, tolerance=-1.0)
    assert not unsettled.steady
    assert unsettled.steps == len(calls)
    assert unsettled.seconds >= 0.05
