"""Make batches ahead of time, in order, in worker processes or threads.

Each worker has a thread, which makes batches or has a process make them. All waiting has a limit, and processes end by
force: a worker that hangs (a stuck disk, SIGSTOP) must not keep the training process from ending.
"""

import atexit
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, MutableSequence, Sequence
from concurrent.futures import Future
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.decode import BadItem
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

HUNG_S = 120.0  # a worker hangs when a batch is waited for, and no worker has begun an item for so long
END_S = 5.0  # what a killed process gets until it is gone

Loaded = tuple[tuple[Tensor, ...] | None, dict[str, str]]  # the batch, and path -> why of bad items
Make = Callable[[list[int], int], Loaded]  # indices, number of the worker -> batch
# Copies of the process that trains. Python 3.14 has others by default, to which a workload's functions cannot be sent.
PROCESSES: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
seeds = itertools.count()  # no two processes draw the same numbers


def item_name(item: Any) -> str:
    """Return the path of an item's file, or the item in words."""
    return str(getattr(item, "path", item))


@dataclasses.dataclass
class BatchMaker:
    """Indices -> batch: samples, collated. `reading` [workers] is the index of the item each worker is at, else -1."""

    items: Sequence[Any]
    sample: Callable[[int], Any]  # index of an item -> sample; raises BadItem
    collate: Callable[[list[Any]], tuple[Tensor, ...]]
    reading: MutableSequence[int] = dataclasses.field(default_factory=lambda: [-1])
    running: threading.Event | None = None  # threads stand still while it is not set

    def make(self, indices: list[int], worker: int = 0) -> Loaded:
        """Return the batch of the items at `indices`, None where all are bad, and path -> why of those that are."""
        samples, bad = [], {}
        for index in indices:
            if self.running is not None:
                self.running.wait()
            self.reading[worker] = index
            try:
                samples.append(self.sample(index))
            except BadItem as error:
                bad[error.path] = error.why
        self.reading[worker] = -1
        return self.collate(samples) if samples else None, bad

    def failure(self, worker: int, error: BaseException | str) -> SpeedkitError:
        """Return the error of a worker with the item it was at; the exception itself may be one that cannot be sent."""
        if isinstance(error, SpeedkitError):
            return error
        if isinstance(error, BaseException):
            error = f"a worker failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        index = self.reading[worker]
        place = f" at {item_name(self.items[index])}" if index >= 0 else ""
        return SpeedkitError(f"{error}{place}; workers=0 shows where")


