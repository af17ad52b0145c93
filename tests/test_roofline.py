"""The roofline: FLOPs as PyTorch counts them, bytes as they are moved, and which ceiling an operator meets."""

import dataclasses

import pytest
import torch
from tiny import points
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from speedkit.hardware import this_machine
from speedkit.measure.ledger import ledger
from speedkit.measure.roofline import SMALL, Call, Operators, count, empty_operator_s, per_step, roofline
from speedkit.plan import Plan
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RATES = {"matmul_fp32": 1e12, "matmul_bf16": 4e12, "memory_bandwidth": 1e10}


@pytest.fixture(autouse=True)
def short_ceilings(monkeypatch):
    monkeypatch.setattr("speedkit.ceilings.BUDGET_S", 0.01)


def calls_of(function):
    with Operators() as noted:
        function()
    return noted.calls


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_pytorchs_own_counter(device):
    model = nn.Sequential(nn.Conv1d(3, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 32, 10)).to(device)
    inputs = torch.randn(4, 3, 32, device=device)
    with FlopCounterMode(display=False) as theirs:
        model(inputs).sum().backward()
    ours = sum(call.flops or 0 for call in calls_of(lambda: model(inputs).sum().backward()))
    assert ours == theirs.get_total_flops() > 0


def test_attention_is_counted_on_a_cpu_where_pytorchs_counter_has_no_formula():
    batch, heads, length, width = 2, 3, 16, 8
    query = torch.randn(batch, heads, length, width)
    calls = calls_of(lambda: nn.functional.scaled_dot_product_attention(query, query, query))
    assert sum(call.flops or 0 for call in calls) == 2 * 2 * batch * heads * length * length * width


def test_bytes_are_those_of_inputs_and_outputs_and_a_view_moves_none():
    one, rows = torch.ones(1000), torch.ones(10, 100, dtype=torch.bfloat16)
    [added], [viewed], [summed] = (
        calls_of(call) for call in (lambda: one + one, lambda: one.view(10, 100), lambda: rows.sum())
    )
    assert (added.bytes, viewed.bytes, summed.bytes) == (12_000, 0, 2002)
    assert (added.dtype, summed.dtype) == ("fp32", "bf16")


def test_operators_that_compiling_would_join_are_seen():
    large, other = torch.ones(1000), torch.ones(10)
    calls = calls_of(lambda: [large.mul(2).view(10, 100).add(1).sum(), other.exp(), large.neg()])
    assert [call.follows for call in calls] == [False, False, True, False, False, False]


def call(name, seconds, flops=None, size=0, dtype="fp32", follows=False):
    return Call(name, seconds, flops, size, dtype, follows)


def test_an_operator_is_bound_by_what_takes_it_longer_at_the_ceilings():
    step = [
        call("mm", 3e-3, flops=10**9, size=10**6),  # 1 ms of computing, 0.1 ms of moving
        call("mm", 3e-3, flops=10**9, size=10**6, dtype="bf16"),  # 0.25 ms of computing
        call("mul", 2e-3, size=10**7),
        call("add", 1e-3, size=10**7, follows=True),  # 1 ms of moving each
        call("mm", 2e-3, flops=10**6, size=10**7),  # 1 ms of moving
        call("neg", 0.5 * SMALL * empty_operator_s(), size=8),
    ]
    found = per_step([step], RATES)
    assert (found["operators"], found["small"]) == (6, 1)
    assert (found["compute_s"], found["bandwidth_s"]) == pytest.approx((6e-3, 5e-3))
    assert (found["compute_roof_s"], found["bandwidth_roof_s"]) == pytest.approx((1.25e-3, 3e-3))
    assert (found["compute_top"], found["bandwidth_top"]) == ("mm", "mul")
    assert found["fusible"] == pytest.approx(1 / 3)
    assert (found["flops"], found["bytes"]) == (2_001_000_000, 32_000_008)
    assert set(found["uncounted"]) == {"mul", "add", "neg"}
    assert found["uncounted_share"] == pytest.approx(3 / 6)


def test_what_disturbed_one_step_does_not_count_and_steps_may_differ():
    quiet, disturbed = [call("mm", 3e-3, flops=10**9)], [call("mm", 9e-3, flops=10**9)]
    assert per_step([quiet, disturbed, quiet], RATES)["compute_s"] == pytest.approx(3e-3)
    longer = per_step([quiet, quiet * 3], RATES)
    assert (longer["operators"], longer["compute_s"]) == pytest.approx((2, 6e-3))
    assert per_step([[]], RATES)["flops"] == 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x).relu()


def blocks():
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 2))


@pytest.mark.parametrize("plan", [{}, {"checkpointing": "blocks"}, {"workers": 1}, {"cache": "ram"}], ids=str)
def test_how_a_model_is_trained_does_not_change_what_it_computes(plan):
    workload = dataclasses.replace(points(), model=blocks)
    # Forward, to the weights and to the inputs; the first layer needs no gradient of its inputs.
    products = 2 * 8 * 16 + 3 * 16 * 16 + 3 * 16 * 16 + 3 * 16 * 2
    assert count(workload, workload.recipe, Plan(**plan), this_machine("cpu"))["flops"] == 2 * 16 * products


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_set_against_the_ceiling_of_its_number_format(device):
    workload, plan, hardware = points(), Plan(), this_machine(device)
    counted = count(workload, workload.recipe, plan, hardware)
    found = roofline(workload, workload.recipe, plan, hardware, ledger(device, {}, 1e-3, 1, 1.0), counted)
    assert found["mfu"] == pytest.approx(found["flops_per_step"] / 1e-3 / found["ceiling_flops_per_s"])
    assert found["achieved_bytes_per_s"] == pytest.approx(found["bytes_per_step"] / 1e-3)
    assert found["dtype"] == "fp32"
    assert "relu" in found["uncounted"]
    assert "mm" not in found["uncounted"]
    assert "MFU" in found["tells"][0]
    assert "at most" in found["tells"][1]
    assert (found["nvml_utilisation"] is None) == (device == "cpu")
    assert ("does not say" in found["tells"][-1]) == (device == "cuda")


def test_counting_leaves_a_compiled_run_of_the_same_workload_compiled(monkeypatch):
    ran, made = [], []

    def backend(graph, inputs):
        made.append(graph)
        return lambda *args: ran.append(1) or graph(*args)

    monkeypatch.setattr("speedkit.train.compile.BACKEND", backend)
    workload, plan = points(), Plan(compile="default")
    run = setup_run(workload, plan=plan, device="cpu", endless=True)
    course = steps(run)
    next(course)
    before = len(made)
    count(workload, workload.recipe, plan, this_machine("cpu"))
    ran.clear()
    next(course)
    run.close()
    assert ran
    assert len(made) == before > 0
