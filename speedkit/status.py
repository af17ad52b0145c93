"""What is published and how current it is: the status table and the ladder in the README, drawn from records."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.contract import current_hash
from speedkit.errors import UsageError
from speedkit.notebooks import find_notebooks, notebooks_folder
from speedkit.parameters import read_notebook, record_of

CLIMB = "90_climb"
FIGURE = Path("records") / "ladder.svg"


def status_rows(notebooks: str | Path | None = None) -> list[dict[str, Any]]:
    """Return a row per notebook: `notebook`, `title`, `claim`, `shown` (a device, None if not run) and `devices`.

    A device is `{device, workload, date, torch, profile, stale}`; stale when the code has changed since its record.
    """
    folder = Path(notebooks) if notebooks else notebooks_folder()
    rows = []
    for path in find_notebooks(None, folder):
        notebook, now = read_notebook(path), current_hash(path)
        first = notebook.cells[0].source if notebook.cells else ""
        title, _, text = first.lstrip("# ").partition("\n")
        claim = re.split(r"(?<=[.!?])\s", text.strip().partition("\n\n")[0].replace("\n", " "))[0]
        shown = record_of(notebook)
        devices = [_device(record, now) | {"workload": workload} for record, workload in _records(folder, path.stem)]
        rows.append({"notebook": path.stem, "title": title.strip(), "claim": claim,
                     "shown": _device(shown, now) if shown else None, "devices": devices})  # fmt: skip
    return rows


def _records(folder: Path, stem: str) -> list[tuple[dict[str, Any], str]]:
    """Return (record, workload) of each machine that published notebook `stem`, GPUs first."""
    from speedkit.measure.schema import load_record

    paths = [path for path in folder.glob(f"records/*/{stem}*.json") if path.stem.partition("-")[0] == stem]
    found = [(load_record(path), path.stem.partition("-")[2]) for path in sorted(paths)]
    return sorted(found, key=lambda item: (not item[0]["hardware"].get("gpu"), bool(item[1])))


def _device(record: Mapping[str, Any], now: str) -> dict[str, Any]:
    from speedkit.show.figures import device_name

    return {"device": device_name(record), "date": record["created"][:10], "torch": record["versions"]["torch"],
            "profile": record["profile"], "stale": record["code_sha256"] != now}  # fmt: skip


def status_table(notebooks: str | Path | None = None, prefix: str = "notebooks") -> str:
    """Return the status of all notebooks as a Markdown table whose links begin with `prefix`."""
    lines = ["| notebook | what it shows | measured on |", "|---|---|---|"]
    for row in status_rows(notebooks):
        shown = row["shown"]
        measured = [_in_words(device) for device in row["devices"]]
        if shown is None:
            measured.insert(0, "not run yet")
        elif shown["stale"]:
            measured.insert(0, f"**stale**: its code changed after {shown['date']}")
        link = f"[{row['notebook'][:2]} {row['title']}]({prefix}/{row['notebook']}.ipynb)"
        lines.append(f"| {_cell(link)} | {_cell(row['claim'])} | {'<br>'.join(map(_cell, measured))} |")
    return "\n".join(lines)


def _in_words(device: Mapping[str, Any]) -> str:
    workload = f" ({device['workload']})" if device.get("workload") else ""
    stale = ", **stale**" if device["stale"] else ""
    return f"{device['device']}{workload}, {device['date']}, torch {device['torch']}, {device['profile']}{stale}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def ladder_table(notebooks: str | Path | None = None, prefix: str = "notebooks") -> str:
    """Return the figure of the climb and its final speed-ups, from records alone, as Markdown."""
    folder = Path(notebooks) if notebooks else notebooks_folder()
    climbs = _climbs(folder)
    if not climbs:
        return "No climb is published yet."
    now = current_hash(folder / f"{CLIMB}.ipynb")
    figure = f"![The climb on {_device(climbs[0][0], now)['device']}]({prefix}/{FIGURE.as_posix()})"
    lines = [figure, "", "| machine | workload | over plain PyTorch | over a careful start | run |", "|---" * 5 + "|"]
    for record, workload in climbs:
        device = _device(record, now)
        workload = workload or record["workload"]["name"]
        ratios = [_ratio(record.get(key)) for key in ("speedup", "speedup_careful")]
        run = f"{device['date']}, torch {device['torch']}{', **stale**' if device['stale'] else ''}"
        lines.append(f"| {' | '.join(map(_cell, [device['device'], workload, *ratios, run]))} |")
    return "\n".join(lines)


def _climbs(folder: Path) -> list[tuple[dict[str, Any], str]]:
    return [item for item in _records(folder, CLIMB) if item[0].get("speedup")] if folder.is_dir() else []


def _ratio(speedup: Mapping[str, float] | None) -> str:
    return "{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**speedup) if speedup else "not measured"


def readme_text(readme: str | Path, notebooks: str | Path | None = None) -> str:
    """Return the README's text with its generated blocks made anew. Raises UsageError when a block has no markers."""
    readme = Path(readme)
    prefix = Path(os.path.relpath(notebooks or notebooks_folder(), readme.resolve().parent)).as_posix()
    text = readme.read_text(encoding="utf-8")
    for name, make in (("status", status_table), ("ladder", ladder_table)):
        start, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise UsageError(f"{readme.name} needs the lines {start} and {end}: put them where the {name} belongs")
        text = f"{before}{start}\n{make(notebooks, prefix)}\n{end}{after}"
    return text


def update_readme(readme: str | Path, notebooks: str | Path | None = None) -> bool:
    """Write the README's generated blocks and the ladder's figure anew; return whether the text changed."""
    folder = Path(notebooks) if notebooks else notebooks_folder()
    text = readme_text(readme, folder)
    if climbs := _climbs(folder):
        from speedkit.show.figures import save, waterfall

        save(waterfall(climbs[0][0]), folder / FIGURE)
    changed = text != Path(readme).read_text(encoding="utf-8")
    if changed:
        files.write_text(readme, text)
    return changed
