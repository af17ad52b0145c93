"""What lesson 91 says of its measurements: titles and sentences, from the rows of its record."""

from collections.abc import Mapping, Sequence
from typing import Any

import peers

from speedkit.lessons import loops

Row = Mapping[str, Any]


def not_installed() -> list[str]:
    """Return the packages that formats or loops need and that are not here."""
    packages = {*(form.package for form in peers.FORMATS), *(package for _, package in loops.LOOPS.values())}
    return [package for package in sorted(packages) if not peers.installed(package)]


def of(row: Row) -> str:
    return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def added_share(row: Row) -> float:
    """Return what the second side of a row takes beyond the first, as a share of that."""
    return 1 / row["ratio"] - 1


def span(rows: Sequence[Row]) -> str:
    """Return the least and the most that rows add, in per cent."""
    shares = sorted(map(added_share, rows))
    return f"{shares[0]:+.0%} to {shares[-1]:+.0%}"


def title_of_reading(read: Mapping[str, Row]) -> str:
    """Return what `read`, comparisons of formats with one mapped file by name, show of the fastest."""
    best = max((row for name, row in read.items() if name != peers.OURS), key=lambda row: row["ratio"])
    shares = f"speedkit's cache keeps {read[peers.OURS]['ratio']:.0%}, {best['b']} {best['ratio']:.0%}"
    return f"Of one mapped file's rate {shares}"


def title_of_loops(added: Mapping[str, Sequence[Row]]) -> str:
    """Return what `added`, comparisons of loops with the bare one by net, show of the little net."""
    ours, *others = added["little"]
    said = f"speedkit's loop adds {added_share(ours):+.0%} to a little step"
    return f"{said}, frameworks {span(others)}" if others else said


def on_reading(read: Mapping[str, Row], damage: Mapping[str, str]) -> str:
    """Return the answers on formats, and on the damage that each noticed or not, as Markdown."""
    npy, ours = read["a .npy file each"], read[peers.OURS]
    better = [name for name, row in read.items() if row["low"] > ours["high"]]
    examples = []
    for library in ("LitData", "datasets", "webdataset"):
        ratios = [f"{row['ratio']:.2g}" for name, row in read.items() if name.startswith(library)]
        examples += [f"{library} {' and '.join(ratios)}"] if ratios else []
    silent = [name for name, outcome in damage.items() if outcome == peers.SILENT]
    noticed = [f"{name} ({outcome})" for name, outcome in damage.items() if outcome != peers.SILENT]
    return f"""
1. One mapped file is {1 / npy["ratio"]:.1f} times as fast as small files. speedkit's cache, which compares each row \
with its checksum once, reads at {of(ours)} of its rate. Two settings of one library: {"; ".join(examples) or "none"} \
of its rate. Faster than speedkit's cache, the mapped file apart: {"; ".join(better) or "none"}.
2. A changed byte was served silently by {"; ".join(silent)}. It was noticed by {"; ".join(noticed)}.
"""


def on_loops(added: Mapping[str, Sequence[Row]]) -> str:
    """Return the answer on training loops as Markdown."""
    sentences = []
    for net, (ours, *others) in added.items():
        quick = [row["b"] for row in others if row["low"] > ours["high"]]
        unsure = [row["b"] for row in others if row["high"] >= ours["low"] and row["b"] not in quick]
        frameworks = f"frameworks {span(others)}" if others else "no framework is installed"
        said = f"To a step of the {net} net speedkit's loop adds {added_share(ours):+.0%}, {frameworks}"
        known = f"faster than speedkit's: {', '.join(quick) or 'none'}"
        sentences.append(f"{said}; {known}; not told apart from it: {', '.join(unsure) or 'none'}.")
    return f"3. {' '.join(sentences)}"


def on_finders(found: Mapping[str, int], at_size: Mapping[str, Row], limit: int) -> str:
    """Return the answer on sizes that were `found` where `limit` samples fit, as Markdown.

    `at_size` compares training at each size with training at speedkit's, by seconds per sample.
    """
    sentences = [f"Of {limit} samples that fit, speedkit's search took {found[loops.OURS]}."]
    lost = False
    for name, row in at_size.items():
        lost = lost or row["low"] > 1
        result = "faster" if row["low"] > 1 else "slower" if row["high"] < 1 else "no different within the noise"
        sentences.append(f"{name} took {found[name]}: per sample {of(row)} times as fast, {result}.")
    if lost:
        sentences.append("So speedkit's own search lost here: a size that it did not take trains faster.")
    elif at_size:
        sentences.append("No other size was shown to train faster than speedkit's.")
    return f"4. {' '.join(sentences)}"
