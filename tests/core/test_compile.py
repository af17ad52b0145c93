"""Compiled training: the same losses in every scope, and a failure that costs nothing but the speed.

Quick tests compile with a backend that generates no code; the slow ones with the real one.
"""

import dataclasses
import os

import pytest
import torch
from faults import limited
from tiny import DEVICES, points, trained
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache

from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.train import compile
from speedkit.train.compile import apply_compile, repeated_blocks

SCOPES = ("model", "blocks")


def compilations():
    """How many graphs have been compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, size), nn.GELU())

    def forward(self, x):  # [B, D] -> [B, D]
        return x + self.body(x)


def stack(depth=3):
    return nn.Sequential(nn.Linear(8, 8), *(Block(8) for _ in range(depth)), nn.Linear(8, 2))


def forget_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def quick(monkeypatch):
    """Trace as ever, backward graphs too, and run what was traced as it is."""
    forget_graphs()
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")


@pytest.fixture
def real():
    """A compiler, with nothing in its cache; CI must have one."""
    machine = this_machine("cpu")
    if not machine.supports("compile"):
        assert os.environ.get("CI") != "true", machine.why_not("compile")
        pytest.skip(machine.why_not("compile"))
    forget_graphs()
    with fresh_cache():
        yield


def stacked(model=stack, **recipe):
    return dataclasses.replace(points(train=40, **({"epochs": 2, "clip_norm": 1.0} | recipe)), model=model)


def course(workload, device="cpu", **plan):
    plan = {"log_every": 1, "validate_every": 3} | plan
    return trained(workload, plan=Plan(**plan), device=device)


@pytest.mark.parametrize("compiler", ["quick", pytest.param("real", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_makes_one_graph_and_learns_the_same(compiler, scope, device, request):
    request.getfixturevalue(compiler)
    history = course(stacked(), device, compile="default", compile_scope=scope)
    assert compilations() == 1  # one class, one shape; not the last batch, nor evaluation, nor a moving rate
    assert history.loss == pytest.approx(course(stacked(), device).loss, rel=1e-4 if device == "cpu" else 1e-2)
    assert list(history.model.state_dict()) == list(stack().state_dict())


def test_blocks_are_the_outermost_of_a_class_that_occurs_twice():
    layers = [
        nn.Sequential(nn.TransformerEncoderLayer(4, 1)),
        nn.TransformerEncoderLayer(4, 1),
        Block(4),
        nn.Linear(4, 4),
    ]
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    assert repeated_blocks(model) == [model[0][0], model[1]]


def test_a_plain_sequence_is_compiled_and_a_model_without_blocks_as_a_whole(quick):
    course(points(train=40), compile="default")
    assert compilations() == 1
    history = course(stacked(lambda: nn.Linear(8, 2)), compile="default", compile_scope="blocks")
    assert "got model: Linear has no class of blocks twice" in str(history.effective.fallbacks[-1])


def test_any_length_takes_two_graphs_and_few_lengths_one_each(quick):
    class Mean(nn.Linear):
        def forward(self, x):  # [B, T] -> [B, K], whatever T
            return super().forward(x.mean(dim=1, keepdim=True).expand(-1, 8))

    bucketed = Plan(compile="default", bucket=True)
    in_blocks = dataclasses.replace(bucketed, compile_scope="blocks")
    for plan, graphs in ((Plan(compile="default"), 2), (bucketed, 4), (in_blocks, 2)):
        forget_graphs()
        model = Mean(8, 2)
        apply_compile(model, plan, dataclasses.replace(points(), length=lambda item: 0))
        for length in (5, 6, 7, 9, 6):
            model(torch.ones(4, length))
        assert compilations() == graphs


# Failures.


def broken_backend(where):
    """A backend that cannot compile the graphs of `where`, or whose code for them fails as it runs."""

    def fail(*_):
        raise InductorError(ValueError("planted"), None)  # what the real backend makes of all errors

    def broken(graph, inputs):
        return make_boxed_func(fail) if "running" in where else fail()

    def whole(graph, inputs):
        return make_boxed_func(graph.forward)

    forward, backward = (broken if side in where else whole for side in ("forward", "backward"))
    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", ["forward", "backward", "running forward", "running backward"])
def test_a_failure_to_compile_costs_nothing_but_the_speed(quick, monkeypatch, scope, where):
    eager = course(stacked()).loss
    monkeypatch.setattr(compile, "BACKEND", broken_backend(where))
    history = course(stacked(), compile="default", compile_scope=scope)
    assert history.loss == eager
    fallback = history.as_dict()["fallbacks"][-1]
    assert (fallback["field"], fallback["asked"], fallback["got"]) == ("compile", "default", "off")
    assert "planted" in fallback["why"] and history.as_dict()["plan_effective"]["compile"] == "off"


def test_an_error_of_the_users_own_is_raised(quick):
    with pytest.raises(KeyError, match="mine"):
        course(limited(stacked(), 0, raises=KeyError("mine")), compile="default")


# With the real compiler.


@pytest.mark.slow
def test_without_a_working_compiler_training_goes_on_eagerly(real):
    workload = points(train=40, epochs=1)
    with inductor.patch({"cpp.cxx": (None, "false")}):
        history = course(workload, compile="default")
    assert history.loss == course(workload).loss
    assert history.effective.plan.compile == "off" and "C++ compiler" in history.effective.fallbacks[-1].why


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("scope", SCOPES)
def test_cuda_graphs_keep_losses(real, scope):
    workload, eager = stacked(epochs=3), {"log_every": 4, "validate_every": None}
    graphs = eager | {"compile": "reduce-overhead", "compile_scope": scope}
    assert course(workload, "cuda", **graphs).loss == pytest.approx(course(workload, "cuda", **eager).loss, rel=1e-2)
