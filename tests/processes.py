"""Python in a process of its own, as a user starts it, or to be killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def python(*words, folder=None, paths=(ROOT, TESTS), **variables):
    """Run Python in `folder` until it ends, with modules of `paths` at hand; return its exit code and what it said."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


def killed(work, *arguments, after_s):
    """Call `work` in a process that is killed `after_s` seconds after it began; return whether it was not done yet."""
    forks = multiprocessing.get_context("forkserver")  # one that has imported what is slow to import
    forks.set_forkserver_preload(["tiny", "speedkit.measure.tune"])
    begun = forks.Event()
    process = forks.Process(target=begin, args=(begun, work, *arguments))
    process.start()
    assert begun.wait(120)
    process.join(after_s)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def begin(begun, work, *arguments):
    begun.set()
    work(*arguments)
