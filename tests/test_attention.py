"""Attention kernels: which may run, which really did and why not another, also in compiled code; ragged lengths."""

import dataclasses

import pytest
import torch
from tiny import emulating
from torch.nn.functional import scaled_dot_product_attention as sdpa

from speedkit.errors import PlanError
from speedkit.plan import Plan, resolve
from speedkit.train import compilation
from speedkit.train.attention import attend, kernels, which_ran
from speedkit.train.loop import begin, close, steps
from speedkit.workloads.text import text

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPE = (2, 4, 16, 32)  # [B, H, T, D]
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def tensors(*shape, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or SHAPE, generator=generator).to(device, dtype) for _ in range(3)]


def ran(function):
    return {row["kernel"] for row in which_ran(function)}


# --- which may run


def test_auto_decides_nothing_and_others_come_first():
    assert kernels(Plan()) is None
    inputs = tensors()
    assert ran(lambda: kernels(Plan(attention="math"))(sdpa)(*inputs)) == {"math"}
    assert ran(lambda: kernels(Plan(attention="flash"))(sdpa)(*inputs)) == {"flash"}
    assert ran(lambda: sdpa(*inputs)) == {"flash"}, "the choice ends with the function"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels are CUDA's")
@pytest.mark.parametrize("asked", ["flash", "efficient", "cudnn", "math"])
def test_on_a_gpu_each_kernel_runs_when_asked_for(asked):
    inputs = tensors(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    if resolve(Plan(attention=asked)).plan.attention == asked:
        assert ran(lambda: kernels(Plan(attention=asked))(sdpa)(*inputs)) == {asked}


@pytest.mark.parametrize("asked", ["flash", "math"])
def test_a_choice_that_refuses_falls_to_the_next(asked):
    assert ran(lambda: kernels(Plan(attention=asked))(sdpa)(*tensors(), dropout_p=0.5)) == {"math"}


@pytest.mark.parametrize("asked", ["efficient", "cudnn"])
def test_kernels_of_cuda_fall_back_on_a_cpu(asked):
    effective = resolve(Plan(attention=asked), emulating("cpu"))
    (fallback,) = effective.fallbacks
    assert (fallback.field, fallback.got, effective.plan.attention) == ("attention", "auto", "auto")
    assert "one of CUDA's" in fallback.why
    with pytest.raises(PlanError, match="attention"):
        resolve(Plan(attention=asked), emulating("cpu"), strict=True)


def test_flash_falls_back_where_it_is_not_built_in():
    without = dataclasses.replace(emulating("cpu"), flash_attention=False)
    (fallback,) = resolve(Plan(attention="flash"), without).fallbacks
    assert fallback.got == "auto" and "not in this build" in fallback.why


# --- which ran, and why


REFUSED = {
    "dropout": (lambda q: sdpa(q, q, q, dropout_p=0.1), "do not support non-zero dropout"),
    "three dimensions": (lambda q: sdpa(q[0], q[0], q[0]), "to be 4 dimensional"),
    "mask of three": (lambda q: sdpa(q, q, q, torch.ones(4, 16, 16, dtype=torch.bool)), "attn mask shapes"),
    "strides": (lambda q: sdpa(*[q.transpose(2, 3)] * 3), "last dimension of the input to have stride 1"),
    "trained mask": (lambda q: sdpa(q, q, q, torch.zeros(16, 16, requires_grad=True)), "needs a gradient"),
    "by name": (lambda q: sdpa(query=q, key=q, value=q[..., :8]), "same last dimension"),
    "asked": (lambda q: kernels(Plan(attention="math"))(sdpa)(q, q, q), "no other kernel was allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_silent_fall_back_to_math_is_named_with_its_reason(case):
    function, why = REFUSED[case]
    (row,) = which_ran(lambda: function(tensors()[0]))
    assert row["kernel"] == "math" and why in row["why"]


def test_a_row_per_kernel_dtype_and_shapes_with_its_calls():
    query, key, value = tensors()
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    short = [tensor.bfloat16().requires_grad_() for tensor in (query, key, value)]

    def work():
        for _ in range(3):
            sdpa(query, key, value)
        sdpa(query[:, :, :4], key, value, attn_mask=mask)
        sdpa(*short).sum().backward()  # its backward pass is no call of its own
        sdpa(query, key, value, dropout_p=0.5)

    rows = which_ran(work)
    assert [(row["kernel"], row["dtype"], row["query"], row["mask"], row["calls"]) for row in rows] == [
        ("flash", "float32", SHAPE, (), 3),
        ("flash", "float32", (2, 4, 4, 32), (2, 1, 1, 16), 1),
        ("flash", "bfloat16", SHAPE, (), 1),
        ("math", "float32", SHAPE, (), 1),
    ]
    assert [bool(row["why"]) for row in rows] == [False, False, False, True]


def test_what_a_model_ran_is_found():
    workload = text(size="tiny", clips=16)
    batch = torch.stack([workload.load(item) for item in workload.train]), torch.arange(16)
    model = workload.model()
    (row,) = which_ran(lambda: workload.loss(model, batch, workload.recipe))
    assert (row["kernel"], row["query"], row["calls"]) == ("flash", (16, 2, 64, 32), 2)


# --- compiled


def ran_in_training(**plan):
    """The kernels of the second step, traced in the first: math, compiled, is no operation of its own."""
    run = begin(text(size="tiny", clips=64), plan=Plan(**plan), device="cpu", endless=True)
    training = steps(run)
    next(training)
    try:
        return ran(lambda: next(training))
    finally:
        training.close()
        close(run)


@pytest.mark.parametrize(
    "scope", ["model", *(pytest.param(scope, marks=pytest.mark.slow) for scope in ("blocks", "step"))]
)
def test_compiled_code_follows_the_plan_though_another_plans_model_was_compiled_before(scope, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    for asked, expected in (("flash", {"flash"}), ("math", set()), ("auto", {"flash"})):
        assert ran_in_training(compile="default", compile_scope=scope, attention=asked) == expected


@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
@pytest.mark.parametrize("asked", ["math", "flash"])
def test_what_is_recomputed_uses_the_same_kernel(asked, checkpointing):
    assert ran_in_training(checkpointing=checkpointing, attention=asked) == {asked}


def test_dynamo_guards_no_choice_made_outside_of_compiled_code():
    """The fact for which compiled functions choose inside: where this fails, they need not."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(lambda *inputs: sdpa(*inputs), backend="aot_eager"), tensors()
    for asked in ("flash", "math"):
        assert ran(lambda asked=asked: kernels(Plan(attention=asked))(compiled)(*inputs)) == {"flash"}


# --- numerics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("asked", ["flash", "math"])
def test_kernels_agree_with_float64(asked, dtype, tolerance, device):
    exact = [tensor.requires_grad_() for tensor in tensors(dtype=torch.float64, device=device)]
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    found = []
    for inputs, name in ((exact, "math"), (rounded, asked)):
        output = kernels(Plan(attention=name))(sdpa)(*inputs)
        output.square().sum().backward()
        found.append([output, *(tensor.grad for tensor in inputs)])
    for wanted, got in zip(*found, strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(16, 5, 1), (16, 16, 16)], ids=str)
def test_ragged_clips_attend_as_each_alone(lengths, dtype, device):
    inputs = [tensor.requires_grad_() for tensor in tensors(3, 4, 16, 32, device=device, dtype=dtype)]
    alone = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    together = attend(*inputs, torch.tensor(lengths, device=device))
    valid = [together[row, :, :length] for row, length in enumerate(lengths)]
    each = [sdpa(*(x[row : row + 1, :, :length] for x in alone))[0] for row, length in enumerate(lengths)]
    for parts in (valid, each):
        sum(part.float().square().sum() for part in parts).backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for got, wanted in zip([*valid, *(x.grad for x in inputs)], [*each, *(x.grad for x in alone)], strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)


def test_padding_takes_a_mask_that_is_broadcast_and_that_flash_takes():
    (row,) = which_ran(lambda: attend(*tensors(), torch.tensor([16, 3])))
    assert row["kernel"] == "flash" and row["mask"] == (2, 1, 1, 16)
