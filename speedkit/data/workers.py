"""Make batches ahead, in worker processes or threads, in order; say in one sentence what happened to a worker.

Whatever is waited for has a limit, and what is still there then ends by force: a worker that stands still (a stuck
disk, SIGSTOP) must not keep the training process from ending.
"""

import atexit
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from multiprocessing import connection, util
from multiprocessing.pool import AsyncResult, ThreadPool
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from speedkit.clock import run_until_steady
from speedkit.errors import SpeedkitError
from speedkit.hardware import usable_cores
from speedkit.plan import Plan

HUNG_S = 120.0  # a batch is waited for, and for so long no worker has begun an item
END_S = 5.0  # what a killed process gets until it is gone
GAIN = 1.05  # workers cost memory and time to start: more are taken only where steps get so much shorter
BUDGET_S, SETTING_S = 10.0, 0.5  # of choosing workers: all of it, and the steps under one setting

Loaded = tuple[tuple[Tensor, ...] | None, dict[str, str]]  # the batch, and path -> why of what could not be read
place = threading.local()  # `number`: which of the workers this thread or process is


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a worker sends in place of an exception, which need not survive the way between processes."""

    item: str
    error: str


@dataclasses.dataclass
class BatchMaker(Dataset):
    """Index batch -> batch: samples of `dataset`, collated; notes in `reading` which item a worker is at."""

    dataset: Any
    collate: Callable[[list[Any]], Loaded]
    pin: bool
    reading: Any
    running: threading.Event | None = None  # threads stand still while it is not set

    def make(self, indices: Iterable[int]) -> Loaded:
        """Return the batch of the items at `indices`, in page-locked memory where `pin` says so."""
        samples = []
        for index in indices:
            if self.running is not None:
                self.running.wait()
            self.reading[getattr(place, "number", 0)] = index
            samples.append(self.dataset[index])
        self.reading[getattr(place, "number", 0)] = -1
        batch, bad = self.collate(samples)
        return (tuple(tensor.pin_memory() for tensor in batch) if batch and self.pin else batch), bad

    def make_in_thread(self, indices: list[int]) -> Loaded | Failure:
        """Return the same, or a Failure: SystemExit, for one, would end the thread and no batch would ever come."""
        try:
            return self.make(indices)
        except BaseException as error:
            at = self.reading[place.number]
            item = self.name(at) if at >= 0 else f"the batch of {self.name(indices[0])}"
            words = str(error).split("\n")[0]
            return Failure(item, words if isinstance(error, SpeedkitError) else f"{type(error).__name__}: {words}")

    def __getitem__(self, indices: list[int]) -> bytes:
        """Return the same from a process, pickled here: the queue would only print an error, and send nothing."""
        loaded = self.make_in_thread(indices)
        try:
            return bytes(ForkingPickler.dumps(loaded))  # moves the tensors to shared memory
        except Exception as error:
            return pickle.dumps(Failure(f"the batch of {self.name(indices[0])}", f"{type(error).__name__}: {error}"))

    def name(self, index: int) -> str:
        """Return the path of an item."""
        item = self.dataset.items[index]
        return str(getattr(item, "path", item))


class BatchLoader:
    """An iterable of the batches whose indices `sampler` gives, made as the plan says.

    Raises SpeedkitError when a worker fails, dies or hangs, or when /dev/shm is full; no process is left behind then.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Loaded], sampler: Any, plan: Plan):
        self.sampler, self.plan, self.workers = sampler, plan, int(plan.workers)
        self.in_processes = self.workers > 0 and plan.worker_kind == "process"
        self.running = threading.Event()
        self.running.set()
        if self.in_processes:  # which pin nothing: page-locked memory belongs to one process
            reading = multiprocessing.RawArray("q", [-1] * self.workers)
            self.maker = BatchMaker(dataset, collate, pin=False, reading=reading)
        else:
            reading = [-1] * max(1, self.workers)
            running = self.running if self.workers else None  # the training process itself is never paused
            self.maker = BatchMaker(dataset, collate, pin=plan.pin_memory, reading=reading, running=running)
        self.loader: DataLoader | None = None
        self.passing: Any = None  # the DataLoader's iterator

    def __iter__(self) -> Iterator[Loaded]:
        if self.in_processes:
            return self.from_processes()
        return self.from_threads() if self.workers else map(self.maker.make, self.sampler)

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return [] if self.passing is None else self.passing._workers

    def pause(self) -> None:
        """Let the workers stand still; threads do so at their next item."""
        self.running.clear()
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the workers go on."""
        self.running.set()
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send a signal to the worker processes that live."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """End the workers by force: they may be stopped, or wait for what a dead one held."""
        self.running.set()
        kill(self.processes)
        if self.passing is not None:
            # PyTorch sets this event when its iterator is deleted, and would wait for a lock that a killed worker held.
            self.passing._workers_done_event = threading.Event()
        self.loader = self.passing = None

    def from_threads(self) -> Generator[Loaded, None, None]:
        """Yield the batches of a pass that threads make. They are daemons: one that hangs does not keep Python."""
        numbers = itertools.count()
        with ThreadPool(self.workers, start_thread, (numbers,)) as pool:
            batches = (pool.apply_async(self.maker.make_in_thread, (indices,)) for indices in self.sampler)
            ahead = deque(itertools.islice(batches, self.workers * self.plan.prefetch_factor))
            while ahead:
                loaded = self.received(ahead.popleft())
                ahead.extend(itertools.islice(batches, 1))
                yield loaded

    def from_processes(self) -> Generator[Loaded, None, None]:
        """Yield the batches of a pass that a DataLoader's processes make.

        A thread talks to them: to take a tensor out of shared memory is to wait for the process that made it, without
        a limit, and it pins the batch while the training goes on.
        """
        at_end = False
        with ThreadPool(1) as reader:
            try:
                self.received(reader.apply_async(self.start_pass))
                loaded = reader.apply_async(self.read)
                while not at_end:
                    batch = self.received(loaded)
                    at_end = batch is None
                    if batch is not None:
                        loaded = reader.apply_async(self.read)
                        yield batch
            finally:
                if not at_end or not self.plan.persistent_workers:
                    self.close()

    def start_pass(self) -> None:
        """Start the processes, or send the persistent ones to a new pass."""
        if self.loader is None:
            util.get_temp_dir()  # for the workers' sockets: killed, they could not remove one of their own
            self.loader = DataLoader(
                self.maker,
                sampler=self.sampler,
                batch_size=None,  # the maker batches
                collate_fn=unchanged,
                num_workers=self.workers,
                prefetch_factor=self.plan.prefetch_factor,
                persistent_workers=self.plan.persistent_workers,
                worker_init_fn=start_process,
                generator=torch.Generator(),  # else it draws from the global one: dropout would depend on loading
            )
        self.passing = iter(self.loader)
        # Where a DataLoader of the user's runs too, PyTorch raises in whatever the main thread is doing when one of
        # these processes ends, by `close` as well. `received` tells what has happened to them.
        if self.passing._worker_pids_set:
            signal_handling._remove_worker_pids(id(self.passing))
            self.passing._worker_pids_set = False

    def read(self) -> Loaded | Failure | None:
        """Return the next batch, pinned where the plan says so; None at the end of the pass."""
        pickled = next(self.passing, None)
        loaded = None if pickled is None else pickle.loads(pickled)
        if self.plan.pin_memory and isinstance(loaded, tuple) and loaded[0]:
            return tuple(tensor.pin_memory() for tensor in loaded[0]), loaded[1]
        return loaded

    def received(self, result: AsyncResult) -> Any:
        """Return what a worker made. Raises SpeedkitError when it failed, or when none begins an item for HUNG_S."""
        while True:
            before = list(self.maker.reading)
            try:
                loaded = result.get(HUNG_S)
                break
            except multiprocessing.TimeoutError:
                why = self.why_dead()
                if not why and list(self.maker.reading) == before:
                    cure = "leave it out, or look with workers=0"
                    why = f"no batch for {HUNG_S:g} s: a worker hangs {self.item_at(max(before))}; {cure}"
            except (RuntimeError, OSError, EOFError, pickle.PickleError) as error:  # of the DataLoader and its sockets
                why = self.why_dead() or (
                    f"the loader processes cannot be read ({type(error).__name__} {error}): too many files may be open "
                    "(ulimit -n), or look with workers=0"
                )
            if why:
                self.close()
                raise SpeedkitError(why)
        if isinstance(loaded, Failure):
            self.close()
            if "allocate shared memory" in loaded.error:
                raise SpeedkitError(self.full_shared_memory())
            raise SpeedkitError(f"a worker failed at {loaded.item}: {loaded.error}; workers=0 shows where")
        return loaded

    def why_dead(self) -> str:
        """Return what a worker process died of, "" when all live."""
        dying = connection.wait([process.sentinel for process in self.processes], 1)
        for process, index in zip(self.processes, self.maker.reading, strict=False):
            if process.sentinel in dying:
                process.join(END_S)  # its pipes are closed before its exit code can be read
            code = process.exitcode
            if code == -signal.SIGBUS:
                return self.full_shared_memory()
            if code:
                cure = "workers=0 shows what it died of"
                if code == -signal.SIGKILL:
                    cure = (
                        "out of memory the system kills so: take fewer workers, a lower prefetch_factor, or workers=0"
                    )
                return f"a loader process died (exit code {code}) {self.item_at(index)}; {cure}"
        return ""

    def item_at(self, index: int) -> str:
        """Return which item a worker was at, as words."""
        return f"at {self.maker.name(index)}" if index >= 0 else "between items"

    def full_shared_memory(self) -> str:
        """Return what to do when batches do not fit into /dev/shm, as in a container."""
        size_mb, batches = shutil.disk_usage("/dev/shm").total / 1e6, self.workers * self.plan.prefetch_factor
        return (
            f"/dev/shm ({size_mb:.0f} MB) is full: workers * prefetch_factor = {batches} batches must fit; lower one "
            "of them, use worker_kind=thread, or give a container more (--shm-size)"
        )


def unchanged(batch: Any) -> Any:
    """Return `batch`: a DataLoader without automatic batching would make tensors of what it can."""
    return batch


def start_thread(numbers: Iterator[int]) -> None:
    """Set a loader thread up: one thread of PyTorch's, for the workers together already fill the cores."""
    place.number = next(numbers)
    torch.set_num_threads(1)


