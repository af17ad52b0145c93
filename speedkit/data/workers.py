"""Make batches ahead, in worker processes or threads, in order; say in one sentence what happened to a worker.

There is a thread per worker, which makes batches or has a process make them. Whatever is waited for has a limit, and
what is still there then ends by force: a worker that stands still (a stuck disk, SIGSTOP) must not keep the training
process from ending.
"""

import atexit
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, MutableSequence, Sequence
from contextlib import closing
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.pool import AsyncResult, ThreadPool
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedkit.clock import run_until_steady
from speedkit.errors import SpeedkitError
from speedkit.hardware import usable_cores
from speedkit.plan import Plan

HUNG_S = 120.0  # a batch is waited for, and for so long no worker has begun an item
END_S = 5.0  # what a killed process gets until it is gone
ORPHAN_S = 2.0  # how often a process that has nothing to do asks whether its parent lives
GAIN = 1.05  # workers cost memory and time to start: more are taken only where steps get so much shorter
SETTING_S = 0.5  # of steps under one number of workers, to choose one

Loaded = tuple[tuple[Tensor, ...] | None, dict[str, str]]  # the batch, and path -> why of what could not be read
seeds = itertools.count()  # no two processes draw the same numbers


@dataclasses.dataclass
class BatchMaker:
    """Indices -> batch: samples, collated. `reading` [workers] is the index of the item each worker is at, else -1."""

    items: Sequence[Any]
    sample: Callable[[int], Any]  # index of an item -> sample
    collate: Callable[[list[Any]], Loaded]
    reading: MutableSequence[int]
    running: threading.Event | None = None  # threads stand still while it is not set

    def make(self, indices: Iterable[int], number: int = 0) -> Loaded:
        """Return the batch of the items at `indices`; `number` is the worker's."""
        samples = []
        for index in indices:
            if self.running is not None:
                self.running.wait()
            self.reading[number] = index
            samples.append(self.sample(index))
        self.reading[number] = -1
        return self.collate(samples)

    def failure(self, error: BaseException, number: int) -> str:
        """Return what failed and at which item; the exception itself may be one that cannot be sent."""
        words = str(error).split("\n")[0]
        place = self.place(self.reading[number])
        return f"a worker failed {place}: {type(error).__name__}: {words}; workers=0 shows where"

    def place(self, index: int) -> str:
        """Return where a worker is, by the index of its item."""
        return f"at {item_name(self.items[index])}" if index >= 0 else "between items"


def item_name(item: Any) -> str:
    """Return the path of an item's file, or the item in words."""
    return str(getattr(item, "path", item))


class Worker(NamedTuple):
    """A worker by its number, and where it is a process, that and the way to ask it."""

    number: int
    process: multiprocessing.Process | None = None
    connection: Connection | None = None


