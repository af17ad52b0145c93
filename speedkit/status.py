"""What is published and how current it is: the status table and the ladder in the README, drawn from records."""

import re
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.errors import UsageError
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.schema import published
from speedkit.notebooks import find_notebooks, is_current
from speedkit.parameters import read_notebook, record_of
from speedkit.show.figures import device_name, save, waterfall

CLIMB = "90_climb.ipynb"
FIGURE = "records/ladder.svg"


def _run(record: dict[str, Any], notebook: Path) -> str:
    """Return when and with what a record was made; it is stale when the notebook's code has changed since."""
    stale = [] if is_current(record, notebook) else ["**stale**"]
    return ", ".join([record["created"][:10], f"torch {record['versions']['torch']}", record["profile"], *stale])


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def status_table(folder: Path) -> str:
    """Return the status of all notebooks in `folder` as a Markdown table, for a file beside the folder."""
    lines = [_line("notebook", "what it shows", "measured on"), "|---|---|---|"]
    for path in find_notebooks(None, folder):
        notebook = read_notebook(path)
        title, _, text = (notebook.cells[0].source if notebook.cells else "").lstrip("# ").partition("\n")
        claim = re.split(r"(?<=[.!?])\s", text.strip().partition("\n\n")[0].replace("\n", " "))[0]
        measured, shown = [], record_of(notebook)
        if shown is None:
            measured.append("not run yet")
        elif not is_current(shown, path):
            measured.append(f"**stale**: its code changed after {shown['created'][:10]}")
        for file, record in published(path).items():
            workload = file.stem.partition("-")[2]
            measured.append(f"{device_name(record)}{f' ({workload})' * bool(workload)}, {_run(record, path)}")
        link = f"[{path.stem[:2]} {title.strip()}]({folder.name}/{path.name})"
        lines.append(_line(link, claim, "<br>".join(measured)))
    return "\n".join(lines)


def _climbs(folder: Path) -> list[dict[str, Any]]:
    return [record for record in published(folder / CLIMB).values() if record.get("speedup")]


def ladder_table(folder: Path) -> str:
    """Return the figure of the climb and its final speed-ups, from records alone, as Markdown."""
    climbs = _climbs(folder)
    if not climbs:
        return "No climb is published yet."
    lines = [f"![The climb on {device_name(climbs[0])}]({folder.name}/{FIGURE})", "",
             _line("machine", "workload", "over plain PyTorch", "over a careful start", "run"),
             "|---" * 5 + "|"]  # fmt: skip
    for record in climbs:
        ratios = ["{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**found) if found else "not measured"
                  for found in (record["speedup"], record["speedup_careful"])]  # fmt: skip
        lines.append(_line(device_name(record), record["workload"]["name"], *ratios, _run(record, folder / CLIMB)))
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


def update_readme(readme: str | Path, notebooks: str | Path | None = None) -> None:
    """Write the README's generated blocks and the ladder's figure anew."""
    folder = Path(notebooks or notebooks_folder())
    files.write_text(readme, readme_text(readme, folder))
    if climbs := _climbs(folder):
        save(waterfall(climbs[0]), folder / FIGURE)
