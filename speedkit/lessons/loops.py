"""Training loops of other libraries, and their finders of a batch size, on the same net: lesson 91 compares them.

Each loop is as its library's documentation writes it, without logs, checkpoints, bars and checks that it can leave out.
"""

import dataclasses
import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from speedkit.measure.compare import Turn, measure_pairs
from speedkit.measure.stats import paired_interval
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.loop import steps
from speedkit.train.micro_batch import micro_batch_for
from speedkit.train.setup import build_learner, setup_run
from speedkit.workload import Batch, Workload

LOG_EVERY = 50  # steps between two readings of the loss, in every loop
PLAN = Plan(fused_optimizer=True, log_every=LOG_EVERY, precision="fp32")
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}


@dataclasses.dataclass
class Job:
    """What is trained, the same in every loop: a net from one seed, and samples that lie in memory."""

    workload: Workload
    recipe: Recipe
    device: torch.device
    inputs: Tensor  # [N, ...]
    targets: Tensor  # [N]

    @functools.cached_property
    def batches(self) -> list[Batch]:
        """The batches of an epoch, on the device."""
        size = self.recipe.batch_size
        parts = zip(self.inputs.split(size), self.targets.split(size), strict=True)
        return [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in parts if len(inputs) == size]

    def learner(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return (model, optimizer), always the same."""
        model, _, optimizer, _ = build_learner(self.workload, self.recipe, PLAN, device=self.device)
        return model, optimizer

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch, self.recipe)[0]


class Log(list[Tensor]):
    """The losses of a loop on the device, read now and then."""

    def add(self, loss: Tensor) -> None:
        self.append(loss.detach())
        if len(self) % LOG_EVERY == 0:
            torch.stack(self[-LOG_EVERY:]).tolist()


Loop = Callable[[Job, Iterable[Batch], int], list[Tensor]]  # (job, batches, how many) -> losses


def job_of(workload: Workload, batch_size: int, device: torch.device) -> Job:
    """Return the job of training on a workload's samples as its features are, at a constant rate."""
    precision.set_matmul_precision(PLAN)  # of the process, so of all loops
    changes: dict[str, Any] = {"schedule": "constant", "learning_rate": 1e-3, "clip_norm": None}
    recipe = dataclasses.replace(workload.recipe, batch_size=batch_size, drop_last=True, **changes)
    inputs = torch.stack([workload.features(workload.load(item)) for item in workload.train])
    targets = torch.tensor([workload.target(item) for item in workload.train])
    return Job(dataclasses.replace(workload, augment=None), recipe, device, inputs, targets)


# ---- a net whose step is next to nothing but calls ----


def row(index: int, inputs: Tensor) -> Tensor:
    return inputs[index]


def label(index: int) -> int:
    return index % 10


def little_net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def cross_entropy(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def little() -> Workload:
    """Return a workload of 1024 rows of noise and a net of two small layers."""
    inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    return Workload(
        "little",
        Recipe(batch_size=32, steps=1000, epochs=None),
        range(1024),
        range(32),
        load=functools.partial(row, inputs=inputs),
        features=torch.Tensor.contiguous,
        target=label,
        model=little_net,
        loss=cross_entropy,
        score=lambda outputs, batch: (outputs.argmax(-1) == batch[1]).float(),
        sources=(row,),
    )


# ---- loops ----


def bare(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    model, optimizer = job.learner()
    log = Log()
    for batch in batches:
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        log.add(loss)
    return log


def by_speedkit(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    run = setup_run(job.workload, job.recipe, PLAN, device=job.device, progress=False, endless=True)
    run.fetch = iter(batches).__next__  # type: ignore[method-assign]
    losses = [run.last_loss for _ in itertools.islice(steps(run), count)]
    run.close()
    return losses


def by_trainer(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    import lightning.pytorch as lightning

    log = Log()

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
            super().__init__()
            self.model, self.optimizer = model, optimizer

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = job.loss(self.model, batch)
            log.add(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    trainer = lightning.Trainer(barebones=True, accelerator=job.device.type, devices=1, max_epochs=1)
    trainer.fit(Module(*job.learner()), batches)
    return log


def by_fabric(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=job.device.type, devices=1)
    model, optimizer = fabric.setup(*job.learner())
    log = Log()
    for batch in batches:
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        log.add(loss)
    return log


def by_accelerate(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device.type == "cpu")
    model, optimizer = accelerator.prepare(*job.learner())
    log = Log()
    for batch in batches:
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        log.add(loss)
    return log


def by_transformers(job: Job, batches: Iterable[Batch], count: int) -> list[Tensor]:
    from transformers import Trainer, TrainingArguments

    log = Log()

    class Their(Trainer):
        def get_train_dataloader(self) -> Any:
            return ({"batch": batch} for batch in batches)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            loss = job.loss(model, inputs["batch"])
            log.add(loss)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        nothing: dict[str, Any] = dict.fromkeys(("logging_strategy", "save_strategy", "eval_strategy"), "no")
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=count,
            use_cpu=job.device.type == "cpu",
            max_grad_norm=0.0,
            report_to="none",
            disable_tqdm=True,
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            **nothing,
        )
        model, optimizer = job.learner()
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        Their(model, arguments, train_dataset=job.batches, optimizers=(optimizer, constant)).train()
    return log


BARE, OURS = "bare loop", "speedkit"
LOOPS: dict[str, tuple[Loop, str]] = {  # by name, with the package that it needs
    BARE: (bare, "torch"),
    OURS: (by_speedkit, "torch"),
    "Lightning Trainer": (by_trainer, "lightning"),
    "Lightning Fabric": (by_fabric, "lightning"),
    "Accelerate": (by_accelerate, "accelerate"),
    "transformers Trainer": (by_transformers, "transformers"),
}


# ---- finders of a batch size ----


class Limited(nn.Module):
    """A model that runs out of memory, as PyTorch's allocator on a CPU does, on more than `limit` samples."""

    def __init__(self, model: nn.Module, limit: float):
        super().__init__()
        self.model, self.limit = model, limit

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) > self.limit:
            raise torch.OutOfMemoryError(f"DefaultCPUAllocator: can't allocate memory: planted at {self.limit} samples")
        return self.model(inputs)


class Endless(Dataset):
    """The samples of a job over and over, so that no search ends for want of data."""

    def __init__(self, job: Job):
        self.job = job

    def __len__(self) -> int:
        return 1 << 16

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices) % len(self.job.inputs)
        return self.job.inputs[chosen], self.job.targets[chosen]


def unchanged(batch: Any) -> Any:
    return batch


def endless(job: Job, batch_size: int) -> DataLoader:
    return DataLoader(Endless(job), batch_size=batch_size, collate_fn=unchanged)


def limited(job: Job, limit: float) -> Job:
    """Return the job with a memory that holds `limit` samples of training."""
    work = dataclasses.replace(job.workload, model=lambda: Limited(job.workload.model(), limit))
    return dataclasses.replace(job, workload=work)


def find_by_speedkit(job: Job, most: int) -> int:
    """Return the micro-batch of the best throughput, the smallest about as fast, for a batch of `most` samples."""
    recipe = dataclasses.replace(job.recipe, batch_size=most)
    return micro_batch_for(job.workload, recipe, PLAN, device=job.device, make_run=setup_run).micro_batch


def find_by_tuner(job: Job, most: int) -> int:
    """Return the largest batch that fits, of the powers of two."""
    import lightning.pytorch as lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
            super().__init__()
            self.model, self.optimizer, self.batch_size = model, optimizer, 2

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return job.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

        def train_dataloader(self) -> DataLoader:
            return endless(job, self.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"accelerator": job.device.type, "devices": 1, "max_epochs": 1, **QUIET}
        trainer = lightning.Trainer(default_root_dir=folder, **options)
        trials = int(math.log2(most))
        return Tuner(trainer).scale_batch_size(Module(*job.learner()), max_trials=trials) or 0


def find_by_accelerate(job: Job, most: int) -> int:
    """Return the first batch that fits: from `most` on, a tenth less each time."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=most)
    def train(batch_size: int) -> int:  # as its documentation has it: all that training makes is made inside
        model, optimizer = job.learner()
        for inputs, targets in itertools.islice(endless(job, batch_size), 3):
            optimizer.zero_grad()
            job.loss(model, (inputs.to(job.device), targets.to(job.device))).backward()
            optimizer.step()
        return batch_size

    return train()


FINDERS: dict[str, tuple[Callable[[Job, int], int], str]] = {
    OURS: (find_by_speedkit, "torch"),
    "Lightning Tuner": (find_by_tuner, "lightning"),
    "Accelerate": (find_by_accelerate, "accelerate"),
}


def in_turns(name: str, turns: Mapping[str, Turn], pairs: int) -> dict[str, Any]:
    """Return the row of `measurements` for two named functions that take turns and return their seconds."""
    for turn in turns.values():
        turn()  # warm up
    seconds_a, seconds_b, decision = measure_pairs(*turns.values(), rng=random.Random(0), pairs=pairs)
    a, b = turns
    row = {"name": name, "a": a, "b": b, "seconds_a": seconds_a, "seconds_b": seconds_b, "decision": decision}
    return row | vars(paired_interval(seconds_a, seconds_b))
