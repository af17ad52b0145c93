"""Number formats: gates against float32, 8-bit layers, switches that agree with each other, loss scaling."""

import itertools

import pytest
import torch
from tiny import DEVICES, reset_switches
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.train.precision import Precision

BACKENDS = torch.backends
CPU = torch.device("cpu")
# Least cosine of a gradient with float32's, and largest relative difference of the loss.
GATES = {
    "fp32": (1, 0),
    "tf32": (0.9999, 1e-3),
    "bf16": (0.999, 1e-2),
    "fp16": (0.9999, 2e-3),
    "fp8-emulated": (0.98, 3e-2),
    "fp8": (0.98, 3e-2),
}


@pytest.fixture(autouse=True)
def restore_switches():
    yield
    reset_switches()


def net():
    torch.manual_seed(1)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def loss_and_gradients(name, device):
    """The loss and each weight's gradient of the same net on the same batch, computed in a format."""
    plan, model, place, rows = Plan(precision=name), net().to(device), torch.device(device), 40
    inputs = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).to(device)
    format = Precision(plan, place)
    format.set_switches()
    format.convert(model)
    with format.context:
        loss = cross_entropy(model(inputs), torch.arange(rows, device=device) % 10)
    format.scaler.scale(loss).backward()
    format.scaler.unscale_(torch.optim.SGD(model.parameters()))
    return float(loss.detach()), [weight.grad for weight in model.parameters()]


def least_cosine(some, others):
    return min(float(cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GATES)
def test_loss_and_gradients_are_those_of_float32_within_the_format(name, device):
    if name == "fp8" and (why := this_machine(device).why_not("fp8")):
        pytest.skip(why)
    (loss, gradients), (true_loss, true_gradients) = (loss_and_gradients(which, device) for which in (name, "fp32"))
    cosine, difference = GATES[name]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert least_cosine(gradients, true_gradients) >= cosine - 1e-6
    assert loss == pytest.approx(true_loss, rel=difference)


def test_cudnn_times_its_algorithms_where_asked_but_not_where_results_must_repeat():
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        Precision(Plan(cudnn_benchmark=True), CPU).set_switches()
        torch.use_deterministic_algorithms(False)
        assert BACKENDS.cudnn.benchmark != deterministic


def mixed():
    """Every kind of layer that 8 bits are not for; some are named so that order cannot hide a mistake."""
    layers = {"stem": nn.Conv1d(4, 16, 3), "odd": nn.Linear(16, 20), "widen": nn.Linear(20, 32)}
    layers |= {"wide": nn.Linear(32, 32), "attention": nn.MultiheadAttention(32, 2), "head": nn.Linear(32, 16)}
    return nn.ModuleDict(layers)


def test_layers_left_alone_are_listed_and_checkpoints_fit_either_way():
    plain, model = mixed(), mixed()
    note = Precision(Plan(precision="fp8-emulated"), CPU).convert(model)
    assert {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"} == {"wide"}
    assert note.split(": ")[1] == "stem, odd, widen, attention.out_proj, head"
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("outside", [None, BACKENDS, BACKENDS.cudnn, BACKENDS.cudnn.conv, BACKENDS.cuda.matmul])
def test_no_getter_raises_whatever_precision_follows_which(outside):
    for name in itertools.chain(*itertools.permutations(("default", "fp32", "tf32"))):
        if outside is not None:
            outside.fp32_precision = "tf32"  # somebody uses the newer switches
        Precision(Plan(precision=name), CPU).set_switches()
        # Each of these can raise where they contradict each other.
        matmul, cuda, cudnn = BACKENDS.cuda.matmul.fp32_precision, BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn
        on_gpu = name not in ("default", "fp32") and torch.cuda.is_available()
        assert (torch.get_float32_matmul_precision(), cuda) == ("high" if on_gpu else "highest", on_gpu)
        assert cudnn.allow_tf32 == (name != "fp32") and matmul == ("tf32" if on_gpu else "ieee")
        assert (cudnn.conv.fp32_precision, BACKENDS.fp32_precision) == ("none" if name == "fp32" else "tf32", "none")