def start_process(number: int) -> None:
    """Set a loader process up.

    Ctrl-C and SIGTERM often go to the whole process group. They are the parent's business, which makes its last step
    and a checkpoint with the workers' help and then ends them.
    """
    start_thread(iter([number]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # PyTorch's handlers would print a line; the training process says what a worker died of.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)


def kill(processes: Iterable[Any]) -> None:
    """Kill processes, stopped ones too, and wait for a limited time until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(END_S)


@atexit.register
def kill_workers() -> None:
    """Kill what a run has left: loader processes ignore SIGTERM, and Python, going out, would wait for ever."""
    kill([process for process in multiprocessing.active_children() if process.daemon])


def choose_workers(
    plan: Plan,
    open_stream: Callable[[Plan], Any],
    compute: Callable[[tuple[Tensor, ...]], Any],
    *,
    device: torch.device,
) -> tuple[Plan, str]:
    """Return `plan` with the workers under which steps, `compute(batch)`, follow each other fastest, and the reason.

    None come first, then threads and processes, 1, 2, 4 ... up to the cores, each kind for as long as it helps.
    `open_stream(plan)` returns the stream of batches under a plan.
    """

    def measure(setting: Plan) -> float:
        """Return the seconds of a step under `setting`."""
        with closing(open_stream(setting)) as stream:
            return run_until_steady(lambda: compute(next(stream)), device, max_s=SETTING_S).step_s

    best = dataclasses.replace(plan, workers=0, persistent_workers=False)
    until_s, best_s = time.perf_counter() + BUDGET_S, measure(best)
    tried = [f"none {1e3 * best_s:.3g} ms"]
    for kind in ("thread", "process"):
        fewer_s = best_s
        for count in (2**power for power in range(usable_cores().bit_length())):
            setting = dataclasses.replace(plan, workers=count, worker_kind=kind, persistent_workers=True)
            try:
                step_s = measure(setting)
            except SpeedkitError as error:  # /dev/shm is full, say: as many do not go
                tried.append(f"{count} by {kind}: {error}")
                break
            tried.append(f"{count} by {kind} {1e3 * step_s:.3g} ms")
            if GAIN * step_s < best_s:
                best, best_s = setting, step_s
            # One worker that is always busy may gain nothing where two do.
            if time.perf_counter() > until_s or (count > 1 and GAIN * step_s > fewer_s):
                break
            fewer_s = step_s
    chosen = dataclasses.replace(best, persistent_workers=plan.persistent_workers and best.workers != 0)
    name = f"{best.workers} by {best.worker_kind}" if best.workers else "none"
    return chosen, f"workers {name} gave the shortest steps: {', '.join(tried)}"
