"""Batches of items, made by torch's DataLoader in the training process or in worker processes.

All waiting has a limit, and workers end by force: one that hangs (a stuck disk, SIGSTOP) must not keep the training
process from ending.
"""

import atexit
import contextlib
import dataclasses
import functools
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, MutableSequence, Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from speedkit.errors import BadItem, DataError, SpeedkitError, answered_by
from speedkit.plan import Plan

CHECK_S = 5.0  # from one look at what the workers do to the next
HUNG_S = 120.0  # workers that do nothing for so long hang
LOOK = ["cpu_times", *(["io_counters"] if hasattr(psutil.Process, "io_counters") else [])]  # not on a Mac
END_S = 5.0  # what a killed process gets until it is gone
STOPS = [signal.SIGINT, signal.SIGTERM]  # they often go to the whole process group
if hasattr(signal, "SIGHUP"):  # not on Windows
    STOPS.append(signal.SIGHUP)  # the terminal is closed

END = object()  # of a loader's batches
Loaded = tuple[Any, dict[str, str]]  # the batch, and path -> why of bad items


def item_name(item: Any) -> str:
    """Return the path of an item's file, or the item in words."""
    return str(getattr(item, "path", item))


@dataclasses.dataclass
class BatchMaker(Dataset):
    """A data set of whole batches: `maker[indices]` is the batch of the items at `indices`, collated.

    `reading` [workers] is the index of the item that each worker is at, else -1; the processes share it.
    """

    items: Sequence[Any]
    sample: Callable[[int], Any]  # index of an item -> sample; raises BadItem
    collate: Callable[[list[Any]], Any]
    reading: MutableSequence[int] = dataclasses.field(default_factory=lambda: [-1])

    def __getitem__(self, indices: list[int]) -> Loaded | SpeedkitError:
        """Return the batch, None where all items are bad, and path -> why of those that are.

        A worker returns its errors: not every exception can be sent to another process, and StopIteration would end
        the epoch.
        """
        process = get_worker_info()
        worker = process.id if process is not None else 0
        try:
            return self.make(indices, worker)
        except BaseException as error:
            if process is None and not isinstance(error, StopIteration):
                raise
            return self.failure(worker, error)

    def make(self, indices: list[int], worker: int) -> Loaded:
        """Return what `maker[indices]` is; raise what goes wrong."""
        samples = []
        bad = {}
        for index in indices:
            self.reading[worker] = index
            try:
                samples.append(self.sample(index))
            except BadItem as error:
                bad[error.path] = error.why
        self.reading[worker] = -1
        return self.collate(samples) if samples else None, bad

    def failure(self, worker: int, error: BaseException | str) -> SpeedkitError:
        """Return the error of a worker in one sentence, with the item it was at."""
        if isinstance(error, SpeedkitError):
            return error
        if isinstance(error, BaseException):
            error = f"a worker failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        index = self.reading[worker]
        place = f" at {item_name(self.items[index])}" if index >= 0 else ""
        return DataError(f"{error}{place}; workers=0 shows where")


@dataclasses.dataclass(eq=False)
class HangDetector:
    """Kills the workers of a DataLoader, in a thread, when they do nothing for HUNG_S while they are waited for.

    DataLoader's own `timeout` takes a slow batch for a hang, and does not hold while a batch comes out of the shared
    memory of a worker that is stopped.
    """

    reading: Sequence[int] = ()  # changes with what the workers are at
    processes: list[BaseProcess] = dataclasses.field(default_factory=list)
    waiting: bool = False
    hung: str = ""  # in words, once they were killed
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    def wait_for(self, make: Callable[[], Any]) -> Any:
        """Return what `make` waits for the workers to do. Raises DataError when they hang."""
        self.waiting = True
        try:
            return make()
        except Exception:
            if self.hung:
                raise DataError(f"{self.hung}; workers=0 shows where") from None
            raise
        finally:
            self.waiting = False

    def look(self) -> None:
        """Kill the workers when they hang; `ended` is the end of it."""
        idle_s = 0.0
        before: list[Any] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            while idle_s < HUNG_S:
                if self.ended.wait(CHECK_S) or any(process.exitcode is not None for process in self.processes):
                    return
                now = [*self.reading, *map(work_done, self.processes)]
                if self.waiting and now and now == before:
                    idle_s += CHECK_S
                else:
                    idle_s = 0.0
                before = now
            self.hung = f"no batch for {HUNG_S:g} s: a worker hangs"
            kill(self.processes)


def epoch_of(
    loader: Any, detector: HangDetector, begin: Callable[[Any], Iterator[Any]] = iter
) -> Generator[Any, None, None]:
    """Yield the batches of an epoch of `loader`; the `detector` looks at its workers, but where it has a timeout."""
    detector.processes = workers_of(getattr(loader, "_iterator", None))  # persistent ones
    if getattr(loader, "num_workers", 0) and not getattr(loader, "timeout", 0):
        threading.Thread(target=detector.look, daemon=True).start()
    try:
        batches = detector.wait_for(functools.partial(begin, loader))
        detector.processes = workers_of(batches)
        while (batch := detector.wait_for(functools.partial(next, batches, END))) is not END:
            yield batch
    finally:
        detector.ended.set()


