"""Compiled training: the same losses in every scope, a failure that costs nothing, and a report that explains itself.

Quick tests compile with a backend that generates no code; the slow ones with the real one.
"""

import dataclasses
import os

import pytest
import torch
from speedkit.train.blocks import repeated_blocks
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
from speedkit.recipe import Recipe, learning_rates
from speedkit.train import compilation, optimizer, precision
from speedkit.train.loop import fit, steps
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
    torch.manual_seed(0)
    blocks = (Block(size, dropout) for _ in range(depth))
    return nn.Sequential(nn.Linear(size, size), *blocks, nn.Linear(size, 2))


def steady():
    """A stack without dropout, for which generated code draws masks of its own."""
    return stack(dropout=0.0)


@pytest.fixture
def quick(monkeypatch):
    """Trace as ever, backward graphs too, and run what was traced as it is."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")


def batch_of(seed, length=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, length, generator=generator), torch.randint(2, (16,), generator=generator)


def train(plan, count=6, model=None, recipe=None, batches=None, loss_of=loss, parts=1):
    """Losses of `count` steps of `model`, and the model: the training loop's calls without the rest of it."""
    recipe, model = recipe or Recipe(clip_norm=1.0), model or stack()
    step = optimizer.build(model.parameters(), recipe, plan.fused_optimizer, compilation.compiles_update(plan))
    forward = compilation.apply(model, plan)
    loss_of, update = compilation.loss(loss_of, plan), compilation.update(forward, step)
    move = optimizer.schedule(step, learning_rates(recipe, count), None)
    losses = []
    for number in range(count):
        move(number)
        random = torch.get_rng_state()
        while True:
            try:
                step.zero_grad()
                for part in zip(*(tensor.chunk(parts) for tensor in (batches or batch_of)(number)), strict=True):
                    value, _ = loss_of(forward, part, recipe)
                    (value / parts).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                update()
                break
            except Exception as error:
                if not compilation.gave_up(forward, error):
                    raise
                torch.set_rng_state(random)
        losses.append(float(value.detach()))
    return losses, forward


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_scope_learns_the_same(quick, scope, parts):
    watch = Watch()
    losses, _ = train(Plan(compile="default", compile_scope=scope), parts=parts)
    assert watch.report().graphs > 0
    assert losses == pytest.approx(train(Plan(), parts=parts)[0], rel=1e-5)


def test_blocks_are_the_outermost_of_a_class_that_occurs_twice():
    pairs = nn.Sequential(Block(4), nn.ModuleList([Block(4)]), nn.Linear(4, 4), nn.Linear(4, 4))
    assert [name for name, _ in repeated_blocks(pairs)] == ["0", "1.0"]
    nested = nn.ModuleDict({"a": nn.TransformerEncoderLayer(4, 1), "b": nn.TransformerEncoderLayer(4, 1)})
    assert [name for name, _ in repeated_blocks(nn.Sequential(nested, Block(4)))] == ["0.a", "0.b"]
    assert repeated_blocks(nn.Sequential(Block(4), nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_blocks_share_code_and_the_model_stays_plain(quick):
    model = stack(depth=6)
    names, watch = list(model.state_dict()), Watch()
    _, forward = train(Plan(compile="default", compile_scope="blocks"), model=model)
    assert watch.report().graphs == 1  # one class, one shape
    model.eval()
    loss(model, batch_of(0), Recipe())
    assert watch.report().graphs == 1  # evaluation compiled nothing
    assert forward.model is model
    assert list(model.state_dict()) == names
    assert not any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules())


def test_a_model_without_blocks_is_compiled_whole_and_says_so(quick):
    plan = Plan(compile="default", compile_scope="blocks")
    _, forward = train(plan, model=nn.Linear(8, 2))
    effective = compilation.honoured(resolve(plan), forward)
    assert effective.plan.compile_scope == "model"
    assert "Linear has no class of blocks twice" in str(effective.fallbacks[-1])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_moving_learning_rate_compiles_the_update_once(quick, name):
    recipe = Recipe(optimizer=name, clip_norm=1.0, learning_rate=0.01)
    plan, watch = Plan(compile="default", compile_scope="step"), Watch()
    assert len(set(learning_rates(recipe, 12))) == 12
    losses, _ = train(plan, 12, recipe=recipe)
    # Model and loss; the update; and of momentum, which the first step makes, the update with it.
    assert watch.report().graphs == 2 + (name == "sgd")
    assert losses == pytest.approx(train(Plan(), 12, recipe=recipe)[0], rel=1e-4)


def test_hooks_of_the_optimizer_are_called_around_a_compiled_update(quick):
    model = stack()
    step = optimizer.build(model.parameters(), Recipe(), fused=False, tensor_rate=True)
    update = compilation.update(compilation.apply(model, Plan(compile="default", compile_scope="step")), step)
    called = []
    step.register_step_pre_hook(lambda *_: called.append("before"))
    step.register_step_post_hook(lambda *_: called.append("after"))
    loss(model, batch_of(0), Recipe())[0].backward()
    update()
    assert called == ["before", "after"]


def test_what_cuda_graphs_write_over_is_copied_before(quick):
    plan = Plan(compile="default", compile_scope="step")
    model, recipe = stack().eval(), Recipe()
    forward, loss_of = compilation.apply(model, plan), compilation.loss(loss, plan)
    forward.cuda_graphs = True
    first, second = batch_of(0), batch_of(1)
    value, _ = loss_of(forward, first, recipe)
    value.backward()
    graphs_own = [weight.grad for weight in model.parameters()]
    alone = [gradient.clone() for gradient in graphs_own]
    loss_of(forward, second, recipe)[0].backward()
    for gradient in graphs_own:
        gradient.fill_(torch.nan)  # as the replay of a graph would
    assert value._base is None and value.grad_fn.name() == "CloneBackward0"
    together = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    loss(model, second, recipe)[0].backward()
    for found, one, weight in zip(together, alone, model.parameters(), strict=True):
        torch.testing.assert_close(found, one + weight.grad)


def test_cuda_graphs_are_not_recorded_for_any_number_of_lengths():
    ragged = dataclasses.replace(points(), length=lambda item: 0)
    gpu = Hardware(torch.device("cuda"), 1, compute_capability=(9, 0), triton=True, compiler="gcc", python_headers=True)
    for bucket, got in ((False, "default"), (True, "reduce-overhead")):
        effective = resolve(Plan(compile="reduce-overhead", bucket=bucket), gpu, workload=ragged)
        assert effective.plan.compile == got


# Failures.


def planted(where):
    """A backend that cannot compile the graphs of `where`: forward, or backward, which is compiled when needed."""

    def fails(graph, inputs):
        raise InductorError(ValueError(f"planted in the {where}"), None)  # what the real backend makes of all errors

    def as_it_is(graph, inputs):
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=fails if where == "forward" else as_it_is, bw_compiler=fails if where == "backward" else as_it_is
    )


