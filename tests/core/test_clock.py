"""The clock: what it measures."""

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
