"""Publish: run notebooks here or take in what others ran, keep outputs and records, draw the README's tables.

`speedkit publish --help`, or `python tools/publish.py --help`, shows how.
"""

import collections
import itertools
import json
import math
import operator
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import nbformat
import torch
from batch_sizes import markdown_table, section
from foreign import escaped, harmless_outputs
from matplotlib import style

from speedkit import files
from speedkit.cli.ending import run_command
from speedkit.cli.options import DEBUG, seconds
from speedkit.errors import SpeedkitError, UsageError
from speedkit.lab.figures import BASELINES, STYLE, device_name, headline, result_text, waterfall
from speedkit.lab.notebooks import find_notebooks, run_notebook
from speedkit.lab.provenance import commit, is_current, notebooks_folder
from speedkit.lab.record import RECORD_MIME, read_notebook
from speedkit.lab.records import load_record, published, validate_record
from speedkit.machine import this_machine
from speedkit.measure.words import duration, recipe_steps, training_s

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# In the folder of the notebooks; peers.json is what benchmarks/peers.py leaves.
TUNE, OPTIMIZATIONS, PEERS = "90_tune.ipynb", "records/optimizations.svg", "records/peers.json"
RECORDS = "records/README.md"
WORKLOADS = ("image", "speech", "text")  # of the tuning, a record each; its notebook shows audio
Row = Mapping[str, Any]


def device_slug(hardware: Row) -> str:
    """Return the folder name for the records of a machine: `nvidia-h200`, `cpu-intel-xeon-2-cores`."""
    name = device_name({"hardware": hardware})
    return re.sub(r"[^a-z0-9]+", "-", (name if hardware.get("gpu") else f"cpu {name}").lower()).strip("-")


def publish(
    names: Sequence[str] | None, out: str | Path | None = None, *, budget_s: float | None = None, workload: str = ""
) -> dict[str, str]:
    """Run the notebooks `names` here, in their auto scale, and write them and their records to `out`.

    None is all of them, the tuning first and on each workload. What is published from the same code is left as it is.
    None starts when `budget_s` is spent, nor one that took longer before than is left of it. With `workload` only the
    record is written, as NN_name-workload.json. Return what became of each by its name. Raises SpeedkitError for a
    busy GPU, for changes since the commit that records would name, and where there is no commit.
    """
    sources = sorted(find_notebooks(names), key=lambda source: source.name != TUNE)
    for index in range(torch.cuda.device_count()):
        if is_busy(index):
            raise SpeedkitError(f"GPU {index} is busy: wait until it is free, then publish")
    name, dirty = commit()
    if name is None:
        raise SpeedkitError("this is no checkout: name the commit that the code is of as SPEEDKIT_COMMIT")
    if dirty:
        raise SpeedkitError(f"the package differs from commit {name}, which the records would name: commit it first")
    end_s = time.monotonic() + (budget_s or math.inf)
    outcomes: dict[str, str] = {}
    for source in sources:
        for word in ("", *WORKLOADS) if names is None and source.name == TUNE else (workload,):
            name = f"{source.stem}-{word}" if word else source.stem
            try:
                outcomes[name] = publish_one(source, name, Path(out or notebooks_folder()), end_s=end_s)
            except SpeedkitError as error:
                outcomes[name] = f"failed: {error}"
    return outcomes


def is_busy(index: int) -> bool:
    """Return whether something runs on a GPU; False where nothing tells it, as for a part of one (MIG)."""
    try:
        return torch.cuda.utilization(index) > 5  # per cent: a screen takes less
    except Exception:
        return False


