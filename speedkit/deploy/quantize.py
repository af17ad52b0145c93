"""Fewer bits for a trained model: INT8 by torchao, FP8 on GPUs that have it, bfloat16 to compare with."""

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
    "bf16": "weights of linear and convolutional layers, and what they multiply, in bfloat16",
    "int8-weight": "weights of linear layers and embeddings in INT8, multiplied as float32",
    "int8-dynamic": "products of linear layers in INT8, with a scale for each row of inputs; embeddings in INT8",
    "int8-static": "products of linear and 2-d convolutional layers in INT8, scales from training items; embeddings",
    "fp8": "products of linear layers in FP8 (e4m3), with a scale for each tensor, found as it comes",
}
ONE_BYTE = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")

Args = tuple[Tensor, ...]


def why_not(method: str, hardware: Hardware) -> str:
    """Return why `method` cannot be used on `hardware`, as a sentence, or "". Raises UsageError for an unknown one."""
    if method not in METHODS:
        raise UsageError(f"there is no method {method!r}{nearest(method, METHODS)}: take {', '.join(METHODS)}")
    on_cpu = hardware.device.type == "cpu"
    if method == "int8-static" and not on_cpu:
        return f"int8-static is for x86 CPUs, not for {hardware.name}: add --device cpu, or take int8-dynamic"
    if method == "int8-static" and (why := hardware.why_not("compile")):
        return f"int8-static has its kernels from the compiler, and {why.split('. ')[0]}; or take int8-dynamic"
    return hardware.why_not("fp8").split(". ")[0] + "; take int8-dynamic" * on_cpu if method == "fp8" else ""


class Int8Embedding(nn.Module):
    """An embedding in INT8, with a scale for each row: only rows that are looked up become float32."""

    weight: Tensor  # [N, D], INT8
    scale: Tensor  # [N, 1]

    def __init__(self, layer: nn.Embedding):
        super().__init__()
        scale = (layer.weight.detach().abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows [..., D] that `index` [...] asks for."""
        return self.weight[index] * self.scale[index]


def copied(model: nn.Module, embeddings: bool = True) -> nn.Module:
    """Return a copy of `model`, in evaluation mode, with its `embeddings` in INT8."""
    model = copy.deepcopy(model).eval()
    found = [
        (owner, name, layer)
        for owner in model.modules()
        for name, layer in owner.named_children()
        if embeddings and type(layer) is nn.Embedding and layer.max_norm is None
    ]
    for owner, name, layer in found:
        setattr(owner, name, Int8Embedding(layer))
    return model


class Bf16(nn.Module):
    """`model` under bfloat16 autocast, with the weights that autocast would cast each time cast beforehand."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.device_type = copy.deepcopy(model), next(model.parameters()).device.type
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
                layer.to(torch.bfloat16)

    def forward(self, *args: Tensor) -> Any:
        """Return what the model returns, in the number formats that its last layers give."""
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.model(*args)


@torch.no_grad()
def exported(
    model: nn.Module, method: str, args: Args, *, varies: bool = False, calibration: Iterable[Args] = ()
) -> ExportedProgram:
    """Return `model` in evaluation mode, quantized by `method` and exported, for batches of any size.

    `args` are the tensors [B, ...] of a batch of 2 or more, by position; `calibration` are such tuples of training
    items, from which "int8-static" takes its scales. With `varies` their other dimensions may change too. `model` stays
    as it is. Raises UsageError where it is quantized already, where nothing in it can be, and without torchao.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.dtype in ONE_BYTE or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        raise UsageError("this model is quantized already: give the float32 model that it was made from")
    shapes = tuple(dict.fromkeys(range(each.dim() if varies else 1), Dim.AUTO) for each in args)
    if method == "none":
        program = torch.export.export(model.eval(), args, dynamic_shapes=shapes)
    elif method == "bf16":
        try:
            program = torch.export.export(Bf16(model).eval(), args, dynamic_shapes=(shapes,))
        except Exception as error:  # whatever fails within export
            raise UsageError(
                f"{type(model).__name__} switches autocast itself, and cannot be exported under it: "
                "take another method than bf16"
            ) from error
    else:
        try:
            import torchao  # noqa: F401
        except ImportError as error:
            raise UsageError(f"{method} needs the package torchao: install it with pip install -e .[quant]") from error
        program = (
            _static(model, args, shapes, calibration)
            if method == "int8-static"
            else _linear(model, method, args, shapes)
        )
        if not quantized_share(program):
            raise UsageError(f"{method} finds nothing to quantize in {type(model).__name__}: {METHODS[method]}")
    # Neither the batch that it was traced with, nor paths of the sources.
    program._example_inputs = None
    for node in program.graph.nodes:
        for note in NOTES:
            node.meta.pop(note, None)
    return program


def quantized_share(program: ExportedProgram) -> float:
    """Return the share of the model's numbers, 0 to 1, that are kept in one byte."""
    tensors = held(program)
    return sum(each.numel() for each in tensors if each.dtype in ONE_BYTE) / sum(each.numel() for each in tensors)


def held(program: ExportedProgram) -> list[Tensor]:
    """Return all tensors that `program` keeps."""
    return [each for each in (*program.state_dict.values(), *program.constants.values()) if isinstance(each, Tensor)]


def _linear(model: nn.Module, method: str, args: Args, shapes: Any) -> ExportedProgram:
    """Return `model` with quantized linear layers, exported with operators and tensors of PyTorch's own."""
    from torch._inductor.decomposition import decompositions
    from torchao import quantization as ao
    from torchao.utils import unwrap_tensor_subclass

    config: Any = {
        "int8-weight": ao.Int8WeightOnlyConfig,
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig,
        "fp8": ao.Float8DynamicActivationFloat8WeightConfig,
    }[method]
    model = copied(model, embeddings=method != "fp8")
    # What it would set in Inductor is process-wide: the models to compare with would be compiled by it too.
    ao.quantize_(model, config(set_inductor_config=False))
    program = torch.export.export(unwrap_tensor_subclass(model), args, dynamic_shapes=shapes)
    own = {node.target for node in program.graph.nodes if str(node.target).startswith("torchao.")} & set(decompositions)
    return program.run_decompositions({operator: decompositions[operator] for operator in own}) if own else program


def _static(model: nn.Module, args: Args, shapes: Any, calibration: Iterable[Args]) -> ExportedProgram:
    """Return `model` with quantize and dequantize operators around what Inductor has INT8 kernels for on x86 CPUs."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    from torchao.utils import should_reduce_range

    # The quantizer knows layers by notes that only strict export leaves.
    program = torch.export.export(copied(model), args, dynamic_shapes=shapes, strict=True)
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
