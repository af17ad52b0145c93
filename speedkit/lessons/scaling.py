"""What a step takes on many GPUs, on paper: from a measured step and a network's bandwidth and latency."""

import dataclasses
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.optimize import nnls

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's bucket_cap_mb


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one GPU that shares nothing, in seconds, and the bytes of the gradients that it would share."""

    forward_s: float
    backward_s: float
    other_s: float
    gradient_bytes: int


@dataclasses.dataclass(frozen=True)
class Network:
    """A link between GPUs of a machine, and the link of each machine to others: bytes per second, seconds a message."""

    bytes_per_s: float
    latency_s: float
    per_machine: int = sys.maxsize
    across_bytes_per_s: float = math.inf
    across_latency_s: float = 0.0


def half_reduce_s(ranks: int, size_bytes: float, *, bytes_per_s: float, latency_s: float) -> float:
    """Return the seconds of half an all-reduce: around a ring, or down a tree where that is quicker.

    A ring sends each byte once, in N - 1 messages one after the other (Patarasuk and Yuan 2009). Double binary trees,
    NCCL's choice for small messages among many ranks, need log2 N of them (Sanders et al. 2009).
    """
    if ranks == 1:
        return 0.0
    ring = (ranks - 1) / ranks * size_bytes / bytes_per_s + (ranks - 1) * latency_s
    tree = size_bytes / bytes_per_s + math.ceil(math.log2(ranks)) * latency_s
    return min(ring, tree)


def transfer_s(ranks: int, size_bytes: float, network: Network) -> float:
    """Return the same within each machine, then across machines, whose one link takes the shares of all its GPUs."""
    within, machines = min(ranks, network.per_machine), math.ceil(ranks / network.per_machine)
    inside = half_reduce_s(within, size_bytes, bytes_per_s=network.bytes_per_s, latency_s=network.latency_s)
    across: dict[str, float] = {"bytes_per_s": network.across_bytes_per_s, "latency_s": network.across_latency_s}
    return inside + half_reduce_s(machines, size_bytes, **across)


def exposed_s(piece_s: float, pieces: int, compute_s: float) -> float:
    """Return what sticks out beyond computing, of which each part makes one piece ready to send (Li et al. 2020)."""
    return max(piece_s, pieces * piece_s - compute_s * (pieces - 1) / pieces)


def efficiency(step: Step, network: Network, ranks: int, *, strong: bool = False) -> float:
    """Return the speed-up of DDP on `ranks` GPUs divided by their number; with `strong` they share one batch."""
    parts, pieces = ranks if strong else 1, max(1, math.ceil(step.gradient_bytes / BUCKET_BYTES))
    forward_s, backward_s = step.forward_s / parts, step.backward_s / parts
    piece_s = transfer_s(ranks, step.gradient_bytes / pieces, network)
    waiting_s = exposed_s(2 * piece_s, pieces, backward_s) if ranks > 1 else 0.0
    alone_s = step.forward_s + step.backward_s + step.other_s
    return alone_s / parts / (forward_s + backward_s + step.other_s + waiting_s)


def fit_network(ranks: int, samples: Sequence[Mapping[str, Any]]) -> Network:
    """Return the network that fits timed all-reduces around a ring best in relative terms."""
    terms = [[2 * (ranks - 1) / ranks * row["bytes"] / 1e6, 2 * (ranks - 1)] for row in samples]
    medians_s = [statistics.median(row["seconds"]) for row in samples]
    scaled = [[term / seconds for term in both] for both, seconds in zip(terms, medians_s, strict=True)]
    per_megabyte, latency_s = nnls(scaled, [1.0] * len(samples))[0]
    return Network(1e6 / per_megabyte if per_megabyte else math.inf, float(latency_s))


def step_of(job: Mapping[str, Any]) -> Step:
    """Return the step of one rank alone, from medians of the raw seconds of a job of `ranks`."""
    turn_s = statistics.median(job["measurements"][0]["seconds_a"])
    alone_s = turn_s / job["ranks"] / job["steps_per_turn"]
    forward_s, both_s = (statistics.median(job["passes"][name]) for name in ("forward_s", "both_s"))
    return Step(forward_s, max(0.0, both_s - forward_s), max(0.0, alone_s - both_s), job["gradient_bytes"])


def torchrun(ranks: int, *command: str, folder: Path, one_thread: bool) -> None:
    """Run a Python file, or `-m` and a module, in `ranks` processes, as `torchrun` does. Raises RuntimeError."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | ({"OMP_NUM_THREADS": "1"} if one_thread else {})
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = subprocess.run(
        [sys.executable, *starter, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
