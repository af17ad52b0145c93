"""Apply a plan to a training loop that its author keeps: here to model and optimizer, in own_loader to the loader."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from speedkit.errors import PlanError, UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.plan import EffectivePlan, Fallback, Plan, resolve
from speedkit.train import attention, compilation, memory, own_loader, precision
from speedkit.train.progress import wanted

# What only the loop can do, and how.
IN_THE_LOOP = {
    "micro_batch": "split the batch in your loop, weigh each part's loss by its share, call step() after the last part",
    "decoder": "your data set reads the files: change it there",
    "features_on": "let the data set give what features are made of, and compute them where your loop has the batch",
    "shards": "your data set opens the files: let it read them from a tar file",
    "worker_kind": "a DataLoader has processes only: give a loader of your own that has threads",
    "bucket": "give your loader a batch_sampler that puts samples of similar length together",
    "log_every": "call loss.item() in your loop after every so many steps, and keep loss.detach() of the others",
    "validate_every": "evaluate in your loop after every so many steps",
    "on_nonfinite": "leave the step out in your loop where torch.isfinite(loss) is false",
    "ranks": "start your script with torchrun, and wrap the model in DistributedDataParallel",
}


class Prepared(NamedTuple):
    """What the loop goes on with: the same model and optimizer, and a loader whose batches are on the device."""

    model: nn.Module
    optimizer: Optimizer
    loader: own_loader.OnDevice

    @property
    def effective(self) -> EffectivePlan:
        """What the plan has become by now, and why where that is not what was asked."""
        return self.loader.effective


def prepare(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    *,
    device: str | torch.device | None = None,
    strict: bool = False,
) -> Prepared:
    """Apply `plan` to the parts of a loop that stays as it is: `model, optimizer, loader = prepare(plan, model, ...)`.

    A field at its default leaves what is there: a loader keeps its own workers. Model and optimizer are changed in
    place, so that schedulers and the names in state_dict() stay valid; copies of the model are plain. Load a checkpoint
    before: an optimizer's brings its own switches. What cannot be applied is printed, and in `.effective`, with what to
    do in the loop instead; under `strict` it raises PlanError, and neither is changed. Raises UsageError for parts that
    do not belong together.
    """
    hardware = this_machine(_checked(model, optimizer, loader, device))
    effective = _settled(plan, model, optimizer, loader, hardware)
    # Shapes may differ from batch to batch: the first is compiled for as it is, later ones once more for all.
    forward = compilation.apply(model, effective.plan, SimpleNamespace(length=len))
    effective = compilation.honoured(effective, forward)
    if why := memory.set_allocator(effective.plan, hardware.device):
        effective = effective.with_fallbacks(Fallback("allocator", plan.allocator, "default", why))
    _refuse(effective, strict)
    if why := memory.checkpoint_blocks(model, effective.plan):
        _refuse(
            effective := effective.with_fallbacks(Fallback("checkpointing", plan.checkpointing, "off", why)), strict
        )
    got = effective.plan
    if got.precision != own_loader.DEFAULT["precision"]:
        precision.apply(got)
    effective = effective.with_fallbacks(
        *(Fallback("precision", plan.precision, got.precision, why) for why in precision.convert(model, got))
    )
    if got.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _fit(optimizer, got)
    if got.precision in precision.AUTOCAST or got.channels_last or got.attention != "auto" or forward is not model:
        vars(model)["_compiled_call_impl"] = Call(model, optimizer, forward, got, hardware.device)
    prepared = Prepared(model, optimizer, own_loader.OnDevice(loader, effective, forward, hardware.device))
    for found in prepared.effective.fallbacks if wanted("auto") else ():
        print(f"prepare: {found}", flush=True)
    return prepared


def _checked(model: Any, optimizer: Any, loader: Any, device: str | torch.device | None) -> torch.device:
    """Return the device to train on. Raises UsageError for parts that do not belong together."""
    for kind, given in ((nn.Module, model), (Optimizer, optimizer), (Iterable, loader)):
        if not isinstance(given, kind):
            raise UsageError(f"a {type(given).__name__} is no {kind.__name__}: give plan, model, optimizer, loader")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter to train: set requires_grad where it is to learn")
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if not any(id(weight) in held for weight in trained):
        raise UsageError("the optimizer holds no parameter of the model: make it from model.parameters()")
    if isinstance(vars(model).get("_compiled_call_impl"), Call):
        raise UsageError("the model is prepared already: make a new one, with an optimizer of its own")
    place, places = trained[0].device, sorted({str(weight.device) for weight in model.parameters()})
    asked = torch.device(place if device in (None, "auto") else device)
    if len(places) > 1 or asked.type != place.type or asked.index not in (None, place.index):
        raise UsageError(f"the model is on {', '.join(places)}, and {asked} was asked: move it before its optimizer")
    return place


def _settled(plan: Plan, model: nn.Module, optimizer: Any, loader: Any, hardware: Hardware) -> EffectivePlan:
    """Return what `plan` becomes, as far as that is known before anything is changed."""
    fallbacks, got = list[Fallback](), dataclasses.asdict(plan)
    there = {"fused_optimizer": all(group.get("fused") for group in optimizer.param_groups)} | own_loader.asked(loader)
    got |= {field: value for field, value in there.items() if got[field] == own_loader.DEFAULT[field]}

    def note(found: Iterable[tuple[str, Any, str]]) -> None:
        for field, value, why in found:
            fallbacks.append(Fallback(field, got[field], value, why))
            got[field] = value

    note(own_loader.different(got, IN_THE_LOOP))
    note(own_loader.fallbacks(got, loader))
    resolved = resolve(Plan(**got), hardware)
    fallbacks += resolved.fallbacks
    got.update(dataclasses.asdict(resolved.plan))
    note(_for_learner(got, model, optimizer, hardware))
    return EffectivePlan(plan, Plan(**got), tuple(fallbacks))


def _for_learner(got: dict[str, Any], model: nn.Module, optimizer: Any, hardware: Hardware) -> Iterator[tuple]:
    """Yield, as `plan.resolve` does inside, what this model and optimizer cannot do: field, new value, reason."""
    groups = optimizer.param_groups
    fusable = isinstance(optimizer, SGD | Adam | AdamW) and not any(group["differentiable"] for group in groups)
    if got["fused_optimizer"] and not fusable:
        yield "fused_optimizer", False, f"{type(optimizer).__name__} has no fused form: SGD, Adam and AdamW have"
    # Recurrent layers keep their weights in a list of their own, past what stands for them while they are scaled.
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if got["precision"] == "fp16" and (recurrent or not fusable or any(group.get("dampening") for group in groups)):
        why = (
            "scaling without a change of the loop takes a fused optimizer, no dampening and no recurrent layer: "
            "take torch.amp.GradScaler in your loop"
        )
        yield "precision", "fp32" if hardware.why_not("bf16") else "bf16", why
    dimensions = {weight.ndim for weight in model.parameters()}
    if got["channels_last"] and (4 not in dimensions or 5 in dimensions):
        yield "channels_last", False, "NHWC is for 2-d convolutions, of which the model has none, or 3-d ones beside"
    if got["compile"] != "off" and (vars(model).get("_compiled_call_impl") or hasattr(model, "_orig_mod")):
        yield "compile", "off", "the model is compiled already, as your script has it"
    if got["precision"] == "fp16" and got["compile"] in compilation.CUDA_GRAPHS and hardware.supports("cuda_graphs"):
        yield "compile", "default", "CUDA graphs would copy all weights in each step, for the sake of loss scaling"
    if got["compile"] != "off" and got["compile_scope"] == "step":
        yield "compile_scope", "model", "your loop calls loss and update: compile these there"


def _refuse(effective: EffectivePlan, strict: bool) -> None:
    for found in effective.fallbacks if strict else ():
        if found.asked != "auto" and found.got != getattr(effective.asked, found.field):
            raise PlanError(f"the plan cannot be honoured, and strict allows no fallback: {found}")


def _fit(optimizer: Any, plan: Plan) -> None:
    """Make the optimizer fused where `plan` says so, and its state, wherever it was made, fit it and the weights."""
    for options in (optimizer.defaults, *optimizer.param_groups) if plan.fused_optimizer else ():
        options |= {"fused": True, "foreach": False}
        optimizer._step_supports_amp_scaling = True  # as its constructor would
    for options, weight in ((group, weight) for group in optimizer.param_groups for weight in group["params"]):
        if options.get("momentum") and plan.precision == "fp16":  # as in optimizer.build
            optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        state = optimizer.state.get(weight, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:  # a fused kernel runs through both at once
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            elif isinstance(value, Tensor) and plan.fused_optimizer:
                state[name] = value.to(weight.device)  # the count of steps


class Call:
    """What `model(...)` does under a plan.

    It stands where nn.Module.compile() puts its own: hooks, names and the module itself stay, copies do not have it.
    float16's loss scale is put on gradients where they enter the model from its outputs, and taken off where they leave
    it to weights and inputs: what the loop sees, and clips, is unscaled, whatever else its loss is made of.
    """

    def __init__(self, model: nn.Module, optimizer: Any, forward: Any, plan: Plan, device: torch.device):
        self.model, self.forward, self.plan = model, forward, plan
        self.theirs, self.full = vars(model).get("_compiled_call_impl"), 0  # their model.compile(); the largest batch
        self.call: Any = self._called
        for context in (attention.attention_kernels(plan), precision.autocast(plan, device)):
            self.call = self.call if context is None else context(self.call)
        self.scale = precision.LossScale(device) if plan.precision == "fp16" else None
        if self.scale is not None:
            optimizer.found_inf = self.scale.found_inf  # read by fused optimizers
            optimizer.register_step_pre_hook(self._look)
            optimizer.register_step_post_hook(lambda *_: self.scale.update())

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model returns, in float32 where it was computed in 16 bits."""
        inputs, named = tree_map_only(Tensor, self._arriving, (inputs, named))
        weights: Any = contextlib.nullcontext()
        if self.scale is not None and torch.is_grad_enabled():
            aliases = {name: self._alias(weight) for name, weight in self.model.named_parameters()}
            weights = _reparametrize_module(self.model, aliases, tie_weights=True, stack_weights=True)
        caller = vars(self.model)["_compiled_call_impl"]  # this, or somebody who watches it
        try:
            vars(self.model)["_compiled_call_impl"] = self.theirs  # what is called from here on is the model itself
            with weights:
                outputs = self.call(*inputs, **named)
        finally:
            vars(self.model)["_compiled_call_impl"] = caller
        return tree_map_only(Tensor, self._leaving, outputs)

    def _called(self, *inputs: Any, **named: Any) -> Any:
        """Call the compiled form on full batches in training: any other would be compiled for anew."""
        size = next((len(leaf) for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor) and leaf.ndim), 0)
        self.full = max(self.full, size)
        if not (self.model.training and torch.is_grad_enabled() and size == self.full):
            return self.model(*inputs, **named)
        try:
            return self.forward(*inputs, **named)
        except Exception as error:
            if not (why := compilation.gave_up(self.forward, error)):
                raise
            print(f"prepare: compile: {why}", flush=True)
        return self.model(*inputs, **named)

    def _arriving(self, tensor: Tensor) -> Tensor:
        if self.plan.channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return self._alias(tensor)

    def _leaving(self, tensor: Tensor) -> Tensor:
        if self.plan.precision in precision.AUTOCAST and tensor.dtype in precision.AUTOCAST.values():
            tensor = tensor.float()
        elif getattr(self.forward, "cuda_graphs", False):
            tensor = tensor.clone()  # the next replay writes to its memory, and the loop may keep it
        return self._alias(tensor, unscale=False)

    def _alias(self, tensor: Tensor, unscale: bool = True) -> Tensor:
        """Return another name for `tensor`, whose gradient is scaled or unscaled on its way through."""
        if self.scale is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        scale, alias = self.scale.scale, tensor.view_as(tensor)
        alias.register_hook(lambda gradient: gradient / scale if unscale else gradient * scale)
        return alias

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        """Note on the device, before a step, whether a gradient is not finite: it is then left out."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        self.scale.found_inf.copy_(norm.isfinite().logical_not())  # type: ignore[union-attr]
