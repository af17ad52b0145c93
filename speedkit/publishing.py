"""Publishing: run notebooks here or take in what others ran, keep outputs and records, draw the README from them."""

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import nvml_facts, this_machine
from speedkit.measure.folklore import WORDS
from speedkit.measure.provenance import commit, is_current, notebooks_folder
from speedkit.measure.record import RECORD_MIME, code_cells, displayed_records, read_notebook, record_of
from speedkit.measure.schema import load_record, published, validate_record
from speedkit.notebooks import find_notebooks, run_notebook
from speedkit.show.figures import device_name, save, waterfall

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CLIMB, LADDER, RECORDS = "90_climb.ipynb", "records/ladder.svg", "records/README.md"
FOLKLORE = "50_folklore.ipynb"  # it shows what all others recorded: last of all
WORKLOADS = ("image", "speech", "text")  # of the climb, a record each; its notebook shows audio


class Outcome(NamedTuple):
    """What became of one notebook or record: published, current (nothing to do), left (no time) or failed."""

    name: str
    state: str
    why: str = ""


def is_stale(executed: Path, source: Path | None = None) -> bool:
    """Whether what the notebook `executed` shows came from other code than that of `source`, itself by default."""
    return not is_current(record_of(read_notebook(executed)), source or executed)


def device_slug(hardware: Mapping[str, Any]) -> str:
    """Return the folder name for the records of a machine: `nvidia-h200`, `cpu-intel-xeon-2-cores`."""
    cpu = re.sub(r"\((r|tm|c)\)|\b(processor|cpu|\d+-core)\b|@.*?hz", " ", (hardware.get("cpu") or "unknown").lower())
    name = hardware.get("gpu") or f"cpu {cpu} {hardware.get('cores', 1)} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def publish(
    names: Sequence[str] | None, out: str | Path | None = None, *, budget_s: float | None = None, workload: str = ""
) -> list[Outcome]:
    """Run the notebooks `names` here, in their auto profile, and write them and their records to `out`.

    None is all of them, the climb first and on each workload. What is published from the same code is left as it is,
    and none starts when `budget_s` is spent. With `workload` only the record is written, as NN_name-workload.json.
    Raises SpeedkitError for a busy GPU, and for changes since the commit that records would name.
    """
    import torch

    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if nvml_facts(uuid, "utilisation").get("utilisation", 0) > 0.05:  # a desktop's screen takes a few per cent
            raise SpeedkitError(f"GPU {index} is busy: wait until it is free, then publish")
    here = commit()
    if here and here[1]:
        raise SpeedkitError(f"the package differs from commit {here[0]}, which the records would name: commit it first")
    sources = sorted(find_notebooks(names), key=lambda source: (source.name != CLIMB, source.name == FOLKLORE))
    jobs = [(source, workload) for source in sources]
    if names is None and not workload:
        jobs[1:1] = [(source, word) for source in sources if source.name == CLIMB for word in WORKLOADS]
    end_s = time.monotonic() + (budget_s or math.inf)
    return [_publish_one(source, word, Path(out or notebooks_folder()), end_s) for source, word in jobs]


def _publish_one(source: Path, workload: str, out: Path, end_s: float) -> Outcome:
    parameters = {"workload": workload} if workload else {}
    name, shown = "-".join([source.stem, *parameters.values()]), out / source.name
    record = out / "records" / device_slug(this_machine().as_dict()) / f"{name}.json"
    done = record.exists() and is_current(files.read_json(record), source)
    if done and (workload or (shown.exists() and not is_stale(shown, source))):
        return Outcome(name, "current")
    if time.monotonic() >= end_s:
        return Outcome(name, "left", "the budget is spent")
    try:
        ran = Path("runs", "publish", f"{name}.ipynb")
        with tempfile.TemporaryDirectory(prefix="speedkit-publish-") as folder:
            settings = {"SPEEDKIT_PROFILE": "", "SPEEDKIT_PROGRESS": "off", "SPEEDKIT_RUN_DIR": folder}
            run_notebook(source, ran, parameters, environment=settings)
        if workload:
            _take_record(record_of(read_notebook(ran)), source, out, name)
        else:
            _take_notebook(ran, source, out)
        ran.unlink()
        return Outcome(name, "published")
    except SpeedkitError as error:
        return Outcome(name, "failed", str(error))


