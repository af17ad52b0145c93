"""Why a step takes so long: causes, each with what shows it, what to change in the plan, and what that would give."""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from speedkit.ceilings import matmul_rates
from speedkit.errors import UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure import loading
from speedkit.measure.ledger import Ledger, ledger_of
from speedkit.measure.roofline import roofline
from speedkit.measure.timeline import BACKWARD, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from speedkit.measure.trace import BANDWIDTH, COMPUTE, COPY, LAUNCH, SYNC
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload

RARELY = "log_every=50: read and report what the device has computed every 50 steps"
REPORTING = ("print(", "log", "write(", "set_postfix", "display(")  # in a line that reads the device
MIN_GAIN = 1.05  # a ledger may leave 5 % unexplained: what would give less may be nothing
MIN_SMALL_ON_CPU = 0.20  # of a step, for calling operators: an eighth of a healthy small step goes into it
POWER_LIMITED = 0.95  # of the power limit: from here on a GPU lowers its clock
Row = dict[str, Any]


@dataclasses.dataclass
class Cause:
    """Something that makes a step long, and what to change."""

    name: str
    part: str  # the row of the ledger that its seconds lie in
    seconds: float  # per step
    change: str  # `field=value`, where the plan has a field for it
    evidence: str
    min_share: float = 0.0  # of a step: below it any healthy training has some
    saved: tuple[float, float] = (0.9, 1.0)  # shares of the seconds that the change saves, at least and at most


def diagnose(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str = "auto",
    cache_dir: str | Path | None = None,
    trace: str | Path | None = None,
) -> Row:
    """Return why a step of `workload` takes as long as it does.

    It is the ledger as ledger.json has it, with `workload`, `loading`, `roofline`, `diagnosis` (see `rank`) and
    `notes`. `trace` is a file that keeps the profiler's trace. Raises UsageError for a file that cannot be written.
    """
    if trace is not None:
        try:
            Path(trace).open("ab").close()
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {trace}: {error.strerror}") from None
    recipe, plan, hardware = recipe or workload.recipe, plan or Plan(), this_machine(device)
    notes = costly_switches(hardware.device)
    ledger = ledger_of(workload, recipe, plan, device=device, cache_dir=cache_dir, trace_file=trace)
    facts, parts = ledger.facts, loading.examine(workload, recipe, device)
    part_s = {row["part"]: row["sample_s"] * recipe.batch_size for row in parts}
    facts.items_s = part_s["read"] + part_s["decode"] + part_s["features"]
    facts.collate_s, facts.cacheable = part_s["collate"], plan.cache == "off"
    if facts.worker_use is not None:
        notes.append(f"each of {facts.workers} loader workers uses {facts.worker_use:.0%} of a core")
    if facts.power_use is not None and facts.power_use > POWER_LIMITED:
        notes.append(f"the GPU draws {facts.power_use:.0%} of its power limit, so it lowers its clock")
    return ledger.as_dict() | {
        "workload": workload.name,
        "loading": parts,
        # Last: what looks into each operator leaves compiled code switched off.
        "roofline": roofline(workload, recipe, plan, hardware=hardware, ledger=ledger),
        "diagnosis": rank(ledger, hardware),
        "notes": notes,
    }


def of_loop(ledger: Ledger, loader: Any, device: torch.device) -> list[Row]:
    """Return the causes in a loop of the user's own, of which the ledger and the `loader` are all there is to see."""
    ledger.facts.items_s, ledger.facts.collate_s = loading.loader_costs(loader)
    ledger.facts.workers = getattr(loader, "num_workers", 0)
    return rank(ledger, this_machine(device))


def costly_switches(device: torch.device) -> list[str]:
    """Return a sentence for each debugging switch that is on and makes steps slower."""
    environment = os.environ if device.type == "cuda" else {}
    blocking = environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    uncached = "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment
    switches = {
        "CUDA_LAUNCH_BLOCKING is set, so the host waits for every kernel": blocking,
        "PYTORCH_NO_CUDA_MEMORY_CACHING is set, so the driver allocates every tensor": uncached,
        "autograd's anomaly detection is on": torch.is_anomaly_enabled(),
        "only deterministic algorithms are allowed": torch.are_deterministic_algorithms_enabled(),
        "a profiler is at work": torch.autograd._profiler_enabled() or sys.getprofile() is not None,
    }
    return [f"this slows each step: {sentence}" for sentence, is_on in switches.items() if is_on]


