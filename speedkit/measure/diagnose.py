"""Why a step takes so long: causes, each with what shows it, what to change in the plan, and what that would give."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.measure import loading
from speedkit.measure.counterfactual import counterfactuals
from speedkit.measure.ledger import Ledger, ledger_of, rates
from speedkit.measure.roofline import count, operator_cost_s, roofline
from speedkit.plan import Plan
from speedkit.recipe import Recipe

# What can be found, and the row of the ledger that its seconds lie in.
FOUND = {
    "slow decode": "data wait",
    "slow collate": "data wait",
    "slow loader": "data wait",
    "large copies": "host-to-device copy",
    "host read each step": "sync-bound",
    "printing each step": "other host work",
    "other host work": "other host work",
    "many small operators": "launch-bound",
    "compute-bound": "compute-bound",
    "bandwidth-bound": "bandwidth-bound",
    "new shapes": "compilation",
    "validation too often": "evaluation and checkpoint",
}
# A change is told from this gain on: a ledger may leave 5 % unexplained, so what would give less may be nothing.
LEAST_GAIN = 1.05
# Of these, shares of a step below are no cause at all. Evaluating, calling operators and a loop's own lines are part of
# any healthy training, and a model that computes most of the time is as it should be: it is told where it is most of a
# step.
LEAST = {
    "evaluation and checkpoint": 0.10,
    "launch-bound": 0.10,
    "other host work": 0.10,
    "compute-bound": 0.5,
    "bandwidth-bound": 0.5,
}
ON_CPU = 0.20  # the least for calling operators there: it is what others leave, an eighth of a healthy small step
DISTURBED = 2.0  # times as long as in the counted steps: what an operator may take in others, and no more is its own
CALLS = 4  # times an empty operator: what a small one may cost, with the layer, the hooks and the Python around it
REPORTING = ("print(", "log", "write(", "set_postfix", "display(")  # in a line that reads the device
RARELY = "log_every=50: read and report what the device has computed every 50 steps"
Row = dict[str, Any]


def diagnose(
    workload: Any,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str = "auto",
    cache_dir: Any = None,
    budget_s: float = 60.0,
) -> Row:
    """Return why a step of `workload` takes as long as it does.

    It is the ledger as ledger.json has it, with `workload`, `roofline`, `counterfactuals`, `loading`, `diagnosis` (see
    `rank`), and `left_out`: why a part is missing. Raises SpeedkitError for a workload that cannot make a step.
    """
    if not budget_s > 0:
        raise UsageError(f"a budget of {budget_s:g} s measures nothing: a ledger takes some 6 s, and all of it some 60")
    recipe, plan, hardware = recipe or workload.recipe, plan or Plan(), this_machine(device)
    until_s = time.perf_counter() + budget_s
    ledger = ledger_of(workload, recipe, plan, device=device, cache_dir=cache_dir, evaluate=True)
    found: Row = ledger.as_dict() | {"workload": workload.name, "left_out": {}}
    stages: dict[str, Callable[[], Any]] = {
        "work": lambda: count(workload, recipe, plan, hardware),
        "roofline": lambda: roofline(
            workload, recipe, plan, hardware, ledger, found["work"] or stages["work"](), cache_dir
        ),
        "counterfactuals": lambda: counterfactuals(workload, recipe, plan, hardware, until_s, cache_dir),
        "loading": lambda: loading.examine(
            workload,
            recipe,
            device,
            next((row.get("step_s") for row in found["counterfactuals"] or () if row["name"] == "same batch"), None),
        ),
    }
    for name, stage in stages.items():
        found[name] = None
        try:
            if time.perf_counter() > until_s:
                raise SpeedkitError(f"the budget of {budget_s:g} s was spent before")
            found[name] = stage()
        except Exception as error:  # what was measured so far is worth having
            found["left_out"][name] = str(error) if isinstance(error, SpeedkitError) else repr(error)
    facts = ledger.facts | {"work": found.pop("work"), "workers": plan.workers} | of_machine(hardware)
    if found["loading"]:
        facts |= loading.facts(found["loading"], plan)
    return found | {"diagnosis": rank(ledger, facts, found["counterfactuals"] or [], hardware)}


def of_loop(ledger: Ledger, facts: Row, loader: Any, device: str = "auto") -> list[Row]:
    """Return the causes in a loop of the user's own, of which `facts` and the `loader` are all there is to look at."""
    hardware = this_machine(device)
    return rank(ledger, loading.facts_of_loader(loader) | of_machine(hardware) | facts, [], hardware)