def _take_record(record: Any, source: Path, out: Path, name: str) -> None:
    """Put a record where the notebook `source` is published. Raises SpeedkitError for none, or one of other code."""
    if problems := validate_record(record):
        raise SpeedkitError(f"its record is not valid: {problems[0]}")
    if record["notebook"] != source.stem or not is_current(record, source):
        raise SpeedkitError(f"it was made by another version of {source.name} or of the modules it measures")
    folder = out / "records" / device_slug(record["hardware"])
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / f"{name}.json", record)


def _take_notebook(executed: Path, source: Path, out: Path) -> None:
    """Put `source` with the outputs of the notebook `executed`, and its record, where they are published.

    Words and metadata stay those of `source`: nothing of papermill's or of a widget comes along. Raises SpeedkitError
    when other code made the outputs.
    """
    import nbformat

    notebook, run = read_notebook(source), read_notebook(executed)
    cells, runs = code_cells(notebook), code_cells(run)
    if is_stale(executed) or len(cells) != len(runs):
        raise SpeedkitError("it was run with parameters or not to its end, or its code was changed since")
    _take_record(record_of(run), source, out, source.stem)
    for cell, ran in zip(cells, runs, strict=True):
        cell.outputs = [output for output in ran.outputs if WIDGET_VIEW not in output.get("data", {})]
        cell.execution_count = ran.execution_count
    record = json.dumps(record_of(run), ensure_ascii=False, separators=(",", ":"))
    for data in displayed_records(notebook):
        data[RECORD_MIME] = "record"
    # The record takes one line: a line for each raw second is a tenth of the file.
    text = nbformat.writes(notebook).replace(f'"{RECORD_MIME}": "record"', f'"{RECORD_MIME}": {record}')
    files.write_text(out / source.name, text + "\n")


def import_published(folder: str | Path, into: str | Path | None = None) -> list[Outcome]:
    """Take in the records, and the notebooks' outputs, that `publish --out` wrote on another machine to `folder`.

    What other code made than there is here fails. Raises UsageError when there is nothing to take in.
    """
    folder, into = Path(folder), Path(into or notebooks_folder())
    paths = [*sorted(folder.glob("records/*/*.json")), *find_notebooks(None, folder)]
    if not paths:
        raise UsageError(f"{folder} holds no notebooks or records: name the folder that `publish --out` wrote")
    outcomes = []
    for path in paths:
        name, source = str(path.relative_to(folder)), into / f"{path.stem.partition('-')[0]}.ipynb"
        try:
            if path.suffix == ".json":
                _take_record(load_record(path), source, into, path.stem)
            else:
                _take_notebook(path, source, into)
            outcomes.append(Outcome(name, "published"))
        except SpeedkitError as error:
            outcomes.append(Outcome(name, "failed", str(error)))
    return outcomes


# ---- the README, and the page of records beside it ----


def update_readme(readme: str | Path) -> None:
    """Write the README's generated blocks, the page of records and the ladder's figure anew."""
    folder = Path(readme).parent / "notebooks"
    files.write_text(readme, readme_text(readme))
    files.write_text(folder / RECORDS, records_text(folder))
    for record in _climbs(folder)[:1]:
        save(waterfall(record), folder / LADDER)


def readme_text(readme: str | Path) -> str:
    """Return the README's text with its generated blocks made anew. Raises UsageError when a block has no markers."""
    folder, text = Path(readme).parent / "notebooks", Path(readme).read_text(encoding="utf-8")
    for name, make in (("ladder", ladder_picture), ("climbs", climbs_table), ("notebooks", notebooks_table)):
        start, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        before, _, rest = text.partition(start)
        if end not in rest:
            raise UsageError(f"{Path(readme).name} needs the lines {start} and {end}: put them where {name} belongs")
        text = f"{before}{start}\n{make(folder)}\n{end}{rest.partition(end)[2]}"
    return text


