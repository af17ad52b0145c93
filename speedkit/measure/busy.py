"""What else runs on this machine."""

import contextlib
import os
import time

import psutil

MIN_SHARE = 0.2  # of a core: less does not disturb


def busy_processes(seconds: float = 0.5) -> str:
    """Return ": name (pid) uses 98 % of a core, ..." of other processes, the busiest first; "" where none is seen."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    others = [process for process in psutil.process_iter(["name"]) if process.pid not in own]
    shares = {}
    for wait_s in (seconds, 0.0):  # psutil counts from one call to the next
        for process in others:
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to somebody else
                shares[process] = process.cpu_percent() / 100
        time.sleep(wait_s)
    busiest = sorted(
        (process for process in shares if shares[process] > MIN_SHARE), key=lambda process: -shares[process]
    )
    words = [f"{process.info['name']} ({process.pid}) uses {shares[process]:.0%} of a core" for process in busiest[:3]]
    return f": {', '.join(words)}" if words else ""
