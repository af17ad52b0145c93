"""Attention kernels: which may run and which really ran, also in compiled and recomputed code; their numerics."""

import contextlib

import pytest
import torch
from tiny import calling, points, trained
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from speedkit.fallbacks import resolve
from speedkit.lab.workloads.text import SIZES, text
from speedkit.measure.kernels import which_ran
from speedkit.plan import Plan
from speedkit.train import compile
from speedkit.train.attention import leave_out_cudnn, with_kernel
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

SHAPE = (2, 4, 16, 32)  # [B, H, T, D]
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def tensors(*shape, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or SHAPE, generator=generator).to(device, dtype) for _ in range(3)]


def under(kernel):
    return with_kernel(sdpa, Plan(attention=kernel))


def ran(function):
    return {entry["kernel"] for entry in which_ran(function)}


def test_the_kernel_asked_for_runs_where_it_can():
    assert ran(lambda: under("math")(*tensors())) == {"math"}
    assert ran(lambda: under("flash")(*tensors(), dropout_p=0.5)) == {"math"}, "refused: the next one takes it"
    query, key, value = (tensor.requires_grad_() for tensor in tensors())

    def work():
        for _ in range(3):
            under("flash")(query, key, value)
        sdpa(query[:, :, :4], key, value).sum().backward()  # its backward pass is no call of its own

    assert which_ran(work) == [{"kernel": "flash"}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels are CUDA's")
@pytest.mark.parametrize("asked", ["flash", "efficient", "cudnn", "math"])
def test_on_a_gpu_each_kernel_runs_when_asked_for(asked):
    inputs = tensors(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    if resolve(Plan(attention=asked)).plan.attention == asked:
        assert ran(lambda: under(asked)(*inputs)) == {asked}


def ran_in_training(**plan):
    """The kernels of the second step, traced in the first: math, compiled, is no operation of its own."""
    workload = text(size=SIZES["tiny"], clips=64)
    with contextlib.closing(setup_run(workload, plan=Plan(**plan), device="cpu", endless=True)) as run:
        training = steps(run)
        next(training)
        return ran(lambda: next(training))


@pytest.mark.parametrize("scope", ["model", pytest.param("blocks", marks=pytest.mark.slow)])
def test_compiled_code_follows_the_plan_though_another_plans_model_was_compiled_before(scope, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    for asked, expected in (("flash", {"flash"}), ("math", set()), ("auto", {"flash"})):
        assert ran_in_training(compile="default", compile_scope=scope, attention=asked) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "checkpointing"), [("math", "blocks"), ("flash", "selective")])
def test_what_is_recomputed_uses_the_same_kernel(asked, checkpointing):
    assert ran_in_training(checkpointing=checkpointing, attention=asked) == {asked}


def refusing(times):
    """Points in whose loss cuDNN refuses the first `times` calls; and whether its attention was allowed in each."""
    allowed = []

    def refuse(model, batch):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(allowed) <= times:
            raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")

    return calling(points(train=32), refuse), allowed


@pytest.mark.slow
def test_what_cudnn_refuses_is_repeated_once_without_its_attention():
    workload, allowed = refusing(times=1)
    history = trained(workload, plan=Plan(log_every=1))
    [fallback] = history.effective.fallbacks
    assert (fallback.field, fallback.asked, fallback.got) == ("attention", "auto", "flash")
    assert "step 1: RuntimeError: cuDNN" in fallback.why
    assert allowed[0] and not any(allowed[1:]) and torch.backends.cuda.cudnn_sdp_enabled(), "the user's, afterwards"
    assert history.loss == trained(points(train=32), plan=Plan(log_every=1)).loss
    for times, plan in ((2, Plan()), (1, Plan(attention="math"))):  # another cause; a plan without cuDNN's attention
        with pytest.raises(RuntimeError, match=r"^cuDNN Frontend error"):
            trained(refusing(times)[0], plan=plan)


def test_no_order_of_kernels_brings_cudnn_back_where_it_is_left_out():
    model = torch.nn.Identity()
    model.forward = with_kernel(lambda: torch.backends.cuda.cudnn_sdp_enabled(), Plan(attention="cudnn"))
    assert model()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which puts back what it has found
        leave_out_cudnn(model)
        assert not model()