class BatchLoader:
    """An iterable of the `batches`, each given by its indices, made as the plan says.

    Raises SpeedkitError when a worker fails, dies or hangs; no process is left behind then.
    """

    def __init__(
        self,
        items: Sequence[Any],
        sample: Callable[[int], Any],
        *,
        collate: Callable[[list[Any]], Loaded],
        batches: Iterable[list[int]],
        plan: Plan,
    ):
        self.batches, self.plan, self.workers = batches, plan, int(plan.workers)
        self.in_processes = self.workers > 0 and plan.worker_kind == "process"
        self.running = threading.Event()
        self.running.set()
        reading = multiprocessing.RawArray("q", max(1, self.workers))
        self.maker = BatchMaker(items, sample, collate, reading)
        if self.workers and not self.in_processes:
            self.maker.running = self.running
        self.threads: ThreadPool | None = None
        self.idle: SimpleQueue[Worker] = SimpleQueue()  # the workers that make nothing
        self.processes: list[multiprocessing.Process] = []

    def __iter__(self) -> Generator[Loaded, None, None]:
        if not self.workers:
            yield from map(self.pinned, map(self.maker.make, self.batches))
            return
        at_end = False
        try:
            threads = self.threads or self.start()
            results = (threads.apply_async(self.fetch, (indices, self.idle)) for indices in self.batches)
            ahead = deque(itertools.islice(results, self.workers * self.plan.prefetch_factor))
            while ahead:
                loaded = self.received(ahead.popleft())
                ahead.extend(itertools.islice(results, 1))
                yield loaded
            at_end = True
        finally:
            if not at_end or not self.plan.persistent_workers:
                self.close()

    def start(self) -> ThreadPool:
        """Start the workers: processes first, for a lock that a thread holds while one is forked stays locked in it."""
        util.get_temp_dir()  # for the processes' sockets: killed, they could not remove one of their own
        self.idle = SimpleQueue()
        for number in range(self.workers):
            self.maker.reading[number] = -1
            if not self.in_processes:
                self.idle.put(Worker(number))
                continue
            near_end, far_end = multiprocessing.Pipe()
            arguments = self.maker, number, far_end, torch.initial_seed() + next(seeds)
            process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
            process.start()
            far_end.close()
            self.processes.append(process)
            self.idle.put(Worker(number, process, near_end))
        # Daemons: one that hangs does not keep Python. One core each: the workers together already fill the machine.
        self.threads = ThreadPool(self.workers, torch.set_num_threads, (1,))
        return self.threads

    def fetch(self, indices: list[int], idle: "SimpleQueue[Worker]") -> Loaded | str:
        """Return a batch, or why there is none: SystemExit, for one, would end the thread and no batch would ever come.

        A tensor is taken out of shared memory here: that is to wait, without a limit, for the process that made it. A
        thread may outlive its pass, and then gives its worker back to the `idle` ones of that pass, not of the next.
        """
        worker = idle.get()
        try:
            loaded = self.ask(indices, worker) if worker.connection else self.maker.make(indices, worker.number)
            return loaded if isinstance(loaded, str) else self.pinned(loaded)
        except BaseException as error:
            return self.maker.failure(error, worker.number)
        finally:
            idle.put(worker)

    def ask(self, indices: list[int], worker: Worker) -> Loaded | str:
        """Return what a process makes of `indices`, or what it died of."""
        assert worker.process is not None and worker.connection is not None, "threads are not asked"
        try:
            worker.connection.send(indices)
            return worker.connection.recv()
        except (EOFError, ConnectionError):
            worker.process.join(END_S)  # its pipes are closed before its exit code can be read
            place = self.maker.place(self.maker.reading[worker.number])
            return (
                f"a loader process died (exit code {worker.process.exitcode}) {place}; workers=0 shows what of, and -9 "
                "may be the system's when memory is out: take fewer workers or a lower prefetch_factor"
            )

    def pinned(self, loaded: Loaded) -> Loaded:
        """Return a batch in page-locked memory, where the plan says so."""
        batch, bad = loaded
        return (tuple(tensor.pin_memory() for tensor in batch) if batch and self.plan.pin_memory else batch), bad

    def received(self, result: AsyncResult) -> Loaded:
        """Return what a worker made. Raises SpeedkitError when it failed, or when none begins an item for HUNG_S."""
        while True:
            before = list(self.maker.reading)
            try:
                loaded = result.get(HUNG_S)
            except multiprocessing.TimeoutError:
                if list(self.maker.reading) != before:
                    continue
                place = self.maker.place(max(before))
                loaded = f"no batch for {HUNG_S:g} s: a worker hangs {place}; leave it out, or look with workers=0"
            if not isinstance(loaded, str):
                return loaded
            self.close()
            raise SpeedkitError(loaded)

    def set_running(self, running: bool) -> None:
        """Let the workers go on, or stand still: threads do so at their next item, and the training process never."""
        if running:
            self.running.set()
        else:
            self.running.clear()
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGCONT if running else signal.SIGSTOP)

    def close(self) -> None:
        """End the workers by force: they may be stopped, or hang."""
        self.running.set()
        kill(self.processes)
        self.processes = []
        if self.threads is not None:
            self.threads.terminate()
            self.threads = None


def serve(maker: BatchMaker, number: int, connection: Connection, seed: int) -> None:
    """Be a loader process: send the batch of each list of indices, or why there is none, until nobody asks.

    Ctrl-C and SIGTERM often go to the whole process group. They are the parent's business, which makes its last step
    and a checkpoint with the workers' help and then ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)  # together they already fill the cores
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for data sets that draw from the legacy generator
    parent = os.getppid()
    with contextlib.suppress(EOFError, ConnectionError):  # the training process has closed the pipe
        while True:
            # Killed, it closes nothing: processes started later hold its ends of this pipe too.
            while not connection.poll(ORPHAN_S):
                if os.getppid() != parent:
                    return
            indices = connection.recv()
            try:
                connection.send(maker.make(indices, number))  # pickled as a whole before any of it is sent
            except BaseException as error:
                connection.send(maker.failure(error, number))


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
    """Return `plan` with the fewest workers under which steps, `compute(batch)`, are nearly the shortest, and why.

    Tried are none, 1, 2, 4 ... up to the cores. `open_stream(plan)` returns the stream of batches under a plan.
    """
    steps_s = {}
    for workers in (0, *(2**power for power in range(usable_cores().bit_length()))):
        tried = dataclasses.replace(plan, workers=workers, persistent_workers=workers > 0)
        with closing(open_stream(tried)) as stream:
            steps_s[workers] = run_until_steady(lambda: compute(next(stream)), device, max_s=SETTING_S).step_s
    best = next(workers for workers, step_s in steps_s.items() if step_s <= GAIN * min(steps_s.values()))
    times = ", ".join(f"{workers} {1e3 * step_s:.3g} ms" for workers, step_s in steps_s.items())
    chosen = dataclasses.replace(plan, workers=best, persistent_workers=plan.persistent_workers and best > 0)
    return chosen, f"workers={best} gave the shortest steps: {times}"