def publish_one(source: Path, name: str, out: Path, *, end_s: float) -> str:
    """Run one notebook, on the workload at the end of `name`, unless it is current or the time is too short.

    A tuning that was stopped goes on where it was, if the code is the same. Records that other machines left of older
    code are deleted. Raises SpeedkitError for a notebook that differs from the commit that its record would name.
    """
    machine, (revision, dirty) = device_slug(this_machine().as_dict()), commit()
    if dirty is not None and not is_current({"commit": revision}, source):
        raise SpeedkitError(
            f"{source.name} differs from commit {revision}, which its record would name: commit it first"
        )
    record_path = out / "records" / machine / f"{name}.json"
    before = files.read_json(record_path) if record_path.exists() else {"commit": None}
    if before["commit"] == revision or is_current(before, source):
        return "current"
    if time.monotonic() + (before.get("seconds") or 0.0) >= end_s:
        return "left: what is left of the budget is too short for it"
    executed, workload = Path("runs", "publish", f"{name}.ipynb"), name.partition("-")[2]
    running = executed.with_name(f"{name}-{revision}").resolve()
    if source.name != TUNE:
        shutil.rmtree(running, ignore_errors=True)
    environment = {"SPEEDKIT_SCALE": "", "SPEEDKIT_PROGRESS": "off", "SPEEDKIT_RUN_DIR": str(running)}
    parameters: dict[str, Any] = {"workload": workload} if workload else {}
    run_notebook(source, executed, parameters, environment=environment)
    record = whole_record(executed)
    record_path.parent.mkdir(parents=True, exist_ok=True)
    if not workload:
        files.write_text(out / source.name, with_outputs(source, executed))
    files.write_json(record_path, record)  # last: a record that is current says that all is done
    for path, other in published(out / source.name).items():
        if path.parent.name != machine and not is_current(other, source):
            path.unlink()
    executed.unlink()
    shutil.rmtree(running, ignore_errors=True)
    return "published"


def import_published(folder: str | Path) -> dict[str, str]:
    """Take in the records, and the notebooks' outputs, that `publish --out` wrote on another machine to `folder`.

    Return what became of each by its path; what other code made than there is here fails. Raises UsageError when there
    is nothing to take in.
    """
    folder, outcomes = Path(folder), {}
    for path in (*filter(Path.is_file, sorted(folder.glob("records/*/*.json"))), *find_notebooks(None, folder)):
        name = path.relative_to(folder)
        try:
            import_one(path, notebooks_folder() / name)
            outcomes[str(name)] = "published"
        except SpeedkitError as error:
            outcomes[str(name)] = f"failed: {error}"
    if not outcomes:
        raise UsageError(f"{folder} holds no notebooks or records: name the folder that `publish --out` wrote")
    return outcomes


def import_one(path: Path, into: Path) -> None:
    """Take in a record, or the harmless outputs of a notebook. Raises SpeedkitError for one that does not fit here."""
    is_record = path.suffix == ".json"
    record = load_record(path) if is_record else whole_record(path)
    source = notebooks_folder() / f"{path.stem.partition('-')[0]}.ipynb"
    if record["notebook"] != source.stem or not is_current(record, source):
        raise SpeedkitError(f"it was made by another version of {source.name} or of the modules it measures")
    into.parent.mkdir(parents=True, exist_ok=True)
    if is_record:
        files.write_json(into, record)
    else:
        files.write_text(source, with_outputs(source, path, foreign=True))


def whole_record(executed: Path) -> Row:
    """Return the record that the notebook at `executed` carries. Raises SpeedkitError when either is damaged."""
    notebook = read_notebook(executed)
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise SpeedkitError(f"{executed.name} is not a valid notebook") from error
    record: Any = record_of(notebook)
    if problems := validate_record(record):
        raise SpeedkitError(f"its record is missing or not valid: {problems[0]}")
    return record


