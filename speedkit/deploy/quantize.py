"""INT8 for a trained model, by torchao."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from speedkit.config import nearest
from speedkit.errors import UsageError
from speedkit.hardware import Hardware

METHODS = {
    "none": "float32 as it is",
    "int8-dynamic": "products of linear layers in INT8, with a scale for each row of inputs",
    "int8-static": "products of linear and 2-d convolutional layers in INT8, with scales from training items",
}

Args = tuple[Tensor, ...]


def why_not(method: str, hardware: Hardware) -> str:
    """Return why `method` cannot be used on `hardware`, as a sentence, or "". Raises UsageError for an unknown one."""
    if method not in METHODS:
        raise UsageError(f"there is no method {method!r}{nearest(method, METHODS)}: take {', '.join(METHODS)}")
    if method == "int8-static" and hardware.device.type != "cpu":
        return f"int8-static is for x86 CPUs, not for {hardware.name}: add --device cpu, or take int8-dynamic"
    return ""


@torch.no_grad()
def exported(
    model: nn.Module, method: str, args: Args, *, varies: bool = False, calibration: Iterable[Args] = ()
) -> ExportedProgram:
    """Return `model` in evaluation mode, quantized by `method` and exported, for batches of any size.

    `args` are the tensors [B, ...] of a batch of 2 or more, by position; `calibration` are such tuples of training
    items, from which "int8-static" takes its scales. With `varies` their other dimensions may change too. `model` stays
    as it is. Raises UsageError where nothing in it can be quantized.
    """
    shapes = tuple(dict.fromkeys(range(tensor.dim() if varies else 1), Dim.AUTO) for tensor in args)
    model = copy.deepcopy(model).eval()
    if method == "none":
        return torch.export.export(model, args, dynamic_shapes=shapes)
    static = method == "int8-static"
    program = _static(model, args, shapes, calibration=calibration) if static else _dynamic(model, args, shapes)
    if not quantized_share(program):
        raise UsageError(f"{method} finds nothing to quantize in {type(model).__name__}: {METHODS[method]}")
    return program


def tensors_in(program: ExportedProgram) -> list[Tensor]:
    """Return all tensors that `program` holds."""
    values = (*program.state_dict.values(), *program.constants.values())
    return [value for value in values if isinstance(value, Tensor)]


def quantized_share(program: ExportedProgram) -> float:
    """Return the share of the model's numbers, 0 to 1, that take one byte each."""
    tensors = tensors_in(program)
    in_one_byte = [tensor.numel() for tensor in tensors if tensor.dtype in (torch.int8, torch.uint8)]
    return sum(in_one_byte) / sum(map(torch.numel, tensors))


@torch.no_grad()
def refused_by_gpu(model: nn.Module, args: Args) -> set[nn.Module]:
    """Return the linear layers whose INT8 product a GPU refuses for the first sample of a batch `args`.

    torch._int_mm takes more than 16 rows on CUDA, and widths that 8 divides.
    """
    refused = set[nn.Module]()

    def note(layer: nn.Linear, inputs: Args) -> None:
        if inputs[0][..., 0].numel() <= 16 or layer.in_features % 8 or layer.out_features % 8:
            refused.add(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if isinstance(layer, nn.Linear)]
    model(*(tensor[:1] for tensor in args))
    for hook in hooks:
        hook.remove()
    return refused


def _dynamic(model: nn.Module, args: Args, shapes: Any) -> ExportedProgram:
    """Return `model` with quantized linear layers, exported with operators and tensors of PyTorch's own."""
    from torch._inductor.decomposition import decompositions
    from torchao import quantization as ao
    from torchao.utils import unwrap_tensor_subclass

    refused = refused_by_gpu(model, args) if args[0].is_cuda else set()
    # What it would set in Inductor is process-wide: the models to compare with would be compiled by it too.
    config: Any = ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    ao.quantize_(model, config, lambda layer, _: type(layer) is nn.Linear and layer not in refused)
    program = torch.export.export(unwrap_tensor_subclass(model), args, dynamic_shapes=shapes)
    # torchao's operators become PyTorch's, so that the file loads without torchao.
    return program.run_decompositions({op: call for op, call in decompositions.items() if "torchao" in str(op)})


def _static(model: nn.Module, args: Args, shapes: Any, *, calibration: Iterable[Args]) -> ExportedProgram:
    """Return `model` with quantize and dequantize operators around what Inductor has INT8 kernels for on x86 CPUs."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    from torchao.utils import should_reduce_range

    # The quantizer knows layers by notes that only strict export leaves.
    program = torch.export.export(model, args, dynamic_shapes=shapes, strict=True)
    if any("autocast" in str(node.target) for node in program.graph.nodes):
        program = program.run_decompositions({})  # which puts regions in line: conversion fails on them
    config = x86.get_default_x86_inductor_quantization_config(reduce_range=should_reduce_range(torch.device("cpu")))
    prepared = prepare_pt2e(program.module(), x86.X86InductorQuantizer().set_global(config))
    for batch in calibration:
        prepared(*batch)
    converted = convert_pt2e(prepared)
    used = {node.target for node in converted.graph.nodes if node.op == "get_attr"}
    for name in {*converted.state_dict()} - used:  # float32 weights
        owner, _, leaf = name.rpartition(".")
        delattr(converted.get_submodule(owner), leaf)
    return torch.export.export(converted, args, dynamic_shapes=shapes)
