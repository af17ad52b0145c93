"""Batches made ahead by worker processes or threads, in order; and what happened to a worker, in a sentence."""

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from multiprocessing import connection
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch
from torch.utils.data import DataLoader
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
            samples.reading = multiprocessing.RawArray("q", self.workers)
            extra |= {"num_workers": self.workers, "prefetch_factor": plan.prefetch_factor,
                      "persistent_workers": plan.persistent_workers, "worker_init_fn": start_worker}  # fmt: skip
        self.loader = DataLoader(samples, batch_sampler=order, collate_fn=collate, pin_memory=plan.pin_memory, **extra)

    def __iter__(self) -> Generator[Any, None, None]:
        if not self.workers:
            yield from self.loader
        elif self.plan.worker_kind == "thread":
            yield from self._from_threads()
        else:
            yield from self._from_processes()

    def signal(self, number: int) -> None:
        """Send a signal to every worker process; threads obey SIGSTOP and SIGCONT too, at their next item."""
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
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)

    def _from_processes(self) -> Generator[Any, None, None]:
        passing: Any = iter(self.loader)
        over, self.processes = threading.Event(), passing._workers
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
        except (RuntimeError, OSError, EOFError) as error:  # what PyTorch and the queue's connection raise
            explained = self._explained(str(error))
            self._kill()  # the others may wait for what a dead one held
            if not explained:
                raise
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
        self._kill()

    def _explained(self, error: str) -> str:
        """Return what happened to a worker process and what to do, "" when `error` is about something else."""
        connection.wait([process.sentinel for process in self.processes], 1)  # one may be about to die
        at = {process.pid: index for process, index in zip(self.processes, self.samples.reading[:], strict=True)}
        dead = next((process for process in self.processes if process.exitcode), None)
        if self.hung:
            return self._hangs(max(at.values()))
        if "shared memory" in error or (dead and dead.exitcode == -signal.SIGBUS):
            return (f"/dev/shm ({shutil.disk_usage('/dev/shm').total / 1e6:.0f} MB) is full: workers * prefetch_factor "
                    f"= {self.workers * self.plan.prefetch_factor} batches must fit; lower one of them, use "
                    "worker_kind=thread, or give a container more (--shm-size)")  # fmt: skip
        if dead is None:
            return ""
        cure = "workers=0 shows what it died of"
        if dead.exitcode == -signal.SIGKILL:
            cure = "the system kills so when memory runs out: take fewer workers, a lower prefetch_factor, or workers=0"
        return f"a loader process died (exit code {dead.exitcode}) at {self._name(at[dead.pid])}; {cure}"

    def _hangs(self, index: int) -> str:
        return f"no batch for {HUNG_S:g} s: a worker hangs at {self._name(index)}; leave it out, or look with workers=0"

    def _name(self, index: int) -> str:
        item = self.samples.items[index]
        return str(getattr(item, "path", item)) if index >= 0 else "no item yet"

    def _from_threads(self) -> Generator[Any, None, None]:
        pending: deque[tuple[AsyncResult, list[int]]] = deque()
        with ThreadPool(self.workers, torch.set_num_threads, (1,)) as pool:  # its threads never keep Python from ending
            for indices in self.order:
                at = [-1]
                pending.append((pool.apply_async(self._make, (indices, at)), at))
                if len(pending) > self.workers * self.plan.prefetch_factor:
                    yield self._finished(*pending.popleft())
            while pending:
                yield self._finished(*pending.popleft())

    def _make(self, indices: list[int], at: list[int]) -> Any:
        samples = []
        for at[0] in indices:
            self.running.wait()
            samples.append(self.samples[at[0]])
        batch, *rest = self.collate(samples)
        return batch and tuple(tensor.pin_memory() if self.plan.pin_memory else tensor for tensor in batch), *rest

    def _finished(self, result: AsyncResult, at: list[int]) -> Any:
        before = None
        while not result.ready():
            if at[0] == before:
                raise SpeedkitError(self._hangs(at[0]))
            before = at[0]
            result.wait(HUNG_S)
        return result.get()


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
