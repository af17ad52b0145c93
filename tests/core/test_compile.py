"""Compiled training: the same losses in every scope, a failure that costs nothing, and a report that explains itself.

Quick tests compile with a backend that generates no code; the slow ones with the real one.
"""

import contextlib
import dataclasses
import os

import pytest
import torch
from faults import limited
from tiny import every_number_format, points
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache

from speedkit.fallbacks import resolve
from speedkit.lessons.compile_report import Compilations
from speedkit.machine import Hardware, this_machine
from speedkit.plan import Plan
from speedkit.recipe import learning_rates
from speedkit.train import compile
from speedkit.train.compile import apply_compile, repeated_blocks
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

SCOPES = ("model", "blocks", "step")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GPU = Hardware(torch.device("cuda"), 1, compute_capability=(9, 0), triton=True, compiler="gcc", python_headers=True)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, size), nn.GELU())

    def forward(self, x):  # [B, D] -> [B, D]
        return x + self.body(x)


def stack(depth=3):
    return nn.Sequential(nn.Linear(8, 8), *(Block(8) for _ in range(depth)), nn.Linear(8, 2))


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
    profile, workload = Compilations(), stacked()
    history = course(workload, compile="default", compile_scope=scope, micro_batch=micro_batch)
    assert profile.report().graphs > 0
    assert history.loss == pytest.approx(course(workload, micro_batch=micro_batch).loss, rel=1e-4)


def test_blocks_are_the_outermost_of_a_class_that_occurs_twice():
    layers = [
        nn.Sequential(nn.TransformerEncoderLayer(4, 1)),
        nn.TransformerEncoderLayer(4, 1),
        Block(4),
        nn.Linear(4, 4),
    ]
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    assert repeated_blocks(model) == [model[0][0], model[1]]


def test_blocks_share_code_names_stay_and_a_model_without_any_is_compiled_whole(quick):
    profile = Compilations()
    course(points(train=40), compile="default")
    assert profile.report().graphs == 1, "a plain sequence of layers too"
    profile, history = Compilations(), course(stacked(), compile="default", compile_scope="blocks")
    assert profile.report().graphs == 1  # one class, one shape; not the last batch, nor evaluation
    assert list(history.model.state_dict()) == list(stack().state_dict())
    history = course(stacked(lambda: nn.Linear(8, 2)), compile="default", compile_scope="blocks")
    assert "got model: Linear has no class of blocks twice" in str(history.effective.fallbacks[-1])


@pytest.mark.parametrize("precision", ["default", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_scope_step_is_one_graph_whatever_the_learning_rate_and_goes_on_from_a_checkpoint(
    quick, tmp_path, clip_norm, precision
):
    workload, profile = stacked(clip_norm=clip_norm, epochs=3), Compilations()
    assert len(set(learning_rates(workload.recipe, 9))) == 9
    plan = Plan(compile="default", compile_scope="step", log_every=1, validate_every=4, precision=precision)
    eager = course(workload, precision=precision)
    stopped = contextlib.closing(setup_run(workload, plan=plan, device="cpu", progress=False, out=tmp_path))
    with stopped as run:
        for step in steps(run):
            assert all(weight.grad is None for weight in run.parameters) or step % 3 == 0, (
                "the last of an epoch is smaller"
            )
            if step == 4:
                break
    assert profile.report().graphs == 1
    resumed = fit(workload, plan=plan, device="cpu", progress=False, out=tmp_path, resume=True)
    assert resumed.loss == pytest.approx(eager.loss, rel=1e-2 if precision == "bf16" else 1e-4)
    assert resumed.effective.fallbacks == ()


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        ({"micro_batch": 8}, {}),
        ({"on_nonfinite": "skip"}, {}),
        ({"precision": "fp16"}, {}),
        ({"checkpointing": "blocks"}, {}),
        ({}, {"optimizer": "sgd", "learning_rate": 0.01}),
    ],
    ids=str,
)
def test_what_one_graph_cannot_do_compiles_the_model(quick, plan, recipe):
    with every_number_format():
        history = course(stacked(**recipe), compile="default", compile_scope="step", **plan)
        eager = course(stacked(**recipe), **plan)
    assert history.effective.plan.compile_scope == "model", history.effective.fallbacks
    assert history.loss == pytest.approx(eager.loss, rel=1e-2 if "fp16" in str(plan) else 1e-4)


@pytest.mark.parametrize("micro_batch", [None, 4, "auto"])
def test_what_cuda_graphs_write_over_is_copied_before(micro_batch):
    """Gradients that are added up lie where the next replay would write: no graphs are recorded then."""
    effective = resolve(Plan(compile="reduce-overhead", micro_batch=micro_batch), GPU, batch_size=16)
    assert effective.plan.compile == ("reduce-overhead" if micro_batch is None else "default")
    assert effective.fallbacks == () or "CUDA graph" in effective.fallbacks[0].why