def code_cells(notebook: Any) -> list[Any]:
    """Return the code cells of `notebook`, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def record_of(notebook: Any) -> Row | None:
    """Return the record that an executed notebook carries, as its last `run.save()` displayed it; None without one."""
    outputs = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return next((data[RECORD_MIME] for data in reversed(outputs) if RECORD_MIME in data), None)


def with_outputs(source: Path, executed: Path, *, foreign: bool = False) -> str:
    """Return the notebook `source` with the outputs of `executed`, without what is papermill's or a widget's.

    Of a `foreign` one only those that are harmless. Raises SpeedkitError where its code is another.
    """
    notebook, run = read_notebook(source), read_notebook(executed)
    if [cell.source for cell in code_cells(notebook)] != [cell.source for cell in code_cells(run)]:
        raise SpeedkitError(f"its code is not that of {source.name}")
    record = record_of(run) or {}
    for cell, ran in zip(code_cells(notebook), code_cells(run), strict=True):
        cell.outputs = [output for output in ran.outputs if WIDGET_VIEW not in output.get("data", {})]
        if foreign:
            cell.outputs = harmless_outputs(cell.outputs, record)
        cell.execution_count = ran.execution_count
    return as_text(notebook)


def as_text(notebook: Any) -> str:
    """Return a notebook's file, its record on one line: a line for each raw second is a tenth of the file."""
    record = json.dumps(record_of(notebook), ensure_ascii=False, separators=(",", ":"))
    for output in code_cells(notebook)[-1].outputs:
        if RECORD_MIME in output.get("data", {}):
            output.data[RECORD_MIME] = "record"
    return nbformat.writes(notebook).replace(f'"{RECORD_MIME}": "record"', f'"{RECORD_MIME}": {record}') + "\n"


# ---- the README, and the page of records beside it ----


def update_readme(readme: Path) -> None:
    """Write the README's generated blocks, the page of records and the picture of a tuning anew."""
    folder = readme.parent / "notebooks"
    files.write_text(readme, readme_text(readme))
    files.write_text(folder / RECORDS, records_text(folder))
    for record in tunings(folder)[:1]:
        with style.context(STYLE), files.atomic(folder / OPTIMIZATIONS) as temporary:
            waterfall(record).savefig(temporary, format="svg", metadata={"Date": None})


def readme_text(readme: Path) -> str:
    """Return the README's text with its generated blocks made anew. Raises ValueError when a block has no markers."""
    folder, text = readme.parent / "notebooks", readme.read_text(encoding="utf-8")
    blocks = {"notebooks": notebooks_table(folder), "tunings": tunings_table(folder), "peers": peers_table(folder)}
    blocks["picture"] = "No tuning is published yet."
    for record in tunings(folder)[:1]:
        title = f"The tuning of {escaped(record['workload']['name'])} on {machine_name(record)}"
        blocks["picture"] = f"![{title}]({folder.name}/{OPTIMIZATIONS})"
    for name, block in blocks.items():
        start = text.index(f"<!-- generated:{name} -->")
        end = text.index(f"<!-- /generated:{name} -->")
        text = f"{text[:start]}<!-- generated:{name} -->\n{block}\n{text[end:]}"
    return text