def as_eager(losses, scope):
    """The same bits, but for the learning rate of scope "step": it is a tensor, of float32."""
    return pytest.approx(losses, rel=1e-6) if scope == "step" else losses


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_to_compile_costs_nothing_but_the_speed(quick, monkeypatch, scope, where):
    eager, _ = train(Plan())
    monkeypatch.setattr(compilation, "BACKEND", planted(where))
    plan = Plan(compile="default", compile_scope=scope)
    losses, forward = train(plan)
    assert losses == as_eager(eager, scope)
    effective = compilation.honoured(resolve(plan), forward)
    assert effective.plan.compile == "off"
    assert [str(found) for found in effective.fallbacks] == [
        f"compile: asked default, got off: compilation failed: ValueError: planted in the {where}"
    ]
    assert compilation.honoured(effective, forward) == effective  # said once


def test_an_error_of_the_users_own_is_raised(quick):
    def wrong(model, batch, recipe):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(Plan(compile="default", compile_scope="step"), loss_of=wrong)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_run_outlives_a_failure_in_its_loop_and_says_so(quick, monkeypatch, scope, capsys):
    def course(**plan):
        workload = dataclasses.replace(points(train=40, epochs=1), model=stack)
        return fit(workload, plan=Plan(log_every=1, **plan), device="cpu")

    eager = course().loss
    monkeypatch.setattr(compilation, "BACKEND", planted("backward"))
    capsys.readouterr()
    history = course(compile="default", compile_scope=scope)
    assert history.loss == as_eager(eager, scope)
    assert history.as_dict()["plan_effective"]["compile"] == "off"
    assert "planted in the backward" in history.as_dict()["fallbacks"][-1]["why"]
    assert capsys.readouterr().out.count("planted in the backward") == 1


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
    (found,) = report.breaks
    assert found.startswith("test_compilation.py:") and '`print(end="")`: Failed to trace builtin' in found
    assert reported(lambda x: x * 2 + 1, (torch.ones(3),)).breaks == ()


def test_recompiles_are_explained():
    sizes = reported(lambda x: x * 2, *((torch.ones(size),) for size in (3, 4, 5, 4)))
    assert sizes.graphs == 3
    assert [why.partition(": ")[2] for why in sizes.recompiles] == [
        f"tensor 'x' size mismatch at index 0. expected {was}, actual {now}" for was, now in ((3, 4), (4, 5))
    ]
    numbers = reported(lambda x, rate: x * rate, *((torch.ones(3), rate) for rate in (0.1, 0.2)))
    assert [why.partition(": ")[2] for why in numbers.recompiles] == ["rate == 0.1"]
    assert reported(lambda x: x + 1, (torch.ones(3),), (torch.ones(3),)).recompiles == ()


