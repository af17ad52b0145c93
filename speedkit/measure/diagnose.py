"""Why a step takes so long: causes, each with what shows it, what to change in the plan, and what that would give."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedkit.config import settings_of
from speedkit.errors import UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure import loading
from speedkit.measure.ablations import ablate
from speedkit.measure.ledger import Ledger, ledger_of
from speedkit.measure.roofline import rates, roofline
from speedkit.measure.timeline import BACKWARD, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from speedkit.measure.trace import BANDWIDTH, COMPUTE, COPY, LAUNCH, SYNC
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload


class Cause(NamedTuple):
    """The row of the ledger that its seconds lie in, and what else decides whether it is one."""

    part: str
    least: float = 0.0  # share of a step: below it any healthy training has some
    ablation: str = ""  # that measures what its change gives


FOUND = {
    "slow decode": Cause(DATA),
    "slow collate": Cause(DATA),
    "slow loader": Cause(DATA),
    "large copies": Cause(COPY),
    "host read each step": Cause(SYNC, ablation="no logging"),
    "printing each step": Cause(OTHER, 0.1, "no logging"),
    "other host work": Cause(OTHER, 0.1),
    "many small operators": Cause(LAUNCH, 0.1, "compiled"),
    "unfused optimizer": Cause(OPTIMIZER, ablation="fused optimizer"),
    "compute-bound": Cause(COMPUTE, 0.5),
    "bandwidth-bound": Cause(BANDWIDTH, 0.5, "compiled"),
    "new shapes": Cause(COMPILATION),
    "validation too often": Cause(EVALUATION, 0.1),
}
# A change is told from this gain on: a ledger may leave 5 % unexplained, so what would give less may be nothing.
LEAST_GAIN = 1.05
SMALL_ON_CPU = 0.20  # the least share of calling operators there: an eighth of a healthy small step goes into it
REPORTING = ("print(", "log", "write(", "set_postfix", "display(")  # in a line that reads the device
RARELY = "log_every=50: read and report what the device has computed every 50 steps"
POWER_LIMITED = 0.95  # of the power limit: from here on a GPU lowers its clock
Row = dict[str, Any]


def diagnose(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str = "auto",
    cache_dir: str | Path | None = None,
    budget_s: float = 60.0,
    trace: str | Path | None = None,
) -> Row:
    """Return why a step of `workload` takes as long as it does.

    It is the ledger as ledger.json has it, with `workload`, `loading`, `ablations`, `roofline` (None where the budget
    has no time left for one), `diagnosis` (see `rank`) and `notes`. `trace` is a file that keeps the profiler's trace.
    Raises SpeedkitError for a workload that cannot make a step, UsageError for a file that cannot be written.
    """
    if trace is not None:
        try:
            Path(trace).open("ab").close()
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {trace}: {error.strerror}") from None
    recipe, plan, hardware = recipe or workload.recipe, plan or Plan(), this_machine(device)
    until_s, notes = time.perf_counter() + budget_s, costly_switches(hardware.device)
    ledger = ledger_of(workload, recipe, plan, device=device, cache_dir=cache_dir, trace_file=trace)
    facts, parts = ledger.facts, loading.examine(workload, recipe, device)
    took_s = {row["part"]: row["sample_s"] * recipe.batch_size for row in parts}
    facts.items_s = took_s["read"] + took_s["decode"] + took_s["features"]
    facts.collate_s, facts.cacheable = took_s["collate"], plan.cache == "off"
    ablations = ablate(workload, recipe, plan, hardware=hardware, cache_dir=cache_dir, until_s=until_s)
    near = None
    if time.perf_counter() < until_s:  # last: what looks into each operator leaves compiled code switched off
        near = roofline(workload, recipe, plan, hardware, ledger=ledger)
    else:
        notes.append(f"roofline left out: the budget of {budget_s:g} s was spent")
    if facts.worker_use is not None:
        notes.append(f"each of {facts.workers} loader workers uses {facts.worker_use:.0%} of a core")
    if facts.power_use is not None and facts.power_use > POWER_LIMITED:
        notes.append(f"the GPU draws {facts.power_use:.0%} of its power limit, so it lowers its clock")
    return ledger.as_dict() | {
        "workload": workload.name,
        "loading": parts,
        "ablations": ablations,
        "roofline": near,
        "diagnosis": rank(ledger, hardware, ablations),
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


def rank(ledger: Ledger, hardware: Hardware, ablations: Sequence[Row] = ()) -> list[Row]:
    """Return the causes of a step's length, the best change first; none on a healthy run.

    Rows are `{cause, part, evidence, field, change, seconds, predicted_speedup_low, predicted_speedup_high}`: `part` is
    the row of the ledger that the `seconds` per step lie in. What an ablation has measured needs no prediction.
    """
    faster = {row["name"]: row for row in ablations if row.get("decision") == "faster"}
    case = Case(ledger, hardware, faster, rates(hardware.device))
    rows = [row for rule in (_loading, _host, _operators, _products) for row in rule(case)]
    told = [row for row in rows if row["predicted_speedup_high"] >= LEAST_GAIN]
    told = [row for row in told if row["seconds"] > FOUND[row["cause"]].least * ledger.step_s]
    return sorted(told, key=lambda row: -row["predicted_speedup_high"])


@dataclasses.dataclass(frozen=True)
class Case:
    """What the rules look at."""

    ledger: Ledger
    hardware: Hardware
    ablations: Mapping[str, Row]  # those that made steps faster, by name
    rates: Mapping[str, float]  # the measured ceilings

    def seconds(self, *causes: str) -> float:
        """Return the seconds per step in rows of the ledger."""
        return self.ledger.share(*causes) * self.ledger.step_s

    def bounds(self) -> tuple[float, float, float]:
        """Return the seconds per step of calling operators, of products of matrices, and of passes over memory.

        A CPU's ledger has no such rows: its passes and update are shared out as the profiler saw the operators. It
        inflates small ones, so these get what the others leave, and no more than the profiler saw.
        """
        if self.hardware.device.type != "cpu":
            return self.seconds(LAUNCH), self.seconds(COMPUTE), self.seconds(BANDWIDTH)
        costs, steps = self.ledger.facts.trace.costs, self.ledger.facts.trace.steps
        room_s, known = self.seconds(FORWARD, BACKWARD, OPTIMIZER), (sum(costs.products_s.values()), costs.passes_s)
        scale = min(1 / steps, room_s / (sum(known) or math.inf))
        products_s, passes_s = (seconds * scale for seconds in known)
        return min(max(room_s - products_s - passes_s, 0.0), costs.small_s / steps), products_s, passes_s

    def row(
        self, cause: str, seconds: float, change: str, *, evidence: str, saved: tuple[float, float] = (0.9, 1.0)
    ) -> Row:
        """Return the row of a cause. Its change, `field=value`, saves these shares of the seconds, or as measured."""
        step_s, field = self.ledger.step_s, change.partition("=")[0]
        low, high = (step_s / max(step_s - share * seconds, 0.02 * step_s) for share in saved)
        if measured := self.ablations.get(FOUND[cause].ablation):
            low, high = measured["low"], measured["high"]
        return {
            "cause": cause,
            "part": FOUND[cause].part,
            "evidence": f"{1e3 * seconds:.3g} of {1e3 * step_s:.3g} ms a step: {evidence}",
            "field": field if field in settings_of(Plan) else None,
            "change": change,
            "seconds": seconds,
            "predicted_speedup_low": low,
            "predicted_speedup_high": high,
        }


def _loading(case: Case) -> Iterator[Row]:
    """Share a wait for the batch out to making its items and to joining them, by what each takes on its own."""
    facts, step_s, cores = case.ledger.facts, case.ledger.step_s, case.hardware.cores
    busy = case.hardware.threads if case.hardware.device.type == "cpu" else 0
    parts = {"slow decode": facts.items_s, "slow collate": facts.collate_s}
    if not any(parts.values()):
        parts = {"slow loader": 1.0}
    for cause, part_s in parts.items():
        own_s = case.seconds(DATA) * part_s / sum(parts.values())
        # At best workers hide behind the computing; at worst they share the cores with it.
        best_s = max(step_s - own_s, own_s / cores)
        worst_s = min(step_s, max(best_s, (own_s + busy * (step_s - own_s)) / cores))
        change, saved = f"workers={cores}", ((step_s - worst_s) / (own_s or 1), (step_s - best_s) / (own_s or 1))
        if facts.workers >= cores or (cause == "slow decode" and facts.cacheable):
            change, saved = "cache=ram", (0.7, 1.0)
        evidence = f"the loop waits for data, with {facts.workers} workers"
        yield case.row(cause, own_s, change, evidence=evidence, saved=saved)


def _host(case: Case) -> Iterator[Row]:
    """What the loop does itself beside training: copy, read the device, report, compile, evaluate."""
    facts, wait_s, other_s = case.ledger.facts, case.seconds(SYNC), case.seconds(OTHER)
    # Page-locked memory is copied faster, and only copies of it can hide behind the computing.
    change, saved = ("prefetch=True", 0.0) if facts.trace.pinned else ("pin_memory=True, prefetch=True", 0.5)
    evidence = "the device stands still while batches are copied to it"
    yield case.row("large copies", case.seconds(COPY), change, evidence=evidence, saved=(saved, 1.0))

    read = facts.syncs[0] if facts.syncs else None
    if read and any(word in read.code for word in REPORTING):
        yield case.row("printing each step", wait_s + other_s, RARELY, evidence=f"the loop reports each, in {read}")
    else:
        evidence = f"the host waits for the device, in {read or 'an unknown line'}"
        yield case.row("host read each step", wait_s, RARELY, evidence=evidence)
        evidence = "the loop itself is at work, not the model, the optimizer or the loader"
        yield case.row("other host work", other_s, "move it out of the loop", evidence=evidence)

    change = "bucket=True: pad to a few lengths; or compile with dynamic=True"
    evidence = f"{facts.recompilations:.2g} graphs are compiled anew in each, for inputs of another shape"
    yield case.row("new shapes", case.seconds(COMPILATION), change, evidence=evidence)
    change = "validate_every=0, or ten times as large"
    evidence = f"the model is evaluated {facts.evaluations:.2g} times in each"
    yield case.row("validation too often", case.seconds(EVALUATION), change, evidence=evidence)


def _operators(case: Case) -> Iterator[Row]:
    """Operators that take as long as it takes to call them, and passes over memory: a compiler joins both."""
    hardware, trace, (small_s, _, passes_s) = case.hardware, case.ledger.facts.trace, case.bounds()
    if hardware.device.type == "cpu" and small_s < SMALL_ON_CPU * case.ledger.step_s:
        small_s = 0.0
    change = f"compile={'reduce-overhead' if hardware.supports('cuda_graphs') else 'default'}"
    if why := hardware.why_not("compile"):
        change, passes_s = f"fewer, larger operators; {why}", 0.0
    evidence = f"{trace.costs.calls / trace.steps:.0f} operators are called that compute little"
    yield case.row("many small operators", small_s, change, evidence=evidence, saved=(0.5, 1.0))
    evidence = "operators read and write memory and compute little"
    yield case.row("bandwidth-bound", passes_s, "compile=default", evidence=evidence, saved=(0.25, 0.75))
    if fused := case.ablations.get("fused optimizer"):
        own_s, evidence = case.ledger.step_s * (1 - 1 / fused["ratio"]), "the update calls operators for each weight"
        yield case.row("unfused optimizer", own_s, "fused_optimizer=True", evidence=evidence)


def _products(case: Case) -> Iterator[Row]:
    """Products in a number format in which this machine is slower than in another."""
    peaks = {name.removeprefix("matmul_"): rate for name, rate in case.rates.items() if name.startswith("matmul_")}
    peaks.pop("fp8", None)  # which not every layer can be converted to
    best, (_, own_s, _) = max(peaks, key=lambda name: peaks[name]), case.bounds()
    costs = case.ledger.facts.trace.costs.products_s
    slow = {name: seconds for name, seconds in costs.items() if peaks.get(name, peaks[best]) < peaks[best]}
    if slow:
        own_s *= sum(slow.values()) / sum(costs.values())
        share = sum(slow[name] * (1 - peaks[name] / peaks[best]) for name in slow) / sum(slow.values())
        evidence = f"products of {' and '.join(slow)} matrices, where {best} is faster"
        yield case.row("compute-bound", own_s, f"precision={best}", evidence=evidence, saved=(0.5 * share, share))


# ---- in words ----


def as_text(found: Row) -> str:
    """Return what `diagnose` found in words; the loader's parts where data is waited for."""
    known: Row = {field.name: found[field.name] for field in dataclasses.fields(Ledger) if field.name in found}
    near = found["roofline"] or {"tells": []}
    lines = [f"{found['workload']}:", str(Ledger(**known)), *found["notes"], *near["tells"]]
    none = "no cause to report: what takes most of the time would not get less by a change of the plan"
    lines.append("causes, by what a change would give (time before / time after):" if found["diagnosis"] else none)
    lines += map(cause_in_words, found["diagnosis"])
    lines.append("the same training with one thing changed, in turns with itself:")
    for row in found["ablations"]:
        shown = "left out: {left_out}" if "left_out" in row else "{ratio:.2f} ({low:.2f} to {high:.2f}) times as fast"
        lines.append("  {name}: ".format_map(row) + shown.format_map(row))
    if any(row["part"] == DATA for row in found["diagnosis"]):
        lines.append("a batch loaded in the training process, in ms per sample:")
        line = "  {part:<10}{0:>10.4g} {share:>7.1%}"
        lines += [line.format(1e3 * row["sample_s"], **row) for row in found["loading"]]
    return "\n".join(lines)


def cause_in_words(row: Row) -> str:
    """Return a row of the diagnosis as two lines."""
    line = "  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {cause}: {change}\n      {evidence}"
    return line.format_map(row)
