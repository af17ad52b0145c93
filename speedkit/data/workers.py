"""Batches made ahead by worker processes or threads, in order; and what went wrong with one, in a sentence."""

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing import active_children
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

HUNG_S = 120.0  # a batch is waited for, and for so long no item has been begun: one hangs

# Otherwise PyTorch raises in whatever the main thread is doing when a worker dies, writing a checkpoint for instance.
# Without, the next batch tells, at most 5 s later.
signal_handling._SIGCHLD_handler_set = True


class Loader:
    """An iterable of batches: `collate` of the samples whose indices `order` gives, made as the plan says.

    Raises SpeedkitError when a worker dies or hangs, or /dev/shm is full; no process is left behind then.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any], plan: Plan, order: Any):
        self.samples, self.collate, self.plan, self.order = samples, collate, plan, order
        self.workers = int(plan.workers)
        self.processes: list[Any] = []
        self.received, self.waiting, self.hung = 0, False, False
        self.running = threading.Event()  # threads stand still while it is not set
        self.running.set()
        # A DataLoader draws its workers' seed from the global generator unless it has its own: dropout would then
        # depend on whether, and how, data is loaded.
        extra: dict[str, Any] = {"generator": torch.Generator()}
        if self.workers and plan.worker_kind == "process":
            samples.reading = multiprocessing.RawArray("q", 2 * self.workers)  # of each worker: index, then process id
            extra |= {
                "num_workers": self.workers,
                "persistent_workers": plan.persistent_workers,
                "prefetch_factor": plan.prefetch_factor,
                "worker_init_fn": start_worker,
            }
        self.loader = DataLoader(samples, batch_sampler=order, collate_fn=collate, pin_memory=plan.pin_memory, **extra)

    def __iter__(self) -> Generator[Any, None, None]:
        if not self.workers:
            yield from self.loader
        elif self.plan.worker_kind == "thread":
            yield from self._from_threads()
        else:
            yield from self._from_processes()

    def signal(self, number: int) -> None:
        """Send a signal to every worker process; SIGSTOP and SIGCONT hold threads too, at their next item."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            self.running.clear()
        elif number == signal.SIGCONT:
            self.running.set()

    def close(self) -> None:
        """End the processes, also where a traceback keeps an iterator over them alive."""
        del self.loader
        self.signal(signal.SIGKILL)

    def _from_processes(self) -> Iterator[Any]:
        before = set(active_children())
        passing, over = iter(self.loader), threading.Event()
        started = [process for process in active_children() if process not in before]
        self.processes = started or self.processes  # none are started where they persist
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            while True:
                self.waiting = True
                batch = next(passing, None)
                self.waiting = False
                if batch is None:
                    return
                self.received += 1
                yield batch
        except RuntimeError as error:
            explained = self._explained(str(error))
            if not explained:
                raise
            self.signal(signal.SIGKILL)  # the others may wait for what the dead one held
            raise SpeedkitError(explained) from error
        finally:
            over.set()
            del passing  # ends its processes, also where a traceback keeps this frame alive

    def _watch(self, over: threading.Event) -> None:
        """Kill the processes when one hangs: PyTorch then finds them dead and stops waiting."""
        quiet_s, seen, tick_s = 0.0, None, HUNG_S / 10
        while quiet_s < HUNG_S:
            if over.wait(tick_s):
                return
            now = (self.received, self.samples.reading[:])
            quiet_s, seen = quiet_s + tick_s if self.waiting and now == seen else 0.0, now
        self.hung = True
        self.signal(signal.SIGKILL)

    def _explained(self, error: str) -> str:
        """Return what happened to a worker process and what to do, "" when `error` is about something else."""
        noted = self.samples.reading[:]
        at = {pid: index for index, pid in zip(noted[: self.workers], noted[self.workers :], strict=True) if index >= 0}
        dead = next((process for process in self.processes if process.exitcode), None)
        if self.hung:
            return self._hangs(next(iter(at.values()), None))
        if "shared memory" in error or (dead and dead.exitcode == -signal.SIGBUS):
            size = f"{shutil.disk_usage('/dev/shm').total / 1e6:.0f} MB"
            return (
                f"/dev/shm ({size}) is full: workers * prefetch_factor = {self.workers * self.plan.prefetch_factor} "
                "batches must fit; lower one of them, use worker_kind=thread, or give a container more (--shm-size)"
            )
        if dead is None:
            return ""
        cause = signal.Signals(-dead.exitcode).name if dead.exitcode < 0 else f"exit code {dead.exitcode}"
        place = f" while it read {self._name(at[dead.pid])}" if dead.pid in at else ""
        cure = "workers=0 shows what it died of"
        if dead.exitcode == -signal.SIGKILL:
            cure = "the system kills so when memory runs out: take fewer workers, a lower prefetch_factor, or workers=0"
        return f"loader process {dead.pid} died{place} ({cause}); {cure}"

    def _hangs(self, index: int | None) -> str:
        place = f"reading {self._name(index)} hangs" if index is not None else "a loader worker hangs"
        return f"no batch for {HUNG_S:g} s: {place}; leave that file out, or see with workers=0 where it stands still"

    def _name(self, index: int) -> str:
        item = self.samples.items[index]
        return str(getattr(item, "path", item))

    def _from_threads(self) -> Iterator[Any]:
        pending: deque[tuple[AsyncResult, list[int]]] = deque()
        with ThreadPool(self.workers, torch.set_num_threads, (1,)) as pool:  # its threads never keep Python from ending
            for indices in self.order:
                at: list[int] = []
                pending.append((pool.apply_async(self._make, (indices, at)), at))
                if len(pending) > self.workers * self.plan.prefetch_factor:
                    yield self._finished(*pending.popleft())
            while pending:
                yield self._finished(*pending.popleft())

    def _make(self, indices: list[int], at: list[int]) -> Any:
        samples = []
        for index in indices:
            self.running.wait()
            at[:] = [index]
            samples.append(self.samples[index])
        batch, *rest = self.collate(samples)
        if batch is not None and self.plan.pin_memory:
            batch = tuple(tensor.pin_memory() for tensor in batch)
        return batch, *rest

    def _finished(self, result: AsyncResult, at: list[int]) -> Any:
        while not result.ready():
            before = list(at)
            result.wait(HUNG_S)
            if at == before and not result.ready():
                raise SpeedkitError(self._hangs(at[0] if at else None))
        return result.get()


def start_worker(number: int) -> None:
    """Set a loader process up: one thread, for the workers together already fill the cores.

    Ctrl-C and SIGTERM often go to the whole process group. They are the parent's business, which makes its last step
    and a checkpoint with the workers' help and then ends them.
    """
    torch.set_num_threads(1)
    worker: Any = get_worker_info()
    worker.dataset.reading[worker.num_workers + number] = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def end_workers() -> None:
    """Kill loader processes that a run left: they ignore SIGTERM, and Python, going out, would wait for ever."""
    for process in active_children():
        if process.daemon:
            process.kill()
