"""What a deployed model is worth: its size, its speed beside float32 and bfloat16, and what quality it lost."""

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.clock import timed
from speedkit.data.loader import BatchStream
from speedkit.deploy.quantize import Args, exported, held, quantized_share, refused_by_gpu, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, claim_folder, write_json
from speedkit.hardware import this_machine
from speedkit.measure.compare import compare_functions
from speedkit.measure.stats import non_inferior
from speedkit.plan import Plan
from speedkit.workloads.workload import Workload

MODEL, FACTS = "model.pt2", "deploy.json"
CALIBRATION, BATCH = 256, 32  # training items that static scales are found on; items that are evaluated at once
Model = Callable[..., Any]


def batches(workload: Workload, items: Sequence[Any], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Return `items` in batches on `device`, in their order."""
    return BatchStream(workload, items, Plan(), batch_size=BATCH, seed=None, device=device).one_epoch()


@torch.no_grad()
def inputs_of(model: nn.Module, workload: Workload, batches: Iterable[tuple[Tensor, ...]]) -> list[Args]:
    """Return the tensors that the workload's loss calls `model` with, by position, for each batch."""
    inputs: list[Args] = []
    hook = model.register_forward_pre_hook(lambda _, args: inputs.append(args))
    for batch in batches:
        workload.loss(model.eval(), batch, workload.recipe)
    hook.remove()
    return inputs


def save(model: nn.Module, path: Path, method: str, args: Args, **options: Any) -> dict[str, Any]:
    """Write `model` by `method` to `path` and return facts about the file; options are those of `exported`.

    `torch.export.load(path).module()` is the model again; that of int8-static needs the module
    `torch.ao.quantization.fx._decomposed` imported before, which registers its operators.
    """
    program = exported(model, method, args, **options)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # which names files of this machine
    with atomic(path) as temporary:
        torch.export.save(program, temporary)
    return {
        "method": method,
        "torch": str(torch.__version__),
        "inputs": [{"dtype": str(tensor.dtype), "shape": ["B", *tensor.shape[1:]]} for tensor in args],
        "left_in_float32": refused_by_gpu(model, args) if method == "int8-dynamic" and args[0].is_cuda else [],
        "quantized_share": quantized_share(program),
        "weights_bytes": sum(tensor.nbytes for tensor in held(program)),
        "size_bytes": path.stat().st_size,
    }


@torch.no_grad()
def quality(workload: Workload, before: nn.Module, after: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return the metric of two models on the test set, and the drop (above 0: worse) with 95 % bounds of it."""
    scores: tuple[list[float], list[float]] = ([], [])
    for batch in batches(workload, workload.test, device):
        for of_model, model in zip(scores, (before, after), strict=True):
            of_model += workload.score(workload.loss(model, batch, workload.recipe)[1], batch).tolist()
    sign = 1 if workload.higher_is_better else -1
    drops = [sign * (one - other) for one, other in zip(*scores, strict=True)]
    before_and_after = {"before": statistics.fmean(scores[0]), "after": statistics.fmean(scores[1])}
    drop = non_inferior(drops, 0)
    bounds = {"drop": drop.mean_change, "low": drop.lower, "high": drop.upper}
    return {"metric": workload.metric, "n": len(drops), **before_and_after, **bounds}


def in_bf16(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that runs under bfloat16 autocast."""
    device_type = next(model.parameters()).device.type
    model = copy.deepcopy(model).eval()
    model.forward = torch.autocast(device_type, torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return model


@torch.no_grad()
def compile_for(model: Model, method: str, args: Args) -> Model:
    """Return `model`, which is by `method`, compiled for tensors like `args`."""
    form = torch.compile(model, dynamic=False)
    # Weights made constants are faster, but a CPU multiplies those of int8-dynamic as float32: these would be kept so.
    with torch._inductor.config.patch(freezing=method != "int8-dynamic"):
        form(*args)
    return form


@torch.no_grad()
def race(
    name: str, models: Mapping[str, Model], args: Args, device: torch.device, *, pairs: int = 10, window_s: float = 0.05
) -> dict[str, Any]:
    """Return the row of `measurements`, in seconds per call, of two models in turns: above 1 the second is faster."""
    quickest = min(min(timed(functools.partial(model, *args), device, 2)) for model in models.values())
    calls = max(1, math.ceil(window_s / quickest))

    def window(model: Model) -> None:
        for _ in range(calls):
            model(*args)

    windows = {word: functools.partial(window, model) for word, model in models.items()}
    row = compare_functions(name, windows, pairs, device=device)
    return row | {side: [seconds / calls for seconds in row[side]] for side in ("seconds_a", "seconds_b")}


def sized(args: Args, size: int) -> Args:
    """Return the batch `args` cut or repeated to `size` samples."""
    return tuple(torch.cat([tensor] * math.ceil(size / len(tensor)))[:size].contiguous() for tensor in args)


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
) -> dict[str, Any]:
    """Quantize a trained `model`, prove it, and leave it in the folder `out`: model.pt2 and deploy.json.

    Return what deploy.json holds: facts, sizes, quality, and measurements against the same model in float32 and
    bfloat16, one sample and `batch_size` at once. Raises SpeedkitError, and leaves no model, where the metric on the
    test set drops by more than `max_drop`; UsageError for what cannot be done.
    """
    hardware = this_machine(device)
    if why := why_not(method, hardware):
        raise UsageError(why)
    path, model = claim_folder(out, "deploy") / MODEL, model.eval().to(hardware.device)
    [args] = inputs_of(model, workload, [next(batches(workload, workload.test, hardware.device))])
    sample = batches(workload, workload.train[:CALIBRATION], hardware.device) if method == "int8-static" else ()
    options = {"varies": workload.length is not None, "calibration": inputs_of(model, workload, sample)}
    plain = save(model, path, "none", args, **options)
    facts = save(model, path, method, args, **options)
    small = torch.export.load(path).module()  # what the file holds is what is tested
    change = quality(workload, model, small, hardware.device)
    if change["drop"] > max_drop:
        path.unlink()
        fell = "{metric} from {before:.4f} to {after:.4f} on {n} test items".format(**change)
        raise SpeedkitError(
            f"{method} takes {fell}, a drop above {max_drop:g}, so no model is left: take another method"
        )

    rivals: dict[str, Model] = {"float32": model}
    if hardware.supports("bf16"):
        rivals["bf16"] = in_bf16(model)
    rows = []
    for size in sorted({1, batch_size}):
        batch, forms = sized(args, size), rivals | {method: small}
        if compiled and hardware.supports("compile"):
            forms = {name: compile_for(form, name, batch) for name, form in forms.items()}
        for name in rivals:
            pair = {name: forms[name], method: forms[method]}
            rows.append(race(f"batch of {size}", pair, batch, hardware.device, pairs=pairs) | {"batch_size": size})
    facts |= {
        "workload": workload.name,
        "device": hardware.device.type,
        "machine": hardware.gpu or hardware.cpu,
        "float32_size_bytes": plain["size_bytes"],
        "quality": change | {"max_drop": max_drop},
        "measurements": rows,
    }
    write_json(path.with_name(FACTS), facts)
    return facts
