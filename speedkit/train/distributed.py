"""Several processes train one model: each learns from its share of every batch, and all make the same steps.

`launch` starts them under torchrun's elastic agent; `join` makes a process one of them. A BatchNorm learns from the
statistics of a rank's own share: torch.nn.SyncBatchNorm, which takes GPUs, or normalising each sample cures that.
"""

import atexit
import contextlib
import functools
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.data.loader import BatchStream
from speedkit.errors import Interrupted, PlanError, SpeedkitError
from speedkit.hardware import usable_cores
from speedkit.plan import EffectivePlan, Plan
from speedkit.recipe import Recipe
from speedkit.train.compile import repeated_blocks
from speedkit.train.nonfinite import get_random_state
from speedkit.workloads.workload import Batch

if TYPE_CHECKING:
    from speedkit.train.run import TrainingRun

TIMEOUT_S = 600.0  # that a rank waits for another, which may be writing a checkpoint; then all end
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RankLost(SpeedkitError):
    """Another rank has ended or does not answer, so that this one ends too."""

    exit_code = 75  # EX_TEMPFAIL: `launch` tells it from an error of the rank's own


def launch(arguments: list[str], ranks: int, *, max_restarts: int = 3) -> int:
    """Run `python -m *arguments` as `ranks` processes on this machine; return the exit code.

    SIGINT and SIGTERM go on to the ranks, which stop at their next log point; a second one kills them. A rank that is
    killed makes all start again with --resume, at most `max_restarts` times. On several machines torchrun starts them.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    received: list[int] = []  # signals
    for number in STOP_SIGNALS:
        signal.signal(number, functools.partial(_forward_signal, received))
    code, message = _run_ranks(arguments, ranks)
    if received:
        return 128 + received[0]
    restarts = code == RankLost.exit_code and max_restarts > 0
    if message:
        ending = "; all ranks start again from the last checkpoint" if restarts else ""
        print(f"{message}{ending}", file=sys.stderr, flush=True)
    if restarts:
        return launch([*arguments, "--resume"], ranks, max_restarts=max_restarts - 1)
    return 1 if code == RankLost.exit_code else code


def _forward_signal(received: list[int], number: int, _frame: Any) -> None:
    """Send a signal on to the ranks: their loader processes, which the agent would include, help with the last step."""
    received.append(number)
    ranks = psutil.Process().children()
    if not ranks:
        raise Interrupted("stopped before the ranks had started", number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number if len(received) == 1 else signal.SIGKILL)


def _run_ranks(arguments: list[str], ranks: int) -> tuple[int, str]:
    """Run `ranks` processes to their end; return the exit code, and what rank 0, which is heard, has not said."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # of the agent: what happened is said in a sentence
    with tempfile.TemporaryDirectory(prefix="speedkit-ranks-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="speedkit",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=0,  # the agent would repeat errors too, which come again
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
            signals_to_handle="SIGHUP,SIGQUIT",  # for others it gives the ranks 30 s
        )
        try:
            elastic_launch(config, sys.executable)("-m", *arguments)
            return 0, ""
        except ChildFailedError as error:
            failures = sorted(error.failures.items())
        finally:
            logging.disable(logging.NOTSET)

        # A rank's own error goes before a signal that killed one, and that before what both have led to in the others.
        for rank, failure in failures:
            if failure.exitcode > 0 and failure.exitcode != RankLost.exit_code:
                written = Path(logs).glob(f"*/*/{rank}/stderr.log")  # none of rank 0
                return failure.exitcode, "".join(path.read_text() for path in written).rstrip()
    for rank, failure in failures:
        if failure.exitcode not in (RankLost.exit_code, -signal.SIGTERM):  # which the agent sends to the others
            return RankLost.exit_code, f"speedkit: rank {rank} was killed by {failure.signal_name()}"
    return RankLost.exit_code, ""


def leave(code: int) -> NoReturn:
    """End this process with an exit code; a rank at once, for Python's way out makes gloo's threads abort at times."""
    if dist.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


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
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if not dist.is_initialized():
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S), device_id=gpu)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return Ranks(plan, device)