def of_machine(hardware: Hardware) -> Row:
    """Return the facts of a machine that `rank` reads: its ceilings, and what calling an operator costs."""
    return {"ceilings": rates(hardware.device), "operator_cost_s": operator_cost_s(hardware.device)}


def rank(ledger: Ledger, facts: Row, counterfactuals: list[Row], hardware: Hardware) -> list[Row]:
    """Return the causes of a step's length, the best change first; none on a healthy run.

    Rows are `{cause, part, evidence, field, change, seconds, predicted_speedup_low, predicted_speedup_high}`: `part` is
    the row of the ledger that the `seconds` per step lie in. `facts` are the ledger's, with those of the loader, of the
    machine, and `work`, what `roofline.per_step` says. What a counterfactual has measured needs no prediction.
    """
    measured = {row["name"]: row for row in counterfactuals if row.get("decision") == "faster"}
    case = Case(ledger, facts, measured, hardware)
    rules = (_loading, _copies, _host, _launches, _model, _shapes, _evaluation)
    told = [
        row
        for rule in rules
        for row in rule(case)
        if row["seconds"] >= LEAST.get(row["part"], 0.0) * ledger.step_s and row["predicted_speedup_high"] >= LEAST_GAIN
    ]
    return sorted(told, key=lambda row: -row["predicted_speedup_high"])


@dataclasses.dataclass(frozen=True)
class Case:
    """What the rules look at."""

    ledger: Ledger
    facts: Row
    measured: dict[str, Row]  # counterfactuals that gained more than the noise, by name
    hardware: Hardware

    def seconds(self, *parts: str) -> float:
        """Return the seconds per step in rows of the ledger."""
        return sum(map(self.ledger.share, parts)) * self.ledger.step_s

    def bound(self) -> tuple[float, float, float]:
        """Return the seconds per step bound by calling operators, by computing and by moving memory.

        On a CPU, whose ledger has none, passes and update are shared out as the operators of the counted steps took
        their time; small ones get what the others leave, as far as their number can explain it.
        """
        work = self.facts.get("work") or {}
        if self.hardware.device.type != "cpu" or not work:
            return self.seconds("launch-bound"), self.seconds("compute-bound"), self.seconds("bandwidth-bound")
        passes_s, known_s = self.seconds("forward", "backward", "optimizer"), work["compute_s"] + work["bandwidth_s"]
        small_s = min(max(passes_s - known_s, 0.0), CALLS * self.facts["operator_cost_s"] * work["small"])
        slower = min(DISTURBED, (passes_s - small_s) / known_s) if known_s else 0.0
        return small_s, slower * work["compute_s"], slower * work["bandwidth_s"]

    def row(
        self,
        cause: str,
        seconds: float,
        evidence: str,
        field: str | None,
        change: str,
        saved_s: tuple[float, float] | None = None,
        measured: str = "",
    ) -> Row:
        """Return the row of a cause. Its change saves 90 % to all of the seconds, if not as given or `measured`."""
        step_s, saved_s = self.ledger.step_s, saved_s or (0.9 * seconds, seconds)
        low, high = (step_s / max(step_s - most_s, 0.02 * step_s) for most_s in saved_s)
        if found := self.measured.get(measured):
            low, high = found["low"], found["high"]
        return {
            "cause": cause,
            "part": FOUND[cause],
            "evidence": evidence,
            "field": field,
            "change": change,
            "seconds": seconds,
            "predicted_speedup_low": low,
            "predicted_speedup_high": high,
        }


