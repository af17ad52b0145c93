"""Several processes train one model: each learns from its share of every batch, and all make the same steps.

`launch` starts them under torchrun's elastic agent; `join` makes a process one of them. A BatchNorm learns from the
statistics of a rank's own share: torch.nn.SyncBatchNorm, which takes GPUs, or normalising each sample cures that.
"""

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.errors import PlanError, SpeedkitError
from speedkit.plan import EffectivePlan, Fallback, Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.blocks import repeated_blocks
from speedkit.train.launcher import launch, started_again, tell
from speedkit.train.oom import release
from speedkit.workloads.workload import Batch

__all__ = ["RankLost", "Ranks", "join", "launch", "own_device", "started_again", "tell", "told_apart"]

TIMEOUT_S = 600.0  # that a rank waits for another, which may be writing a checkpoint; then all end
REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precision -> what FSDP gathers weights in


class RankLost(SpeedkitError):
    """Another rank has ended, or does not answer: its own message says why."""

    lost = True


def own_device(plan: Plan | None, device: str | torch.device) -> str | torch.device:
    """Return the device of this process: of several ranks on GPUs, each takes its own."""
    rank = os.environ.get("LOCAL_RANK") if plan is not None and plan.ranks > 1 and torch.cuda.is_available() else None
    if rank is not None and str(device) in ("auto", "cuda"):
        return f"cuda:{int(rank) % torch.cuda.device_count()}"
    return device


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


