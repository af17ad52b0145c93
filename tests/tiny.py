"""A workload small enough to train in a test: points in the plane, two classes, no files."""

import contextlib
import dataclasses
import functools
import time

import torch
from torch import nn

from speedkit.machine import Hardware
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

QUIET = {"device": "cpu", "progress": False}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Machines that a test may know without having them.
CPU = Hardware(cores=2, compiler="g++", python_headers=True)
CPU_BF16 = dataclasses.replace(CPU, cpu_flags=("avx512_bf16",))
H100 = dataclasses.replace(
    CPU, device=torch.device("cuda"), gpu="H100", gpu_count=1, compute_capability=(9, 0), triton=True
)
T4 = dataclasses.replace(H100, gpu="Tesla T4", compute_capability=(7, 5))


@dataclasses.dataclass(frozen=True)
class Point:
    path: str
    label: int


def load(item, size):
    generator = torch.Generator().manual_seed(int(item.path))
    return torch.randn(size, generator=generator) + 0.7 * (2 * item.label - 1)


def features(waveform):
    return waveform * 2.0


def target(item):
    return item.label


def make_model(size, hidden, classes, dropout=0.0):
    return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes))


def loss(model, batch, recipe):
    inputs = batch.inputs
    targets = batch.targets
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=recipe.label_smoothing), outputs


def masked_loss(model, batch, recipe):
    """Cross-entropy over the samples whose first feature is positive: few or many of a batch."""
    outputs = model(batch.inputs)
    losses = nn.functional.cross_entropy(outputs, batch.targets, reduction="none")
    return (losses * (batch.inputs[:, 0] > 0)).sum() / valid_items(batch).clamp(min=1), outputs


def valid_items(batch):
    return (batch.inputs[:, 0] > 0).sum()


def score(outputs, batch):
    return (outputs.argmax(-1) == batch.targets).float()


def jitter(batch, generator):
    inputs = batch.inputs
    noise = torch.randn(inputs.shape, generator=generator, device=inputs.device)
    return dataclasses.replace(batch, inputs=inputs + 0.1 * noise)


def points(train=96, test=32, size=8, hidden=16, augment=None, dropout=0.0, **recipe):
    """A workload of `train` + `test` points in `size` dimensions."""
    items = [Point(str(index), index % 2) for index in range(train + test)]
    return Workload(
        "points",
        Recipe(**({"batch_size": 16, "epochs": 2, "learning_rate": 1e-2} | recipe)),
        items[:train],
        items[train:],
        functools.partial(load, size=size),
        features,
        target,
        functools.partial(make_model, size, hidden, 2, dropout),
        loss,
        score,
        augment=augment,
        honours=("label_smoothing",),
        parameters={"size": size},
        sources=(load, features),
    )


def trained(workload, recipe=None, plan=None, **options):
    """What `fit` returns, on the CPU and without a word, but for `options`."""
    return fit(workload, recipe, plan, **QUIET | options)


def opened(workload, **options):
    """A run that is set up as `trained` would, for a `with` that closes it."""
    return contextlib.closing(setup_run(workload, **QUIET | options))


def outcome(history):
    """All that must not depend on how it was learned."""
    evaluation = {name: value for name, value in history.evaluations[-1].items() if name != "seconds"}
    return evaluation, history.steps, {name: weight.tolist() for name, weight in history.model.state_dict().items()}


def calling(workload, call):
    """The workload, whose loss begins with `call(model, batch)`."""

    def loss_with_call(model, batch, recipe):
        call(model, batch)
        return workload.loss(model, batch, recipe)

    return dataclasses.replace(workload, loss=loss_with_call)


def busy(seconds):
    """Keep a processor core busy for so long: unlike sleeping, which would let others use it."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def slow_loss(model, batch, recipe, seconds):
    busy(seconds)
    return loss(model, batch, recipe)


def slowed(workload, seconds):
    """The same workload with `seconds` of waiting planted in every step."""
    return dataclasses.replace(workload, loss=functools.partial(slow_loss, seconds=seconds))


def reset_switches():
    """Undo what a plan has set for the whole process."""
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
