"""The start of several ranks on this machine, under torchrun's elastic agent, and the one message of their failure."""

import atexit
import contextlib
import ctypes
import json
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import torch

from speedkit.errors import Interrupted, UsageError
from speedkit.system import usable_cores

AGAIN = "SPEEDKIT_STARTED_AGAIN"  # set for ranks that replace dead ones: they go on from the checkpoint
MEETING_S = 75.0  # to get an answer where machines meet; for one that nobody gives PyTorch waits 60
LAUNCHED = "SPEEDKIT_LAUNCHED"  # set for ranks of `launch`, which prints their message


def started_again() -> bool:
    """Whether this process replaces one that died, so that it is to go on from the last checkpoint."""
    return AGAIN in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch(arguments: list[str], ranks: int, *, nnodes: int = 1, endpoint: str = "", max_restarts: int = 0) -> int:
    """Run `python -m *arguments` as `ranks` processes, of them `ranks / nnodes` on this machine; return the exit code.

    With several machines the same is called on each, with `endpoint` HOST:PORT of one of them. Of each machine one rank
    is heard, and of a failure one message. When a rank dies (of a signal, not of an error that it tells) all are
    started again, at most `max_restarts` times, with `started_again()` true. SIGINT and SIGTERM go on to the ranks; a
    second one ends them at once. The code is 128 + the signal's number then. Raises UsageError where none can start.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    _check(ranks, nnodes, endpoint)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_id, address = ("speedkit", None) if nnodes > 1 else (uuid.uuid4().hex, "localhost")
    parameters = RendezvousParameters("c10d", endpoint or "localhost:0", run_id, nnodes, nnodes, address)
    logging.disable(logging.CRITICAL)  # of torch.distributed.elastic: what happened is told in a sentence
    try:
        spec = WorkerSpec(
            "ranks",
            ranks // nnodes,
            _meeting(parameters),
            max_restarts=max_restarts,
            local_addr=address,
            entrypoint=sys.executable,
            args=("-m", "speedkit.train.launcher", *arguments),
        )
        try:
            return _run(spec)
        finally:
            spec.rdzv_handler.shutdown()
    except Interrupted as interrupted:
        return interrupted.exit_code
    except RendezvousError as error:
        raise UsageError(
            f"the ranks could not meet{' at ' * bool(endpoint)}{endpoint} ({error or type(error).__name__}): give all "
            "machines the same free --rdzv-endpoint and --nnodes; where another has ended the run, it says why"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
        os.environ.pop(AGAIN, None)


def _meeting(parameters: Any) -> Any:
    """Return where the machines meet. Raises UsageError where something else listens and never answers.

    PyTorch waits for that for ever, and deaf to signals: so another thread does, which does not hinder the process when
    it ends.
    """
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    meeting: Future[Any] = Future()

    def connect() -> None:
        try:
            meeting.set_result(get_rendezvous_handler(parameters))
        except BaseException as error:
            meeting.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return meeting.result(MEETING_S)
    except TimeoutError as error:
        why = f"what listens at {parameters.endpoint} is no run of speedkit"
        raise UsageError(f"{why}: give a free --rdzv-endpoint") from error


def _check(ranks: int, nnodes: int, endpoint: str) -> None:
    """Raise UsageError for ranks that machines cannot share, and for a place where they cannot meet."""
    if ranks % nnodes:
        raise UsageError(f"ranks={ranks} is that of all machines, and {nnodes} cannot share it evenly")
    host, _, port = endpoint.rpartition(":")
    if (endpoint or nnodes > 1) and not (host and port.isdigit()):
        raise UsageError(f"--rdzv-endpoint {endpoint!r} must read HOST:PORT, HOST being one of the machines")
    if endpoint and nnodes == 1:
        with socket.socket() as probe:
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                raise UsageError(f"--rdzv-endpoint {endpoint}: {error.strerror}; one machine needs none") from error


def _run(spec: Any) -> int:
    """Run the processes of `spec` to their end; return the exit code."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        """One that starts ranks again only where that can help."""

        def _monitor_workers(self, group: Any) -> Any:
            result = super()._monitor_workers(group)
            if result.failures:
                message, code = _told(result.failures)
                if code or stopped:
                    self._remaining_restarts = 0  # it would fail again
                elif self._remaining_restarts:
                    _say(f"{message}; all ranks start again from the last checkpoint")
            return result

        def _restart_workers(self, group: Any) -> None:
            os.environ[AGAIN] = "1"
            # A new store too: in the old one the new ranks would find the addresses of the dead.
            spec.rdzv_handler._bootstrap_store_info = None
            super()._restart_workers(group)

    stopped: list[int] = []
    with tempfile.TemporaryDirectory(prefix="speedkit-ranks-") as folder:
        agent = Agent(spec, DefaultLogsSpecs(folder, local_ranks_filter={0}))  # type: ignore[no-untyped-call]
        with _signals_to(agent, stopped):
            failures = agent.run().failures
        if not failures:
            return 0
        message, code = _told(failures)
        _say(message)
        return 128 + stopped[0] if stopped else code or 1


@contextlib.contextmanager
def _signals_to(agent: Any, stopped: list[int]) -> Iterator[None]:
    """Send SIGINT and SIGTERM on to the ranks, and note them in `stopped`."""

    def forward(number: int, _frame: Any) -> None:
        stopped.append(number)
        pids = [worker.id for worker in agent.get_worker_group().workers if worker.id is not None]
        if len(stopped) > 1 or not pids:
            raise Interrupted("stopped", number)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    main_thread = threading.current_thread() is threading.main_thread()
    names = (signal.SIGINT, signal.SIGTERM) if main_thread else ()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # else the agent kills at once
    before = {name: signal.signal(name, forward) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _told(failures: Any) -> tuple[str, int]:
    """Return what to say of failed ranks, and the exit code of one that failed by itself; 0 where one only died."""

    def order(rank: int) -> tuple[bool, bool]:
        failure = failures[rank]
        told = "code" in failure.error_file_data or failure.exitcode > 0
        return not told or failure.error_file_data.get("lost", False), failure.exitcode == -signal.SIGTERM

    rank = min(failures, key=order)  # what the others follow from, and were ended for
    failure = failures[rank]
    if "code" in (data := failure.error_file_data):  # that file is ours
        return data["message"], 0 if data["lost"] else data["code"]
    if failure.exitcode > 0:
        return f"rank {rank} ended with exit code {failure.exitcode}", failure.exitcode
    return f"rank {rank} was killed by {failure.signal_name()}", 0


def _say(text: str) -> None:
    print(f"speedkit: {text}", file=sys.stderr, flush=True)


def tell(message: str, code: int, lost: bool) -> bool:
    """Hand a failure's message and exit code to the launcher, which prints one of all; return whether there is one.

    `lost` marks a failure that only follows from another rank's.
    """
    if LAUNCHED not in os.environ:
        return False
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as stream:
        json.dump({"message": message, "code": code, "lost": lost, "timestamp": int(time.time())}, stream)
    return True


def main() -> None:
    """Run the module that `launch` was given as one rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    os.environ[LAUNCHED] = "1"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    sys.argv, code = sys.argv[1:], 0
    # From layouts that a compiler or channels_last chose, gradients are copied into DDP's buckets: no news to a reader.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        kind = "" if hasattr(error, "exit_code") else f"{type(error).__name__}: "
        tell(f"{kind}{error}", getattr(error, "exit_code", 1), hasattr(error, "lost"))
        if "--debug" in sys.argv:
            raise
        code = getattr(error, "exit_code", 1)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this rank: what Python takes down on its way out now and then makes PyTorch's threads abort."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
