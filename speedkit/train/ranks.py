"""Several processes train one model: each learns from its share of every batch, and all make the same steps.

A BatchNorm sees a rank's own share only: take torch.nn.SyncBatchNorm, which needs GPUs, or normalise each sample.
"""

import atexit
import contextlib
import functools
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from speedkit.errors import PlanError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.compile import repeated_blocks
from speedkit.train.optimizer import restore_optimizer
from speedkit.train.precision import Precision


def local_device(device: str | torch.device) -> str | torch.device:
    """Return the device of this process: of those that torchrun starts on GPUs, each takes its own."""
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available() and str(device) in ("auto", "cuda"):
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return device


def join(count: int, device: torch.device) -> int:
    """Return which of `count` ranks this process is. Raises PlanError where there are fewer processes, or more."""
    if int(os.environ.get("WORLD_SIZE", 1)) != count:
        how = f"`speedkit train WORKLOAD --ranks {count}` or `torchrun --nproc-per-node {count} SCRIPT`"
        raise PlanError(f"ranks={count} takes as many processes: start them by {how}")
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if not dist.is_initialized():
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, device_id=gpu)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return dist.get_rank()


class Ranks:
    """This process among those of one run, perhaps the only one. Every method is called by all of them alike."""

    def __init__(self, plan: Plan, recipe: Recipe, device: torch.device):
        self.count = plan.ranks
        self.several = self.count > 1
        self.rank = join(self.count, device) if self.several else 0
        self.first = self.rank == 0  # which speaks and writes for all
        self.device = device
        self.sharded = self.several and plan.strategy == "fsdp"
        self.share = math.ceil(recipe.batch_size / self.count)  # samples of a batch that a rank learns from, at most
        # By torchrun, after one had died.
        self.restarted = self.several and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, small and of plain Python."""
        values = [value] * self.count
        if self.several:
            dist.all_gather_object(values, value)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks."""
        if self.several:
            dist.all_reduce(values)
        return values

    def spread_nonfinite(self, loss: Tensor) -> Tensor:
        """Return `loss`, []; where it is not finite, neither are its gradients: all ranks see it after the exchange."""
        if not self.several:
            return loss
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)

    def apply_data_parallel(self, model: nn.Module, recipe: Recipe, precision: Precision) -> nn.Module:
        """Return what exchanges the gradients of `model`: DDP around it, or itself, with FSDP2 applied to its blocks.

        Zhao et al. 2023; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
        """
        if self.rank:  # weights were drawn alike; what dropout draws is for other samples
            torch.manual_seed(recipe.seed * 1_000_003 + (self.rank << 40))
        if not self.several:
            return model
        if not self.sharded:
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh(self.device.type, (self.count,))
        policy = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
        for module in (*repeated_blocks(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model

    def gradient_exchange(self, replica: Any, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass whose gradients are exchanged where it is the `last` of a step."""
        if self.sharded:
            replica.set_requires_gradient_sync(last)
        elif self.several and not last:
            return replica.no_sync()
        return contextlib.nullcontext()

    def full_state(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of `model` and `optimizer`: of sharded weights the whole, on rank 0."""
        if not self.sharded:
            return dict(model.state_dict()), optimizer.state_dict()
        from torch.distributed.checkpoint import state_dict as dcp  # takes a second to import

        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dcp.get_state_dict(model, optimizer, options=options)

    def restore(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Give `model` and `optimizer` this rank's part of the whole run's `state`."""
        if not self.sharded:
            model.load_state_dict(state["model"])
            restore_optimizer(optimizer, state["optimizer"])
            return
        from torch.distributed.checkpoint import state_dict as dcp

        whole = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_model_state_dict(model, state["model"], options=whole)
        # A run that was not sharded has numbers for the parameters, in the same order.
        saved = state["optimizer"]
        [group] = saved["param_groups"]
        names = dict(zip(group["params"], (name for name, _ in model.named_parameters()), strict=True))
        group["params"] = list(names.values())
        saved["state"] = {names[key]: values for key, values in saved["state"].items()}
        whole = dcp.StateDictOptions(full_state_dict=True, strict=False)  # a weight without gradients has no such state
        load = functools.partial(dcp.set_optimizer_state_dict, model, optimizer, options=whole)
        restore_optimizer(optimizer, saved, load=load)
