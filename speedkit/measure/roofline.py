"""What a step computes and moves, operator by operator, against what this machine was measured to reach."""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from speedkit.clock import run_until_steady, timed
from speedkit.hardware import Hardware, nvml_facts
from speedkit.measure.ledger import Ledger, rates
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

STEPS = 3  # that are counted, after one that is not: lengths may differ from batch to batch
SMALL = 8  # empty operators: what takes no longer (addmm or a softmax of nothing does not) is the cost of a call
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
aten = torch.ops.aten
# PyTorch's own formulas, by operator; of attention they leave out the kernel that a CPU takes.
FLOPS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator."""

    name: str
    seconds: float  # of the host; on a CPU those of the work itself
    flops: int | None  # None: PyTorch's counter has no formula for it
    bytes: int  # of its inputs and outputs, whether or not they lie in a cache; a view moves none
    dtype: str  # of its first decimal tensor, as a ceiling names it
    follows: bool  # it goes over as many elements as the call before, one by one as that did: compiled, they are one


class Operators(TorchDispatchMode):
    """Notes each call of an operator inside, in `calls`, in the forward and the backward pass.

    Compiled code that meets it stays off until `torch._dynamo.reset()`: it is for eager steps, best of a fresh model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.last = 0  # elements of the call before, where that went over them one by one

    def take(self) -> list[Call]:
        """Return the calls since it was last asked, such as those of one step."""
        taken, self.calls = self.calls, []
        return taken

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began_s = time.perf_counter()
        result = operation(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began_s
        if operation.namespace == "profiler":
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        tensors = [] if operation.is_view or "empty" in str(operation) else inputs + outputs
        dtype = next((FORMATS.get(tensor.dtype, "fp32") for tensor in inputs if tensor.is_floating_point()), "fp32")
        if dtype == "fp32" and operation.overloadpacket in FLOPS and inputs[0].is_cuda:
            dtype = _float32(operation.overloadpacket.__name__)
        flops = None
        with contextlib.suppress(Exception):  # no formula, or one that does not know such a call: training goes on
            flops = FLOPS[operation.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elements = outputs[0].numel() if outputs and torch.Tag.pointwise in operation.tags else 0
        if not operation.is_view:
            self.last, before = elements, self.last
        self.calls.append(
            Call(
                operation.overloadpacket.__name__,
                seconds,
                flops,
                sum(tensor.nbytes for tensor in tensors),
                dtype,
                bool(elements) and not operation.is_view and elements == before,
            )
        )
        return result


def _float32(name: str) -> str:
    """Return the format in which a GPU multiplies float32 numbers: convolutions have a switch of their own."""
    with contextlib.suppress(RuntimeError):  # the older getters raise where somebody has set the newer switches
        products = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if (torch.backends.cudnn.allow_tf32 if "conv" in name else products) else "fp32"
    return "fp32"


def per_step(passes: list[list[Call]], found: Mapping[str, float]) -> dict[str, Any]:
    """Return what the calls of some eager steps come to for one, against the measured ceilings `found`.

    `small` of its `operators` take hardly longer than an empty one. The others are bound by computing or by moving
    memory: `compute_s` and `bandwidth_s` are what they took (nothing to go by on a GPU, for which the host does not
    wait), `..._roof_s` what they would at the ceilings, `..._top` the one that took most. `fusible` is the share of the
    bandwidth-bound bytes that compiled code need not move, `dtype` the format of most of the computing, `dtype_share`.
    """
    if len({tuple(call.name for call in calls) for calls in passes}) == 1:  # what disturbed one step is not in another
        passes = [[sorted(same, key=lambda call: call.seconds)[len(same) // 2] for same in zip(*passes, strict=True)]]
    count, calls, short_s = len(passes), list(itertools.chain(*passes)), SMALL * empty_operator_s()
    kinds: dict[str, list[tuple[Call, float]]] = {"small": [], "compute": [], "bandwidth": []}
    for call in calls:
        compute_s = (call.flops or 0) / found.get(f"matmul_{call.dtype}", found["matmul_fp32"])
        roof_s = max(compute_s, call.bytes / found["memory_bandwidth"])
        kind = "compute" if compute_s == roof_s else "bandwidth"
        kinds["small" if max(call.seconds, roof_s) < short_s else kind].append((call, roof_s))
    row: dict[str, Any] = {"operators": len(calls) / count, "small": len(kinds.pop("small")) / count}
    for kind, members in kinds.items():
        took_s = Counter[str]()
        for call, _ in members:
            took_s[call.name] += call.seconds  # type: ignore[assignment]
        row |= {
            f"{kind}_s": sum(call.seconds for call, _ in members) / count,
            f"{kind}_roof_s": sum(roof_s for _, roof_s in members) / count,
            f"{kind}_top": max(took_s, key=lambda name: took_s[name], default=None),
        }
    moved, moving = [call for call, _ in kinds["bandwidth"]], [call for call in calls if call.bytes]
    formats, names = Counter[str](), Counter(call.name for call in moving if call.flops is None)
    for call, roof_s in kinds["compute"]:  # by their time: a few long products in float32 outweigh many short ones
        formats[call.dtype] += max(call.seconds, roof_s)  # type: ignore[assignment]
    dtype, dtype_s = next(iter(formats.most_common(1)), ("fp32", 1.0))
    return row | {
        "flops": sum(call.flops or 0 for call in calls) / count,
        "bytes": sum(call.bytes for call in calls) / count,
        "uncounted": [name for name, _ in names.most_common()],
        "uncounted_share": names.total() / max(1, len(moving)),
        "fusible": sum(call.bytes for call in moved if call.follows) / max(1, sum(call.bytes for call in moved)),
        "dtype": dtype,
        "dtype_share": dtype_s / max(formats.total(), dtype_s),
    }


@functools.cache
def empty_operator_s() -> float:
    """Return the seconds of an operator that has nothing to do, as `Operators` times it on this machine."""
    one = torch.ones(1)
    with Operators() as noted:
        for _ in range(500):
            torch.add(one, one)
    return statistics.median(call.seconds for call in noted.calls)


@functools.cache
def operator_cost_s(device: torch.device) -> float:
    """Return what the host spends on one operator of a training step, forward or backward, that has nothing to do."""
    start, chain = torch.ones(1, device=device, requires_grad=True), 256

    def step() -> None:
        value = start
        for _ in range(chain):
            value = value * 1.0
        torch.autograd.grad(value, start)

    return min(timed(step, device, repeats=9, warmup=3)) / (2 * chain)


def count(workload: Any, recipe: Recipe, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    """Return `per_step` of `workload`, counted on a fresh, eager model and batches loaded in this process."""
    # Left off is what changes nothing of what a model computes; to compute it twice, to save memory, is no work of it.
    eager: dict[str, Any] = {"compile": "off", "checkpointing": "off", "workers": 0, "cache": "off", "shards": False}
    run = setup_run(workload, recipe, dataclasses.replace(plan, **eager), device=hardware.device, endless=True)
    passes = []
    try:
        batches, course = [run.fetch() for _ in range(STEPS)], steps(run)
        for number, run.fixed_batch in enumerate([batches[0], *batches]):
            with Operators() as noted:
                next(course)
            if number:  # the first one makes the optimizer's state
                passes.append(noted.take())
    finally:
        run.close()
    return per_step(passes, rates(hardware.device))


def roofline(
    workload: Any,
    recipe: Recipe,
    plan: Plan,
    hardware: Hardware,
    ledger: Ledger,
    counted: dict[str, Any],
    cache_dir: Any = None,
) -> dict[str, Any]:
    """Return how near a step of `workload`, as its `ledger` has it, comes to the ceilings measured on this machine.

    `counted` is what `count` returns, of an eager step. Its bytes are an upper estimate: they count what caches hold.
    """
    step_s, found = ledger.step_s * (1 - ledger.share("evaluation and checkpoint")), rates(hardware.device)
    asked = resolve(plan, hardware, workload=workload).plan.precision.removesuffix("-emulated")
    if asked == "default":  # float32: a GPU multiplies matrices in it as it is, and convolves in TF32
        asked = counted["dtype"]
    dtype = asked if f"matmul_{asked}" in found else "fp32"
    row = {
        "flops_per_step": counted["flops"],
        "uncounted": counted["uncounted"],
        "uncounted_share": counted["uncounted_share"],
        "dtype": dtype,
        "step_s": step_s,
        "achieved_flops_per_s": counted["flops"] / step_s,
        "ceiling_flops_per_s": found[f"matmul_{dtype}"],
        "mfu": counted["flops"] / step_s / found[f"matmul_{dtype}"],
        "bytes_per_step": counted["bytes"],
        "achieved_bytes_per_s": counted["bytes"] / step_s,
        "bandwidth_ceiling": found["memory_bandwidth"],
        "busy_share": ledger.busy_share,
        "nvml_utilisation": None,
    }
    if hardware.device.type == "cuda" and plan.compile == "off":  # compiling once more is more than it is worth
        run = setup_run(workload, recipe, plan, device=hardware.device, cache_dir=cache_dir, endless=True)
        course = steps(run)
        run_until_steady(lambda: next(course), run.device, window_s=0.5)  # longer than NVML looks back
        uuid = str(torch.cuda.get_device_properties(run.device).uuid)
        row["nvml_utilisation"] = nvml_facts(uuid, "utilisation").get("utilisation")
        run.close()
    return row | {"tells": _tells(row)}


def _tells(row: dict[str, Any]) -> list[str]:
    giga = {key: row[key] / 1e9 for key in row if key.endswith(("per_step", "per_s", "_ceiling"))}
    tells = [
        f"{giga['flops_per_step']:.4g} GFLOP a step, {giga['achieved_flops_per_s']:.4g} GFLOP/s: {row['mfu']:.1%} of "
        f"the {giga['ceiling_flops_per_s']:.4g} GFLOP/s that products of {row['dtype']} matrices reach here (MFU)",
        f"at most {giga['bytes_per_step']:.4g} GB a step, {giga['achieved_bytes_per_s']:.4g} GB/s of "
        f"{giga['bandwidth_ceiling']:.4g} measured: all inputs and outputs of an eager step's operators, cached or not",
    ]
    if row["uncounted"]:
        names = ", ".join(row["uncounted"][:5]) + ", ..." * (len(row["uncounted"]) > 5)
        tells.append(f"{row['uncounted_share']:.0%} of the operators have no count of FLOPs: {names}")
    if row["nvml_utilisation"] is not None:
        busy = "" if row["busy_share"] is None else f"; the GPU was busy for {row['busy_share']:.0%} of a step"
        share = row["nvml_utilisation"]
        tells.append(
            f"NVML shows {share:.0%} utilisation: for so much of the time some kernel ran, which "
            f"does not say how much of the GPU it used{busy}"
        )
    return tells