class Ranks:
    """This process among those of one run. Every method but `parts` and `own` is called by all of them alike."""

    def __init__(self, plan: Plan, device: torch.device):
        self.rank, self.count, self.device = dist.get_rank(), dist.get_world_size(), device
        self.fsdp = plan.strategy == "fsdp"
        self.ready = self.fsdp  # DDP is built after the first step was rehearsed
        self.ddp: Any = None
        hosts = "gloo" in dist.get_backend_config()  # else the group is somebody else's, for GPUs alone
        self.group = dist.group.WORLD if hosts else dist.new_group(backend="gloo")
        self.asked: Any = None  # (a reduction under way, the signal it brings)

    def gathered(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, small and of plain Python."""
        if self.asked is not None:
            self.asked[0].wait()  # a process that ends, or leaves the group, with a reduction under way is aborted
        values = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values

    def united(self, bad: dict[str, str]) -> dict[str, str]:
        """Return the bad files of all ranks, and why."""
        return {path: why for one in self.gathered(bad) for path, why in one.items()}

    def first(self, value: Any) -> Any:
        """Return the value of the lowest rank that has any, else None."""
        return next(filter(None, self.gathered(value)), None)

    def scored(self, total: Tensor, count: int) -> tuple[Tensor, int]:
        """Return the sum over ranks of the scores and of the items that have them."""
        sums = self.summed(torch.stack([total, torch.tensor(float(count), device=self.device)]))
        return sums[0], int(sums[1])

    def agreed(self, effective: EffectivePlan) -> EffectivePlan:
        """Return what is taken by all: that of the rank with the smallest micro-batch."""
        return min(self.gathered(effective), key=lambda one: one.plan.micro_batch or 0)

    def summed(self, losses: Tensor) -> Tensor:
        """Return the sum over ranks of `losses [N]`."""
        dist.all_reduce(losses)
        return losses

    def shard(self, model: nn.Module, recipe: Recipe, plan: Plan) -> str:
        """With FSDP2, leave each rank its part of every weight; return "" or why no fused optimizer updates them.

        A block's weights are gathered while it computes. With both strategies each rank has its own draws from here on.
        Zhao et al. 2023; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
        """
        if self.rank:  # weights were drawn alike; what dropout draws is for other samples
            torch.manual_seed(recipe.seed * 1_000_003 + (self.rank << 40))
        if not self.fsdp:
            return ""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh(self.device.type, (self.count,))
        policy = MixedPrecisionPolicy(param_dtype=REDUCED.get(plan.precision), reduce_dtype=torch.float32)
        for module in (*(block for _, block in repeated_blocks(model)), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if not (plan.fused_optimizer and recipe.optimizer == "sgd"):
            return ""
        if plan.precision == "fp16":
            raise PlanError("precision=fp16 takes a fused optimizer, and fsdp has none for sgd: use bf16, or ddp")
        return "PyTorch has no fused sgd for sharded weights"

    def rehearse(self, run: Any, batch: Batch, cure: Callable[..., None]) -> None:
        """Go through the largest part of a first step alone, before any gradient is exchanged; then build DDP.

        What does not fit in memory or compile shows here, where all ranks can agree on a smaller micro-batch. Later a
        rank could not repeat a step, for the others would wait for another sum than it sends.
        """
        while not self.ready:
            random_state, failed, unused = checkpoint.get_random_state(run.device), False, False
            part = tuple(tensor[: run.micro_batch] for tensor in batch)
            try:
                forward = run.forward if len(part[0]) == run.micro_batch else run.model
                run.loss(forward, part, run.recipe)[0].backward()
                unused = any(parameter.grad is None for parameter in run.parameters)
            except Exception as error:
                cure(run, error, len(part[0]), False)
                failed = True
            run.optimizer.zero_grad(set_to_none=True)
            if failed:
                release(run.device)
            checkpoint.set_random_state(random_state, run.device)
            run.guard.put_back()
            found = self.gathered((failed, unused, run.micro_batch))
            if (smallest := min(size for *_, size in found)) < run.micro_batch:
                rank = [size for *_, size in found].index(smallest)
                fallback = Fallback("micro_batch", run.micro_batch, smallest, f"out of memory on rank {rank}")
                run.effective = run.history.effective = run.effective.with_fallbacks(fallback)
                run.micro_batch = smallest
                run.progress.say(f"  {fallback}")
            if not any(failed for failed, *_ in found):
                unused = any(unused for _, unused, _ in found)
                self.ddp = Replica(run.model, gradient_as_bucket_view=True, find_unused_parameters=unused)
                self.ready = True

    def accumulate(self, run: Any, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
        """Add up the gradients of the whole batch, of which `batch` is this rank's share; as `loop.accumulate`.

        Each part weighs as many valid items as it holds of all that the ranks have together, so that their sum is the
        exact mean. The loss returned is this rank's part of it. Gradients are exchanged during the last backward pass.
        """
        parts = self.parts(run, batch, run.batches, run.batches.epoch, run.batches.position)
        count, weights = run.workload.count or (lambda part: len(part[0])), torch.zeros(len(parts), device=self.device)
        for index, (part, counts) in enumerate(parts):
            weights[index] = count(part) * counts
        total = weights.sum()
        dist.all_reduce(total)
        weights /= total.clamp_(min=1)
        losses, outputs, part = [], torch.empty(0), batch
        for index, (part, _) in enumerate(parts):
            forward = run.forward if len(part[0]) == run.micro_batch else run.model
            with self._exchanging(forward, index == len(parts) - 1) as model:
                loss, outputs = run.loss(model, part, run.recipe)
                loss = loss * weights[index]
                # Both strategies take the mean over ranks of what is to be added up.
                (loss * self.count * (1 if run.scale is None else run.scale.scale)).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0]), outputs, part

    @contextlib.contextmanager
    def _exchanging(self, forward: Any, last: bool) -> Iterator[Any]:
        """Yield what to call for `forward`, so that the `last` backward pass exchanges the gradients of all."""
        if self.fsdp:
            forward.set_requires_gradient_sync(last)
            yield forward
            return
        self.ddp.__dict__["module"] = forward  # compiled or not: both fill the same buckets
        with contextlib.nullcontext() if last else self.ddp.no_sync():
            yield self.ddp

    def parts(self, run: Any, batch: Batch, batches: Any, epoch: int, position: int) -> list[tuple[Batch, bool]]:
        """Return the micro-batches of this rank's `batch`, and whether each counts: as many on every rank.

        What does not count is there because the others wait: samples that another rank has, or that replace bad files.
        """
        counts, size, parts = batches.counts(epoch, position), run.micro_batch, list[tuple[Batch, bool]]()
        for start in range(0, batches.largest(position), size):
            part = tuple(tensor[start : start + size] for tensor in batch)
            parts.append((part, counts) if len(part[0]) else (tuple(tensor[:1] for tensor in batch), False))
        return parts

    def stopping(self, run: Any) -> int:
        """Return the signal that all ranks stop by after this step, 0 to go on; what one gets, all hear a step later.

        The host waits for no device: the question of the step before has long been answered.
        """
        if self.asked is not None:
            work, heard = self.asked
            work.wait()
            if heard := int(heard):
                run.stop = heard
                return heard
        flag = torch.tensor(run.stop)
        self.asked = dist.all_reduce(flag, dist.ReduceOp.MAX, self.group, async_op=True), flag
        return 0

    def same_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, such as BatchNorm's statistics."""
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the `state` of the whole run: weights unsharded, what each rank has of losses and draws together."""
        from torch.distributed.tensor import DTensor

        state = tree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)
        others = self.gathered((state["rng"], state["pending"]))
        state["ranks_rng"] = [rng for rng, _ in others]
        state["pending"] = [sum(losses) for losses in zip(*(pending for _, pending in others), strict=True)]
        state["history"]["quarantined"] = self.united(state["history"]["quarantined"])
        return state

    def spread(self, found: tuple[dict[str, Any], Any] | None) -> tuple[dict[str, Any], Any] | None:
        """Return what rank 0 has `found`, a state and its path, on all ranks: other machines need not see the file."""
        held = [tree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, found)]
        dist.broadcast_object_list(held, 0, self.group)
        leaves, spec = tree.tree_flatten(held[0])
        own = tree.tree_leaves(found) if self.rank == 0 else leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = own[index].cpu() if self.rank == 0 else torch.empty_like(leaf, device="cpu")
                dist.broadcast(leaves[index], 0, self.group)
        return tree.tree_unflatten(leaves, spec)

    def own(self, run: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the whole run's `state`; where there were fewer ranks, with new draws."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        def like(weight: Any, value: Any) -> Any:
            if not isinstance(weight, DTensor) or not isinstance(value, Tensor) or value.shape != weight.shape:
                return value
            value = value.to(weight.device)
            return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)

        named = dict(run.model.named_parameters())
        model = {name: like(named.get(name), value) for name, value in state["model"].items()}
        held = {
            index: {key: like(run.parameters[index], value) for key, value in values.items()}
            for index, values in state["optimizer"]["state"].items()
        }
        mine = {"model": model, "optimizer": state["optimizer"] | {"state": held}}
        if self.fsdp:
            mine["recovery"] = state["recovery"] | {"kept": [], "newer": False}  # the present state is kept instead
        if self.rank:
            mine["pending"] = [0.0] * len(state["pending"])
        drawn = dict(enumerate(state.get("ranks_rng", [state["rng"]])))
        return state | mine | {"rng": drawn.get(self.rank, checkpoint.get_random_state(run.device))}


@contextlib.contextmanager
def told_apart(plan: Plan | None) -> Iterator[None]:
    """Raise RankLost for what goes wrong within because another rank has: its error, not this, is the one to read."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if plan is None or plan.ranks == 1 or not (isinstance(error, dist.DistError) or "gloo" in text):
            raise
        late = f"did not answer within {TIMEOUT_S / 60:.0f} minutes" if "imed out" in text else "has ended"
        raise RankLost(f"another rank {late}, so this one ends too: {text}") from error
