"""What is published and how current it is: the status table and the ladder in the README, drawn from records."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.errors import UsageError
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.schema import load_record
from speedkit.notebooks import find_notebooks, is_current
from speedkit.parameters import read_notebook, record_of
from speedkit.show.figures import device_name, save, waterfall

CLIMB = "90_climb.ipynb"
FIGURE = "records/ladder.svg"


def status_rows(notebooks: str | Path | None = None) -> list[dict[str, Any]]:
    """Return a row per notebook: `notebook`, `title`, `claim`, `shown` (a device, None if not run) and `devices`."""
    folder = Path(notebooks or notebooks_folder())
    rows = []
    for path in find_notebooks(None, folder):
        notebook = read_notebook(path)
        title, _, text = (notebook.cells[0].source if notebook.cells else "").lstrip("# ").partition("\n")
        claim = re.split(r"(?<=[.!?])\s", text.strip().partition("\n\n")[0].replace("\n", " "))[0]
        shown = record_of(notebook)
        rows.append({"notebook": path.stem, "title": title.strip(), "claim": claim,
                     "shown": _device(shown, path) if shown else None,
                     "devices": [device for _, device in _published(path)]})  # fmt: skip
    return rows


def _published(notebook: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (record, device) of each machine that published the notebook, GPUs first."""
    paths = sorted(notebook.parent.glob(f"records/*/{notebook.stem}*.json"))
    names = [(path, *path.stem.partition("-")) for path in paths]
    records = [(load_record(path), workload) for path, stem, _, workload in names if stem == notebook.stem]
    records.sort(key=lambda item: (not item[0]["hardware"].get("gpu"), bool(item[1])))
    return [(record, _device(record, notebook, workload)) for record, workload in records]


def _climbs(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(record, device) for record, device in _published(folder / CLIMB) if record.get("speedup")]


def _device(record: Mapping[str, Any], path: Path, workload: str = "") -> dict[str, Any]:
    """Return what the tables say of a run; it is stale when the code of notebook `path` has changed since."""
    return {"device": device_name(record), "workload": workload, "date": record["created"][:10],
            "torch": record["versions"]["torch"], "profile": record["profile"],
            "stale": not is_current(record, path)}  # fmt: skip


def _run(device: Mapping[str, Any]) -> list[str]:
    return [device["date"], f"torch {device['torch']}", device["profile"], *["**stale**"] * device["stale"]]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def status_table(folder: Path) -> str:
    """Return the status of all notebooks in `folder` as a Markdown table, for a file beside the folder."""
    lines = [_line("notebook", "what it shows", "measured on"), "|---|---|---|"]
    for row in status_rows(folder):
        measured = [", ".join([device["device"] + f" ({device['workload']})" * bool(device["workload"]), *_run(device)])
                    for device in row["devices"]]  # fmt: skip
        if row["shown"] is None:
            measured.insert(0, "not run yet")
        elif row["shown"]["stale"]:
            measured.insert(0, f"**stale**: its code changed after {row['shown']['date']}")
        link = f"[{row['notebook'][:2]} {row['title']}]({folder.name}/{row['notebook']}.ipynb)"
        lines.append(_line(link, row["claim"], "<br>".join(measured)))
    return "\n".join(lines)


def ladder_table(folder: Path) -> str:
    """Return the figure of the climb and its final speed-ups, from records alone, as Markdown."""
    climbs = _climbs(folder)
    if not climbs:
        return "No climb is published yet."
    lines = [f"![The climb on {climbs[0][1]['device']}]({folder.name}/{FIGURE})", "",
             _line("machine", "workload", "over plain PyTorch", "over a careful start", "run"),
             "|---" * 5 + "|"]  # fmt: skip
    for record, device in climbs:
        ratios = ["{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**found) if found else "not measured"
                  for found in (record.get("speedup"), record.get("speedup_careful"))]  # fmt: skip
        lines.append(_line(device["device"], record["workload"]["name"], *ratios, ", ".join(_run(device))))
    return "\n".join(lines)


def readme_text(readme: str | Path, notebooks: str | Path | None = None) -> str:
    """Return the README's text with its generated blocks made anew. Raises UsageError when a block has no markers."""
    folder, text = Path(notebooks or notebooks_folder()), Path(readme).read_text(encoding="utf-8")
    for name, make in (("status", status_table), ("ladder", ladder_table)):
        start, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        before, _, rest = text.partition(start)
        if end not in rest:
            raise UsageError(f"{Path(readme).name} needs the lines {start} and {end}: put them where {name} belongs")
        text = f"{before}{start}\n{make(folder)}\n{end}{rest.partition(end)[2]}"
    return text


def update_readme(readme: str | Path, notebooks: str | Path | None = None) -> bool:
    """Write the README's generated blocks and the ladder's figure anew; return whether the text changed."""
    folder = Path(notebooks or notebooks_folder())
    text = readme_text(readme, folder)
    if climbs := _climbs(folder):
        save(waterfall(climbs[0][0]), folder / FIGURE)
    if text == Path(readme).read_text(encoding="utf-8"):
        return False
    files.write_text(readme, text)
    return True