@contextlib.contextmanager
def report_lost_rank() -> Iterator[None]:
    """Raise RankLost for an error that only follows from the end of another rank, whose own message says why."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        how = f"did not answer within {TIMEOUT_S:.0f} s" if "imed out" in str(error) else "has ended"
        raise RankLost(f"another rank {how}, so this one ends too") from error


class Replica(nn.parallel.DistributedDataParallel):
    """DDP, with the attributes of the model that it holds: losses may ask for them."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the model. Raises SpeedkitError where parameters got no gradient, for which DDP would wait."""
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            # The message ends with their indices among those that learn.
            names = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
            unused = [names[int(index)] for index in str(error).partition("for rank")[2].split()[1:] if index.isdigit()]
            raise SpeedkitError(
                f"strategy=ddp waits for the gradient of every parameter, and {', '.join(unused)} got none: use them "
                "in the loss, freeze them with requires_grad_(False), or take strategy=fsdp"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def gradients_exchanged(ranks: "Ranks | None", replica: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Return the context of a forward pass whose backward pass exchanges gradients if it is the `last` of a step."""
    if ranks is not None and ranks.sharded:
        replica.set_requires_gradient_sync(last)  # type: ignore[operator]
    elif ranks is not None and not last:
        return replica.no_sync()  # type: ignore[operator]
    return contextlib.nullcontext()


class Ranks:
    """This process among those of one run. Every method is called by all of them alike."""

    def __init__(self, plan: Plan, device: torch.device):
        self.rank, self.count, self.device = dist.get_rank(), dist.get_world_size(), device
        self.sharded = plan.strategy == "fsdp"
        self.launcher = os.getppid()
        self.stop_requested = False  # agreed on at the last log point
        on_host = "gloo" in dist.get_backend_config()  # else the group is somebody else's, for GPUs alone
        self.group = dist.group.WORLD if on_host else dist.new_group(backend="gloo")

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
        """Return the mean over ranks of `losses [N]`, and the signal that any of them got, 0 for none."""
        if os.getppid() != self.launcher:  # it was killed, and cannot tell the ranks to end
            stop = signal.SIGTERM
        flags = losses.new_tensor([stop == number for number in STOP_SIGNALS])
        sums = torch.cat([losses, flags])
        dist.all_reduce(sums)
        stop = max(number * int(flag > 0) for number, flag in zip(STOP_SIGNALS, sums[-2:].tolist(), strict=True))
        self.stop_requested = bool(stop)
        return sums[:-2] / self.count, stop

    def all_reduce_score(self, total: Tensor, count: int) -> tuple[Tensor, int]:
        """Return the sum over ranks of the scores and of the items that have them."""
        sums = torch.stack([total, torch.full_like(total, count)])
        dist.all_reduce(sums)
        return sums[0], int(sums[1])

    def as_many_parts(self, parts: list[Batch], stream: BatchStream, position: int, *, micro_batch: int) -> list[Batch]:
        """Return the parts of batch `position` of `stream`, the first once more until all ranks have as many.

        FSDP gathers weights in every forward pass, so all ranks have to make it.
        """
        return parts + (most_parts(stream, position, micro_batch) - len(parts)) * parts[:1]

    def weighted(
        self, parts: list[Batch], counts: Sequence[int | Tensor], stream: BatchStream, *, micro_batch: int
    ) -> list[tuple[Batch, Tensor | float | None]]:
        """Return the parts of this rank's share of the batch that `stream` gave last, and what each counts for.

        Each weighs as many valid items as it holds of all that the ranks have together: both strategies take the mean
        over ranks of the gradients, which then is that of the whole batch.
        """
        learned = stream.sampler.counts(stream.position)  # else another rank has these samples too
        numbers = torch.zeros(most_parts(stream, stream.position, micro_batch), device=self.device)
        for index, count in enumerate(counts if learned else ()):
            numbers[index] = count
        total = numbers.sum()
        dist.all_reduce(total)
        parts = self.as_many_parts(parts, stream, stream.position, micro_batch=micro_batch)
        return list(zip(parts, numbers * self.count / total.clamp(min=1), strict=True))

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
        gathered_as = torch.bfloat16 if plan.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=gathered_as, reduce_dtype=torch.float32)
        for module in (*(block for _, block in repeated_blocks(model)), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model

    def full_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the `state` of the whole run: weights unsharded (on rank 0), losses and draws of all ranks."""

        def gathered(leaf: Any) -> Any:
            if not hasattr(leaf, "full_tensor"):
                return leaf
            whole = leaf.full_tensor()
            return None if self.rank else whole.cpu()  # one weight after another: together they may not fit the device

        random_states, pending = zip(*self.all_gather((state["rng"], state["pending"])), strict=True)
        state = tree.tree_map(gathered, state)
        state["ranks_rng"] = list(random_states)
        state["pending"] = [sum(losses) / self.count for losses in zip(*pending, strict=True)]
        state["history"]["quarantined"] = self.merge_dicts(state["history"]["quarantined"])
        return state

    def broadcast_state(self, state: Any) -> Any:
        """Return what rank 0 has, on the CPU, on all ranks: other machines need not see its file."""
        states = [tree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, state)]
        dist.broadcast_object_list(states, 0, self.group)
        return states[0]

    def local_state(self, run: "TrainingRun", state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the whole run's `state`; where there were fewer ranks, with new draws."""
        rng = dict(enumerate(state.get("ranks_rng", [state["rng"]])))
        state["rng"] = rng.get(self.rank, get_random_state(run.device))
        state["bad"] = [flag.to(run.device) for flag in state["bad"]]
        if not self.sharded:
            return state
        from torch.distributed.tensor import distribute_tensor

        def shard(weight: Any, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != weight.shape:  # a count of steps, or None
                return value
            value = value.to(weight.device)
            return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)

        parameters = dict(run.model.named_parameters())
        state["model"] |= {name: shard(weight, state["model"][name]) for name, weight in parameters.items()}
        for index, weight in enumerate(parameters.values()):
            values = state["optimizer"]["state"].get(index, {})
            values.update({key: shard(weight, value) for key, value in values.items()})
        state["recovery"]["snapshot"] = {}  # the present state is kept instead
        return state


def most_parts(stream: BatchStream, position: int, micro_batch: int) -> int:
    """Return in how many parts of `micro_batch` samples the largest share of batch `position` (1-based) is."""
    sampler = stream.sampler
    samples = min(sampler.batch_size, sampler.count - (position - 1) * sampler.batch_size)
    return math.ceil(math.ceil(samples / sampler.world_size) / micro_batch)
