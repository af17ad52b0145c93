"""What a deployed model is worth: its size, its speed beside that of others, and what quality it lost."""

import functools
import io
import json
import math
import statistics
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.clock import timed
from speedkit.data.loader import BatchStream
from speedkit.deploy import load as loader
from speedkit.deploy.quantize import METHODS, Args, Bf16, exported, held, quantized_share, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, claim_folder, write_json, write_text
from speedkit.hardware import Hardware, this_machine
from speedkit.measure.stats import non_inferior
from speedkit.measure.turns import in_turns
from speedkit.plan import Plan

MODEL, FACTS, LOADER = "model.pt2", "deploy.json", "load_model.py"
CALIBRATION, BATCH = 256, 32  # training items that static scales are found on; items that are evaluated at once


def batches(workload: Any, items: Sequence[Any], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Return `items` in batches on `device`, in their order."""
    return BatchStream(workload, items, Plan(), batch_size=BATCH, seed=None, device=device).one_epoch()


@torch.no_grad()
def inputs_of(model: nn.Module, workload: Any, batches: Iterable[tuple[Tensor, ...]]) -> list[Args]:
    """Return the tensors that `workload` calls `model` with for each batch. Raises UsageError for anything else."""
    seen: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    for batch in batches:
        workload.loss(model.eval(), batch, workload.recipe)
    hook.remove()
    if any(kwargs or not all(isinstance(each, Tensor) for each in args) for args, kwargs in seen):
        raise UsageError(f"the loss of {workload.name} must call its model with tensors, by position, to export it")
    return [args for args, _ in seen]


def as_file(
    model: nn.Module, method: str, args: Args, hardware: Hardware, **options: Any
) -> tuple[bytes, dict[str, Any]]:
    """Return `model` by `method` as the content of a file, and what is noted in it. Options are those of `exported`."""
    program = exported(model, method, args, **options)
    spaces = {str(node.target).split(".")[0] for node in program.graph.nodes}
    about = {
        "method": method,
        "device": hardware.device.type,
        "machine": hardware.gpu or hardware.cpu,
        "vnni": loader.vnni(),
        "torch": str(torch.__version__),
        "needs": sorted(spaces & loader.REGISTERED_BY.keys()),
        "inputs": [{"dtype": str(each.dtype), "shape": ["B", *each.shape[1:]]} for each in args],
        "quantized_share": quantized_share(program),
        "weights_bytes": sum(each.nbytes for each in held(program)),
    }
    raw, packed = io.BytesIO(), io.BytesIO()
    torch.export.save(program, raw, extra_files={"speedkit.json": json.dumps(about)})
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(packed, "w") as target:
        for name in source.namelist():  # the graph is the larger part of a small model, unless it is compressed
            how = zipfile.ZIP_DEFLATED if "/models/" in name else zipfile.ZIP_STORED
            target.writestr(zipfile.ZipInfo(name), source.read(name), how)
    return packed.getvalue(), about


@torch.no_grad()
def quality(workload: Any, before: Any, after: Any, device: torch.device) -> dict[str, Any]:
    """Return the metric of two models on the test set, and the drop (above 0: worse) with 95 % bounds of it."""
    found: tuple[list[float], list[float]] = ([], [])
    for batch in batches(workload, workload.test, device):
        for scores, model in zip(found, (before, after), strict=True):
            scores += workload.score(workload.loss(model, batch, workload.recipe)[1], batch).tolist()
    sign = 1 if workload.higher_is_better else -1
    drops = [sign * (one - other) for one, other in zip(*found, strict=True)]
    return {
        "metric": workload.metric,
        "n": len(drops),
        "before": statistics.fmean(found[0]),
        "after": statistics.fmean(found[1]),
        "drop": statistics.fmean(drops),
        "low": non_inferior(drops, 0).lower,
        "high": 0 - non_inferior([-drop for drop in drops], 0).lower,
    }


@torch.no_grad()
def forms(model: nn.Module, method: str, args: Args, compiled: bool) -> dict[str, Callable[..., Any]]:
    """Return what runs `model`, which is by `method`, on tensors like `args`: plain, and compiled as suits it."""
    found: dict[str, Callable[..., Any]] = {f"{method} eager": model}
    if compiled:
        found[f"{method} compiled"] = form = torch.compile(model, dynamic=False)
        with torch._inductor.config.patch(freezing=method in ("float32", "none", "bf16", "int8-static")):
            form(*args)
    return found


@torch.no_grad()
def race(
    name: str, two: dict[str, Any], args: Args, device: torch.device, pairs: int = 10, window_s: float = 0.05
) -> dict[str, Any]:
    """Return the row of `measurements`, in seconds per call, of two models in turns: above 1 the second is faster."""
    quickest = min(min(timed(functools.partial(model, *args), device, 2)) for model in two.values())
    calls = max(1, math.ceil(window_s / quickest))

    def window(model: Any) -> Callable[[], Any]:
        return lambda: [model(*args) for _ in range(calls)][-1:]

    row = in_turns(name, {word: window(model) for word, model in two.items()}, pairs, device)
    return row | {side: [each / calls for each in row[side]] for side in ("seconds_a", "seconds_b")}


def sized(args: Args, size: int) -> Args:
    """Return the batch `args` cut or repeated to `size` samples."""
    return tuple(torch.cat([each] * math.ceil(size / len(each)))[:size].contiguous() for each in args)


def deploy(
    workload: Any,
    model: nn.Module,
    out: str | Path,
    *,
    method: str = "int8-dynamic",
    max_drop: float = 0.01,
    device: str = "auto",
    batch_size: int = 64,
    pairs: int = 10,
    compiled: bool = True,
    say: Callable = print,
) -> dict[str, Any]:
    """Quantize a trained `model`, prove it, and leave it in the folder `out`: model.pt2, deploy.json, load_model.py.

    Return what deploy.json holds: facts, sizes, quality, and measurements against the same model in float32 and
    bfloat16, one sample and `batch_size` at once. Raises SpeedkitError, and writes no model, where the metric on the
    test set drops by more than `max_drop`; UsageError for what cannot be done.
    """
    hardware = this_machine(device)
    if max_drop < 0:
        raise UsageError(f"--max-drop {max_drop} asks for a better model than there is: take 0 or more")
    if why := why_not(method, hardware):
        raise UsageError(why)
    folder, model, where = claim_folder(out, "deploy"), model.eval().to(hardware.device), hardware.device
    args = inputs_of(model, workload, [next(batches(workload, workload.test, where))])[0]
    options = {"varies": workload.length is not None}
    seen = batches(workload, workload.train[:CALIBRATION], where) if method == "int8-static" else ()
    plain, _ = as_file(model, "none", args, hardware, **options)
    content, about = as_file(model, method, args, hardware, calibration=inputs_of(model, workload, seen), **options)
    small = torch.export.load(io.BytesIO(content)).module()  # what the file holds is what is tested
    found = quality(workload, model, small, where)
    if found["drop"] > max_drop:
        raise SpeedkitError(
            "{method} takes {metric} from {before:.4f} to {after:.4f} on {n} test items, a drop above "
            "{most:g}, so no model is written: take another of {others}".format(
                method=method, most=max_drop, others=", ".join(METHODS), **found
            )
        )
    compiled, rows = compiled and hardware.supports("compile"), []
    kinds = {"float32": model} | ({"bf16": Bf16(model)} if hardware.supports("bf16") else {})
    for size in sorted({1, batch_size}):
        batch = sized(args, size)
        ours = [*forms(small, method, batch, compiled).items()][-1:]
        for rival in (form for kind in kinds for form in forms(kinds[kind], kind, batch, compiled).items()):
            say(f"  {rival[0]} and {ours[0][0]} take turns, {size} at once")
            rows.append(race(f"batch of {size}", dict([rival, *ours]), batch, where, pairs) | {"batch_size": size})
    fact = (
        {"workload": workload.name}
        | about
        | {
            "size_bytes": len(content),
            "float32_size_bytes": len(plain),
            "quality": found | {"max_drop": max_drop},
            "measurements": rows,
        }
    )
    with atomic(folder / MODEL) as temporary:
        temporary.write_bytes(content)
    write_text(folder / LOADER, Path(loader.__file__).read_text(encoding="utf-8"))
    write_json(folder / FACTS, fact)
    return fact
