"""Batches made ahead by worker processes or threads, in order; and what happened to a worker, in a sentence."""

import atexit
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing import connection
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

HUNG_S = 120.0  # a batch is waited for, and for so long no item has been begun: one hangs
LOOKS = 120  # within that time, at what the processes are at, and whether they live

# PyTorch's own would raise in whatever the main thread is doing when a worker dies. Without, the next batch tells.
signal_handling._SIGCHLD_handler_set = True


class Hung(SpeedkitError):
    """No batch came for long, and no item was begun."""


class Loader:
    """An iterable of batches: `collate` of the samples whose indices `order` gives, made as the plan says.

    Raises SpeedkitError when a worker dies, hangs again, or /dev/shm is full; no process is left behind then.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any], plan: Plan, order: Any):
        self.samples, self.collate, self.plan, self.order = samples, collate, plan, order
        self.workers = int(plan.workers)
        self.processes: list[Any] = []
        self.running = threading.Event()  # threads stand still while it is not set
        self.running.set()
        self.loader: Any = self._made()

    def _made(self) -> DataLoader:
        # Else it draws its workers' seed from the global generator: dropout would depend on how data is loaded.
        extra: dict[str, Any] = {"generator": torch.Generator()}
        if self.workers and self.plan.worker_kind == "process":
            self.samples.reading = multiprocessing.RawArray("q", [-1] * self.workers)
            extra |= {
                "num_workers": self.workers,
                "prefetch_factor": self.plan.prefetch_factor,
                "persistent_workers": self.plan.persistent_workers,
                "worker_init_fn": start_worker,
            }
        return DataLoader(
            self.samples, batch_sampler=self.order, collate_fn=self.collate, pin_memory=self.plan.pin_memory, **extra
        )

    def __iter__(self) -> Iterator[Any]:
        if not self.workers:
            return iter(self.loader)
        return self._from_threads() if self.plan.worker_kind == "thread" else self._from_processes()

    def signal(self, number: int) -> None:
        """Send SIGSTOP or SIGCONT to every worker process; threads obey at their next item."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)
        (self.running.clear if number == signal.SIGSTOP else self.running.set)()

    def close(self) -> None:
        """End the processes, also where a traceback keeps an iterator over them alive."""
        self.loader = None
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(5)

    def _from_processes(self) -> Generator[Any, None, None]:
        """Yield a pass. Where processes hang, new ones go on: a lock that another thread held as they were forked, and
        that nobody can free in them, is not held twice. An item at which they hang again is an error."""
        given, hung_after = 0, -1
        while True:
            try:
                for batch in self._pass():
                    given += 1
                    yield batch
                return
            except Hung as hung:
                if given == hung_after:
                    raise
                warnings.warn(f"{hung}. Its batch is tried once more with new workers", stacklevel=2)
                self.order.start += given - max(0, hung_after)
                self.loader, hung_after = self._made(), given

    def _pass(self) -> Generator[Any, None, None]:
        passing: Any = iter(self.loader)
        self.processes = passing._workers
        try:
            passing._timeout = HUNG_S / LOOKS
            while (batch := self._received(lambda: next(passing, None))) is not None:
                yield batch
        finally:
            passing._timeout = 0  # persistent ones may begin the next pass by finishing what is left of this one

    def _from_threads(self) -> Generator[Any, None, None]:
        ahead = self.workers * self.plan.prefetch_factor
        self.samples.reading = [-1] * (ahead + 1)
        with ThreadPool(self.workers, torch.set_num_threads, (1,)) as pool:  # its threads never keep Python from ending
            begun = (
                pool.apply_async(self._make, (number % (ahead + 1), indices))
                for number, indices in enumerate(self.order)
            )
            pending = deque(itertools.islice(begun, ahead))
            while pending:
                pending.extend(itertools.islice(begun, 1))
                yield self._received(functools.partial(pending.popleft().get, HUNG_S / LOOKS))

    def _make(self, place: int, indices: list[int]) -> Any:
        permitted = (index for index in indices if self.running.wait())
        batch, bad = self.collate(self.samples.__getitems__(permitted, place))
        return batch and tuple(tensor.pin_memory() if self.plan.pin_memory else tensor for tensor in batch), bad

    def _received(self, take: Callable[[], Any]) -> Any:
        """Return the batch that `take` waits for, a short time each call: no hang while items are begun meanwhile."""
        quiet, seen = 0, list[int]()
        while quiet < LOOKS:
            try:
                return take()
            except multiprocessing.TimeoutError:  # of threads
                pass
            except (RuntimeError, OSError, EOFError) as error:  # what PyTorch and its queue's connection raise
                if not str(error).startswith("DataLoader timed out"):
                    explained = self._explained(str(error))
                    self._kill()  # the others may wait for what a dead one held
                    if not explained:
                        raise
                    raise SpeedkitError(explained) from error
            before, seen = seen, list(self.samples.reading)
            quiet = quiet + 1 if seen == before else 0
        self._kill()
        at = self._name(max(seen))
        raise Hung(f"no batch for {HUNG_S:g} s: a worker hangs at {at}; leave it out, or look with workers=0")

    def _explained(self, error: str) -> str:
        """Return what happened to a worker process and what to do, "" when `error` is about something else."""
        connection.wait([process.sentinel for process in self.processes], 1)  # one may be about to die
        at = zip((process.exitcode for process in self.processes), self.samples.reading, strict=False)
        code, index = next(((code, index) for code, index in at if code), (None, -1))  # (None, -1): all are alive
        if "shared memory" in error or code == -signal.SIGBUS:
            return (
                f"/dev/shm ({shutil.disk_usage('/dev/shm').total / 1e6:.0f} MB) is full: workers * prefetch_factor "
                f"= {self.workers * self.plan.prefetch_factor} batches must fit; lower one of them, use "
                "worker_kind=thread, or give a container more (--shm-size)"
            )
        cure = "workers=0 shows what it died of"
        if code == -signal.SIGKILL:
            cure = "the system kills so when memory runs out: take fewer workers, a lower prefetch_factor, or workers=0"
        return f"a loader process died (exit code {code}) at {self._name(index)}; {cure}" if code else ""

    def _name(self, index: int) -> str:
        item = self.samples.items[index]
        return str(getattr(item, "path", item)) if index >= 0 else "no item yet"


def start_worker(_: int) -> None:
    """Set a loader process up: one thread, for the workers together already fill the cores.

    Ctrl-C and SIGTERM often go to the whole process group. They are the parent's business, which makes its last step
    and a checkpoint with the workers' help and then ends them.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def end_workers() -> None:
    """Kill loader processes that a run left: they ignore SIGTERM, and Python, going out, would wait for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
