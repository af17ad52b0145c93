"""Bottlenecks: why a step takes so long, what shows it, what to change in the plan, and what that would give."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from speedkit.display import table
from speedkit.machine import Hardware
from speedkit.measure.breakdown import Breakdown
from speedkit.measure.peaks import matmul_rates
from speedkit.measure.predict import SIZES
from speedkit.measure.timeline import BACKWARD, CHECKPOINT, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from speedkit.measure.trace import BANDWIDTH, COMMUNICATION, COMPUTE, COPY, LAUNCH, SYNC
from speedkit.plan import Plan

RARELY = "log_every=50: read and report what the device has computed every 50 steps"
REPORTING = ("print(", "log", "write(", "set_postfix", "display(")  # in a line that reads the device
MIN_GAIN = 1.05  # a breakdown may leave 5 % unexplained: what would give less may be nothing
MUCH_LONGER = 2.0  # times as long is the wait as making the batch again: a slow disk, not NVMe, or handing it over
HANDING_OVER_S = 1e-3  # of a batch, from a worker to the loop: for less no worker pays
ALL_CORES = 0.9  # of them in use: a worker would find none
CHEAPER = "make a batch at once (__getitems__), and before training what is always the same"
TINY = 4  # items, of which a forward pass hardly takes longer than of one
MIN_SMALL_ON_CPU = 0.20  # of a step, for calling operators: an eighth of a healthy small step goes into it
SAVED_ON_CPU = (0.0, 0.3)  # by compiling, of the time for calling small operators: C++ still makes a loop of each chain
FUSED_ON_CPU = (0.0, 0.75)  # of the time for passes: a transformer's step gained 3 %, long chains gain most of it
COMPILED_CALL_S = 80e-6  # that a call of compiled code takes longer there than one of a module: guards, autograd
MIN_PASSES = 0.60  # of a step, for passes over memory: of a healthy small step in bf16 they are up to 0.52
EXCHANGE_LESS = "exchange less often (larger batches), less (in bf16), or beside the backward pass (DDP's buckets)"
TO_FLOAT = "model.float(), and float32 data: of NumPy it is float64"
Row = dict[str, Any]


@dataclasses.dataclass
class Bottleneck:
    """Something that makes a step long, and what to change."""

    name: str
    seconds: float  # per step
    change: str  # `field=value`, where the plan has a field for it
    evidence: str
    min_share: float = 0.0  # of a step: below it any healthy training has some
    saved: tuple[float, float] = (0.9, 1.0)  # shares of the seconds that the change saves, at least and at most


def costly_switches(device: torch.device) -> list[str]:
    """Return a sentence for each debugging switch that is on and makes steps slower."""
    blocking = device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    switches = {
        "CUDA_LAUNCH_BLOCKING is set, so the host waits for every kernel": blocking,
        "autograd's anomaly detection is on": torch.is_anomaly_enabled(),
        "only deterministic algorithms are allowed": torch.are_deterministic_algorithms_enabled(),
    }
    return [f"this slows each step: {sentence}" for sentence, is_on in switches.items() if is_on]


# ---- the bottlenecks ----


def rank(breakdown: Breakdown, hardware: Hardware, rates: Mapping[str, float] | None = None) -> list[Row]:
    """Return the bottlenecks of a step, the best change first; none on a healthy run.

    `rates` are those of products of matrices by number format, by default as measured here.
    Rows are `{cause, evidence, field, change, seconds, predicted_speedup_low, predicted_speedup_high}`, with `seconds`
    per step; `field` is None where the plan has none for the change.
    """
    rows = []
    step_s = breakdown.step_s
    for found in (
        *_data_bottlenecks(breakdown, hardware),
        *_host_bottlenecks(breakdown),
        *_operator_bottlenecks(breakdown, hardware, rates or matmul_rates(hardware)),
    ):
        row = row_of(found, step_s)
        if found.seconds > found.min_share * step_s and row["predicted_speedup_high"] >= MIN_GAIN:
            rows.append(row)
    return sorted(rows, key=lambda row: -row["predicted_speedup_high"])


def row_of(found: Bottleneck, step_s: float) -> Row:
    """Return a bottleneck of steps that take `step_s`, as `rank` does."""
    seconds = found.seconds
    low, high = (step_s / max(step_s - share * seconds, 0.02 * step_s) for share in found.saved)
    field: str | None = found.change.partition("=")[0]
    if field not in vars(Plan()):
        field = None
    return {
        "cause": found.name,
        "evidence": f"{1e3 * seconds:.3g} of {1e3 * step_s:.3g} ms a step: {found.evidence}",
        "field": field,
        "change": found.change,
        "seconds": seconds,
        "predicted_speedup_low": low,
        "predicted_speedup_high": high,
    }


def _data_bottlenecks(breakdown: Breakdown, hardware: Hardware) -> Iterator[Bottleneck]:
    """Yield what makes the loop wait for data, in proportion to what making and joining a batch's items takes."""
    facts = breakdown.facts
    wait_s = breakdown.per_step_s(DATA)
    costs = {"slow decode": facts.items_s, "slow collate": facts.collate_s}
    make_s = sum(costs.values())
    waiting = f"the loop waits for data, with {facts.workers} workers"
    much_longer = wait_s > MUCH_LONGER * make_s > 0
    if much_longer and facts.read_bytes:
        read = f"; {1e-6 * facts.read_bytes:.3g} MB of it are read from a slow disk or network"
        waiting += f"{read}, and read again they take far less: copy the files to NVMe"
    elif much_longer and facts.workers:
        here = f"{waiting}, and without them a batch is made in {1e3 * make_s:.3g} ms"
        yield Bottleneck("too many workers", wait_s, "workers=0", here, saved=(0.0, 1 - make_s / wait_s))
        return
    if not make_s:
        costs = {"slow loader": 1.0}
    workers, hidden = _workers_needed(breakdown, hardware, make_s)
    for name, cost_s in costs.items():
        change = "cache=ram"
        saved = (0.7, 1.0)
        evidence = waiting
        if wait_s > HANDING_OVER_S and workers > facts.workers and not (name == "slow decode" and facts.cacheable):
            change = f"workers={workers}, persistent_workers=True"
            saved = (0.5 * hidden, hidden)
            evidence += f"; each worker keeps 2 batches, {2e-6 * facts.batch_bytes:.3g} MB, beside the data set"
        elif facts.why_not_kept or name == "slow collate" or wait_s <= HANDING_OVER_S:
            change = CHEAPER
            saved = (0.0, 1.0)
            evidence += f"; {facts.why_not_kept or 'other workers or a cache would not help'}"
        else:
            evidence += "; a cache helps from the second epoch on"
        yield Bottleneck(name, wait_s * cost_s / sum(costs.values()), change, evidence, saved=saved)


