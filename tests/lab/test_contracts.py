"""What every workload promises under every plan, on two epochs of ten samples: four, four and two to a batch."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_losses import WORKLOADS, make
from tiny import DEVICES, jitter, opened, outcome, points, trained
from torch import nn
from torch.utils.data import TensorDataset

from speedkit.config import settings_of
from speedkit.data.batch import tensors_of
from speedkit.data.loader import BatchStream
from speedkit.fallbacks import resolve
from speedkit.machine import this_machine
from speedkit.measure.quality import mean_difference, same_losses
from speedkit.own_workload import from_dataset
from speedkit.plan import Plan
from speedkit.train import compile
from speedkit.train.loop import steps

pytestmark = pytest.mark.usefixtures("every_format")


def lively():
    """A model and data set of one's own."""
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    train, test = (TensorDataset(part, (part[:, 0] > 0).long()) for part in inputs.split(30))
    return from_dataset(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2)), train, test, augment=jitter)


@pytest.fixture(scope="module", params=["points", "yours", *WORKLOADS])
def workload(request, tmp_path_factory):
    if request.param == "points":
        return points(augment=jitter, dropout=0.2, clip_norm=1.0)
    return lively() if request.param == "yours" else make(request.param, tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def short(workload):
    recipe = dataclasses.replace(workload.recipe, batch_size=4, epochs=2, steps=None)
    return dataclasses.replace(workload, recipe=recipe, train=workload.train[:10], test=workload.test[:5])


def train(workload, recipe=None, **plan):
    return trained(workload, recipe, Plan(**plan))


@pytest.fixture(scope="module")
def plain(short):
    return train(short, log_every=1)


PROMISES = {
    "Same bits.": "bit-equal",
    "Same losses within another seed's.": "loss-equal",
    "Other batches of the same items.": "order-equal",
}
# The cheapest workload that shows it, field, and another value.
FIELDS = [
    ("points", "micro_batch", 3),
    ("points", "precision", "bf16"),
    ("points", "compile", "default"),
    ("text", "compile_scope", "blocks"),
    ("image", "channels_last", True),
    ("points", "cudnn_benchmark", True),
    ("text", "attention", "math"),
    ("text", "checkpointing", "blocks"),
    ("text", "checkpointing", "selective"),
    ("points", "fused_optimizer", True),
    ("points", "cache", "disk"),
    ("yours", "cache", "ram"),
    ("audio", "cache", "ram"),
    ("audio", "cache_of", "waveform"),
    ("points", "cache_dtype", "float16"),
    ("audio", "decoder", "torchcodec"),
    ("audio", "features_on", "device"),
    ("points", "workers", 2),
    ("yours", "workers", 2),
    ("points", "persistent_workers", True),
    ("points", "prefetch_factor", 1),
    ("points", "pin_memory", True),
    ("points", "prefetch", True),
    ("speech", "bucket", True),
    ("points", "log_every", 4),
    ("points", "validate_every", 5),
    ("points", "threads", 1),
    ("points", "allocator", "expandable"),
    ("points", "allocator", "keep"),
]
BESIDE = {  # what is set beside both values
    "cache_of": {"cache": "ram"},
    "cache_dtype": {"cache": "ram"},
    "compile_scope": {"compile": "default"},
    "persistent_workers": {"workers": 2},
    "prefetch_factor": {"workers": 2},
}
OF_SOME_MACHINES = {  # what a CPU cannot honour, or only one with more libraries
    "cudnn_benchmark": "CUDA GPU",
    "decoder": "FFmpeg",
    "pin_memory": "CUDA GPU",
    "prefetch": "CUDA GPU",
    "allocator": "needs",
}


@pytest.fixture(scope="module")
def noise(short, plain):
    """The mean difference that another seed makes of the losses."""
    other_seed = dataclasses.replace(short.recipe, seed=short.recipe.seed + 1)
    return mean_difference(train(short, recipe=other_seed, log_every=1).loss, plain.loss)


@pytest.mark.parametrize(("workload", "field", "value"), FIELDS, indirect=["workload"], ids=str)
def test_a_field_takes_effect_and_keeps_its_promise(short, plain, noise, field, value, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")  # which generates no code
    given = BESIDE.get(field, {})
    before = train(short, log_every=1, **given) if given else plain
    after = train(short, **{"log_every": 1} | given | {field: value})
    changed = vars(after.effective.plan).items() - vars(before.effective.plan).items()
    if not changed:
        [why] = [fallback.why for fallback in after.effective.fallbacks if fallback.field == field]
        assert OF_SOME_MACHINES[field] in why
    else:
        assert changed == {(field, value)}
    promise = next(PROMISES[words] for words in PROMISES if settings_of(Plan)[field].help.endswith(words))
    if field == "log_every":
        assert after.loss == pytest.approx(means(before.loss, after.log_steps))
    else:
        kept = same_losses(promise if changed else "bit-equal", after.loss, before.loss, noise=noise)
        assert kept.passed, kept.words
    if promise == "bit-equal":
        assert outcome(after) == outcome(before)


def means(losses, log_steps):
    """The mean of the steps since the log point before, for each; the last of an epoch may have fewer steps."""
    bounds = itertools.pairwise([0, *log_steps])
    return [sum(losses[begin:end]) / (end - begin) for begin, end in bounds]


def test_every_field_is_in_the_table_or_held_by_the_tests_of_ranks():
    assert {field for _, field, *_ in FIELDS} | {"ranks", "strategy"} == set(settings_of(Plan))
    for field in ("ranks", "strategy"):
        assert settings_of(Plan)[field].help.endswith("Same losses within another seed's.")
    both = Plan(ranks=2, strategy="fsdp")
    assert resolve(both, this_machine("cpu")).plan == both


def gradients(workload, **plan):
    """The gradients of the first step, and its loss."""
    with opened(workload, plan=Plan(**plan)) as run:
        for module in run.learner.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # for every way to cut a batch draws another mask
        next(steps(run))
        return [weight.grad for weight in run.learner.parameters], float(run.position.last_loss)


def test_accumulated_gradients_are_those_of_the_whole_batch(short):
    """In speech and text the parts hold unequal numbers of what counts."""
    whole, whole_loss = gradients(short)
    parts, parts_loss = gradients(short, micro_batch=3)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)


# ---- the functions of a workload ----


def batch_of(workload, device="cpu"):
    """The first batch of the test set."""
    stream = BatchStream(workload, workload.test, Plan(), batch_size=6, seed=None, device=torch.device(device))
    return next(stream.one_epoch())


def test_augmentation_follows_its_generator_and_leaves_the_batch_alone(workload):
    batch = batch_of(workload)
    before = [tensor.clone() for tensor in tensors_of(batch)]
    one, again, other = (tensors_of(workload.augment(batch, torch.Generator().manual_seed(seed))) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, again)) and not all(map(torch.equal, one, other))
    assert all(map(torch.equal, tensors_of(batch), before))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_never_asks_the_device_for_a_number(workload, device):
    if (workload.name, device) == ("image", "cpu"):
        pytest.skip("one_hot looks at its labels on a CPU, and there alone")
    net, batch, generator = workload.model().to(device), batch_of(workload, device), torch.Generator(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        batch = workload.augment(batch, generator)
        count = workload.count(batch) if workload.count else len(batch.inputs)
        (workload.loss(net, batch, workload.recipe)[0] * count).backward()
    assert not {event.name for event in profile.events()} & {"aten::_local_scalar_dense", "aten::nonzero"}


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_the_loss_is_float32_and_near_and_each_sample_has_a_score(workload, device):
    net, batch = workload.model().to(device).eval(), batch_of(workload, device)
    wide, _ = workload.loss(net, batch, workload.recipe)
    with torch.autocast(device, torch.bfloat16):
        narrow, outputs = workload.loss(net, batch, workload.recipe)
    assert narrow.dtype == torch.float32 and narrow.item() == pytest.approx(wide.item(), rel=0.03)
    assert workload.score(outputs, batch).shape == (len(batch.inputs),)


@pytest.mark.slow
@pytest.mark.skipif(not this_machine("cpu").supports("compile"), reason="nothing can be compiled here")
def test_compiled_bfloat16_gradients_are_finite_and_near(workload):
    """amax in place of max gave NaN here: its gradient compares rounded with unrounded values."""
    torch.manual_seed(0)
    net, batch = workload.model().eval(), workload.augment(batch_of(workload), torch.Generator().manual_seed(0))
    gradients = []
    for forward in (net, torch.compile(net, dynamic=False, fullgraph=True)):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward is not net):
            value, _ = workload.loss(forward, batch, workload.recipe)
        value.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    assert gradients[1].isfinite().all() and F.cosine_similarity(*gradients, dim=0) > 0.98