# ---- the causes ----


def rank(ledger: Ledger, hardware: Hardware) -> list[Row]:
    """Return the causes of a step's length, the best change first; none on a healthy run.

    Rows are `{cause, part, evidence, field, change, seconds, predicted_speedup_low, predicted_speedup_high}`: `part` is
    the row of the ledger that the `seconds` per step lie in.
    """
    rows, step_s = [], ledger.step_s
    for cause in (*_data_causes(ledger, hardware), *_host_causes(ledger), *_operator_causes(ledger, hardware)):
        low, high = (step_s / max(step_s - share * cause.seconds, 0.02 * step_s) for share in cause.saved)
        if cause.seconds <= cause.min_share * step_s or high < MIN_GAIN:
            continue
        field = cause.change.partition("=")[0]
        row = {
            "cause": cause.name,
            "part": cause.part,
            "evidence": f"{1e3 * cause.seconds:.3g} of {1e3 * step_s:.3g} ms a step: {cause.evidence}",
            "field": field if field in vars(Plan()) else None,
            "change": cause.change,
            "seconds": cause.seconds,
            "predicted_speedup_low": low,
            "predicted_speedup_high": high,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["predicted_speedup_high"])


def _data_causes(ledger: Ledger, hardware: Hardware) -> Iterator[Cause]:
    """Yield what makes the loop wait for data: the wait is shared out as making and joining a batch's items take."""
    facts, step_s, cores = ledger.facts, ledger.step_s, hardware.cores
    costs = {"slow decode": facts.items_s, "slow collate": facts.collate_s}
    if not any(costs.values()):
        costs = {"slow loader": 1.0}
    for name, cost_s in costs.items():
        seconds = step_s * ledger.share(DATA) * cost_s / sum(costs.values())
        change, saved = "cache=ram", (0.7, 1.0)
        if facts.workers < cores and not (name == "slow decode" and facts.cacheable):
            # At best workers hide behind the computing; at worst they share the cores with it.
            busy = hardware.threads if hardware.device.type == "cpu" else 0
            best_s = max(step_s - seconds, seconds / cores)
            worst_s = min(step_s, max(best_s, (seconds + busy * (step_s - seconds)) / cores))
            change = f"workers={cores}"
            saved = (step_s - worst_s) / (seconds or 1.0), (step_s - best_s) / (seconds or 1.0)
        yield Cause(name, DATA, seconds, change, f"the loop waits for data, with {facts.workers} workers", saved=saved)


def _host_causes(ledger: Ledger) -> Iterator[Cause]:
    """Yield what the host does beside calling operators."""
    facts = ledger.facts
    copy_s, sync_s, other_s, compiling_s, evaluation_s = (
        ledger.step_s * ledger.share(part) for part in (COPY, SYNC, OTHER, COMPILATION, EVALUATION)
    )
    # Page-locked memory is copied faster, and only copies of it can hide behind the computing.
    pinned = "pin_memory=True, prefetch=True"
    yield Cause("large copies", COPY, copy_s, pinned, "the device waits for a batch's copy", saved=(0.5, 1.0))
    read = facts.syncs[0] if facts.syncs else None
    if read and any(word in read.code for word in REPORTING):
        yield Cause("printing each step", OTHER, sync_s + other_s, RARELY, f"the loop reports each, in {read}", 0.1)
    else:
        where = read or "an unknown line"
        yield Cause("host read each step", SYNC, sync_s, RARELY, f"the host waits for the device, in {where}")
        lines = "the loop's own lines are at work"
        yield Cause("other host work", OTHER, other_s, "move it out of the loop", lines, 0.1)
    graphs = f"{facts.recompilations:.2g} graphs are compiled"
    yield Cause("new shapes", COMPILATION, compiling_s, "bucket=True: pad to a few lengths", graphs)
    evaluations = f"{facts.evaluations:.2g} evaluations"
    yield Cause("validation too often", EVALUATION, evaluation_s, "validate_every=0, or larger", evaluations, 0.1)