def _workers_needed(breakdown: Breakdown, hardware: Hardware, make_s: float) -> tuple[int, float]:
    """Return how many workers make batches, each in `make_s`, as fast as the loop takes them, and what that hides.

    The latter is a share of the wait, 0 workers where no core is free. Without workers the loop has waited for the
    making itself; where nobody knows what it takes, workers are taken to be busy all the time.
    """
    facts = breakdown.facts
    step_s = breakdown.step_s
    computing_s = max(step_s - breakdown.per_step_s(DATA), 1e-3 * step_s)
    make_s = make_s or facts.workers * step_s
    if not facts.workers:
        make_s = max(make_s, step_s - computing_s)
    workers = min(math.ceil(make_s / computing_s), hardware.cores)
    busy = facts.cores_used / hardware.cores
    if busy > ALL_CORES:
        workers = 0
    best_s = max(computing_s, make_s / max(1, workers), busy * step_s)
    return workers, max(0.0, (step_s - best_s) / (step_s - computing_s or 1.0))


def _host_bottlenecks(breakdown: Breakdown) -> Iterator[Bottleneck]:
    """Yield what the host does beside calling operators."""
    spent_s = breakdown.per_step_s
    # Page-locked memory is copied faster, and only copies of it can hide behind the computing.
    pinned = "pin_memory=True, prefetch=True"
    yield Bottleneck("large copies", spent_s(COPY), pinned, "the device waits for a batch's copy", saved=(0.5, 1.0))
    yield Bottleneck(
        "communication", spent_s(COMMUNICATION), EXCHANGE_LESS, "GPUs exchange data, and nothing else runs", 0.1
    )
    read = next(iter(breakdown.facts.syncs), None)
    if read and any(word in read.code for word in REPORTING):
        yield Bottleneck("printing each step", spent_s(SYNC, OTHER), RARELY, f"the loop reports each, in {read}", 0.1)
    else:
        where = "an unknown line"
        if read:
            where = f"{read} ({read.count} times in {breakdown.facts.audited} steps)"
        yield Bottleneck("host-device sync", spent_s(SYNC), RARELY, f"the host waits for the device, in {where}")
        own = "the loop's own lines are at work"  # of which a part has to stay: a batch is drawn by fewer, not by none
        yield Bottleneck("other host work", spent_s(OTHER), "move it out of the loop", own, 0.1, saved=(0.5, 1.0))
    yield from _compiler_bottlenecks(breakdown)
    yield Bottleneck("checkpoints too often", spent_s(CHECKPOINT), "save less often", "checkpoints are made", 0.1)
    evaluated_s = spent_s(EVALUATION)
    if breakdown.facts.graphs:
        graphs = f"its {breakdown.facts.graphs} forward passes keep what only a backward pass needs"
        without = "with torch.no_grad(): around the evaluation"
        yield Bottleneck("validation without no_grad", evaluated_s, without, graphs, 0.1, saved=(0.1, 0.5))
    else:
        yield Bottleneck(
            "validation too often", evaluated_s, "validate_every=0, or larger", "the model is evaluated", 0.1
        )


