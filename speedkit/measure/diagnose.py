"""Why a step takes so long: causes, each with what shows it, what to change in the plan, and what that would give."""

import collections
import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedkit.ceilings import matmul_rates
from speedkit.errors import UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure import loading
from speedkit.measure.ledger import Ledger, ledger_of
from speedkit.measure.roofline import roofline
from speedkit.measure.timeline import BACKWARD, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from speedkit.measure.trace import BANDWIDTH, COMPUTE, COPY, LAUNCH, SYNC, Trace
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload


class Cause(NamedTuple):
    """What can make a step long."""

    part: str  # the row of the ledger that its seconds lie in
    change: str  # `field=value`, where the plan has a field for it
    evidence: str
    least: float = 0.0  # share of a step: below it any healthy training has some
    saved: tuple[float, float] = (0.9, 1.0)  # shares of its seconds that the change saves, at least and at most


RARELY = "log_every=50: read and report what the device has computed every 50 steps"
WAITING = "the loop waits for data, with {facts.workers} workers"
FOUND = {
    "slow decode": Cause(DATA, "workers={cores}", WAITING),
    "slow collate": Cause(DATA, "workers={cores}", WAITING),
    "slow loader": Cause(DATA, "workers={cores}", WAITING),
    # Page-locked memory is copied faster, and only copies of it can hide behind the computing.
    "large copies": Cause(
        COPY, "pin_memory=True, prefetch=True", "the device waits for a batch's copy", 0.0, (0.5, 1.0)
    ),
    "host read each step": Cause(SYNC, RARELY, "the host waits for the device, in {read}"),
    "printing each step": Cause(OTHER, RARELY, "the loop reports each, in {read}", 0.1),
    "other host work": Cause(OTHER, "move it out of the loop", "the loop's own lines are at work", 0.1),
    "many small operators": Cause(LAUNCH, "compile=default", "{calls:.0f} operators compute little", 0.1, (0.5, 1.0)),
    "compute-bound": Cause(COMPUTE, "precision={best}", "products of matrices are faster in {best}", 0.5),
    "bandwidth-bound": Cause(BANDWIDTH, "compile=default", "operators read and write much", 0.5, (0.25, 0.75)),
    "new shapes": Cause(
        COMPILATION, "bucket=True: pad to a few lengths", "{facts.recompilations:.2g} graphs are compiled"
    ),
    "validation too often": Cause(
        EVALUATION, "validate_every=0, or larger", "{facts.evaluations:.2g} evaluations", 0.1
    ),
}
# A change is told from this gain on: a ledger may leave 5 % unexplained, so what would give less may be nothing.
LEAST_GAIN = 1.05
SMALL_ON_CPU = 0.20  # the least share of calling operators there: an eighth of a healthy small step goes into it
REPORTING = ("print(", "log", "write(", "set_postfix", "display(")  # in a line that reads the device
POWER_LIMITED = 0.95  # of the power limit: from here on a GPU lowers its clock
Row = dict[str, Any]


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
    `notes`. `trace` is a file that keeps the profiler's trace. Raises SpeedkitError for a workload that cannot make a
    step, UsageError for a file that cannot be written.
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
    took_s = {row["part"]: row["sample_s"] * recipe.batch_size for row in parts}
    facts.items_s = took_s["read"] + took_s["decode"] + took_s["features"]
    facts.collate_s, facts.cacheable = took_s["collate"], plan.cache == "off"
    if facts.worker_use is not None:
        notes.append(f"each of {facts.workers} loader workers uses {facts.worker_use:.0%} of a core")
    if facts.power_use is not None and facts.power_use > POWER_LIMITED:
        notes.append(f"the GPU draws {facts.power_use:.0%} of its power limit, so it lowers its clock")
    return ledger.as_dict() | {
        "workload": workload.name,
        "loading": parts,
        # Last: what looks into each operator leaves compiled code switched off.
        "roofline": roofline(workload, recipe, plan, hardware, ledger=ledger),
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
    on_gpu, blocking = device.type == "cuda", os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    uncached = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    profiled = torch.autograd._profiler_enabled() or sys.getprofile() is not None
    switches = {
        "CUDA_LAUNCH_BLOCKING is set, so the host waits for every kernel": on_gpu and blocking not in ("", "0"),
        "PYTORCH_NO_CUDA_MEMORY_CACHING is set, so the driver allocates every tensor": on_gpu and uncached,
        "autograd's anomaly detection is on": torch.is_anomaly_enabled(),
        "only deterministic algorithms are allowed": torch.are_deterministic_algorithms_enabled(),
        "a profiler is at work": profiled,
    }
    return [f"this slows each step: {sentence}" for sentence, is_on in switches.items() if is_on]


# ---- the causes ----


def rank(ledger: Ledger, hardware: Hardware) -> list[Row]:
    """Return the causes of a step's length, the best change first; none on a healthy run.

    Rows are `{cause, part, evidence, field, change, seconds, predicted_speedup_low, predicted_speedup_high}`: `part` is
    the row of the ledger that the `seconds` per step lie in.
    """
    facts, step_s, peaks = ledger.facts, ledger.step_s, matmul_rates(hardware)
    peaks.pop("fp8", None)  # which not every layer can be converted to
    words = {
        "facts": facts,
        "cores": hardware.cores,
        "read": facts.syncs[0] if facts.syncs else "an unknown line",
        "calls": facts.trace.costs.calls / facts.trace.steps,
        "best": max(peaks, key=lambda name: peaks[name]),
    }
    rows = []
    for name, seconds in seconds_by_cause(ledger, hardware, peaks).items():
        cause = remedy(name, seconds, ledger, hardware=hardware, peaks=peaks)
        low, high = (step_s / max(step_s - share * seconds, 0.02 * step_s) for share in cause.saved)
        if seconds <= cause.least * step_s or high < LEAST_GAIN:
            continue
        change, evidence = (text.format(**words) for text in (cause.change, cause.evidence))
        field = change.partition("=")[0]
        row = {
            "cause": name,
            "part": cause.part,
            "evidence": f"{1e3 * seconds:.3g} of {1e3 * step_s:.3g} ms a step: {evidence}",
            "field": field if field in vars(Plan()) else None,
            "change": change,
            "seconds": seconds,
            "predicted_speedup_low": low,
            "predicted_speedup_high": high,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["predicted_speedup_high"])


def seconds_by_cause(ledger: Ledger, hardware: Hardware, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per step that each cause takes."""
    facts, seconds = ledger.facts, {row["cause"]: row["share"] * ledger.step_s for row in ledger.rows}
    seconds = collections.defaultdict(float, seconds)
    wait_s, own_s = seconds[DATA], facts.items_s + facts.collate_s  # one after the other, without workers
    reports = bool(facts.syncs) and any(word in facts.syncs[0].code for word in REPORTING)
    small_s, products_s, passes_s = seconds[LAUNCH], seconds[COMPUTE], seconds[BANDWIDTH]
    if hardware.device.type == "cpu":
        small_s, products_s, passes_s = _seconds_on_cpu(facts.trace, seconds, ledger.step_s)
    formats, slow = facts.trace.costs.products_s, slow_products(facts.trace, peaks)
    return {
        "slow decode": wait_s * facts.items_s / (own_s or 1.0),
        "slow collate": wait_s * facts.collate_s / (own_s or 1.0),
        "slow loader": 0.0 if own_s else wait_s,
        "large copies": seconds[COPY],
        "host read each step": 0.0 if reports else seconds[SYNC],
        "printing each step": seconds[SYNC] + seconds[OTHER] if reports else 0.0,
        "other host work": 0.0 if reports else seconds[OTHER],
        "many small operators": small_s,
        "compute-bound": products_s * sum(slow.values()) / (sum(formats.values()) or 1.0),
        "bandwidth-bound": passes_s if hardware.supports("compile") else 0.0,
        "new shapes": seconds[COMPILATION],
        "validation too often": seconds[EVALUATION],
    }


def slow_products(trace: Trace, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of products of matrices by number format, of those that are slower here than the best."""
    best = max(peaks.values())
    return {name: took_s for name, took_s in trace.costs.products_s.items() if peaks.get(name, best) < best}


def _seconds_on_cpu(trace: Trace, seconds: Mapping[str, float], step_s: float) -> tuple[float, float, float]:
    """Return the seconds per step of calling small operators, of products of matrices, and of passes over memory.

    A CPU's ledger has no such rows: its passes and update are shared out as the profiler saw the operators. It
    inflates small ones, so these get what the others leave, and no more than the profiler saw.
    """
    costs, room_s = trace.costs, sum(seconds[part] for part in (FORWARD, BACKWARD, OPTIMIZER))
    known_s = sum(costs.products_s.values()), costs.passes_s
    scale = min(1 / trace.steps, room_s / (sum(known_s) or math.inf))
    products_s, passes_s = (part_s * scale for part_s in known_s)
    small_s = min(max(room_s - products_s - passes_s, 0.0), costs.small_s / trace.steps)
    return small_s if small_s > SMALL_ON_CPU * step_s else 0.0, products_s, passes_s


def remedy(name: str, seconds: float, ledger: Ledger, *, hardware: Hardware, peaks: Mapping[str, float]) -> Cause:
    """Return a cause with the change that mends it on this machine."""
    cause, facts, step_s, cores = FOUND[name], ledger.facts, ledger.step_s, hardware.cores
    if cause.part == DATA and (facts.workers >= cores or (name == "slow decode" and facts.cacheable)):
        return cause._replace(change="cache=ram", saved=(0.7, 1.0))
    if cause.part == DATA:
        # At best workers hide behind the computing; at worst they share the cores with it.
        busy = hardware.threads if hardware.device.type == "cpu" else 0
        best_s = max(step_s - seconds, seconds / cores)
        worst_s = min(step_s, max(best_s, (seconds + busy * (step_s - seconds)) / cores))
        return cause._replace(saved=((step_s - worst_s) / (seconds or 1), (step_s - best_s) / (seconds or 1)))
    if name == "many small operators" and not hardware.supports("compile"):
        return cause._replace(change=f"fewer, larger operators; {hardware.why_not('compile')}")
    if name == "many small operators" and hardware.supports("cuda_graphs"):
        return cause._replace(change="compile=reduce-overhead")
    if name == "compute-bound":
        best, slow = max(peaks.values()), slow_products(facts.trace, peaks)
        share = sum(took_s * (1 - peaks[kind] / best) for kind, took_s in slow.items()) / (sum(slow.values()) or 1.0)
        return cause._replace(saved=(0.5 * share, share))
    return cause


# ---- in words ----


def as_text(found: Row) -> str:
    """Return what `diagnose` found in words; the loader's parts where data is waited for."""
    known: Row = {field.name: found[field.name] for field in dataclasses.fields(Ledger) if field.name in found}
    lines = [f"{found['workload']}:", str(Ledger(**known)), *found["notes"], *found["roofline"]["tells"]]
    none = "no cause to report: what takes most of the time would not get less by a change of the plan"
    lines.append("causes, by what a change would give (time before / time after):" if found["diagnosis"] else none)
    lines += map(cause_in_words, found["diagnosis"])
    if any(row["part"] == DATA for row in found["diagnosis"]):
        lines.append("a batch loaded in the training process, in ms per sample:")
        line = "  {part:<10}{0:>10.4g} {share:>7.1%}"
        lines += [line.format(1e3 * row["sample_s"], **row) for row in found["loading"]]
    return "\n".join(lines)


def cause_in_words(row: Row) -> str:
    """Return a row of the diagnosis as two lines."""
    line = "  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {cause}: {change}\n      {evidence}"
    return line.format_map(row)
