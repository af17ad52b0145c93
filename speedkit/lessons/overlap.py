"""What lesson 40 starts under torchrun: steps of equal layers whose gradients are sent one by one, or in buckets.

Rank 0 writes the seconds of each step to overlap.json.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARMUP, TURNS = 2, 16


def equal_layers(device: torch.device) -> torch.nn.Module:
    """Return eight layers of 4 MiB of weights each."""
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)


def step_s(model: torch.nn.Module, inputs: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass, and of the exchange: DDP's, or one message a gradient."""
    dist.barrier()
    begin = time.perf_counter()
    model.zero_grad()
    model(inputs).square().mean().backward()
    if not isinstance(model, DistributedDataParallel):
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
    if inputs.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - begin


def main(kind: str) -> None:
    """Measure three ways in turns."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    sides = {
        "by hand": equal_layers(device),
        "one bucket": DistributedDataParallel(equal_layers(device), bucket_cap_mb=1000),
        "buckets of 8 MiB": DistributedDataParallel(equal_layers(device), bucket_cap_mb=8),
    }
    inputs = torch.randn(64, 1024, device=device)
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARMUP + TURNS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(step_s(sides[name], inputs))
    if dist.get_rank() == 0:
        Path("overlap.json").write_text(json.dumps({name: times[WARMUP:] for name, times in seconds.items()}))
    dist.barrier()
    os._exit(0)  # on the way out gloo's threads may abort it


if __name__ == "__main__":
    main(sys.argv[1])