def _compiler_bottlenecks(breakdown: Breakdown) -> Iterator[Bottleneck]:
    """Yield why compiled code does not pay."""
    facts = breakdown.facts
    name = "new shapes"
    change = "bucket=True: pad to a few lengths"
    evidence = "graphs are compiled while training"
    if facts.guard:
        evidence += f", for a guard failed: {facts.guard}"
    if facts.guard and "size mismatch" not in facts.guard:
        name = "failing guards"
        change = "keep it the same in all steps, or make a tensor of it"
    yield Bottleneck(name, breakdown.per_step_s(COMPILATION), change, evidence)
    if facts.broken:
        evidence = f"a part is not compiled: {facts.broken}"
        change = "a forward pass without that line"
        if facts.guard and "limit" in facts.broken:
            change = f"fewer variants, or mark_dynamic: {facts.guard}"
        yield Bottleneck("broken graphs", breakdown.per_step_s(FORWARD), change, evidence, 0.1, saved=(0.0, 0.5))


def _operator_bottlenecks(breakdown: Breakdown, hardware: Hardware, rates: Mapping[str, float]) -> Iterator[Bottleneck]:
    """Yield where operators take longer than they must, to be called or to compute."""
    trace = breakdown.facts.trace
    small_s, products_s, passes_s = _operator_seconds(breakdown, hardware)

    change = "compile=default"
    if hardware.supports("cuda_graphs"):
        change = "compile=reduce-overhead"
    if not hardware.supports("compile"):
        change = f"fewer, larger operators; {hardware.why_not('compile')}"
    calls = f"{trace.calls / trace.steps:.0f} operators compute little"
    if 0 < breakdown.facts.items_at_once <= TINY:
        yield _small_batch(breakdown, max(small_s, breakdown.per_step_s(OPTIMIZER)))
    saved, fused = (0.5, 1.0), (0.25, 0.75)
    if change == "compile=default" and hardware.device.type == "cpu":
        small_s -= COMPILED_CALL_S * breakdown.facts.calls
        saved, fused = SAVED_ON_CPU, FUSED_ON_CPU
    yield Bottleneck("many small operators", small_s, change, calls, 0.1, saved=saved)
    if hardware.supports("compile"):
        much = "operators read and write much"
        yield Bottleneck("bandwidth-bound", passes_s, "compile=default", much, MIN_PASSES, saved=fused)

    profiled_s = sum(trace.products_s.values()) or 1.0
    doubles_s = (products_s + passes_s) * trace.products_s.get("fp64", 0.0) / profiled_s
    yield Bottleneck("float64", doubles_s, TO_FLOAT, "it computes in float64", 0.1, saved=(0.3, 0.95))

    rates = {name: rate for name, rate in rates.items() if name != "fp8"}  # which not every layer can be converted to
    best = max(rates, key=rates.__getitem__)
    slow_s = gained_s = 0.0  # of the products, as profiled
    for name, seconds in trace.products_s.items():
        if rates.get(name, rates[best]) < rates[best]:
            slow_s += seconds
            gained_s += seconds * (1 - rates[name] / rates[best])
    gain = gained_s / (slow_s or 1.0)
    slow_s *= products_s / profiled_s
    if best in SIZES and slow_s:  # passes over numbers of half the size take half the time, too
        gain += passes_s / 2 / slow_s
    faster = f"products of matrices are faster in {best}"
    # At worst casts eat up what faster products gain, as where these are small.
    yield Bottleneck("compute-bound", slow_s, f"precision={best}", faster, 0.5, saved=(0.0, gain))


