"""Several processes train one model: each learns from its share of every batch, and all make the same steps.

`launch` starts them under torchrun; `join` makes a process one of them. A BatchNorm learns from the statistics of a
rank's own share: torch.nn.SyncBatchNorm, which takes GPUs, or normalising each sample cures that.
"""

import atexit
import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as tree

from speedkit.data.loader import BatchStream
from speedkit.errors import PlanError
from speedkit.plan import EffectivePlan, Plan
from speedkit.recipe import Recipe
from speedkit.train.compile import repeated_blocks
from speedkit.train.launcher import launch, tell
from speedkit.train.nonfinite import get_random_state
from speedkit.workloads.workload import Batch

if TYPE_CHECKING:
    from speedkit.train.run import TrainingRun

__all__ = ["Ranks", "gradients_exchanged", "is_restart", "join", "launch", "local_device", "tell"]

TIMEOUT_S = 600.0  # that a rank waits for another, which may be writing a checkpoint; then all end
REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precision -> what FSDP gathers weights in


def local_device(plan: Plan, device: str | torch.device) -> str | torch.device:
    """Return the device of this process: of several ranks on GPUs, each takes its own."""
    rank = os.environ.get("LOCAL_RANK") if plan.ranks > 1 and torch.cuda.is_available() else None
    if rank is not None and str(device) in ("auto", "cuda"):
        return f"cuda:{int(rank) % torch.cuda.device_count()}"
    return device


