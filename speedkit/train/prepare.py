"""Apply a plan to a training loop that its author keeps."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from speedkit.errors import PlanError, UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.plan import CUDA_GRAPHS, EffectivePlan, Plan, Rule, resolve
from speedkit.train import memory, precision
from speedkit.train.setup import transform_model

# The fields that a DataLoader has too, and its names for them.
LOADER_OPTIONS = {"workers": "num_workers"} | {
    name: name for name in ("persistent_workers", "prefetch_factor", "pin_memory", "drop_last")
}
COPIED_OPTIONS = ("collate_fn", "generator", "worker_init_fn", "timeout", "multiprocessing_context", "in_order")
IN_THE_MODEL = ("precision", "compile", "compile_scope", "channels_last", "attention", "checkpointing")
APPLIED = (*LOADER_OPTIONS, *IN_THE_MODEL, "fused_optimizer", "allocator")
DEFAULTS = dataclasses.asdict(Plan())
HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Prepared:
    """The prepared parts of a loop, to be unpacked: `model, optimizer, loader = prepared`.

    `effective` is what the plan has become, with a reason for each field that could not be applied.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader
    effective: EffectivePlan

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.loader))


def prepare(  # noqa: PLR0917  # the order in which every loop has them
    plan: Plan, model: nn.Module, optimizer: Optimizer, loader: DataLoader, *, strict: bool = False
) -> Prepared:
    """Apply `plan` to the parts of a loop that stays as it is: `model, optimizer, loader = prepare(plan, model, ...)`.

    Model and optimizer are changed in place; the new loader's batches are on the model's device. A field at its default
    leaves what the script has set. Fields that cannot be applied are printed; `strict` raises PlanError for them. Load
    a checkpoint before: it brings the optimizer's own switches. Raises UsageError for a loader that is no DataLoader.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(f"a {type(loader).__name__} makes its batches in its own way: give a plain DataLoader")
    device = next(model.parameters()).device
    effective = plan_for_loop(plan, optimizer, loader, hardware=this_machine(device))
    applied = effective.plan

    if applied.precision != DEFAULTS["precision"]:
        precision.set_matmul_precision(applied)
    memory.set_allocator(applied, device)
    if applied.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    effective = effective.with_fallbacks(*transform_model(model, applied))
    if applied.precision in precision.AUTOCAST:
        # A partial of a bound method is copied along with the model; a closure would go on calling the original.
        model.forward = functools.partial(_autocast_forward, model.forward, applied, device)
    if applied.fused_optimizer:
        fuse(optimizer)
    for fallback in effective.fallbacks:
        if strict and fallback.got != getattr(plan, fallback.field):
            raise PlanError(f"the plan cannot be honoured, and strict allows no fallback: {fallback}")
        print(f"prepare: {fallback}", flush=True)
    return Prepared(model, optimizer, DeviceLoader(loader, applied, device), effective)


def plan_for_loop(plan: Plan, optimizer: Optimizer, loader: DataLoader, *, hardware: Hardware) -> EffectivePlan:
    """Return what `plan` becomes for these parts on this machine; nothing is changed yet."""
    in_script: dict[str, Any] = {field: getattr(loader, option) for field, option in LOADER_OPTIONS.items()}
    in_script["fused_optimizer"] = is_fused(optimizer)
    unset = {field: value for field, value in in_script.items() if value and getattr(plan, field) == DEFAULTS[field]}
    effective = EffectivePlan(plan, dataclasses.replace(plan, **unset))
    for field, value, why in _limits(effective.plan, optimizer, loader, hardware=hardware):
        if getattr(effective.plan, field) != value:
            effective = effective.fall_back(field, value, why)
    resolved = resolve(effective.plan, hardware)
    return EffectivePlan(plan, resolved.plan, (*effective.fallbacks, *resolved.fallbacks))


def _limits(plan: Plan, optimizer: Optimizer, loader: DataLoader, *, hardware: Hardware) -> Iterator[Rule]:
    """Yield the fields that cannot be otherwise in somebody's own loop, or for its optimizer and its loader."""
    for field in DEFAULTS:
        if field not in APPLIED:
            yield field, DEFAULTS[field], "only your loop and your data set can do that"
    if resolve(Plan(precision=plan.precision), hardware).plan.precision == "fp16":
        yield "precision", DEFAULTS["precision"], "float16 needs a loss that your loop scales by torch.amp.GradScaler"
    if isinstance(loader.dataset, IterableDataset):  # each worker would give all of that
        yield "workers", loader.num_workers, "how many your data set can take you know: give your loader a number"
    if optimizer.state or not isinstance(optimizer, SGD | Adam | AdamW):
        why = "SGD, Adam and AdamW have a fused form, to be chosen before their first step"
        yield "fused_optimizer", is_fused(optimizer), why
    if plan.compile in CUDA_GRAPHS:
        why = "CUDA graphs write over gradients that your loop may add up, and over outputs that it may keep"
        yield "compile", "default", why
    if plan.compile_scope == "step":
        yield "compile_scope", "model", "your loop calls loss and update: compile these there"


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` updates all weights in one kernel."""
    return all(group.get("fused") for group in optimizer.param_groups)


def fuse(optimizer: Optimizer) -> None:
    """Switch `optimizer` to its fused kernel."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # for a GradScaler, as its constructor
    for options in (optimizer.defaults, *optimizer.param_groups):
        options |= {"fused": True, "foreach": False}
    for group in optimizer.param_groups:
        if group.get("momentum") and not group["dampening"]:
            # A first step that a GradScaler skips would leave it uninitialised. From zero it is the same step.
            for weight in group["params"]:
                optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))


def _autocast_forward(forward: Callable[..., Any], plan: Plan, device: torch.device, *inputs: Any, **named: Any) -> Any:
    """Call `forward` under the plan's autocast; return outputs of 16 bits as float32."""
    with precision.autocast(plan, device):
        outputs = forward(*inputs, **named)
    return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, outputs)


class DeviceLoader(DataLoader):
    """A DataLoader made again with the settings of a plan; its batches are on the device."""

    def __init__(self, loader: DataLoader, plan: Plan, device: torch.device):
        options: dict[str, Any] = {option: getattr(plan, field) for field, option in LOADER_OPTIONS.items()}
        if not plan.workers:
            options["prefetch_factor"] = None
        if loader.batch_size is None and loader.batch_sampler is not None:
            options["batch_sampler"] = loader.batch_sampler
        else:
            options["batch_size"] = loader.batch_size
            options["sampler"] = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
        super().__init__(loader.dataset, **options, **{name: getattr(loader, name) for name in COPIED_OPTIONS})
        self.device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield tree_map(self.to_device, batch)

    def to_device(self, leaf: Any) -> Any:
        """Return a part of a batch on the device if it can move, as tensors and a tokenizer's output can."""
        if isinstance(leaf, Tensor):
            return leaf.to(self.device, non_blocking=self.pin_memory)
        return leaf.to(self.device) if hasattr(leaf, "to") else leaf
