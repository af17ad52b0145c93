"""Python in a process of its own, as a user starts it."""

import os
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
