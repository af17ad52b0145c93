"""A tuning's record in words and sentences: for pictures and reports, and for what runs without matplotlib."""

from collections.abc import Mapping
from typing import Any

from speedkit.measure.optimizations import text
from speedkit.recipe import Recipe

# What a tuning is compared with, by its key in `step_s` of a record: its headline is over the faster of the two.
BASELINES = {"baseline": "plain PyTorch", "careful": "the careful plan"}
Row = Mapping[str, Any]
WIDEST = 100.0  # of an interval: its high end over its low one


def device_name(record: Row) -> str:
    """Return what the machine of a record is called."""
    hardware = record["hardware"]
    if hardware.get("gpu"):
        return hardware["gpu"]
    cpu = (hardware.get("cpu") or "CPU").replace("(R)", "").replace("(TM)", "")
    return f"{cpu}, {hardware['cores']} cores"


def speedups(record: Row) -> dict[str, Row]:
    """Return what the final plan gains over each of `BASELINES`, by key, the faster one first.

    The careful plan is not held against itself.
    """
    over = {"baseline": record["speedup"]}
    if record["speedup_careful"]["low"] < record["speedup_careful"]["high"]:
        over["careful"] = record["speedup_careful"]
    return dict(sorted(over.items(), key=lambda item: item[1]["ratio"]))


def headline(record: Row) -> tuple[str, Row]:
    """Return the one speed-up that a tuning is told by, and what it is over: the faster of `BASELINES`.

    The first is the baseline's key in `BASELINES`, the second the ratio with its interval.
    """
    return next(iter(speedups(record).items()))


def is_boundless(row: Row) -> bool:
    """Return whether an interval holds 1 and reaches so far that it tells nothing."""
    return row["low"] < 1 < row["high"] and row["high"] > WIDEST * row["low"]


def ratio_text(row: Row) -> str:
    """Return a ratio with its interval, and whether that shows something slower."""
    if is_boundless(row):
        return "not settled"
    slower = ": slower" if row["high"] < 1 else ""
    return f"{row['ratio']:.2f}× ({row['low']:.2f} to {row['high']:.2f}{slower})"


def result_text(row: Row) -> str:
    """Return a ratio with its interval where it is decided, and else the interval alone."""
    if row["decision"] == "undecided" and row["low"] < row["high"] and not is_boundless(row):
        return f"undecided ({row['low']:.2f} to {row['high']:.2f})"
    return ratio_text(row)


def outcome(row: Row) -> str:
    """Return a ratio, its interval and its decision as the end of a sentence."""
    if is_boundless(row):
        return "not settled: there were too few turns for so noisy a machine"
    return "{ratio:.2f} times as fast ({low:.2f} to {high:.2f}), {decision}".format_map(row)


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best: `42.1 ms`, `3.2 s`, `12 min`, `1.5 h`."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 1e-6:#.3g}".rstrip(".") + " µs"


# ---- in sentences ----


def in_short(record: Row) -> list[str]:
    """Return a tuning's result in plain sentences, the most important first."""
    if record["change"] == "nothing":
        sentences = nothing_kept(record)
    elif any(row["decision"] != "undecided" for row in speedups(record).values()):
        sentences = [*whole_training(record), *step_in_words(record), quality_in_words(record["quality"])]
        sentences.append(f"Switched on: {record['change']}.")
    else:
        sentences = [*nothing_decided(record), quality_in_words(record["quality"])]
        sentences.append(f"Kept by single comparisons: {record['change']}.")
    for row in record["optimizations"]:
        if pays_later(row):
            sentences.append(f"{row['change']} {pays_in_words(row, recipe_steps(record))}.")
    if record["quarantined"]:
        sentences.append(f"Files left out: {len(record['quarantined'])} (quarantine.csv says why).")
    return sentences


def recipe_steps(record: Row) -> int:
    """Return the steps of a training by the recipe."""
    return Recipe(**record["recipe"]).total_steps(record["workload"]["train"])


def nothing_kept(record: Row) -> list[str]:
    """Return what a tuning that has kept nothing says of what it tried."""
    tried = [row for row in record["optimizations"] if row["ratio"]]
    undecided = [row["change"] for row in tried if row["why"].startswith("undecided")]
    if len(undecided) == len(tried):
        return nothing_decided(record)
    if undecided:
        return [f"Nothing was shown to be faster. Undecided: {'; '.join(undecided)}.", what_would_decide(record)]
    return ["Nothing that was tried is worth switching on: plain PyTorch stays."]


def nothing_decided(record: Row) -> list[str]:
    """Return that nothing was decided, and what would decide it."""
    because = ""
    if record["busy"]:
        because = f": the machine was busy ({', '.join(record['busy'])})"
    return [f"Nothing was decided{because}.", what_would_decide(record)]


def what_would_decide(record: Row) -> str:
    """Return in a sentence what would decide more."""
    how = "Tune again when it is idle" if record["busy"] else "A longer --budget or a quieter machine may decide"
    return f"{how}: in this tuning a gain of {record['resolution']:.2f} was found every other time."


def training_s(record: Row, steps: int) -> tuple[float, float]:
    """Return the seconds of a training of `steps` in plain PyTorch, and by the final plan with all that it prepares."""
    step_s = record["step_s"]
    return steps * step_s["baseline"], steps * step_s["final"] + sum(record["payback"]["prepare_s"].values())


