"""What a deployed model is worth: its size, its speed beside float32 and bfloat16, and what quality it lost."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.clock import timed
from speedkit.data.loader import BatchStream
from speedkit.deploy.quantize import Args, exported, quantized_share, tensors_in, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, claim_folder, write_json
from speedkit.hardware import this_machine
from speedkit.measure.compare import compare_functions
from speedkit.measure.stats import non_inferior
from speedkit.plan import Plan
from speedkit.workloads.workload import Workload

MODEL, FACTS = "model.pt2", "deploy.json"
CALIBRATION = 256  # training items that static scales are found on
BATCH = 32  # items that are evaluated at once
# Of a graph: where in the code its nodes are from, with names of this machine's files. A third of a small model's file.
NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
Row = dict[str, Any]
Model = Callable[..., Any]


def batches(workload: Workload, items: Sequence[Any], model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Return `items` in batches on the device of `model`, in their order."""
    device = next(model.parameters()).device
    return BatchStream(workload, items, Plan(), batch_size=BATCH, seed=None, device=device).one_epoch()


@torch.no_grad()
def inputs_of(model: nn.Module, workload: Workload, items: Sequence[Any]) -> list[Args]:
    """Return the tensors that the workload's loss calls `model` with, by position, for each batch of `items`."""
    inputs: list[Args] = []
    hook = model.register_forward_pre_hook(lambda _, args: inputs.append(args))
    for batch in batches(workload, items, model):
        workload.loss(model.eval(), batch, workload.recipe)
    hook.remove()
    return inputs


def save(model: nn.Module, method: str, args: Args, *, path: Path, **options: Any) -> Row:
    """Write `model` by `method` to `path` and return facts about the file; options are those of `exported`.

    `torch.export.load(path).module()` is the model again; that of int8-static needs the module
    `torch.ao.quantization.fx._decomposed` imported before, which registers its operators.
    """
    program = exported(model, method, args, **options)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for note in NOTES:
                node.meta.pop(note, None)
    with atomic(path) as temporary, temporary.open("wb") as stream:  # of another suffix it would warn
        torch.export.save(program, stream)
    linear = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and method == "int8-dynamic"]
    return {
        "method": method,
        "inputs": [{"dtype": str(tensor.dtype), "shape": ["B", *tensor.shape[1:]]} for tensor in args],
        "left_in_float32": [name for name in linear if f"{name}.weight" in program.state_dict],
        "quantized_share": quantized_share(program),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors_in(program)),
        "size_bytes": path.stat().st_size,
    }


@torch.no_grad()
def quality(workload: Workload, before: nn.Module, after: nn.Module) -> Row:
    """Return the metric of two models on the test set, and the drop (above 0: worse) with 95 % bounds of it."""
    scores: list[list[float]] = [[], []]
    for batch in batches(workload, workload.test, before):
        for of_model, model in zip(scores, (before, after), strict=True):
            outputs = workload.loss(model, batch, workload.recipe)[1]
            of_model += workload.score(outputs, batch).tolist()
    sign = 1 if workload.higher_is_better else -1
    drop = non_inferior([sign * (one - other) for one, other in zip(*scores, strict=True)], 0)
    means = {"before": statistics.fmean(scores[0]), "after": statistics.fmean(scores[1])}
    bounds = {"drop": drop.mean_change, "low": drop.lower, "high": drop.upper}
    return {"metric": workload.metric, "n": len(workload.test), **means, **bounds}


# ---- speed ----


def sized(args: Args, size: int) -> Args:
    """Return the batch `args` cut or repeated to `size` samples."""
    return tuple(tensor[torch.arange(size) % len(tensor)] for tensor in args)


@torch.no_grad()
def compile_for(model: Model, method: str, args: Args) -> Model:
    """Return `model`, which is by `method`, compiled for tensors like `args`."""
    compiled = torch.compile(model, dynamic=False)
    # Weights made constants are faster, but a CPU multiplies those of int8-dynamic as float32: these would be kept so.
    with torch._inductor.config.patch(freezing=method != "int8-dynamic"):
        compiled(*args)
    return compiled


@torch.no_grad()
def race(name: str, models: Mapping[str, Model], args: Args, *, pairs: int = 10, window_s: float = 0.05) -> Row:
    """Return the row of `measurements`, in seconds per call, of two models in turns: above 1 the second is faster."""
    device = args[0].device
    quickest_s = min(min(timed(functools.partial(model, *args), device, 2)) for model in models.values())
    calls = math.ceil(window_s / quickest_s)

    def window(model: Model) -> None:
        for _ in range(calls):
            model(*args)

    windows = {key: functools.partial(window, model) for key, model in models.items()}
    row = compare_functions(name, windows, pairs=pairs, device=device)
    return row | {side: [seconds / calls for seconds in row[side]] for side in ("seconds_a", "seconds_b")}


def deploy(
    workload: Workload,
    model: nn.Module,
    out: str | Path,
    *,
    method: str = "int8-dynamic",
    max_drop: float = 0.01,
    device: str = "auto",
    batch_size: int = 64,
    pairs: int = 10,
    compiled: bool = True,
) -> Row:
    """Quantize a trained `model`, prove it, and leave it in the folder `out`: model.pt2 and deploy.json.

    Return what deploy.json holds: facts, sizes, quality, and measurements against the same model in float32 and
    bfloat16, one sample and `batch_size` at once. Raises SpeedkitError, and leaves no model, where the metric on the
    test set drops by more than `max_drop`; UsageError for what cannot be done.
    """
    hardware = this_machine(device)
    if why := why_not(method, hardware):
        raise UsageError(why)
    path, model = claim_folder(out, "deploy") / MODEL, model.eval().to(hardware.device)
    [args] = inputs_of(model, workload, workload.test[:BATCH])
    calibration = inputs_of(model, workload, workload.train[:CALIBRATION]) if method == "int8-static" else []
    options: dict[str, Any] = {"path": path, "varies": workload.length is not None, "calibration": calibration}
    plain = save(model, "none", args, **options)
    facts = save(model, method, args, **options)
    small = torch.export.load(path).module()  # what the file holds is what is tested
    change = quality(workload, model, small)
    if change["drop"] > max_drop:
        path.unlink()
        why = f"a drop above {max_drop:g}, so no model is left: take another method"
        raise SpeedkitError("{} takes {metric} from {before:.4f} to {after:.4f}, {}".format(method, why, **change))

    models: dict[str, Model] = {method: small, "float32": model}
    if hardware.supports("bf16"):
        models["bf16"] = torch.autocast(hardware.device.type, torch.bfloat16)(model.forward)
    rows = []
    for size in sorted({1, batch_size}):
        batch, forms = sized(args, size), models
        if compiled and hardware.supports("compile"):
            forms = {name: compile_for(form, name, batch) for name, form in models.items()}
        for rival in [*forms][1:]:
            pair = {rival: forms[rival], method: forms[method]}
            rows.append(race(f"batch of {size}", pair, batch, pairs=pairs) | {"batch_size": size})
    facts |= {"workload": workload.name, "device": hardware.device.type, "machine": hardware.gpu or hardware.cpu}
    facts |= {"float32_size_bytes": plain["size_bytes"], "quality": change | {"max_drop": max_drop}}
    facts |= {"measurements": rows}
    write_json(path.with_name(FACTS), facts)
    return facts