def is_restart() -> bool:
    """Whether torchrun has started this process in place of one that died: it goes on from the last checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def join(plan: Plan, recipe: Recipe, device: torch.device) -> "Ranks | None":
    """Return this process's part in a run of several ranks; None where there is one, whatever else goes on here.

    Raises PlanError in a process that is not one of `plan.ranks`, or where a batch has fewer samples than ranks.
    """
    if plan.ranks == 1:
        return None
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if there != plan.ranks:
        raise PlanError(
            f"ranks={plan.ranks} takes as many processes, and this is one of {there}: start them with `speedkit train "
            f"WORKLOAD --ranks {plan.ranks}`, or a script of yours with `torchrun --nproc-per-node {plan.ranks} SCRIPT`"
        )
    if recipe.batch_size < plan.ranks:
        raise PlanError(f"batch_size={recipe.batch_size} is that of all ranks, and fewer than ranks={plan.ranks}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, timeout=timedelta(seconds=TIMEOUT_S), device_id=device if device.type == "cuda" else None
        )
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return Ranks(plan, device)


class Replica(nn.parallel.DistributedDataParallel):
    """DDP, with the attributes of the model that it holds: losses may ask for them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def gradients_exchanged(ranks: "Ranks | None", replica: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Return the context of a forward pass whose backward pass exchanges gradients if it is the `last` of a step."""
    if ranks is None:
        return contextlib.nullcontext()
    if ranks.sharded:
        replica.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else replica.no_sync()  # type: ignore[operator]


class Ranks:
    """This process among those of one run. Every method is called by all of them alike."""

    def __init__(self, plan: Plan, device: torch.device):
        self.rank, self.count, self.device = dist.get_rank(), dist.get_world_size(), device
        self.sharded = plan.strategy == "fsdp"
        self.stop_requested = False  # agreed on at the last log point
        hosts = "gloo" in dist.get_backend_config()  # else the group is somebody else's, for GPUs alone
        self.group = dist.group.WORLD if hosts else dist.new_group(backend="gloo")

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, small and of plain Python."""
        values = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def merge_dicts(self, own: dict[str, str]) -> dict[str, str]:
        """Return the entries of all ranks together."""
        return {key: value for entries in self.all_gather(own) for key, value in entries.items()}

    def first_not_none(self, value: Any) -> Any:
        """Return the value of the lowest rank that has one."""
        return next((other for other in self.all_gather(value) if other is not None), None)

    def smallest_micro_batch(self, effective: EffectivePlan) -> EffectivePlan:
        """Return the plan of the rank with the smallest micro-batch."""
        return min(self.all_gather(effective), key=lambda one: one.plan.micro_batch or 0)

    def all_reduce_log(self, losses: Tensor, stop: int) -> tuple[Tensor, int]:
        """Return the sums over ranks of `losses [N]`, and the signal that any of them got, 0 for none."""
        dist.all_reduce(losses)
        stop = max(self.all_gather(stop))
        self.stop_requested = bool(stop)
        return losses, stop

    def all_reduce_score(self, total: Tensor, count: int) -> tuple[Tensor, int]:
        """Return the sum over ranks of the scores and of the items that have them."""
        sums = torch.stack([total, torch.tensor(float(count), device=self.device)])
        dist.all_reduce(sums)
        return sums[0], int(sums[1])

    def weighted(
        self, parts: list[Batch], counts: Sequence[int | Tensor], batches: BatchStream
    ) -> list[tuple[Batch, Tensor | float | None]]:
        """Return the parts of this rank's share with their weights; as many parts on every rank.

        Each weighs as many valid items as it holds of all that the ranks have together: both strategies take the mean
        over ranks of the gradients, and their sum is the exact mean.
        """
        if not batches.counts(batches.epoch, batches.position):  # samples that another rank has too
            counts = [0 * count for count in counts]
        numbers = torch.stack([torch.as_tensor(count, device=self.device).float() for count in counts])
        total = numbers.sum()
        dist.all_reduce(total)
        weights = list(numbers * self.count / total.clamp(min=1))
        largest = batches.order.largest(batches.position)
        for _ in range(-(-largest // max(1, len(parts[0][0]))) - len(parts)):
            parts, weights = [*parts, parts[0]], [*weights, torch.zeros((), device=self.device)]
        return list(zip(parts, weights, strict=True))

    def apply_data_parallel(self, model: nn.Module, recipe: Recipe, plan: Plan) -> nn.Module:
        """Return what exchanges the gradients of `model`: DDP around it, or itself with FSDP2 applied to its blocks.

        With both strategies each rank has its own random draws from here on.
        Zhao et al. 2023; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
        """
        if self.rank:  # weights were drawn alike; what dropout draws is for other samples
            torch.manual_seed(recipe.seed * 1_000_003 + (self.rank << 40))
        if not self.sharded:
            return Replica(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh(self.device.type, (self.count,))
        policy = MixedPrecisionPolicy(param_dtype=REDUCED.get(plan.precision), reduce_dtype=torch.float32)
        for module in (*(block for _, block in repeated_blocks(model)), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model

    def full_state(self, run: "TrainingRun", state: dict[str, Any]) -> dict[str, Any]:
        """Return the `state` of the whole run: weights unsharded, losses and draws of all ranks."""
        state = tree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)
        others = self.all_gather((state["rng"], state["pending"]))
        state["ranks_rng"] = [rng for rng, _ in others]
        state["pending"] = [sum(losses) for losses in zip(*(pending for _, pending in others), strict=True)]
        state["history"]["quarantined"] = self.merge_dicts(state["history"]["quarantined"])
        return state

    def broadcast_state(self, state: Any) -> Any:
        """Return what rank 0 has on all ranks: other machines need not see its file."""
        outline = [tree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, state)]
        dist.broadcast_object_list(outline, 0, self.group)
        leaves, spec = tree.tree_flatten(outline[0])
        own = tree.tree_leaves(state) if self.rank == 0 else leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = own[index].cpu() if self.rank == 0 else torch.empty_like(leaf, device="cpu")
                dist.broadcast(leaves[index], 0, self.group)
        return tree.tree_unflatten(leaves, spec)

    def local_state(self, run: "TrainingRun", state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the whole run's `state`; where there were fewer ranks, with new draws."""

        def like(weight: Any, value: Any) -> Any:
            if not isinstance(weight, DTensor) or not isinstance(value, Tensor) or value.shape != weight.shape:
                return value
            value = value.to(weight.device)
            return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)

        named = dict(run.model.named_parameters())
        model = {name: like(named.get(name), value) for name, value in state["model"].items()}
        optimizer_state = {
            index: {key: like(run.parameters[index], value) for key, value in values.items()}
            for index, values in state["optimizer"]["state"].items()
        }
        local = {"model": model, "optimizer": state["optimizer"] | {"state": optimizer_state}}
        if self.sharded:
            local["recovery"] = state["recovery"] | {"snapshot": {}}  # the present state is kept instead
        if self.rank:
            local["pending"] = [0.0] * len(state["pending"])
        rng = dict(enumerate(state.get("ranks_rng", [state["rng"]])))
        return state | local | {"rng": rng.get(self.rank, get_random_state(run.device))}