def whole_training(record: Row) -> list[str]:
    """Return what a whole training takes by the recipe, and by the horizon where that is another, and what is prepared.

    Building the cache and compiling are among it.
    """
    payback = record["payback"]
    horizon = round(payback["baseline_s"] / record["step_s"]["baseline"])
    prepared = []
    for name, what in (("cache", "build the cache"), ("compile", "compile")):
        if payback["prepare_s"][name]:
            prepared.append(f"{duration(payback['prepare_s'][name])} to {what}")
    included = f", {' and '.join(prepared)} included" if prepared else ""
    sentences = []
    for steps in dict.fromkeys((recipe_steps(record), horizon)):
        before_s, after_s = training_s(record, steps)
        took = f"{duration(after_s)} instead of {duration(before_s)} in plain PyTorch{included}"
        sentences.append(f"A training of {steps:,} steps takes {took}: {before_s / after_s:.2f} times as fast.")
    if prepared and payback["pays_back_after_s"] is None:
        sentences.append(f"Preparing does not pay back within {horizon:,} steps.")
    elif prepared:
        sentences.append(f"Preparing pays back after {duration(payback['pays_back_after_s'])}.")
    return sentences


def step_in_words(record: Row) -> list[str]:
    """Return the gain of a step: over the faster of `BASELINES`, and over the other one where that is undecided."""
    decided = {side: row for side, row in speedups(record).items() if row["decision"] != "undecided"}
    side, row = next(iter(decided.items()))
    told = "" if row["decision"] == "faster" else f": {row['decision']}"
    ratio = f"{row['ratio']:.2f} times as fast {interval_text(row)}"
    sentences = [f"A step is {ratio} as with {BASELINES[side]}{told}."]
    side, row = headline(record)
    if side not in decided:
        sentences.append(f"Over {BASELINES[side]} nothing was decided.")
    again = record.get("speedup_again")  # not in records of before
    if again and "ratio" in again and is_boundless(again):
        sentences.append("Measured once more, nothing was decided: there were too few turns for so noisy a machine.")
    elif again and "ratio" in again:
        sentences.append(
            f"Measured once more, it is {again['ratio']:.2f} {interval_text(again)} over {BASELINES[side]}."
        )
    return sentences


def interval_text(row: Row) -> str:
    """Return the ends of an interval."""
    return f"({row['low']:.2f} to {row['high']:.2f}, 99 %)"


def pays_later(row: Row) -> bool:
    """Return whether an optimization was faster, and compiling has to be earned."""
    return bool(row.get("pays_from_step")) and row["why"].startswith("faster")


def pays_in_words(row: Row, steps: int) -> str:
    """Return from which step on an optimization pays, beside the `steps` of the recipe."""
    pays = f"pays from {row['pays_from_step']:,} steps on"
    return pays if row["kept"] else f"{pays}; this recipe has {steps:,}, --horizon says yours"


def quality_in_words(quality: Row) -> str:
    """Return in one sentence whether the final plan learns as well."""
    if quality["decision"] == "not tested":
        why = "no training was needed"
        if quality.get("budget_s"):
            why = f"even a short training of each plan takes a budget of about {duration(quality['budget_s'])}"
        return f"Whether the result is as good was not tested: {why}."
    trainings = len(quality["final"])
    shown = "{mean_change:+.4f}, at least {lower:+.4f}"
    change = f"{quality['metric']} changed by {shown.format_map(quality)}; margin {quality['margin']:g}"
    if quality["likelihood"]:
        likelihood = shown.format_map(quality["likelihood"])
        change += f"; in {trainings} folds, where the right class's probability changed by {likelihood}"
    if quality["schedule"] < 1:
        change += f", in trainings of {quality['steps']:,} steps, {quality['schedule']:.0%} of the schedule"
    if quality["decision"] != "not decided":
        return f"The result is {quality['decision']}: {change}."
    needed = f"{trainings} trainings of each plan cannot show it; about {quality['seeds_needed']} would"
    if quality["items_needed"]:
        needed = "{test_items} test items cannot show {margin:g}; about {items_needed} would".format_map(quality)
    return f"Whether the result is as good is not decided: {change}. {needed}."


def left_out(record: Row) -> list[Row]:
    """Return a row for each optimization that is not in the plan: which fields of it are not, and why.

    Of several changes by one optimization it is the one that gained most, as it was measured last; nearest first.
    """
    fields_of = {row["change"]: row["fields"] for row in record["optimizations"]}
    measured = (*record["optimizations"], *record["dropped"], *(record["stalls"] or ()))
    rows: dict[str, Row] = {}
    for row in sorted(measured, key=lambda row: (row.get("again", False), row["ratio"] or 0.0), reverse=True):
        fields = fields_of.get(row["change"], {})
        change = {field: value for field, value in fields.items() if value != record["plan"][field]}
        if not change or row["kept"]:
            continue
        why = row["why"]
        if pays_later(row):
            why = f"faster; {pays_in_words(row, recipe_steps(record))}"
        rows.setdefault(row["optimization"], {**row, "change": text(change), "why": why})
    return [*rows.values()]
