"""Other libraries' file formats on the same samples, and finders of a batch size: lesson 91 compares them.

The first setting of a library is the one that its documentation begins with.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before they are imported: no look for newer versions, nothing fetched, no advice.
os.environ |= {"LITDATA_DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ |= {"TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import torch
from torch import nn

from speedkit.data.cache import FeatureCache, open_cache
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

SHAPE = (1, 64, 256)  # of a sample, float32: 64 kB, a spectrogram of a few seconds
Gather = Callable[[np.ndarray], Any]  # indices [B] -> rows [B, *SHAPE]
Epoch = Callable[[], Iterator[tuple[Any, Any]]]  # begins an epoch of (rows, their indices)


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store rows [N, *SHAPE] in a folder, and to read them in random batches."""

    name: str
    write: Callable[[Path, np.ndarray], object]
    read: Callable[[Path, int, int], Epoch]  # (folder, rows in all, batch size) -> epochs
    package: str = "torch"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what libraries print, log and warn about to themselves."""
    said = io.StringIO()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def installed(package: str) -> bool:
    """Return whether a package is here."""
    return importlib.util.find_spec(package) is not None


def by_index(open_folder: Callable[[Path], Gather]) -> Callable[[Path, int, int], Epoch]:
    """Return the reader of a format that finds rows by their indices."""

    def read(folder: Path, count: int, batch_size: int) -> Epoch:
        gather = open_folder(folder)

        def epoch() -> Iterator[tuple[Any, Any]]:
            for indices in torch.randperm(count).split(batch_size):
                yield gather(indices.numpy()), indices

        return epoch

    return read


# ---- one file, mapped ----


def write_mapped(folder: Path, rows: np.ndarray) -> None:
    np.save(folder / "rows.npy", rows)


def open_mapped(folder: Path) -> Gather:
    mapped = np.load(folder / "rows.npy", mmap_mode="r", allow_pickle=False)
    return lambda indices: mapped[indices]


# ---- one file for each sample ----


def write_npy(folder: Path, rows: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for index, row in enumerate(rows):
        np.save(folder / f"{index:06d}.npy", row)


def open_npy(folder: Path) -> Gather:
    return lambda indices: np.stack([np.load(folder / f"{index:06d}.npy", allow_pickle=False) for index in indices])


def write_torch(folder: Path, rows: np.ndarray) -> None:
    for index, row in enumerate(rows):
        torch.save(torch.from_numpy(row.copy()), folder / f"{index:06d}.pt")


def open_torch(folder: Path) -> Gather:
    load = functools.partial(torch.load, weights_only=True)
    return lambda indices: torch.stack([load(folder / f"{index:06d}.pt") for index in indices])


# ---- speedkit's cache, of the .npy files ----


@dataclasses.dataclass(frozen=True)
class Sample:
    """A file of a sample, and its place among them."""

    path: str
    label: int


def load_row(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(np.load(sample.path, allow_pickle=False))


def label_of(sample: Sample) -> int:
    return sample.label


def stored_samples(folder: Path) -> Workload:
    """Return the .npy files of a folder as a workload; nothing is trained on it."""
    samples = [Sample(str(path), index) for index, path in enumerate(sorted(folder.glob("*.npy")))]
    return Workload(
        "samples",
        Recipe(),
        samples,
        samples[:1],
        load=load_row,
        features=torch.Tensor.contiguous,
        target=label_of,
        sources=(load_row,),
        model=nn.Identity,
        loss=torch.sub,  # type: ignore[arg-type]
        score=torch.sub,  # type: ignore[arg-type]
    )


def write_cache(folder: Path, rows: np.ndarray) -> None:
    write_npy(folder / "files", rows)
    open_cached(folder)


def cache_of(work: Workload, folder: Path | str) -> FeatureCache:
    """Return speedkit's cache of all samples in `folder`, built where it is not there."""
    return open_cache(work, work.train, Plan(cache="disk"), cache_dir=folder)


def open_cached(folder: Path) -> Gather:
    cache = cache_of(stored_samples(folder / "files"), folder / "cache")
    return lambda indices: cache.gather(torch.from_numpy(indices), torch.device("cpu"))[0]


# ---- HDF5 ----


def write_hdf5(folder: Path, rows: np.ndarray, **storage: Any) -> None:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("rows", data=rows, **storage)


def open_hdf5(folder: Path, *, one_by_one: bool = False) -> Gather:
    import h5py

    dataset = h5py.File(folder / "rows.h5", "r")["rows"]
    if one_by_one:  # faster where each row is a chunk
        return lambda indices: np.stack([dataset[int(index)] for index in indices])

    def gather(indices: np.ndarray) -> np.ndarray:
        batch, rising = np.empty((len(indices), *SHAPE), np.float32), np.argsort(indices)
        batch[rising] = dataset[indices[rising]]  # which takes indices in rising order only
        return batch

    return gather


# ---- Arrow files of Hugging Face datasets ----


def write_arrow(folder: Path, rows: np.ndarray, *, as_bytes: bool) -> None:
    import datasets

    datasets.disable_progress_bars()
    column = datasets.Value("binary") if as_bytes else datasets.Array3D(SHAPE, "float32")
    values = [row.tobytes() for row in rows] if as_bytes else rows
    features = datasets.Features(row=column)
    datasets.Dataset.from_dict({"row": values}, features=features).save_to_disk(folder / "arrow")