def _small_batch(breakdown: Breakdown, seconds: float) -> Bottleneck:
    """Return that few items share the `seconds` of a step which more of them would not make longer."""
    facts = breakdown.facts
    change = "larger batches, with a learning rate for them"
    if facts.batches > 1:
        change = f"micro_batch up: the items of {facts.batches:.0f} batches in fewer forward passes"
    shared = f"operators are called, and weights updated, for a batch of {facts.items_at_once}"
    return Bottleneck("small batch", seconds, change, shared, 0.2, saved=(0.5, 1.0))


def _operator_seconds(breakdown: Breakdown, hardware: Hardware) -> tuple[float, float, float]:
    """Return the seconds per step of calling small operators, of products of matrices, and of passes over memory.

    A CPU's breakdown has no such rows: forward, backward and update are divided as the profiler saw the operators. It
    inflates small ones, so these get what the others leave, and no more than the profiler saw. Under it steps are
    slower: where they were faster, something else held up those that were timed, and the shares of these count.
    """
    step_s = breakdown.step_s
    if hardware.device.type != "cpu":
        return breakdown.per_step_s(LAUNCH), breakdown.per_step_s(COMPUTE), breakdown.per_step_s(BANDWIDTH)
    trace = breakdown.facts.trace
    products_s = sum(trace.products_s.values())
    room_s = breakdown.per_step_s(FORWARD, BACKWARD, OPTIMIZER)
    profiled = 1 / trace.steps
    if trace.window_s:
        profiled = max(profiled, step_s / trace.window_s)
    scale = min(profiled, room_s / (products_s + trace.passes_s or math.inf))
    products_s *= scale
    passes_s = scale * trace.passes_s
    small_s = min(room_s - products_s - passes_s, trace.small_s * profiled)
    if small_s <= MIN_SMALL_ON_CPU * step_s:
        small_s = 0.0
    return small_s, products_s, passes_s


# ---- in words ----


def bottleneck_table(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return bottlenecks in HTML, `notes` below them."""
    columns = ("cause", "change", "predicted_speedup_low", "predicted_speedup_high", "evidence")
    cells = [[row[key] for key in columns] for row in rows]
    return table("Bottlenecks", ("cause", "change", "from", "to times as fast", "why"), cells, below="\n".join(notes))


def bottleneck_in_words(row: Row) -> str:
    """Return a bottleneck as two lines."""
    line = "  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {cause}: {change}\n      {evidence}"
    return line.format_map(row)
