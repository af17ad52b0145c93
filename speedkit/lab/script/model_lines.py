"""Lines that change a model in place, in a script: its names in a checkpoint stay.

The class's own forward and the model are arguments, so that a copy of the model computes by itself, and lines that a
script comes to twice do no more than once.
"""

from torch import nn

from speedkit.plan import CUDA_GRAPHS, Plan

IN_BF16 = """

def in_bf16(forward, model, *inputs, **named):  # in training; its outputs are float32, as they were
    with torch.autocast("{device}", torch.bfloat16, enabled=model.training and torch.is_grad_enabled()):
        outputs = forward(model, *inputs, **named)
    return tree_map_only(torch.Tensor, lambda leaf: leaf.float() if leaf.dtype == torch.bfloat16 else leaf, outputs)"""
IN_GRAPHS = """

def in_graphs(compiled, *inputs, **named):  # whose outputs the next call would overwrite
    torch.compiler.cudagraph_mark_step_begin()
    return tree_map_only(torch.Tensor, torch.clone, compiled(*inputs, **named))"""


def model_line(field: str, model: nn.Module, name: str, *, plan: Plan, own_autocast: bool) -> str:
    """Return the line by which a `field` of a plan changes the model `name`; `own_autocast`: bf16 is no keyword."""
    if field == "channels_last":
        return f"{name}.to(memory_format=torch.channels_last)"
    in_bf16 = own_autocast and plan.precision == "bf16"
    mode = f'mode="{plan.compile}"'
    own = f"type({name}).forward"
    if plan.compile in CUDA_GRAPHS:
        compiled = f"torch.compile({own}, {mode}), {name}"
        if in_bf16:
            compiled = f"torch.compile(in_bf16, {mode}), {own}, {name}"
        return f"{name}.forward = functools.partial(in_graphs, {compiled})"
    if field == "precision":
        return f"{name}.forward = functools.partial(in_bf16, {own}, {name})"
    if type(model).__module__.startswith("torch.") and not in_bf16:  # whose own code .compile() skips
        return f"{name}.forward = functools.partial(torch.compile({own}, {mode}), {name})"
    return f"{name}.compile({mode})"


def definitions(line: str, model: nn.Module) -> list[str]:
    """Return the functions that a line for `model` calls."""
    functions = {"in_bf16": IN_BF16.format(device=next(model.parameters()).device.type), "in_graphs": IN_GRAPHS}
    return [text for name, text in functions.items() if name in line]