def open_arrow(folder: Path, *, as_bytes: bool) -> Gather:
    import datasets

    dataset = datasets.load_from_disk(folder / "arrow").with_format("arrow" if as_bytes else "torch")
    if not as_bytes:
        return lambda indices: dataset[indices]["row"]

    def gather(indices: np.ndarray) -> np.ndarray:
        chunks = dataset[indices]["row"].chunks
        return np.stack([np.frombuffer(value.as_buffer(), np.float32) for chunk in chunks for value in chunk])

    return lambda indices: gather(indices).reshape(-1, *SHAPE)


# ---- streams, which bring their own shuffling ----


def write_litdata(folder: Path, rows: np.ndarray) -> None:
    import litdata

    # Where it works before it moves the result; otherwise folders are left behind outside of ours.
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "made")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "data")

    def sample(index: int) -> dict[str, Any]:
        return {"row": torch.from_numpy(rows[index]), "label": index}

    options: dict[str, Any] = {"num_workers": 1, "start_method": "fork", "verbose": False}
    litdata.optimize(sample, list(range(len(rows))), str(folder / "chunks"), chunk_bytes="64MB", **options)


def read_litdata(folder: Path, count: int, batch_size: int, **options: Any) -> Epoch:
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True, **options)
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch_size)
    return lambda: ((batch["row"], batch["label"]) for batch in loader)


def write_tars(folder: Path, rows: np.ndarray, *, column: str) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{folder}/%06d.tar", maxsize=16e6, verbose=0) as writer:
        for index, row in enumerate(rows):
            writer.write({"__key__": f"{index:06d}", column: row if column == "npy" else row.tobytes(), "cls": index})


def from_bytes(sample: dict[str, Any]) -> tuple[np.ndarray, int]:
    return np.frombuffer(sample["bin"], np.float32).reshape(SHAPE), int(sample["cls"])


def read_tars(folder: Path, count: int, batch_size: int, *, column: str) -> Epoch:
    import webdataset

    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(paths, shardshuffle=len(paths)).shuffle(1000 if column == "npy" else 256)
    dataset = dataset.decode().to_tuple("npy", "cls") if column == "npy" else dataset.map(from_bytes)
    return lambda: iter(torch.utils.data.DataLoader(dataset.batched(batch_size), batch_size=None))


PLAIN, OURS, SILENT = "one mapped file", "speedkit's cache", "served silently"
partial = functools.partial
checked = partial(write_hdf5, chunks=(1, *SHAPE), fletcher32=True)
arrow = [(partial(write_arrow, as_bytes=each), by_index(partial(open_arrow, as_bytes=each))) for each in (False, True)]
tars = [(partial(write_tars, column=column), partial(read_tars, column=column)) for column in ("npy", "bin")]
FORMATS = [
    Format(PLAIN, write_mapped, by_index(open_mapped)),
    Format(OURS, write_cache, by_index(open_cached)),
    Format("a .npy file each", write_npy, by_index(open_npy)),
    Format("a torch.save file each", write_torch, by_index(open_torch)),
    Format("HDF5", write_hdf5, by_index(open_hdf5), "h5py"),
    Format("HDF5 (fletcher32)", checked, by_index(partial(open_hdf5, one_by_one=True)), "h5py"),
    Format("datasets (Array3D)", *arrow[0], "datasets"),
    Format("datasets (bytes)", *arrow[1], "datasets"),
    Format("LitData", write_litdata, read_litdata, "litdata"),
    Format("LitData (batch_decode=0)", write_litdata, partial(read_litdata, batch_decode=0), "litdata"),
    Format("webdataset (decode)", *tars[0], "webdataset"),
    Format("webdataset (bytes)", *tars[1], "webdataset"),
]


def store(folder: Path, rows: np.ndarray, batch_size: int) -> dict[str, Epoch]:
    """Store rows in each format that is installed, in a folder of its name, and return what begins its epochs."""
    epochs = {}
    for form in FORMATS:
        if installed(form.package):
            place = folder / form.name
            place.mkdir()
            with quietly():
                form.write(place, rows)
                epochs[form.name] = form.read(place, len(rows), batch_size)
    return epochs


def drained(epoch: Epoch) -> Callable[[], object]:
    """Return a function that takes the batches of an epoch and throws them away."""
    return lambda: collections.deque(epoch(), maxlen=0)


def whole(epoch: Epoch, rows: np.ndarray) -> bool:
    """Return whether an epoch delivers every row once, bit for bit."""
    seen: list[int] = []
    for batch, labels in epoch():
        seen += torch.as_tensor(labels).tolist()
        if not np.array_equal(torch.as_tensor(batch), rows[torch.as_tensor(labels)]):
            return False
    return sorted(seen) == list(range(len(rows)))


def damaged(form: Format, folder: Path, rows: np.ndarray) -> str:
    """Store `rows` in a new `folder`, flip the bits of one byte of a value there, and return what reading comes to."""
    folder.mkdir()
    with quietly():
        form.write(folder, rows)
    path, content = next(
        (path, content)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and rows[1].tobytes() in (content := path.read_bytes())
    )
    place = content.index(rows[1].tobytes()) + rows[1].nbytes // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
    try:
        with quietly():
            right = whole(form.read(folder, len(rows), 8), rows)
    except Exception as error:  # whatever a library raises is what is asked for here
        return f"an error: {type(error).__name__}"
    return "computed anew" if right else SILENT
