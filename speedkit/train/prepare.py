"""Apply a plan to a training loop that its author keeps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader

from speedkit.data import own_loader
from speedkit.data.batches import HangDetector, epoch_of
from speedkit.data.own_loader import DEFAULTS
from speedkit.errors import UsageError
from speedkit.fallbacks import EffectivePlan, resolve
from speedkit.machine import Hardware, this_machine
from speedkit.plan import CUDA_GRAPHS, Plan, as_plan
from speedkit.train import compile, memory
from speedkit.train.optimizer import fuse
from speedkit.train.precision import Precision
from speedkit.train.setup import transform_model

APPLIED = (
    *own_loader.LOADER_OPTIONS,
    "precision",
    "compile",
    "compile_scope",
    "channels_last",
    "attention",
    "checkpointing",
    "fused_optimizer",
    "allocator",
    "cudnn_benchmark",
    "threads",
    "cache",
)
NOT_APPLIED = [field for field in DEFAULTS if field not in APPLIED]


def prepare(  # noqa: PLR0917  # the order in which every loop has them
    plan: Plan | str,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader,
    *,
    seconds: float = math.inf,
    strict: bool = False,
    verbose: bool = False,
) -> tuple[nn.Module, Optimizer, Any]:
    """Apply `plan` to the parts of a loop that stays as it is: `model, optimizer, loader = prepare(plan, model, ...)`.

    Model and optimizer are changed in place; the new loader's batches are on the model's device. A loader of a class
    with batches of its own, as Accelerate's, stays as it is. A field at its default leaves what the script has set.
    Given `seconds`, what the training takes now, compiling is left out where it cannot pay. `loader.effective` is what
    the plan has become; fields that cannot be applied are printed, many in one line unless `verbose`, and `strict`
    raises PlanError for them. Load a checkpoint before: it brings the optimizer's own switches. Raises UsageError for a
    loader that is no DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{own_loader.own_way(loader)}: give a DataLoader")
    device = next(model.parameters()).device
    hardware = this_machine(device)
    effective = plan_for_loop(as_plan(plan, hardware), optimizer, loader, hardware=hardware, seconds=seconds)
    applied = effective.plan

    precision = Precision(applied, device)
    cudnn_benchmark = torch.backends.cudnn.benchmark or applied.cudnn_benchmark
    if applied.precision != DEFAULTS["precision"]:
        precision.set_switches()
    torch.backends.cudnn.benchmark = cudnn_benchmark
    if applied.threads is not None:
        torch.set_num_threads(applied.threads)
    memory.set_allocator(applied, device)
    if applied.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    effective.add(*transform_model(model, applied, precision=precision))
    if precision.dtype is not None:
        # A partial of a bound method is copied along with the model; a closure would go on calling the original.
        model.forward = functools.partial(_autocast_forward, model.forward, device.type, precision.dtype)
    if applied.fused_optimizer:
        fuse(optimizer)
    if strict:
        effective.check_strict()
    if applied.compile != "off" and seconds == math.inf:
        takes = f"compiling takes about {compile.COMPILING_S[device.type]:.0f} s"
        print(f"prepare: {takes}: seconds=N, what the training takes now, leaves it out where that is too short")
    for note in effective.notes(verbose):
        print(f"prepare: {note}", flush=True)
    prepared: Any = DeviceLoader(loader, effective, device) if own_loader.is_plain(loader) else loader
    prepared.effective = effective
    return model, optimizer, prepared


def plan_for_loop(
    plan: Plan, optimizer: Optimizer, loader: DataLoader, *, hardware: Hardware, seconds: float
) -> EffectivePlan:
    """Return what `plan` becomes in somebody's own loop, for its parts and on this machine; nothing is changed yet."""
    settings = own_loader.own_settings(loader, plan)
    settings["fused_optimizer"] = plan.fused_optimizer or is_fused(optimizer)
    effective = EffectivePlan(plan, dataclasses.replace(plan, **settings))
    for field, value, why in rules_of_loop(effective.plan, optimizer, loader, hardware=hardware, seconds=seconds):
        effective.fall_back(field, value, why)
    if effective.plan.cache != "off":
        why = "samples are kept in memory, as your data set makes them"
        effective.fall_back("cache", "ram", why, lost=False)
    effective.add(*resolve(effective.plan, hardware).fallbacks)
    return effective


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether all weights are updated in one kernel already."""
    return all(group.get("fused") for group in optimizer.param_groups)


def rules_of_loop(
    plan: Plan, optimizer: Optimizer, loader: DataLoader, *, hardware: Hardware, seconds: float
) -> Iterator[tuple[str, Any, str]]:
    """Yield each field that a loop, its loader or its optimizer rules out, what it is instead, and why."""
    if plan.cache != "off" and (unkept := own_loader.why_not_kept(loader)):
        yield "cache", "off", unkept
    for field in NOT_APPLIED:
        yield field, DEFAULTS[field], "only your loop can do that"
    if resolve(Plan(precision=plan.precision), hardware).plan.precision == "fp16":
        yield "precision", "default", "float16 needs a loss that your loop scales by torch.amp.GradScaler"
    yield from own_loader.rules_of_loader(loader)
    if not isinstance(optimizer, SGD | Adam | AdamW) or optimizer.state:
        yield "fused_optimizer", is_fused(optimizer), "SGD, Adam and AdamW have a fused form, before their first step"
    if plan.compile in CUDA_GRAPHS:
        yield "compile", "default", "CUDA graphs write over gradients and outputs that your loop may keep"
    takes_s = compile.COMPILING_S[hardware.device.type]
    saved_s = compile.MOST_SAVED * seconds
    if saved_s < takes_s:
        yield "compile", "off", f"compiling takes about {takes_s:.0f} s, and would save {saved_s:.0f} s at most"


def _autocast_forward(
    forward: Callable[..., Any], device: str, dtype: torch.dtype, /, *inputs: Any, **named: Any
) -> Any:
    """Call `forward` under the plan's autocast; return outputs of 16 bits as float32."""
    with torch.autocast(device, dtype):
        outputs = forward(*inputs, **named)
    return tree_map_only(Tensor, _widened, outputs)


def _widened(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


class DeviceLoader(DataLoader):
    """A DataLoader made again with the settings of a plan; its batches are on the device."""

    def __init__(self, loader: DataLoader, effective: EffectivePlan, device: torch.device):
        self.effective = effective
        self.device = device
        dataset = loader.dataset
        if effective.plan.cache == "ram":
            dataset = own_loader.MemoryDataset(dataset)
        super().__init__(dataset, **own_loader.loader_options(loader, effective.plan))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in epoch_of(self, HangDetector(), DataLoader.__iter__):
            yield tree_map(self.to_device, batch)

    def to_device(self, leaf: Any) -> Any:
        """Return what a batch holds on the device: whatever can move does, a tokenizer's output too."""
        if hasattr(leaf, "to"):
            return leaf.to(device=self.device, non_blocking=self.pin_memory)
        return leaf
