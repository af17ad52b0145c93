"""A climb's result in plain sentences, drawn from its record."""

from collections.abc import Mapping
from typing import Any

from speedkit.clock import duration

Row = Mapping[str, Any]


def in_short(record: Row) -> list[str]:
    """Return a climb's result in plain sentences, the most important first; [] for a record of something else."""
    if "speedup" not in record:
        return []
    if record["change"] == "nothing":
        return ["Nothing that was tried is worth switching on: plain PyTorch stays."]
    over = "{ratio:.2f} times as fast as {0} ({low:.2f} to {high:.2f}, 99 %)".format
    names = [over("plain PyTorch", **record["speedup"])]
    if careful := record["speedup_careful"]:
        names.insert(0 if record.get("headline") == "careful" else 1, over("a careful start", **careful))
    sentences = [f"Training steps are {', and '.join(names)}.", quality_in_words(record["quality"])]
    if paid := record.get("payback"):
        sentences.append(payback_in_words(paid))
    return [*sentences, f"Switched on: {record['change']}."]


def quality_in_words(quality: Row) -> str:
    """Return in one sentence whether the final plan learns as well."""
    if quality.get("lower") is None:
        why = "the time was used up before each plan was trained twice"
        return (
            f"Whether the result is as good was not tested: {why if quality['baseline'] else 'no training was needed'}."
        )
    shown = "{mean_change:+.4f}, at least {lower:+.4f}".format
    change = f"{quality['metric']} changed by {shown(**quality)}; margin {quality['margin']:g}"
    if likelihood := quality.get("likelihood"):
        change += (
            f"; in {len(quality['final'])} folds, where the right class's probability changed by {shown(**likelihood)}"
        )
    if quality["decision"] != "not decided":
        return f"The result is {quality['decision']}: {change}."
    needed = f"{len(quality['final'])} trainings of each plan cannot show it; about {quality['seeds_needed']} would"
    if quality.get("items_needed"):
        needed = "{test_items} test items cannot show {margin:g}; about {items_needed} would".format(**quality)
    return f"Whether the result is as good is not decided: {change}. {needed}."


def payback_in_words(paid: Row) -> str:
    """Return in one sentence what the final plan saves, and when it has earned what it takes to prepare."""
    if not paid["baseline_s"] or not paid["final_s"]:
        return "Nothing was switched on, so nothing is to be paid back."
    saved = f"Your {paid['epochs']:.3g} epochs: from {duration(paid['baseline_s'])} to {duration(paid['final_s'])}"
    prepared = {"build the cache": paid["prepare_s"]["cache"], "compile": paid["prepare_s"]["compile"]}
    took = " and ".join(f"{duration(value)} to {what}" for what, value in prepared.items() if value)
    if not took:
        return f"{saved}."
    if paid["pays_back_after_s"] is None:
        return f"{saved}, with {took}; that does not pay back within so short a training."
    return f"{saved}, with {took}; that pays back after {duration(paid['pays_back_after_s'])}."