def tunings(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the tunings, those of today's code first, then GPUs first."""
    notebook = folder / TUNE
    records = [record for record in published(notebook).values() if record.get("speedup")]
    return sorted(records, key=lambda record: not is_current(record, notebook))


def tunings_table(folder: Path) -> str:
    """Return the headline of each tuning, what it is over, its quality and which code it is of, as a Markdown table."""
    rows = []
    for record in tunings(folder):
        side, speedup = headline(record)
        code = f"{record['commit']}, {record['created'][:10]}, {mark(record, folder / TUNE)}"
        workload = escaped(record["workload"]["name"])
        steps = recipe_steps(record)
        before, after = map(duration, training_s(record, steps))
        training = f"{after} instead of {before}, {steps:,} steps"
        quality = record["quality"]["decision"]
        rows.append([machine_name(record), workload, training, result_text(speedup), BASELINES[side], quality, code])
    trained = "whole training, over plain PyTorch"
    head = ["machine", "workload", trained, "a step, times as fast (99 %)", "over", "result", "code"]
    return markdown_table(head, rows)


def machine_name(record: Row) -> str:
    """Return what the machine of a record is called, as Markdown."""
    return escaped(device_name(record))


def mark(record: Row, notebook: Path) -> str:
    """Return in words whether `record` is of today's code."""
    return "measured" if is_current(record, notebook) else "out of date"


def peers_table(folder: Path) -> str:
    """Return what benchmarks/peers.py has measured side by side, as a Markdown table."""
    if not (folder / PEERS).exists():
        return "Nothing is measured beside its peers yet: `python benchmarks/peers.py` does it."
    record = files.read_json(folder / PEERS)
    tables = []
    for a, measured in itertools.groupby(record["measurements"], operator.itemgetter("a")):
        found: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for row in measured:
            found[row["name"].partition(":")[0]][row["b"]] = "{ratio:.2g} ({low:.2g} to {high:.2g})".format_map(row)
        rows = [[what, *ratios.values()] for what, ratios in found.items()]
        tables.append(markdown_table([f"time of {a} over that of", *next(iter(found.values()))], rows))
    text = "\n\n".join(tables)
    return f"On {record['machine']}, at commit {record['commit']}, with 99 % intervals; below 1 is slower:\n\n{text}"


def notebooks_table(folder: Path) -> str:
    """Return what each notebook teaches, its minutes to read and to run, and where it was measured, as a table."""
    by_notebook = {path: [*published(path).values()] for path in find_notebooks(None, folder)}
    machines = list(dict.fromkeys(machine_name(record) for records in by_notebook.values() for record in records))
    rows = []
    for path, records in by_notebook.items():
        title, _, text = read_notebook(path).cells[0].source.lstrip("# ").partition("\n")
        claim = text.strip().partition("\n\n")[0].replace("\n", " ").strip("*")
        minutes = re.findall(r"About (\d+) minutes", text)[:1]
        minutes += [str(max(1, round(record["seconds"] / 60))) for record in records[:1]]
        link = f"[{path.stem[:2]} {title.strip()}]({folder.name}/{path.name})"
        # The plain workload's record comes last of a machine's, so that it is the one that is told.
        measured_on = {machine_name(record): mark(record, path) for record in reversed(records)}
        marks = [measured_on.get(machine, "not yet") for machine in machines]
        rows.append([link, claim, " + ".join(minutes), *marks])
    return markdown_table(["notebook", "what it teaches", "minutes: to read + to run", *machines], rows)


def records_text(folder: Path) -> str:
    """Return the page of all records: which code, versions and machine each is from, and its checks."""
    rows = []
    for path in find_notebooks(None, folder):
        for file, record in published(path).items():
            code = escaped("speedkit {speedkit} at {}, torch {torch}".format(record["commit"], **record["versions"]))
            checks = [row["passed"] for row in record["checks"]]
            passed = f"{sum(checks)} of {len(checks)}"
            day = record["created"][:10]
            name = escaped(file.stem)
            rows.append([name, machine_name(record), day, code, record["scale"], passed, mark(record, path)])
    head = ["record", "machine", "day", "code", "scale", "checks passed", ""]
    about = "# Records\n\nWritten by `speedkit publish`; each record lies in the folder of its machine."
    return f"{about}\n\n{markdown_table(head, rows)}\n{section(folder)}"


@click.command(params=[DEBUG])
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("--all", "everything", is_flag=True, help="every notebook")
@click.option("--out", help="folder to write to (the notebooks' own)")
@click.option("--budget", "budget_s", type=seconds, metavar="TIME", help="start none that does not fit into it")
@click.option("--workload", default="", help="write only the record, of this workload")
@click.option("--import", "source", help="take in what another machine published to this folder")
def command(names: tuple[str, ...], everything: bool, source: str | None, **values: Any) -> int:
    """Run notebooks here for the repository: executed notebooks and records, and the README's tables."""
    if not (source or names or everything):
        raise UsageError("name notebooks to publish, or give --all or --import DIR")
    outcomes = import_published(source) if source else publish(None if everything else names, **values)
    for name, outcome in outcomes.items():
        click.echo(f"{name}: {outcome}")
    if not values["out"]:
        update_readme(notebooks_folder().parent / "README.md")
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    run_command(command, "speedkit publish")