class BatchLoader:
    """An iterable of `batches`, each given by its indices, made as the plan says.

    Raises SpeedkitError when a worker fails, dies or hangs; no process is left behind then.
    """

    def __init__(self, maker: BatchMaker, batches: Iterable[list[int]], plan: Plan):
        self.maker, self.batches, self.plan = maker, batches, plan
        self.running = threading.Event()
        self.running.set()
        self.tasks: SimpleQueue | None = None  # (indices, future) of batches to be made; None ends a thread
        self.processes: list[BaseProcess] = []

    def __iter__(self) -> Generator[Loaded, None, None]:
        if not self.plan.workers:
            yield from map(self.pinned, map(self.maker.make, self.batches))
            return
        complete = False
        try:
            if self.tasks is None:
                self.start()
            futures = map(self.submit, self.batches)
            ahead = deque(itertools.islice(futures, self.plan.workers * self.plan.prefetch_factor))
            while ahead:
                loaded = self.received(ahead.popleft())
                ahead.extend(itertools.islice(futures, 1))
                yield loaded
            complete = True
        finally:
            if not (complete and self.plan.persistent_workers):
                self.close()

    def start(self) -> None:
        """Start the workers: processes first, for a lock that a thread holds while one is forked stays locked in it."""
        self.maker.reading = multiprocessing.RawArray("q", [-1] * self.plan.workers)
        makers: list[Make] = [self.maker.make] * self.plan.workers
        if self.plan.worker_kind == "process":
            util.get_temp_dir()  # for the processes' sockets: killed, they could not remove one of their own
            makers = [self.start_process(worker) for worker in range(self.plan.workers)]
        else:
            self.maker.running = self.running
        self.tasks = SimpleQueue()
        for worker, make in enumerate(makers):
            # Daemons: one that hangs does not keep Python.
            threading.Thread(target=self.work, args=(self.tasks, make, worker), daemon=True).start()

    def start_process(self, worker: int) -> Make:
        """Start a loader process; return the function that has it make a batch."""
        pipe = near_end, far_end = multiprocessing.Pipe()
        options = {"pipe": pipe, "seed": torch.initial_seed() + next(seeds)}
        process = PROCESSES.Process(target=serve, args=(self.maker, worker), kwargs=options, daemon=True)
        process.start()
        far_end.close()
        self.processes.append(process)

        def ask(indices: list[int], worker: int) -> Loaded:
            """Return the batch that the process makes of `indices`. Raises SpeedkitError where it fails or has died."""
            try:
                near_end.send(indices)
                answer = near_end.recv()  # takes tensors out of shared memory, for which the process has to be alive
            except (EOFError, ConnectionError):
                process.join(END_S)  # its pipes are closed before its exit code can be read
                answer = f"a loader process died (exit code {process.exitcode}, where -9 may mean that memory is out)"
                answer = self.maker.failure(worker, answer)
            if isinstance(answer, SpeedkitError):
                raise answer
            return answer

        return ask

    def submit(self, indices: list[int]) -> Future:
        """Have a batch made; return what it will come in."""
        future: Future = Future()
        self.tasks.put((indices, future))  # type: ignore[union-attr]
        return future

    def work(self, tasks: SimpleQueue, make: Make, worker: int) -> None:
        """Make batches, in the thread of a worker, until None is asked for."""
        torch.set_num_threads(1)  # the workers together already fill the machine
        while (task := tasks.get()) is not None:
            indices, future = task
            try:
                future.set_result(self.pinned(make(indices, worker)))
            except BaseException as error:  # SystemExit would end the thread, and no batch would ever come
                future.set_exception(self.maker.failure(worker, error))

    def pinned(self, loaded: Loaded) -> Loaded:
        """Return a batch in page-locked memory, where the plan says so."""
        batch, bad = loaded
        return (tuple(tensor.pin_memory() for tensor in batch) if batch and self.plan.pin_memory else batch), bad

    def received(self, future: Future) -> Loaded:
        """Return what a worker made. Raises SpeedkitError when it failed, or when none begins an item for HUNG_S."""
        while True:
            before = list(self.maker.reading)
            try:
                return future.result(HUNG_S)
            except TimeoutError:
                if list(self.maker.reading) == before:
                    hung = before.index(max(before))
                    raise self.maker.failure(hung, f"no batch for {HUNG_S:g} s: a worker hangs") from None

    def set_running(self, running: bool) -> None:
        """Let the workers go on or stand still; threads do so at their next item."""
        if running:
            self.running.set()
        else:
            self.running.clear()
        set_running(self.processes, running)

    def close(self) -> None:
        """End the workers by force: they may be stopped, or hang."""
        self.running.set()
        kill(self.processes)
        self.processes, tasks, self.tasks = [], self.tasks, None
        if tasks is not None:
            with contextlib.suppress(Empty):
                while True:
                    tasks.get_nowait()
            for _ in range(self.plan.workers):
                tasks.put(None)


def serve(maker: BatchMaker, worker: int, *, pipe: tuple[Connection, Connection], seed: int) -> None:
    """Be a loader process: send the batch of each list of indices, or the error, until the pipe is closed."""
    near_end, connection = pipe
    near_end.close()  # held by the training process alone, even one that is killed closes it
    for stop in (signal.SIGINT, signal.SIGTERM):
        # They often go to the whole process group: the parent makes a checkpoint with the workers' help, and ends them.
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(1)  # together they already fill the cores
    torch.manual_seed(seed)  # for data sets that draw from one of the three
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            indices = connection.recv()
            try:
                connection.send(maker.make(indices, worker))  # pickled as a whole before any of it is sent
            except BaseException as error:
                connection.send(maker.failure(worker, error))


def set_running(processes: Iterable[Any], running: bool) -> None:
    """Let processes go on or stand still."""
    for process in filter(BaseProcess.is_alive, processes):
        os.kill(process.pid, signal.SIGCONT if running else signal.SIGSTOP)


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
