"""Where POSIX parts are missing, speedkit is imported, caches and trains; what cannot be there is told with its reason.

Other packages are imported on the real platform: each is made for its own.
"""

import pytest
from processes import python

COMMON = """
import ctypes, os, signal, sys
import filelock, numpy, psutil, pydantic, torch, torch._dynamo, torch.utils.data, tqdm.auto, yaml

def take_away(platform, modules, functions):
    sys.platform = platform
    os.sched_getaffinity = os.posix_fallocate = None
    del os.sched_getaffinity, os.posix_fallocate
    for name in modules:
        sys.modules[name] = None
    for module, names in functions.items():
        for name in names.split():
            delattr(module, name)
"""
WINDOWS = """
functions = {os: "sysconf fork pread killpg setpgid", signal: "pthread_sigmask SIGSTOP SIGCONT SIGKILL SIGCHLD"}
take_away("win32", ["resource", "fcntl", "termios", "pwd", "grp"], functions)
c_library = ctypes.CDLL

def without_a_name(name, *others):
    if name is None:
        raise TypeError("a library has a name")
    return c_library(name, *others)

ctypes.CDLL = without_a_name
memory = psutil.Process.memory_info  # which tells the peak on Windows
peak = type("Memory", (), {"rss": memory(psutil.Process()).rss, "peak_wset": 123456})
psutil.Process.memory_info = lambda process: peak
workers = 0
"""
MAC = """
import multiprocessing

multiprocessing.set_start_method("spawn")  # a Mac's own
take_away("darwin", [], {})
workers = 1
"""
TRAIN = """
import speedkit
from speedkit.machine import this_machine
from tiny import points

losses = []
for plan in ({"workers": workers, "persistent_workers": True}, {"cache": "disk"}, {"cache": "ram"}):
    plan = speedkit.Plan(log_every=1, **plan)
    history = speedkit.fit(points(), plan=plan, device="cpu", progress=False)
    assert history.steps == 12 and history.peak_memory_bytes, plan
    losses.append(history.loss)
assert losses[0] == losses[1] == losses[2]
assert ("WSL2" in this_machine("cpu").why_not("workers")) == (workers == 0)
assert this_machine("cpu").ram_bytes
"""


SPAWNING = pytest.param(MAC, marks=pytest.mark.slow, id="darwin")  # each worker imports torch


@pytest.mark.parametrize("system", [pytest.param(WINDOWS, id="win32"), SPAWNING])
def test_it_trains_without_what_other_systems_lack(system, tmp_path):
    ended = python("-c", COMMON + system + TRAIN, SPEEDKIT_CACHE_DIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