class BatchLoader:
    """An iterable of `batches`, each given by its indices, made as the plan says.

    Raises SpeedkitError when a worker fails, dies or hangs; no process is left behind then.
    """

    def __init__(self, maker: BatchMaker, batches: Iterable[list[int]], plan: Plan):
        self.maker, self.batches, self.plan = maker, batches, plan
        self.generator = torch.Generator()  # of the workers' seeds: the global random state stays as it is
        self.generator.manual_seed(torch.initial_seed())
        self.loader: DataLoader | None = None
        self.detector = HangDetector()

    def __iter__(self) -> Generator[Loaded, None, None]:
        complete = False
        try:
            if self.loader is None:
                self.loader = self.make_loader()
            self.detector = HangDetector(self.maker.reading)
            for loaded in epoch_of(self.loader, self.detector, self.begin):
                if isinstance(loaded, SpeedkitError):
                    raise loaded
                yield loaded
            complete = True
        except Exception as error:
            told = isinstance(error, SpeedkitError) and not self.detector.hung
            if told or not self.detector.processes:
                raise
            raise self.failure(error) from None
        finally:
            if not (complete and self.plan.persistent_workers):
                self.close()

    def begin(self, loader: DataLoader) -> Iterator[Any]:
        """Return the batches of an epoch, with workers that have begun on them."""
        if not self.plan.workers:
            return iter(loader)
        atexit.register(self.close)  # Python, going out, would wait for ever: the workers ignore SIGTERM
        with stops_held_back():
            return iter(loader)

    def make_loader(self) -> DataLoader:
        """Return the DataLoader of the plan. Batches, and not samples, are what a worker is asked for."""
        options: dict[str, Any] = {}
        if self.plan.workers:
            util.get_temp_dir()  # for the workers' sockets: killed, they could not remove one of their own
            self.maker.reading = multiprocessing.RawArray("q", [-1] * self.plan.workers)
            options = {
                "num_workers": self.plan.workers,
                "prefetch_factor": self.plan.prefetch_factor,
                "persistent_workers": self.plan.persistent_workers,
                "worker_init_fn": begin_worker,
            }
            if sys.platform == "linux":
                # Copies of the process that trains. Python 3.14 has others by default, to which functions of a workload
                # cannot be sent. On a Mac copies may crash, so DataLoader's own way stays.
                options["multiprocessing_context"] = "fork"
        return DataLoader(
            self.maker,
            batch_size=None,
            sampler=self.batches,
            pin_memory=self.plan.pin_memory,
            generator=self.generator,
            **options,
        )

    def failure(self, error: Exception) -> SpeedkitError:
        """Return why there is no batch: a worker hung, has died or does so now, or the `error` itself."""
        processes = self.detector.processes
        if self.detector.hung:
            worker = max(range(len(processes)), key=self.maker.reading.__getitem__)
            return self.maker.failure(worker, self.detector.hung)
        ended = wait([process.sentinel for process in processes], END_S)  # for the first that ends
        for worker, process in enumerate(processes):
            if process.sentinel in ended:
                process.join(END_S)  # its files, and with them the sentinel, are closed before it is seen to be dead
                died = f"a loader process died (exit code {process.exitcode}, where -9 may mean that memory is out)"
                return self.maker.failure(worker, died)
        return self.maker.failure(0, error)

    def close(self) -> None:
        """End the workers by force: they may be stopped, or hang."""
        self.detector.ended.set()
        kill(self.detector.processes)
        self.loader = None
        self.detector = HangDetector()
        atexit.unregister(self.close)


@contextlib.contextmanager
def stops_held_back() -> Iterator[None]:
    """Hold back what asks for an end while workers start: one that does not ignore them yet would die of them.

    What another thread has got is put off, too: Python would drop what a handler raises in the middle of a fork.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    came: list[int] = []
    try:
        with answered_by(lambda number, _frame: came.append(number), STOPS):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came[:1]:
            signal.raise_signal(number)


def workers_of(batches: Any) -> list[BaseProcess]:
    """Return the workers of a DataLoader's iterator, if it has any, so that their ends raise nothing by themselves."""
    if getattr(batches, "_worker_pids_set", False):
        # Else torch's handler of SIGCHLD raises in the middle of a step, or when a worker is ended here.
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return getattr(batches, "_workers", [])


def begin_worker(_: int) -> None:
    """Ignore what ends the training process: it makes a checkpoint with the workers' help, and ends them."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)


def work_done(process: BaseProcess) -> tuple[float, Any]:
    """Return how long a process has used a core, in hundredths of HUNG_S, and what it has read and written."""
    seen = psutil.Process(process.pid).as_dict(LOOK, ad_value=())
    used_s = sum(seen["cpu_times"][:2])
    return used_s // (HUNG_S / 100), seen.get("io_counters")  # one that waits wakes up, too


def kill(processes: Iterable[BaseProcess]) -> None:
    """Kill processes, stopped ones too, and wait for a limited time until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(END_S)


def set_running(processes: Iterable[BaseProcess], running: bool) -> None:
    """Let processes go on or stand still."""
    act = psutil.Process.resume if running else psutil.Process.suspend
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a HangDetector may end it meanwhile
            if process.is_alive():
                act(psutil.Process(process.pid))
