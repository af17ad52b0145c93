"""Other libraries beside speedkit, in turns on the same samples and nets: file formats and training loops.

Prints a line for each comparison and leaves the record from which the README's table is drawn. A library that is not
installed is left out and named.
"""

import argparse
import contextlib
import io
import logging
import os
import random
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

# Before they are imported: no look for newer versions, nothing fetched, no advice.
os.environ |= {"LITDATA_DISABLE_VERSION_CHECK": "1", "TRANSFORMERS_VERBOSITY": "error"}

import common
import numpy as np
import torch
from torch import Tensor, nn

from speedkit.data.cache import open_cache
from speedkit.files import write_json
from speedkit.lab.figures import device_name
from speedkit.lab.provenance import commit, notebooks_folder
from speedkit.machine import this_machine
from speedkit.measure.turns import measure_pairs
from speedkit.plan import Plan
from speedkit.workload import Batch, Workload

ROW, BATCH = 16384, 64  # float32 values of a sample, 64 kB: a spectrogram of a few seconds; samples of a batch
LEAD = 3  # steps of a loop before the clock starts
Row = dict[str, Any]
Batches = Iterable[Batch]
Epoch = Callable[[], Iterable[Any]]  # begins an epoch of batches


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what libraries print, log and warn about to themselves."""
    logging.disable(logging.WARNING)
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def in_turns(name: str, sides: Mapping[str, Any], pairs: int) -> Row:
    """Return the row of two functions that return the seconds of their turns: above 1 the second is faster."""
    for turn in sides.values():
        turn()  # warm up

    def seconds_of(side: Callable[[], float], steps: int) -> float:
        return sum(side() for _ in range(steps))

    turns = (partial(seconds_of, side) for side in sides.values())
    taken = measure_pairs(*turns, pairs=pairs, rng=random.Random(0), looks=())
    a, b = sides
    row = {"name": name, "a": a, "b": b, "seconds_a": taken.seconds_a, "seconds_b": taken.seconds_b}
    return row | vars(taken.interval)


# ---- formats: each function stores rows [N, ROW] in a folder, and returns what reads them in random batches ----


def by_index(count: int, gather: Any) -> Epoch:
    """Return the epochs of a format that finds rows by their indices, an array [B]."""

    def epoch() -> Iterator[Any]:
        for indices in torch.randperm(count).split(BATCH):
            yield gather(indices.numpy())

    return epoch


def mapped_file(folder: Path, rows: np.ndarray) -> Epoch:
    np.save(folder / "rows.npy", rows)
    return by_index(len(rows), np.load(folder / "rows.npy", mmap_mode="r").__getitem__)


def cached(folder: Path, rows: np.ndarray) -> Epoch:
    cache = open_cache(common.perceptron(ROW, 4, BATCH), range(len(rows)), Plan(cache="disk"), cache_dir=folder)
    return by_index(len(rows), lambda indices: cache.gather(torch.from_numpy(indices), torch.device("cpu")))


def a_file_each(folder: Path, rows: np.ndarray, *, save: Any, load: Any) -> Epoch:
    for index, row in enumerate(rows):
        save(folder / f"{index}.npy", row)
    return by_index(len(rows), lambda indices: np.stack([load(folder / f"{index}.npy") for index in indices]))


def hdf5(folder: Path, rows: np.ndarray) -> Epoch:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("rows", data=rows)
    stored = h5py.File(folder / "rows.h5", "r")["rows"]
    return by_index(len(rows), lambda indices: stored[np.sort(indices)])  # it takes rising indices only


def litdata_chunks(folder: Path, rows: np.ndarray, **options: Any) -> Epoch:
    import litdata

    # Where it works before it moves the result; otherwise folders are left behind outside of ours.
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "made")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "data")
    chunks = str(folder / "chunks")
    litdata.optimize(torch.from_numpy, list(rows), chunks, chunk_bytes="64MB", num_workers=1, start_method="fork")
    dataset = litdata.StreamingDataset(chunks, shuffle=True, **options)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH).__iter__


def webdataset_tars(folder: Path, rows: np.ndarray) -> Epoch:
    import webdataset

    with webdataset.ShardWriter(f"{folder}/%06d.tar", maxsize=16e6) as writer:
        for index, row in enumerate(rows):
            writer.write({"__key__": f"{index:06d}", "bin": row.tobytes()})  # three times as fast as its "npy"
    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(paths, shardshuffle=100).shuffle(256).map(from_bytes)
    return webdataset.WebLoader(dataset.batched(BATCH), batch_size=None).__iter__


def from_bytes(sample: Row) -> tuple[np.ndarray]:
    return (np.frombuffer(sample["bin"], np.float32),)


FORMATS: dict[str, Callable[..., Epoch]] = {
    "speedkit's cache": cached,
    "a .npy file each": partial(a_file_each, save=np.save, load=np.load),
    "a torch.save file each": partial(
        a_file_each, save=lambda path, row: torch.save(torch.tensor(row), path), load=torch.load
    ),
    "HDF5": hdf5,
    "LitData": litdata_chunks,
    "LitData, batch_decode=0": partial(litdata_chunks, batch_decode=0),
    "webdataset": webdataset_tars,
}


def reading_s(epoch: Epoch) -> float:
    """Return the seconds in which the batches of an epoch are taken and thrown away."""
    began_s = perf_counter()
    deque(epoch(), maxlen=0)
    return perf_counter() - began_s


def reading(name: str, *, count: int, pairs: int) -> Row:
    """Compare a format with one mapped file: an epoch of `count` rows, warm, in one process."""
    rows = np.random.default_rng(0).standard_normal((count, ROW), dtype=np.float32)
    with tempfile.TemporaryDirectory() as scratch, quietly():
        folder = Path(scratch) / name
        folder.mkdir()
        epochs = {"one mapped file": mapped_file(Path(scratch), rows), name: FORMATS[name](folder, rows)}
        sides = {side: partial(reading_s, epoch) for side, epoch in epochs.items()}
        return in_turns(f"read: {name}", sides, pairs)


# ---- loops: each trains the same net on the batches it is given, and returns it ----


def learner(work: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer with which every loop begins."""
    recipe = work.recipe
    torch.manual_seed(recipe.seed)
    model = work.model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    return model, optimizer


