"""Compiled training: the same losses in every scope, a failure that costs nothing, and a report that explains itself.

Quick tests compile with a backend that generates no code; the slow ones with the real one.
"""

import dataclasses
import os

import pytest
import torch
from tiny import loss, points
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache

from speedkit.hardware import Hardware, this_machine
from speedkit.measure.graphs import Watch, break_even_step
from speedkit.plan import Plan, resolve
from speedkit.recipe import learning_rates
from speedkit.train import compile
from speedkit.train.compile import apply_compile, repeated_blocks
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

SCOPES = ("model", "blocks", "step")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Block(nn.Module):
    def __init__(self, size, dropout=0.1):
        super().__init__()
        wide = 2 * size
        self.body = nn.Sequential(nn.Linear(size, wide), nn.GELU(), nn.Dropout(dropout), nn.Linear(wide, size))

    def forward(self, x):  # [B, D] -> [B, D]
        return x + self.body(x)


def stack(size=8, depth=3, dropout=0.1):
    blocks = (Block(size, dropout) for _ in range(depth))
    return nn.Sequential(nn.Linear(size, size), *blocks, nn.Linear(size, 2))


def steady():
    """A stack without dropout, for which generated code draws masks of its own."""
    return stack(dropout=0.0)


@pytest.fixture
def quick(monkeypatch):
    """Trace as ever, backward graphs too, and run what was traced as it is."""
    torch._dynamo.reset()
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")


def stacked(model=stack, **recipe):
    return dataclasses.replace(points(train=40, **({"epochs": 2, "clip_norm": 1.0} | recipe)), model=model)


def course(workload, **plan):
    plan = {"log_every": 1, "validate_every": 3} | plan
    return fit(workload, plan=Plan(**plan), device="cpu", progress=False)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("micro_batch", [None, 8])
def test_every_scope_learns_the_same(quick, scope, micro_batch):
    watch, workload = Watch(), stacked()
    history = course(workload, compile="default", compile_scope=scope, micro_batch=micro_batch)
    assert watch.report().graphs > 0
    assert history.loss == pytest.approx(course(workload, micro_batch=micro_batch).loss, rel=1e-4)


