"""A climb's result in plain sentences, drawn from its record."""

from typing import Any

from speedkit.clock import duration

Row = dict[str, Any]


def in_short(record: Row) -> list[str]:
    """Return a climb's result in plain sentences, the most important first; [] for a record of something else."""
    if "speedup" not in record:
        return []
    over = "{ratio:.2f} times as fast as {0} ({low:.2f} to {high:.2f}, 99 %)".format
    if record["change"] == "nothing":
        return ["Nothing that was tried is worth switching on: plain PyTorch stays."]
    ends = {"baseline": ("plain PyTorch", record["speedup"]), "careful": ("a careful start", record["speedup_careful"])}
    first = record.get("headline", "baseline")
    second = "careful" if first == "baseline" else "baseline"
    names = [over(ends[name][0], **ends[name][1]) for name in (first, second) if ends[name][1]]
    sentences = [f"Training steps are {', and '.join(names)}.", quality_in_words(record["quality"])]
    if paid := record.get("payback"):
        sentences.append(payback_in_words(paid))
    return [*sentences, f"Switched on: {record['change']}."]


def quality_in_words(quality: Row) -> str:
    """Return in one sentence whether the final plan learns as well."""
    decision = quality.get("decision") or ("as good" if quality["passed"] else "not decided")
    if quality.get("lower") is None:
        why = "no training was needed"
        if quality["baseline"]:
            why = "the time was used up before each plan was trained twice"
        return f"Whether the result is as good was not tested: {why}."
    change = "{metric} changed by {mean_change:+.4f}, at least {lower:+.4f}; margin {margin:g}".format(**quality)
    if quality.get("likelihood"):
        change += "; that of the right class's mean probability {mean_change:+.4f}, at least {lower:+.4f}".format(
            **quality["likelihood"]
        )
    if decision == "not decided" and quality.get("items_needed"):
        items = f"the test items there are cannot show {quality['margin']:g}; about {quality['items_needed']} would"
        return f"Whether the result is as good is not decided: {change}. In {len(quality['final'])} folds {items}."
    if decision == "not decided":
        needed = f"; about {quality['seeds_needed']} would" if quality.get("seeds_needed") else ""
        seeds = f"{len(quality['final'])} trainings of each plan cannot show it{needed}"
        return f"Whether the result is as good is not decided: {change}. {seeds}."
    return f"The result is {decision}: {change}."


def payback_in_words(paid: Row) -> str:
    """Return in one sentence what the final plan saves, and when it has earned what it takes to prepare."""
    if not paid["baseline_s"] or not paid["final_s"]:
        return "Nothing was switched on, so nothing is to be paid back."
    prepared = {"build the cache": paid["prepare_s"]["cache"], "compile": paid["prepare_s"]["compile"]}
    took = " and ".join(f"{duration(value)} to {what}" for what, value in prepared.items() if value)
    saved = f"Your {paid['epochs']:.3g} epochs: from {duration(paid['baseline_s'])} to {duration(paid['final_s'])}"
    if not took:
        return f"{saved}."
    after = "does not pay back within so short a training"
    if paid["pays_back_after_s"] is not None:
        after = f"pays back after {duration(paid['pays_back_after_s'])}"
    return f"{saved}, with {took}; that {after}."
