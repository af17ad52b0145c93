"""A script's tuning in plain sentences."""

from collections.abc import Mapping
from typing import Any

from speedkit.measure.optimizations import text
from speedkit.measure.words import interval_text, result_text

Row = Mapping[str, Any]


def in_sentences(record: Row) -> list[str]:
    """Return what a script's tuning has found, a sentence for each optimization, and last what all of it gives."""
    sentences = [optimization_in_words(row) for row in record["optimizations"]]
    if record["in_words"]:
        sentences.append(f"In {record['framework']}:")
        sentences += [f"    {line}" for line in record["in_words"]]
    if record["runs"] > 1:
        sentences.append(f"The script was run {record['runs']} times, for its loop is short.")
    sentences += [f"Note: {note}." for note in record["notes"]]
    return [*sentences, headline_of_script(record)]


def optimization_in_words(row: Row) -> str:
    """Return in a sentence what one optimization gave, and whether it is kept."""
    if row["ratio"] is None:
        return f"{row['change']}: {row['why']}."
    pays = ""
    if row["pays_from_step"] and row["kept"]:
        pays = f"; compiling pays from {row['pays_from_step']:,} steps on"
    kept = "kept" if row["kept"] else "not kept"
    return f"{row['change']}: {found(row)}, {kept}: {row['why']}{pays}."


def found(row: Row) -> str:
    """Return the ratio of a row, with its interval where it was decided."""
    if row["decision"] == "undecided":  # of few pairs the interval holds everything
        return f"about {row['ratio']:.2f}× in {row['pairs']} pairs"
    return result_text(row)


def headline_of_script(record: Row) -> str:
    """Return in a sentence what all that is kept gives."""
    script = record["script"]
    speedup = record["speedup"]
    if not record["plan"]:
        if any(row["decision"] == "undecided" and row["ratio"] for row in record["optimizations"]):
            return f"Nothing was shown to make {script} faster; a longer --budget or a quieter machine may decide more."
        return f"Nothing that was tried makes {script} faster: it stays as it is."
    kept = text(record["plan"])
    if speedup["ratio"] is None:
        return (
            f"Each of these was faster by itself: {kept}. No time was left to hold all of it against {script} as it is."
        )
    if speedup["decision"] == "undecided":
        return f"Each of these was faster by itself: {kept}. All of it against {script} as it is was not decided."
    ratio = f"{speedup['ratio']:.2f} times as fast {interval_text(speedup)}"
    told = "" if speedup["decision"] == "faster" else f": {speedup['decision']}"
    return f"A step of {script} is {ratio} with {kept}{told}."
