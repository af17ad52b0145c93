"""Peaks of this machine, and the roofline: FLOPs as PyTorch counts them, bytes as operators read and write them."""

import dataclasses
import itertools
import math

import pytest
import torch
from tiny import DEVICES, opened, points
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import Float8LinearConfig

from speedkit.machine import Hardware, this_machine
from speedkit.measure.breakdown import StepFacts, make_breakdown
from speedkit.measure.peaks import _calls, peaks
from speedkit.measure.roofline import OperatorCounter, count, roofline
from speedkit.measure.warm_up import compilations
from speedkit.plan import Plan
from speedkit.train.loop import steps

CPU = torch.device("cpu")


def test_flops_and_bytes_are_those_of_the_operators_and_a_view_moves_none():
    query = torch.randn(2, 3, 16, 8)  # batch, heads, length, width; on a CPU PyTorch's counter has no formula for it
    with FlopCounterMode(display=False) as counted:
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert counted.get_total_flops() == 2 * 2 * (2 * 3 * 16 * 16 * 8)
    one, rows = torch.ones(1000), torch.ones(10, 100, dtype=torch.bfloat16)
    for call, moved in ((lambda: one + one, 12_000), (lambda: one.view(10, 100), 0), (lambda: rows.sum(), 2002)):
        with OperatorCounter() as counted:
            call()
        assert sum(counted.moved_bytes.values()) == moved


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_of_a_convolution_count_forward_and_backward(kind, groups):
    convolution = kind(8, 8, 3, padding=1, groups=groups)
    forward = 2 * (2 * 10 * 10) * (8 * 8 // groups) * (3 * 3)  # outputs in a channel, channels, kernel
    for needs_gradient, backward in ((False, forward), (True, 2 * forward)):  # of the weights alone, and the inputs
        with FlopCounterMode(display=False) as counted:
            outputs = convolution(torch.randn(2, 8, 10, 10, requires_grad=needs_gradient))
        assert counted.get_total_flops() == forward
        with FlopCounterMode(display=False) as counted:
            outputs.sum().backward()
        assert counted.get_total_flops() == backward


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_set_against_the_peak_of_its_number_format(device):
    workload, breakdown = points(), make_breakdown(device, {"forward": 1e-3}, steps=1, facts=StepFacts())
    row = roofline(workload, workload.recipe, Plan(), hardware=this_machine(device), breakdown=breakdown)
    assert row["mfu"] == pytest.approx(row["flops_per_step"] / 1e-3 / row["peak_flops_per_s"])
    assert row["dtype"] == "fp32" and "MFU" in row["tells"][0]


class Block(nn.Sequential):
    """Something to be recomputed: a class that occurs twice."""


def blocks():
    return nn.Sequential(nn.Linear(8, 16), *(Block(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)), nn.Linear(16, 2))


def test_counting_counts_the_plain_model_and_leaves_a_compiled_run_compiled(monkeypatch):
    """Neither recomputing nor loading is work of the model; nothing is compiled again where something was counted."""
    monkeypatch.setattr("speedkit.train.compile.BACKEND", "aot_eager")
    workload = dataclasses.replace(points(), model=blocks)
    plan = Plan(compile="default", checkpointing="blocks", workers=1, cache="ram")
    with opened(workload, plan=plan, endless=True) as run:
        training, before = steps(run), compilations()
        next(training)
        assert compilations() > before
        counted = count(workload, workload.recipe, plan, device=CPU)
        with torch.compiler.set_stance("fail_on_recompile"):
            next(training)  # still what was compiled, or this would raise
    # Forward, to the weights and to the inputs; the first layer needs no gradient of its inputs.
    assert sum(counted.flops.values()) == 2 * 16 * (2 * 8 * 16 + 3 * 16 * (16 + 16 + 2))
    assert counted.moved_bytes.keys() > counted.flops.keys()


@pytest.mark.slow
def test_peaks_are_measured_and_kept_per_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    machine = this_machine("cpu")
    measured = peaks(machine)
    assert measured.keys() >= {"matmul_fp32", "memory_bandwidth"} and "matmul_fp8" not in measured
    assert ("matmul_bf16" in measured) == machine.supports("bf16")
    assert all(0 < peak.median <= peak.value < math.inf for peak in measured.values())
    [path] = tmp_path.iterdir()
    assert peaks(machine) == measured
    path.write_text("{ not JSON")
    assert peaks(machine) != measured


def test_the_peak_of_8_bits_adds_up_as_a_trainings_products_do():
    hopper = Hardware(torch.device("cuda"), compute_capability=(9, 0))
    with FakeTensorMode():
        (multiply,) = (call for name, call, *_ in itertools.islice(_calls(hopper), 5) if name == "matmul_fp8")
    training = Float8LinearConfig.from_recipe_name("tensorwise").gemm_config_output
    assert multiply.keywords["use_fast_accum"] == training.use_fast_accum
