"""How training scales with GPUs: predicted for any number from a few measured times, and measured with those at hand.

`torchrun --nproc-per-node 2 -m speedkit.measure.scaling image --out scaling.json` measures.
"""

import contextlib
import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from speedkit.clock import timed
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import write_json
from speedkit.measure.compare import Side
from speedkit.measure.turns import in_turns
from speedkit.plan import Plan
from speedkit.workloads import load_workload

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's bucket_cap_mb
TRANSFERS = {"ddp": 2, "fsdp": 3}  # times that a step moves the bytes of all gradients around a ring
SIZES = tuple(4096 * 8**power for power in range(5))  # bytes of the all-reduces that are timed, 4 KiB to 16 MiB


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one GPU that shares nothing, and the bytes of the gradients that it would share."""

    forward_s: float
    backward_s: float
    other_s: float  # loading, augmentation, update: nothing is sent meanwhile
    gradient_bytes: float


@dataclasses.dataclass(frozen=True)
class Network:
    """What GPUs talk over: the bandwidth of a GPU's link, that of a machine's link to others, seconds per message."""

    bytes_per_s: float
    latency_s: float
    per_machine: int = sys.maxsize  # GPUs in a machine
    across_bytes_per_s: float = math.inf
    across_latency_s: float = 0.0


def ring_s(ranks: int, size_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Return the seconds of a reduce-scatter, or an all-gather, around a ring; an all-reduce is one of each.

    In N - 1 rounds each rank hands on an N-th of the bytes; an all-reduce takes 2 (N - 1) / N * bytes / bandwidth +
    2 (N - 1) * latency (Patarasuk and Yuan 2009, Journal of Parallel and Distributed Computing 69; Baidu, Horovod).
    """
    return (ranks - 1) / ranks * size_bytes / bytes_per_s + (ranks - 1) * latency_s


def transfer_s(ranks: int, size_bytes: float, network: Network) -> float:
    """Return the seconds of a reduce-scatter, or an all-gather: a ring within each machine, then rings across them.

    Each GPU of a machine has a share of the bytes then, and all shares travel across at once, over the machine's one
    link, whose bandwidth carries all the bytes. A machine that is not full counts as one that is.
    """
    within, machines = min(ranks, network.per_machine), math.ceil(ranks / network.per_machine)
    across_s = ring_s(machines, size_bytes, network.across_bytes_per_s, network.across_latency_s)
    return ring_s(within, size_bytes, network.bytes_per_s, network.latency_s) + across_s


def exposed_s(piece_s: float, pieces: int, compute_s: float) -> float:
    """Return what sticks out beyond `compute_s` of `pieces` transfers, of which one is ready after each part of it.

    max(t, K t - compute (K - 1) / K): the last piece has nothing left to hide behind; and where transfers take longer
    than computing, they begin after its first K-th and then follow each other (Li et al. 2020, "PyTorch Distributed").
    """
    return max(piece_s, pieces * piece_s - compute_s * (pieces - 1) / pieces)


def predict(
    step: Step,
    network: Network,
    ranks: int,
    *,
    strategy: str = "ddp",
    scaling: str = "weak",
    overlap: bool = True,
    piece_bytes: float = BUCKET_BYTES,
) -> dict[str, float]:
    """Return {ranks, compute_s, communication_s, exposed_s, step_s, speedup, efficiency} of a step on `ranks` GPUs.

    "weak" scaling: each GPU has the batch of `step`; efficiency is t(1) / t(N). "strong": they share it, passes take an
    N-th and the rest as long as before: t(1) / (N t(N)). DDP all-reduces gradients beside the backward pass, in
    pieces; FSDP gathers weights beside the forward pass, then weights once more and gradients beside the backward pass
    (Rajbhandari et al. 2020, "ZeRO": 3 transfers for 2). Without `overlap` the GPU waits for all of it.
    """
    parts, pieces = ranks if scaling == "strong" else 1, max(1, math.ceil(step.gradient_bytes / piece_bytes))
    forward_s, backward_s = step.forward_s / parts, step.backward_s / parts
    piece_s = transfer_s(ranks, step.gradient_bytes / pieces, network)
    sticks_out_s = total_s = TRANSFERS[strategy] * pieces * piece_s
    if overlap:
        sticks_out_s = exposed_s(2 * piece_s, pieces, backward_s)
        sticks_out_s += exposed_s(piece_s, pieces, forward_s) if strategy == "fsdp" else 0.0
    compute_s, alone_s = (f + b + step.other_s for f, b in ((forward_s, backward_s), (step.forward_s, step.backward_s)))
    efficiency = alone_s / parts / (compute_s + sticks_out_s)
    return {
        "ranks": ranks,
        "compute_s": compute_s,
        "communication_s": total_s,
        "exposed_s": sticks_out_s,
        "step_s": compute_s + sticks_out_s,
        "speedup": ranks * efficiency,
        "efficiency": efficiency,
    }