def bare(
    work: Workload, batches: Batches, count: int = 0, *, made: Any = None, backward: Any = Tensor.backward
) -> nn.Module:
    """Train by the loop that everybody writes, with the model and optimizer `made` or those of all loops."""
    model, optimizer = made or learner(work)
    for batch in batches:
        optimizer.zero_grad()
        backward(work.loss(model, batch, work.recipe)[0])
        optimizer.step()
    return model


def by_speedkit(work: Workload, batches: Batches, count: int) -> nn.Module:
    options = {"progress": False, "endless": True, "wrap_batches": lambda stream: iter(batches)}
    with common.training(work, Plan(fused_optimizer=True), **options) as (run, steps):
        deque(islice(steps, count), maxlen=0)
    return run.learner.model


def by_lightning(work: Workload, batches: Batches, count: int) -> nn.Module:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = learner(work)

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return work.loss(self.model, batch, work.recipe)[0]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    module = Module()
    lightning.Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1).fit(module, batches)
    return module.model


def by_fabric(work: Workload, batches: Batches, count: int) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return bare(work, batches, made=fabric.setup(*learner(work)), backward=fabric.backward)


def by_accelerate(work: Workload, batches: Batches, count: int) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return bare(work, batches, made=accelerator.prepare(*learner(work)), backward=accelerator.backward)


def by_transformers(work: Workload, batches: Batches, count: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class Theirs(Trainer):
        def get_train_dataloader(self) -> Any:
            return ({"batch": batch} for batch in batches)

        def compute_loss(self, model: nn.Module, inputs: Row, **_: Any) -> Tensor:  # type: ignore[override]
            return work.loss(model, inputs["batch"], work.recipe)[0]

    model, optimizer = learner(work)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=count,
            use_cpu=True,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Theirs(model, arguments, optimizers=(optimizer, constant)).train()
    return model


LOOPS = {
    "speedkit": by_speedkit,
    "Lightning Trainer": by_lightning,
    "Lightning Fabric": by_fabric,
    "Accelerate": by_accelerate,
    "transformers Trainer": by_transformers,
}


def handed_out(batches: Batches, count: int, times: list[float]) -> Iterator[Batch]:
    """Yield batches; append to `times` when `count` whole steps of whoever asks for them began and ended."""
    for step, batch in enumerate(islice(cycle(batches), LEAD + count + 1)):
        if step in (LEAD, LEAD + count):
            times.append(perf_counter())
        yield batch


def training(name: str, *, sizes: tuple[int, int, int], count: int, pairs: int) -> Row:
    """Compare a loop with a bare one: `count` whole steps of a perceptron, whose weights must end near each other."""
    work = common.perceptron(*sizes, schedule="constant")
    inputs = torch.randn(8, sizes[2], sizes[0])
    targets = torch.randint(common.CLASSES, (8, sizes[2]))
    batches = list(map(Batch, inputs, targets))

    def turn(loop: Any) -> float:
        times: list[float] = []
        model = loop(work, handed_out(batches, count, times), LEAD + count + 1)
        # Rounding grows with steps; a loop that did something else would be several times as far off.
        torch.testing.assert_close(list(model.parameters()), expected, rtol=0.0, atol=0.005)
        return times[1] - times[0]

    expected = list(bare(work, handed_out(batches, count, [])).parameters())
    sides = {side: partial(turn, loop) for side, loop in {"bare loop": bare, name: LOOPS[name]}.items()}
    with quietly():
        return in_turns(f"step of {sizes[2]} samples: {name}", sides, pairs)


def comparisons(quick: bool) -> Iterator[Callable[[], Row]]:
    """Measure what other libraries' file formats and training loops cost, and speedkit's own, in turns."""
    pairs = 2 if quick else 20
    for name in FORMATS:
        yield partial(reading, name, count=128 if quick else 1024, pairs=pairs)
    for sizes, count in ((common.SMALL, 250), (common.LARGE, 20)):
        for name in LOOPS:
            yield partial(training, name, sizes=sizes, count=5 if quick else count, pairs=pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; the figures mean nothing")
    parser.add_argument("--out", help="where the record goes, if not among the others; of a quick run nowhere")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measurements = []
    for comparison in comparisons(arguments.quick):
        try:
            row = comparison()
        except ModuleNotFoundError as error:
            print(f"left out: {error.name} is not installed")
            continue
        print("{name}: {ratio:.3g}x ({low:.3g} to {high:.3g}) as fast as {a}".format(**row), flush=True)
        measurements.append(row)
    if arguments.out or not arguments.quick:
        path = arguments.out or notebooks_folder() / "records/peers.json"
        machine = device_name({"hardware": this_machine("cpu").as_dict()})
        write_json(path, {"commit": commit()[0], "machine": machine, "measurements": measurements})