def _loading(case: Case) -> Iterator[Row]:
    """Share a wait for the batch out to making its items and to joining them, by what each takes on its own."""
    facts, step_s, wait_s = case.facts, case.ledger.step_s, case.seconds("data wait")
    items_s, collate_s = facts.get("items_s", 0.0), facts.get("collate_s", 0.0)
    parts = {"slow decode": items_s, "slow collate": collate_s} if items_s + collate_s else {"slow loader": 1.0}
    shown = f"a step waits {_ms(wait_s)} of its {_ms(step_s)} for a batch"
    if items_s + collate_s:
        shown += f"; making the items of one takes {_ms(items_s)}, joining them {_ms(collate_s)}"
    cores, busy = case.hardware.cores, case.hardware.threads if case.hardware.device.type == "cpu" else 0
    for cause, part_s in parts.items():
        own_s = wait_s * part_s / sum(parts.values())
        rest_s = step_s - own_s
        if (facts.get("workers") or 0) >= cores:
            yield case.row(cause, own_s, f"{shown}; {cores} cores have as many workers", "cache", "cache=disk")
            continue
        # At best workers hide behind the computing; at worst they share the cores with it.
        best_s = max(rest_s, own_s / cores)
        saved_s = step_s - min(step_s, max(best_s, (own_s + busy * rest_s) / cores)), step_s - best_s
        lever = {"field": "workers", "change": f"workers={cores}"}
        if cause == "slow decode" and facts.get("levers"):
            lever, trained_s = facts["levers"][0], step_s - case.seconds("evaluation and checkpoint")
            least_s, most_s = (trained_s * (1 - 1 / lever[f"predicted_speedup_{end}"]) for end in ("low", "high"))
            saved_s = least_s, most_s
        yield case.row(cause, own_s, shown, lever["field"], lever["change"], saved_s)


def _copies(case: Case) -> Iterator[Row]:
    """Pinned memory is copied faster, and only copies of it can hide behind the computing."""
    facts, copy_s, rate = case.facts, case.seconds("host-to-device copy"), case.facts["ceilings"]
    pinned = facts.get("pinned")
    memory, size = "pinned" if pinned else "pageable", (facts.get("copies_bytes") or 0) / 1e6
    shown = f"{_ms(copy_s)} a step go into copying {size:.3g} MB of {memory} memory while nothing computes"
    slower = rate.get("host_to_device_pageable", 1.0) / rate.get("host_to_device_pinned", 1.0)
    saved_s = (0.0 if pinned else copy_s * max(0.0, 1 - slower)), copy_s
    yield case.row(
        "large copies", copy_s, shown, "prefetch" if pinned else "pin_memory", "pin_memory=True, prefetch=True", saved_s
    )


def _host(case: Case) -> Iterator[Row]:
    """What the loop does itself: it reads the device, and does something with what it read."""
    facts, wait_s, other_s = case.facts, case.seconds("sync-bound"), case.seconds("other host work")
    read = next(iter(facts.get("syncs") or ()), None)
    where = f"{Path(read['file']).name}:{read['line']}: {read['code']}" if read else "an unknown line"
    if read and any(word in read["code"] for word in REPORTING):
        shown = f"{_ms(wait_s + other_s)} a step are spent in the loop itself, which reports each step, in {where}"
        yield case.row("printing each step", wait_s + other_s, shown, "log_every", RARELY, measured="no logging")
        return
    yield case.row(
        "host read each step",
        wait_s,
        f"the host waits {_ms(wait_s)} a step for the device, in {where}",
        "log_every",
        RARELY,
        measured="no logging",
    )
    yield case.row(
        "other host work",
        other_s,
        f"{_ms(other_s)} a step are spent in the loop itself, in neither the model, the optimizer nor the loader",
        None,
        "move it out of the loop",
    )


def _launches(case: Case) -> Iterator[Row]:
    """Operators that take as long as it takes to call them: on a GPU the gaps before launches."""
    facts, work, hardware = case.facts, case.facts.get("work") or {}, case.hardware
    each_s, calls = facts["operator_cost_s"], work.get("operators") or facts.get("operators_per_step") or 0
    own_s, *_ = case.bound()
    if hardware.device.type == "cpu" and own_s < ON_CPU * case.ledger.step_s:
        own_s = 0.0
    shown = (
        f"{_ms(own_s)} a step go into calling operators: there are {calls:.0f}, and one that has nothing to do "
        f"costs {_ms(each_s)} here"
    )
    compiles = hardware.supports("compile")
    mode = "reduce-overhead" if hardware.supports("cuda_graphs") else "default"
    change = f"compile={mode}" if compiles else f"fewer, larger operators; {hardware.why_not('compile')}"
    field = "compile" if compiles else None
    yield case.row("many small operators", own_s, shown, field, change, (0.5 * own_s, own_s), "compiled")
    if fused := case.measured.get("fused optimizer"):
        own_s = case.ledger.step_s * (1 - 1 / fused["ratio"])
        shown = f"a step is {_ms(own_s)} shorter where one operator updates all weights"
        yield case.row(
            "many small operators", own_s, shown, "fused_optimizer", "fused_optimizer=True", measured="fused optimizer"
        )