def ladder_picture(folder: Path) -> str:
    """Return the figure of the first climb as Markdown, for a file beside `folder`."""
    for record in _climbs(folder)[:1]:
        return f"![The climb of {record['workload']['name']} on {device_name(record)}]({folder.name}/{LADDER})"
    return "No climb is published yet."


def climbs_table(folder: Path) -> str:
    """Return the final speed-ups of all climbs, from records alone, as a Markdown table."""
    rows = []
    for record in _climbs(folder):
        ratios = [
            "{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**found) if found else "not measured"
            for found in (record["speedup"], record["speedup_careful"])
        ]
        rows.append([device_name(record), record["workload"]["name"], *ratios, _mark(record, folder / CLIMB)])
    return _table(["machine", "workload", "over plain PyTorch", "over a careful start", ""], rows)


def notebooks_table(folder: Path) -> str:
    """Return what each notebook teaches, the minutes that it took, and a mark per machine, as a Markdown table."""
    recorded = {path: list(published(path).values()) for path in find_notebooks(None, folder)}
    machines = list(dict.fromkeys(device_name(record) for records in recorded.values() for record in records))
    rows = []
    for path, records in recorded.items():
        title, _, text = read_notebook(path).cells[0].source.lstrip("# ").partition("\n")
        claim = re.split(r"(?<=[.!?])\s", text.strip().partition("\n\n")[0].replace("\n", " "))[0]
        marks = {device_name(record): _mark(record, path) for record in reversed(records)}  # of the plain workload
        minutes = next((f"{record['seconds'] / 60:.0f}" for record in records if "seconds" in record), "")
        link = f"[{path.stem[:2]} {title.strip()}]({folder.name}/{path.name})"
        rows.append([link, claim, minutes, *(marks.get(machine, "not yet") for machine in machines)])
    return _table(["notebook", "what it teaches", "minutes", *machines], rows)


def records_text(folder: Path) -> str:
    """Return the page of all records: which code, versions and machine each is from, its checks and its verdicts."""
    rows = []
    for path in find_notebooks(None, folder):
        for file, record in published(path).items():
            versions, commit = record["versions"], record["commit"] or "no commit"
            code = f"speedkit {versions['speedkit']} at {commit}, torch {versions['torch']}"
            cells = [file.stem, device_name(record), record["created"][:10], code, record["profile"]]
            rows.append([*cells, _mark(record, path), _verdicts(record)])
    head = ["record", "machine", "day", "code", "profile", "", "checks, and verdicts on claims"]
    about = "Written by `speedkit publish`; each record lies in the folder of its machine."
    return f"# Records\n\n{about}\n\n{_table(head, rows)}\n"


def _climbs(folder: Path) -> list[dict[str, Any]]:
    return [record for record in published(folder / CLIMB).values() if record.get("speedup")]


def _mark(record: dict[str, Any], notebook: Path) -> str:
    """Return whether a record is of the code that its notebook has now."""
    return "measured" if is_current(record, notebook) else "out of date"


def _verdicts(record: dict[str, Any]) -> str:
    """Return how many checks of a record passed, and how it answers claims."""
    checks = [row["verdict"] == "passed" for row in record["verdicts"] if not row["claim"]]
    words = [f"{sum(checks)} of {len(checks)} checks passed"]
    for verdict, word in WORDS.items():
        claims = sorted(row["claim"] for row in record["verdicts"] if row["claim"] and row["verdict"] == verdict)
        words += [f"{word}: {', '.join(claims)}"] if claims else []
    return "; ".join(words)


def _table(head: list[str], rows: list[list[str]]) -> str:
    first, *others = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])
