"""Start several ranks on this machine, as torchrun does."""

import logging
import os
import signal
import sys

from speedkit.machine import usable_cores


def launch(arguments: list[str], ranks: int, *, max_restarts: int = 3) -> int:
    """Run `python -m *arguments` as `ranks` processes on this machine under torchrun's agent; return the exit code.

    SIGINT and SIGTERM go on to the ranks, which have 30 s to reach their next log point and stop there. A rank that is
    killed makes all start again with --resume, at most `max_restarts` times. On several machines torchrun starts them.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    logging.disable(logging.CRITICAL)  # of the agent: the ranks say what happened
    # The agent's own restarts would repeat errors too, which come again.
    options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", *arguments]))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]  # gloo aborts what a failure left
        if not killed or not max_restarts:
            return max(1, *codes.values())
        print(f"rank {killed[0]} was killed; all start again from the last checkpoint", file=sys.stderr, flush=True)
        return launch([*arguments, "--resume"], ranks, max_restarts=max_restarts - 1)
    return 0