def test_more_shapes_than_the_limit_are_reported():
    with torch._dynamo.config.patch(recompile_limit=2):
        report = reported(lambda x: x - 1, *((torch.ones(size),) for size in (3, 4, 5)))
    assert report.graphs == 2
    assert "recompile limit" in " ".join(report.uncompiled)


def test_any_length_takes_two_graphs_and_few_lengths_one_each(quick):
    class Mean(nn.Linear):
        def forward(self, x):  # [B, T] -> [B, K], whatever T
            return super().forward(x.mean(dim=1, keepdim=True).expand(-1, 8))

    ragged = dataclasses.replace(points(), length=lambda item: 0)
    for plan, graphs in ((Plan(compile="default"), 2), (Plan(compile="default", bucket=True), 4)):
        torch._dynamo.reset()
        watch, forward = Watch(), compilation.apply(Mean(8, 2), plan, ragged)
        for length in (5, 6, 7, 9, 6):
            forward(torch.ones(4, length))
        assert watch.report().graphs == graphs


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


def gradients(plan, device):
    """Loss and gradients of a first pass, as the training loop computes them."""
    model = stack().to(device)
    loss_of, recipe = compilation.loss(loss, plan), Recipe()
    if (autocast := precision.autocast(plan, device)) is not None:
        loss_of = autocast(loss_of)
    batch = tuple(tensor.to(device) for tensor in batch_of(0))
    value, _ = loss_of(compilation.apply(model.eval(), plan), batch, recipe)  # no dropout, whose masks may differ
    value.backward()
    return float(value.detach()), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("format_", "apart"), [("fp32", 1e-6), ("bf16", 2e-3)])
def test_compiled_numerics_are_those_of_the_number_format(real, device, format_, apart):
    device = torch.device(device)
    exact_loss, exact = gradients(Plan(), device)
    for scope in SCOPES:
        value, found = gradients(Plan(compile="default", compile_scope=scope, precision=format_), device)
        assert value == pytest.approx(exact_loss, rel=10 * apart)
        assert torch.cosine_similarity(found, exact, dim=0) > 1 - apart


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_trained_for_real_every_scope_compiles_once_and_learns_the_same(real, scope):
    watch, workload = Watch(), dataclasses.replace(points(train=40, epochs=3, clip_norm=1.0), model=steady)
    plan = Plan(compile="default", compile_scope=scope, log_every=1, validate_every=0)
    run = setup_run(workload, plan=plan, device="cpu", progress=False)
    counts = [watch.report().graphs for _ in steps(run)]
    run.close()
    assert set(counts) == {2 if scope == "step" else 1}  # not the last batch, nor evaluation, nor a moving rate
    assert run.history.loss == pytest.approx(fit(workload, plan=Plan(log_every=1), device="cpu").loss, rel=1e-4)
    report = watch.report()
    assert report.seconds > 0 and report.cache_misses > 0 and report.breaks == report.uncompiled == ()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_compiler_that_stops_working_costs_nothing_but_the_speed(real, monkeypatch, where):
    """The C++ compiler goes away before anything is compiled, or between the forward and the first backward pass."""

    def loss_and_accident(model, batch, recipe):
        found = loss(model, batch, recipe)
        inductor.cpp.cxx = (None, "false")
        return found

    workload = dataclasses.replace(points(train=40, epochs=1, dropout=0.2), loss=loss_and_accident)
    with inductor.patch({"cpp.cxx": inductor.cpp.cxx}):  # what the loss breaks is whole again afterwards
        eager = fit(workload, plan=Plan(log_every=1), device="cpu", progress=False).loss
        inductor.cpp.cxx = (None, "false" if where == "forward" else "g++")
        history = fit(workload, plan=Plan(log_every=1, compile="default"), device="cpu", progress=False)
    assert history.loss == eager
    assert history.effective.plan.compile == "off"
    assert "C++ compiler" in history.effective.fallbacks[-1].why


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("scope", SCOPES)
def test_cuda_graphs_keep_losses_and_accumulate_gradients(real, scope, micro_batch):
    workload = dataclasses.replace(points(train=64, epochs=3, clip_norm=1.0), model=steady)
    plan = Plan(compile="reduce-overhead", compile_scope=scope, micro_batch=micro_batch, log_every=4)
    eager = fit(workload, plan=Plan(log_every=4), progress=False).loss
    assert fit(workload, plan=plan, progress=False).loss == pytest.approx(eager, rel=1e-2)