def test_blocks_are_the_outermost_of_a_class_that_occurs_twice():
    pairs = nn.Sequential(Block(4), nn.ModuleList([Block(4)]), nn.Linear(4, 4), nn.Linear(4, 4))
    assert [name for name, _ in repeated_blocks(pairs)] == ["0", "1.0"]
    nested = nn.ModuleDict({"a": nn.TransformerEncoderLayer(4, 1), "b": nn.TransformerEncoderLayer(4, 1)})
    assert [name for name, _ in repeated_blocks(nn.Sequential(nested, Block(4)))] == ["0.a", "0.b"]
    assert repeated_blocks(nn.Sequential(Block(4), nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_a_sequence_of_layers_is_one_graph(quick):
    watch, history = Watch(), course(points(train=40), compile="default")
    assert watch.report().graphs == 1
    assert history.loss == pytest.approx(course(points(train=40)).loss, rel=1e-4)


def test_blocks_share_code_and_names_stay(quick):
    watch, history = Watch(), course(stacked(lambda: stack(depth=6)), compile="default", compile_scope="blocks")
    assert watch.report().graphs == 1  # one class, one shape; not the last batch, nor evaluation
    assert list(history.model.state_dict()) == list(stack(depth=6).state_dict())


def test_a_model_without_blocks_is_compiled_whole_and_says_so(quick):
    history = course(stacked(lambda: nn.Linear(8, 2)), compile="default", compile_scope="blocks")
    assert history.effective.plan.compile_scope == "model"
    assert "Linear has no class of blocks twice" in str(history.effective.fallbacks[-1])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_moving_learning_rate_compiles_the_update_once(quick, name):
    workload, watch = stacked(optimizer=name, learning_rate=0.01, epochs=3), Watch()
    assert len(set(learning_rates(workload.recipe, 9))) == 9
    history = course(workload, compile="default", compile_scope="step")
    # Model and loss; the update; and of momentum, which the first step makes, the update with it.
    assert watch.report().graphs == 2 + (name == "sgd")
    assert history.loss == pytest.approx(course(workload).loss, rel=1e-4)


def test_cuda_graphs_are_not_recorded_for_any_number_of_lengths():
    ragged = dataclasses.replace(points(), length=lambda item: 0)
    gpu = Hardware(torch.device("cuda"), 1, compute_capability=(9, 0), triton=True, compiler="gcc", python_headers=True)
    for bucket, mode in ((False, "default"), (True, "reduce-overhead")):
        effective = resolve(Plan(compile="reduce-overhead", bucket=bucket), gpu, workload=ragged)
        assert effective.plan.compile == mode


@pytest.mark.parametrize("micro_batch", [None, 4, "auto"])
def test_what_cuda_graphs_write_over_is_copied_before(micro_batch):
    """Gradients that are added up lie where the next replay would write: no graphs are recorded then."""
    gpu = Hardware(torch.device("cuda"), 1, compute_capability=(9, 0), triton=True, compiler="gcc", python_headers=True)
    effective = resolve(Plan(compile="reduce-overhead", micro_batch=micro_batch), gpu, batch_size=16)
    assert effective.plan.compile == ("reduce-overhead" if micro_batch is None else "default")
    assert effective.fallbacks == () or "CUDA graph" in effective.fallbacks[0].why


def test_any_length_takes_two_graphs_and_few_lengths_one_each(quick):
    class Mean(nn.Linear):
        def forward(self, x):  # [B, T] -> [B, K], whatever T
            return super().forward(x.mean(dim=1, keepdim=True).expand(-1, 8))

    ragged = dataclasses.replace(points(), length=lambda item: 0)
    for plan, graphs in ((Plan(compile="default"), 2), (Plan(compile="default", bucket=True), 4)):
        torch._dynamo.reset()
        watch, model = Watch(), Mean(8, 2)
        apply_compile(model, plan, ragged)
        for length in (5, 6, 7, 9, 6):
            model(torch.ones(4, length))
        assert watch.report().graphs == graphs


# Failures.


def broken_backend(where):
    """A backend that cannot compile the graphs of `where`, or whose code for them fails as it runs."""

    def fails(graph, inputs):
        if "running" in where:

            def run(*arguments):
                raise AssertionError("expected size 16==16, stride 234==364 at dim=0")

            return make_boxed_func(run)
        raise InductorError(ValueError(f"planted in the {where}"), None)  # what the real backend makes of all errors

    def as_it_is(graph, inputs):
        return make_boxed_func(graph.forward)

    forward, backward = (fails if side in where else as_it_is for side in ("forward", "backward"))
    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", ["forward", "backward", "running forward", "running backward"])
def test_a_failure_to_compile_costs_nothing_but_the_speed(quick, monkeypatch, scope, where, capsys):
    eager = course(stacked(steady)).loss
    monkeypatch.setattr(compile, "BACKEND", broken_backend(where))
    plan = Plan(compile="default", compile_scope=scope, log_every=1, validate_every=3)
    history = fit(stacked(steady), plan=plan, device="cpu", progress=True)
    # The same bits, but for the learning rate of scope "step": it is a tensor, of float32.
    assert history.loss == (pytest.approx(eager, rel=1e-4) if scope == "step" else eager)
    fallback = history.as_dict()["fallbacks"][-1]
    assert (fallback["field"], fallback["asked"], fallback["got"]) == ("compile", "default", "off")
    assert ("stride 234==364" if "running" in where else f"planted in the {where}") in fallback["why"]
    assert history.as_dict()["plan_effective"]["compile"] == "off"


@pytest.mark.parametrize("scope", SCOPES)
def test_an_error_of_the_users_own_is_raised(quick, scope):
    def wrong(model, batch, recipe):
        model(batch[0])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        course(dataclasses.replace(stacked(), loss=wrong), compile="default", compile_scope=scope)


# The report.


def reported(function, *calls, dynamic=False):
    torch._dynamo.reset()
    watch, compiled = Watch(), torch.compile(function, backend="eager", dynamic=dynamic)
    for arguments in calls:
        compiled(*arguments)
    return watch.report()


def test_a_graph_break_is_named_with_its_line_and_reason():
    def prints(x):
        doubled = x * 2
        print(end="")
        return doubled + 1

    report = reported(prints, (torch.ones(3),))
    assert report.graphs == 2
    (graph_break,) = report.breaks
    assert graph_break.startswith("test_compile.py:") and '`print(end="")`: Failed to trace builtin' in graph_break
    assert reported(lambda x: x * 2 + 1, (torch.ones(3),)).breaks == ()


def test_recompiles_are_explained():
    sizes = reported(lambda x: x * 2, *((torch.ones(size),) for size in (3, 4, 5, 4)))
    assert sizes.graphs == 3
    assert [why.partition(": ")[2] for why in sizes.recompiles] == [
        f"tensor 'x' size mismatch at index 0. expected {was}, actual {now}" for was, now in ((3, 4), (4, 5))
    ]
    assert reported(lambda x: x + 1, (torch.ones(3),), (torch.ones(3),)).recompiles == ()


def test_more_shapes_than_the_limit_are_reported():
    with torch._dynamo.config.patch(recompile_limit=2):
        report = reported(lambda x: x - 1, *((torch.ones(size),) for size in (3, 4, 5)))
    assert report.graphs == 2
    assert "recompile limit" in " ".join(report.uncompiled)


@pytest.mark.parametrize(("eager", "compiled", "steps"), [(0.5, 0.25, 40), (0.2, 0.2, None), (0.2, 0.3, None)])
def test_the_break_even_step(eager, compiled, steps):
    assert break_even_step(10.0, eager, compiled) == steps


# With the real compiler.


@pytest.fixture
def real():
    """A compiler, with nothing in its cache; CI must have one."""
    machine = this_machine("cpu")
    if not machine.supports("compile"):
        assert os.environ.get("CI") != "true", machine.why_not("compile")
        pytest.skip(machine.why_not("compile"))
    torch._dynamo.reset()
    with fresh_cache():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", SCOPES)
def test_trained_for_real_every_scope_compiles_once_and_learns_the_same(real, scope, device):
    watch, workload = Watch(), stacked(steady, epochs=3)
    plan = Plan(compile="default", compile_scope=scope, log_every=1, validate_every=0)
    run = setup_run(workload, plan=plan, device=device, progress=False)
    counts = [watch.report().graphs for _ in steps(run)]
    run.close()
    assert set(counts) == {2 if scope == "step" else 1}  # not the last batch, nor evaluation, nor a moving rate
    eager = fit(workload, plan=Plan(log_every=1), device=device, progress=False).loss
    assert run.history.loss == pytest.approx(eager, rel=1e-4 if device == "cpu" else 1e-2)
    report = watch.report()
    assert report.seconds > 0 and report.breaks == report.uncompiled == ()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_compiler_that_stops_working_costs_nothing_but_the_speed(real, where):
    """The C++ compiler goes away before anything is compiled, or between the forward and the first backward pass."""

    def loss_and_accident(model, batch, recipe):
        result = loss(model, batch, recipe)
        inductor.cpp.cxx = (None, "false")
        return result

    workload = dataclasses.replace(points(train=40, epochs=1), loss=loss_and_accident)
    with inductor.patch({"cpp.cxx": inductor.cpp.cxx}):  # what the loss breaks is whole again afterwards
        eager = course(workload).loss
        inductor.cpp.cxx = (None, "false" if where == "forward" else "g++")
        history = course(workload, compile="default")
    assert history.loss == eager
    assert history.effective.plan.compile == "off"
    assert "C++ compiler" in history.effective.fallbacks[-1].why


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("scope", SCOPES)
def test_cuda_graphs_keep_losses(real, scope):
    workload = stacked(steady, epochs=3)
    plan = Plan(compile="reduce-overhead", compile_scope=scope, log_every=4)
    eager = fit(workload, plan=Plan(log_every=4), progress=False).loss
    assert fit(workload, plan=plan, progress=False).loss == pytest.approx(eager, rel=1e-2)