def fit_ring(ranks: int, samples: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return bytes per second and seconds per message, neither below 0, that fit timed all-reduces {bytes, seconds}."""
    from scipy.optimize import nnls

    medians_s = np.array([statistics.median(row["seconds"]) for row in samples])
    megabytes = np.array([2 * (ranks - 1) / ranks * row["bytes"] / 1e6 for row in samples])
    terms = np.stack([megabytes, np.full_like(megabytes, 2 * (ranks - 1))], axis=1) / medians_s[:, None]  # relative
    per_megabyte, latency_s = nnls(terms, np.ones(len(samples)))[0]
    return (1e6 / per_megabyte if per_megabyte else math.inf), float(latency_s)


def step_from(found: Mapping[str, Any]) -> Step:
    """Return the step of one rank alone out of what `measure` found: medians of its raw seconds."""
    alone_s = statistics.median(found["measurements"][0]["seconds_a"]) / found["ranks"] / found["steps_per_window"]
    forward_s, both_s = (statistics.median(found["passes"][name]) for name in ("forward_s", "both_s"))
    return Step(forward_s, max(0.0, both_s - forward_s), max(0.0, alone_s - both_s), found["gradient_bytes"])


def measure(
    workload: Any,
    batch_size: int,
    plan: Plan,
    *,
    pairs: int = 10,
    window_s: float = 1.0,
    device: str = "auto",
    loss_steps: int = 4,
    repeats: int = 9,
) -> dict[str, Any]:
    """Return raw seconds that ranks, each of which calls this, find together: windows in turns, passes, all-reduces.

    Rank 0 makes N times as many steps of `batch_size` samples as all make of N times that, while the others wait in a
    barrier: time A / time B is the speed-up. Another side has all make steps of their own: what the machine allows.
    """
    if len(workload.train) < plan.ranks * batch_size:
        raise UsageError(f"all ranks take {plan.ranks * batch_size} items a step of {len(workload.train)}: take fewer")
    ranks, recipe = plan.ranks, dataclasses.replace(workload.recipe, batch_size=batch_size)
    joint, one_plan = dataclasses.replace(recipe, batch_size=ranks * batch_size), dataclasses.replace(plan, ranks=1)
    with (
        contextlib.closing(Side(workload, joint, plan, device, None)) as together,
        contextlib.closing(Side(workload, recipe, one_plan, device, None)) as alone,
    ):
        losses, target = list[torch.Tensor](), together.run.device
        for _ in range(loss_steps):
            alone.window(1)  # to warm up
            together.window(1)
            losses.append(together.run.last_loss.clone())  # a rank's part of it
            dist.all_reduce(losses[-1])
        steps = [math.ceil(window_s / max(min(side.window(1) for _ in range(3)) for side in (together, alone)))]
        dist.broadcast_object_list(steps)  # all ranks make as many as rank 0 finds right
        count, first, run, batch = steps[0], dist.get_rank() == 0, alone.run, alone.run.batches.next()

        def window(side: Side, count: int) -> None:
            side.window(count)
            dist.barrier()

        def forward() -> torch.Tensor:
            return run.loss(run.forward, batch, run.recipe)[0]

        passes = {"forward_s": forward, "both_s": lambda: forward().backward()}
        one, sides = partial(window, alone, first * ranks * count), {"all": together, "all, nothing shared": alone}
        reduced = [(size, partial(dist.all_reduce, torch.zeros(size // 4, device=target))) for size in SIZES]
        found = {
            "workload": workload.name,
            "ranks": ranks,
            "strategy": plan.strategy,
            "device": str(target),
            "backend": dist.get_backend(),
            "threads": torch.get_num_threads(),
            "batch_size": batch_size,
            "gradient_bytes": sum(weight.nbytes for weight in alone.run.parameters),
            "losses": [float(loss) for loss in losses],
            "steps_per_window": count,
            "measurements": [
                in_turns(
                    f"{name} against one", {"one": one, name: partial(window, side, count)}, pairs, target, dist.barrier
                )
                for name, side in sides.items()
            ],
            "passes": {name: timed(function, target, repeats) for name, function in passes.items() if first},
            "all_reduce": [{"bytes": size, "seconds": timed(call, target, repeats, 3)} for size, call in reduced],
        }
        together.run.ranks.gathered(None)  # type: ignore[union-attr]  # none leaves while another still waits for it
    return found


@click.command()
@click.argument("workload")
@click.option("--batch-size", default=128, help="samples per rank and step")
@click.option("--size")
@click.option("--clips", type=int)
@click.option("--strategy", type=click.Choice(list(TRANSFERS)), default="ddp")
@click.option("--device", default="auto")
@click.option("--pairs", default=10)
@click.option("--window-s", default=1.0, help="seconds of a window of all ranks, at least")
@click.option("--out", required=True, help="file to write")
def main(workload: str, batch_size: int, strategy: str, device: str, out: str, **more: Any) -> None:
    """Measure how WORKLOAD scales with the ranks that torchrun has started; write what was found as JSON."""
    try:
        if (ranks := int(os.environ.get("WORLD_SIZE", 1))) < 2:
            raise UsageError("start it under torchrun: torchrun --nproc-per-node 2 -m speedkit.measure.scaling ...")
        plan = Plan(ranks=ranks, strategy=strategy, fused_optimizer=True, cache="device", drop_last=True)
        made = load_workload(workload, **{name: more.pop(name) for name in ("size", "clips")})
        found = measure(made, batch_size, plan, device=device, **more)
    except SpeedkitError as error:
        raise click.ClickException(str(error)) from error
    if dist.get_rank() == 0:
        write_json(out, found)


if __name__ == "__main__":
    main()
