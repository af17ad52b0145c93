"""What each workload does on a GPU, on tensors that have a GPU's device and no memory: no GPU is needed for that.

A tensor that is left behind on the CPU, or two number formats that do not go together, is an error as it is there.
"""

import contextlib
import itertools

import pytest
import torch
from test_losses import WORKLOADS
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig

from speedkit import Plan, load_workload
from speedkit.data.batch import map_batch
from speedkit.data.cache import open_cache
from speedkit.data.loader import BatchStream
from speedkit.lab.workloads.residual import GroupNorm
from speedkit.machine import Hardware
from speedkit.measure.peaks import _calls
from speedkit.train.attention import apply_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real one shows more: the other tests take it")


@contextlib.contextmanager
def autocast(dtype):
    """Return `torch.autocast` for CUDA, which switches itself off where there is none."""
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def to_gpu(model):
    """Move parameters and buffers, and nothing else: what a module keeps elsewhere stays on the CPU."""
    for module in model.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = None if value is None else nn.Parameter(value.detach().to("cuda"))
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else value.to("cuda")
    return model


@pytest.fixture(scope="module")
def fake_gpu():
    """One mode for all: what a workload keeps per device, such as the angles of positions, is of it too."""
    return FakeTensorMode()


@pytest.fixture(scope="module")
def made():
    """Each workload, and a batch of it on the CPU."""
    cpu, batches = torch.device("cpu"), {}
    for name, options in WORKLOADS.items():
        workload = load_workload(name, **options)
        stream = BatchStream(workload, workload.train, Plan(), batch_size=4, seed=0, device=cpu)
        batches[name] = workload, next(stream)
    return batches


def step_on(fake_gpu, workload, batch, dtype, **plan):
    """The loss and the scores of a batch on the GPU."""
    with fake_gpu:
        model = to_gpu(workload.model())
        assert apply_attention(model, Plan(**plan)) == ""
        fake = map_batch(batch, lambda tensor: fake_gpu.from_tensor(tensor).to("cuda"))
        with autocast(dtype):
            loss, outputs = workload.loss(model, fake, workload.recipe)
        return loss, workload.score(outputs, fake)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_finds_all_it_needs_on_the_gpu(made, fake_gpu, name, dtype):
    loss, score = step_on(fake_gpu, *made[name], dtype)
    assert {tensor.device.type for tensor in (loss, score)} == {"cuda"} and loss.dtype == torch.float32


def test_varlen_attention_takes_what_speech_gives_it(made, fake_gpu):
    with Operators() as seen:
        step_on(fake_gpu, *made["speech"], torch.bfloat16, attention="varlen")
    assert "_varlen_attn" in seen.whole


# Of the operators without a deterministic kernel, those that nets like ours may call, up to their last part: see
# https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
NOT_DETERMINISTIC = "nll_loss2d adaptive_avg_pool2d adaptive_max_pool2d upsample_bilinear2d reflection_pad1d put histc"


class Operators(TorchDispatchMode):
    """Notes the operators inside, and of each tensor whether it is copied without waiting or page-locked."""

    def __init__(self):
        super().__init__()
        self.names, self.options, self.whole = set(), set(), set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__.rpartition("_")[0])
        self.whole.add(operation.overloadpacket.__name__)
        self.options |= {*(kwargs or {}).items()} & {("non_blocking", True), ("pin_memory", True)}
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_takes_no_operator_without_a_deterministic_kernel(made, fake_gpu, name):
    workload, batch = made[name]
    with Operators() as seen:
        batch = workload.augment(batch, torch.Generator().manual_seed(0))
        workload.loss(workload.model(), batch, workload.recipe)[0].backward()
    assert "nll_loss" in seen.names or name in ("audio", "image")
    assert not seen.names & {*NOT_DETERMINISTIC.split()}


def test_the_peak_of_8_bits_adds_up_as_a_trainings_products_do(fake_gpu):
    hopper = Hardware(torch.device("cuda"), compute_capability=(9, 0))
    with fake_gpu:
        (multiply,) = (call for name, call, *_ in itertools.islice(_calls(hopper), 5) if name == "matmul_fp8")
    training = Float8LinearConfig.from_recipe_name("tensorwise").gemm_config_output
    assert multiply.keywords["use_fast_accum"] == training.use_fast_accum


def saved_by(norm, inputs, dtype):
    """Return the output of `norm` and the bytes that autograd saves for its backward pass."""
    saved = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.setdefault(id(tensor), tensor), lambda x: x)
    with hooks, autocast(dtype):
        outputs = norm(inputs)
    return outputs, sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=["bf16", "fp16", "fp32"])
def test_group_norm_stays_in_the_format_of_its_input(fake_gpu, dtype):
    with fake_gpu:
        ours, pytorchs = to_gpu(GroupNorm(1, 8)), to_gpu(nn.GroupNorm(1, 8))
        inputs = torch.empty(4, 8, 16, 16, device="cuda", dtype=dtype or torch.float32, requires_grad=True)
        (outputs, saved_bytes), (wide, wide_bytes) = (saved_by(norm, inputs, dtype) for norm in (ours, pytorchs))
    assert outputs.dtype == inputs.dtype and wide.dtype == torch.float32
    assert saved_bytes <= 0.55 * wide_bytes if dtype else saved_bytes == wide_bytes


def test_the_order_of_an_epoch_is_sent_to_the_device_once(made, tmp_path):
    workload, _ = made["audio"]
    plan, cpu = Plan(cache="ram"), torch.device("cpu")
    cache = open_cache(workload, workload.train, plan, cache_dir=tmp_path)
    stream = BatchStream(workload, workload.train, plan, batch_size=4, seed=0, device=cpu, cache=cache)
    stream.device = torch.device("meta")  # which holds no numbers, and needs no GPU
    hosts, places = zip(*stream.cached(stream.sampler.batches()), strict=True)
    assert [len(place) for place in places if place.is_meta] == [len(host) for host in hosts]
    assert len(hosts) > 1 == len({place.untyped_storage()._cdata for place in places}) == 1, (
        "all are parts of one tensor"
    )