def _model(case: Case) -> Iterator[Row]:
    """What the model computes and moves, where another number format, or fewer passes, would make it less."""
    work, rate, step_s = case.facts.get("work") or {}, case.facts["ceilings"], case.ledger.step_s
    _, compute_s, bandwidth_s = case.bound()
    compute_s *= work.get("dtype_share", 1.0)  # what is in the best format already has nothing to gain
    peaks = {name: rate[f"matmul_{name}"] for name in ("fp32", "tf32", "bf16", "fp16") if f"matmul_{name}" in rate}
    own, best = work.get("dtype", "fp32"), max(peaks, key=lambda name: peaks[name])
    own = own if own in peaks else "fp32"
    if own != best:
        factor = peaks[best] / peaks[own]
        top, roof_s = work.get("compute_top"), work.get("compute_roof_s", 0.0)
        shown = (
            f"{_ms(compute_s)} of {_ms(step_s)} are products bound by computing, most in {top}; at the {own} "
            f"ceiling {_ms(roof_s)} would be left, and that of {best} is {factor:.3g} times as high"
        )
        saved_s = 0.5 * (1 - 1 / factor) * compute_s, (1 - 1 / factor) * compute_s
        yield case.row("compute-bound", compute_s, shown, "precision", f"precision={best}", saved_s)
    if case.hardware.supports("compile"):
        fusible = work.get("fusible", 0.0)
        shown = (
            f"{_ms(bandwidth_s)} of {_ms(step_s)} are passes over memory, most in {work.get('bandwidth_top')}; "
            f"{fusible:.0%} of the bytes are of operators that follow another over as many elements"
        )
        yield case.row(
            "bandwidth-bound",
            bandwidth_s,
            shown,
            "compile",
            "compile=default: one pass for many operators",
            (0.5 * fusible * bandwidth_s, fusible * bandwidth_s),
            "compiled",
        )


def _shapes(case: Case) -> Iterator[Row]:
    facts, own_s = case.facts, case.seconds("compilation")
    shown = (
        f"{facts.get('recompiles') or 0:.0f} graphs were compiled anew in {case.ledger.steps} steps, "
        f"{_ms(own_s)} a step: batches had {facts.get('shapes_seen') or 'several'} shapes"
    )
    change = "bucket=True: pad to a few lengths; or compile with dynamic=True"
    yield case.row("new shapes", own_s, shown, "bucket", change)


def _evaluation(case: Case) -> Iterator[Row]:
    own_s, step_s = case.seconds("evaluation and checkpoint"), case.ledger.step_s
    often = case.facts.get("evaluations") or 0
    shown = (
        f"evaluating {often:.3g} times in {case.ledger.steps} steps takes {_ms(own_s)} of {_ms(step_s)} a step, "
        f"{own_s / step_s:.0%}"
    )
    yield case.row("validation too often", own_s, shown, "validate_every", "validate_every ten times as large, or 0")


def as_text(found: Row) -> str:
    """Return what `diagnose` found in words; the loader's parts where data is waited for."""
    known: Row = {field.name: found[field.name] for field in dataclasses.fields(Ledger) if field.name in found}
    lines = [f"{found['workload']}:", str(Ledger(**known))]
    lines += [f"  {told}" for told in (found["roofline"] or {"tells": []})["tells"]]
    none = "no cause to report: what takes most of the time would not get less by a change of the plan"
    lines.append("causes, by what a change would give (time before / time after):" if found["diagnosis"] else none)
    for row in found["diagnosis"]:
        lines.append("  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {cause}: {change}".format_map(row))
        lines.append(f"      {row['evidence']}")
    lines += ["the same training with one thing changed, in turns with itself:"] * bool(found["counterfactuals"])
    for row in found["counterfactuals"] or ():
        shown = "left out: {left_out}" if "left_out" in row else "{ratio:.2f} ({low:.2f} to {high:.2f}) times as fast"
        lines.append("  {name}: ".format_map(row) + shown.format_map(row))
    if found["loading"] and any(row["part"] == "data wait" for row in found["diagnosis"]):
        lines.append(loading.as_text(found["loading"]))
    return "\n".join([*lines, *(f"  {name} left out: {why}" for name, why in found["left_out"].items())])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