def _operator_causes(ledger: Ledger, hardware: Hardware) -> Iterator[Cause]:
    """Yield what calling and computing the operators takes longer than it must."""
    trace = ledger.facts.trace
    small_s, products_s, passes_s = (ledger.step_s * ledger.share(part) for part in (LAUNCH, COMPUTE, BANDWIDTH))
    if hardware.device.type == "cpu":
        small_s, products_s, passes_s = _seconds_on_cpu(ledger)

    change = "compile=reduce-overhead" if hardware.supports("cuda_graphs") else "compile=default"
    if not hardware.supports("compile"):
        change = f"fewer, larger operators; {hardware.why_not('compile')}"
    calls = f"{trace.costs.calls / trace.steps:.0f} operators compute little"
    yield Cause("many small operators", LAUNCH, small_s, change, calls, 0.1, (0.5, 1.0))
    if hardware.supports("compile"):
        passes = "operators read and write much"
        yield Cause("bandwidth-bound", BANDWIDTH, passes_s, "compile=default", passes, 0.5, (0.25, 0.75))

    rates = matmul_rates(hardware)
    rates.pop("fp8", None)  # which not every layer can be converted to
    best = max(rates, key=lambda name: rates[name])
    saved = {name: 1 - rate / rates[best] for name, rate in rates.items()}  # of a product's time, by its number format
    slow = {name: seconds for name, seconds in trace.costs.products_s.items() if saved.get(name)}
    slow_s = products_s * sum(slow.values()) / (sum(trace.costs.products_s.values()) or 1.0)
    gain = sum(seconds * saved[name] for name, seconds in slow.items()) / (sum(slow.values()) or 1.0)
    products = f"products of matrices are faster in {best}"
    yield Cause("compute-bound", COMPUTE, slow_s, f"precision={best}", products, 0.5, (0.5 * gain, gain))


def _seconds_on_cpu(ledger: Ledger) -> tuple[float, float, float]:
    """Return the seconds per step of calling small operators, of products of matrices, and of passes over memory.

    A CPU's ledger has no such rows: its passes and update are shared out as the profiler saw the operators. It
    inflates small ones, so these get what the others leave, and no more than the profiler saw.
    """
    costs, steps = ledger.facts.trace.costs, ledger.facts.trace.steps
    room_s = ledger.step_s * sum(map(ledger.share, (FORWARD, BACKWARD, OPTIMIZER)))
    large_s = sum(costs.products_s.values()) + costs.passes_s
    scale = min(1 / steps, room_s / (large_s or math.inf))
    small_s = min(room_s - scale * large_s, costs.small_s / steps)
    small_s = small_s if small_s > MIN_SMALL_ON_CPU * ledger.step_s else 0.0
    return small_s, scale * sum(costs.products_s.values()), scale * costs.passes_s


# ---- in words ----


def as_text(report: Row) -> str:
    """Return the report of `diagnose` in words; the loader's parts where data is waited for."""
    ledger: Row = {field.name: report[field.name] for field in dataclasses.fields(Ledger) if field.name in report}
    lines = [f"{report['workload']}:", str(Ledger(**ledger)), *report["notes"], *report["roofline"]["tells"]]
    none = "no cause to report: what takes most of the time would not get less by a change of the plan"
    lines.append("causes, by what a change would give (time before / time after):" if report["diagnosis"] else none)
    lines += map(cause_in_words, report["diagnosis"])
    if any(row["part"] == DATA for row in report["diagnosis"]):
        lines.append("a batch loaded in the training process, in ms per sample:")
        line = "  {part:<10}{0:>10.4g} {share:>7.1%}"
        lines += [line.format(1e3 * row["sample_s"], **row) for row in report["loading"]]
    return "\n".join(lines)


def cause_in_words(row: Row) -> str:
    """Return a row of the diagnosis as two lines."""
    line = "  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {cause}: {change}\n      {evidence}"
    return line.format_map(row)