def test_a_loss_that_a_replay_writes_over_is_a_copy(monkeypatch):
    """What a graph returns lies in memory of its own; here each call is such a replay."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    memory, weight = torch.zeros(()), torch.nn.Parameter(torch.ones(()))
    still = torch.optim.AdamW([weight], lr=torch.tensor(0.0))

    def replayed(model, batch, recipe):
        mean = weight * batch
        mean.data = memory.copy_(mean.detach())
        return mean, batch

    plan = Plan(compile="reduce-overhead", compile_scope="step")
    workload = dataclasses.replace(points(), loss=replayed)
    loss = compile.compile_step(workload, still, plan)
    first, second = (loss(None, torch.tensor(number), workload.recipe)[0] for number in (3.0, 5.0))
    assert (first.item(), second.item(), float(still.state[weight]["step"])) == (3.0, 5.0, 2.0)


def test_any_length_takes_two_graphs_and_few_lengths_one_each(quick):
    class Mean(nn.Linear):
        def forward(self, x):  # [B, T] -> [B, K], whatever T
            return super().forward(x.mean(dim=1, keepdim=True).expand(-1, 8))

    for plan, graphs in ((Plan(compile="default"), 2), (Plan(compile="default", bucket=True), 4)):
        torch._dynamo.reset()
        profile, model = Compilations(), Mean(8, 2)
        apply_compile(model, plan, dataclasses.replace(points(), length=lambda item: 0))
        for length in (5, 6, 7, 9, 6):
            model(torch.ones(4, length))
        assert profile.report().graphs == graphs


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
    if scope == "step":  # the backward pass is in the same graph
        where = where.replace("backward", "forward")
    monkeypatch.setattr(compile, "BACKEND", broken_backend(where))
    history = course(stacked(), compile="default", compile_scope=scope)
    # The same bits, but for the learning rate of scope "step": it is a tensor, of float32.
    assert history.loss == (pytest.approx(eager, rel=1e-4) if scope == "step" else eager)
    fallback = history.as_dict()["fallbacks"][-1]
    assert (fallback["field"], fallback["asked"], fallback["got"]) == ("compile", "default", "off")
    assert "planted" in fallback["why"] and history.as_dict()["plan_effective"]["compile"] == "off"


def flipped(batch, generator):
    inputs, targets = batch
    return torch.where(torch.rand(len(inputs), 1, generator=generator) < 0.5, -inputs, inputs) * 0.5, targets


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_scope_step_compiles_augmentation_too_and_its_failure_costs_nothing(quick, monkeypatch, fails):
    workload = dataclasses.replace(points(train=40), augment=flipped)
    eager = course(workload).loss
    plan, profile = Plan(compile="default", compile_scope="step", log_every=1), Compilations()
    assert compile.compile_augment(workload, plan, torch.device("cpu")) is workload
    with contextlib.closing(setup_run(workload, plan=plan, device="cpu", progress=False)) as run:
        if fails:
            monkeypatch.setattr(compile, "BACKEND", broken_backend(["forward"]))
        run.augmenter = compile.compile_augment(workload, plan, torch.device("cuda"))
        for _ in steps(run):
            pass
    assert run.history.loss == pytest.approx(eager, rel=1e-4)
    assert profile.report().graphs > 3 or fails, "beside that of the step"
    assert bool(run.effective.fallbacks) == fails and (run.augmenter is run.workload) == fails


def test_an_error_of_the_users_own_is_raised(quick):
    with pytest.raises(KeyError, match="mine"):
        course(limited(stacked(), 0, raises=KeyError("mine")), compile="default")


# The report.


def reported(function, *calls):
    torch._dynamo.reset()
    profile, compiled = Compilations(), torch.compile(function, backend="eager", dynamic=False)
    for arguments in calls:
        compiled(arguments)
    return profile.report()


def test_a_graph_break_is_named_with_its_line_and_reason():
    def prints(x):
        doubled = x * 2
        print(end="")
        return doubled + 1

    report = reported(prints, torch.ones(3))
    (graph_break,) = report.breaks
    assert graph_break.startswith("test_compile.py:") and '`print(end="")`: Failed to trace builtin' in graph_break
    assert report.graphs == 2 and reported(lambda x: x * 2 + 1, torch.ones(3)).breaks == ()


def test_recompiles_are_explained_and_so_is_their_limit():
    report = reported(lambda x: x * 2, *(torch.ones(size) for size in (3, 4, 4)))
    assert report.graphs == 2 and report.uncompiled == ()
    (recompile,) = report.recompiles
    assert recompile.endswith("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    with torch._dynamo.config.patch(recompile_limit=2):
        report = reported(lambda x: x - 1, *(torch.ones(size) for size in (3, 4, 5)))
    assert report.graphs == 2 and "recompile limit" in " ".join(report.uncompiled)


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
    profile, workload = Compilations(), stacked()
    plan = Plan(compile="default", compile_scope=scope, log_every=1, validate_every=0)
    with contextlib.closing(setup_run(workload, plan=plan, device=device, progress=False)) as run:
        counts = [profile.report().graphs for _ in steps(run)]
    assert set(counts) == {1}  # not the last batch, nor evaluation, nor a moving rate
    eager = fit(workload, plan=Plan(log_every=1), device=device, progress=False).loss
    assert run.history.loss == pytest.approx(eager, rel=1e-4 if device == "cpu" else 1e-2)
    report = profile.report()
    assert report.seconds > 0 and report.breaks == report.uncompiled == ()


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
    workload = stacked(epochs=3)
    plan = Plan(compile="reduce-overhead", compile_scope=scope, log_every=4)
    eager = fit(workload, plan=Plan(log_every=4), progress=False).loss
    assert fit(workload, plan=plan, progress=False).loss == pytest.approx(eager, rel=1e-2)
