"""How a notebook of this repository is written, as rules; and small notebooks that keep them, for the tests.

nbval passes a stripped notebook without comparing anything, so that checked cells have outputs is a rule here.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from speedkit import publishing
from speedkit.errors import UsageError
from speedkit.measure.provenance import code_sha256
from speedkit.measure.record import RECORD_MIME, code_cells, read_notebook, record_of, start
from speedkit.measure.schema import validate_record
from speedkit.notebooks import declared_parameters

MAX_BYTES = 300_000
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~/:-])(/(home|root|Users|tmp|private|work|workspace|usr|opt|var|mnt|srv|data|content|kaggle)/[\w.-]+"
    r"|[A-Z]:\\\w+)"
)
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
CHECKED = "nbval-check-output"
HEADINGS = ("predict", "does not help", "exercise", "next")
KEPT = {"tags", "jupyter"}  # of a cell's metadata; `jupyter` holds what is folded
STRAY_TAGS = {"injected-parameters", "papermill-error-cell-tag", "nbval-skip", "nbval-ignore-output"}
# "3x", "1.5 ×", "2-fold", "40 % faster", "twice as fast"; "3x3" and "3 × 3" are sizes.
HAND_TYPED = re.compile(
    r"(?<![\w.])\d+(\.\d+)?\s?([x×](?![\w-]|\s?\d)|-?fold\b|times\s+(as\s+)?(fast|slow|quick|less|more))"
    r"|\d\s?(%|per\s?cent)\s+(faster|slower|quicker|less|more|speed|saved|of the time)"
    r"|\b(twice|thrice)\s+as\s+(fast|slow|quick)",
    re.IGNORECASE,
)


def contract_problems(path: Path) -> list[str]:
    """Return what is wrong with the notebook at `path`, how it is written and what it shows; [] when nothing is."""
    try:
        notebook = read_notebook(path)
    except UsageError as error:
        return [str(error)]
    problems = []
    try:
        declared_parameters(path)
    except UsageError as error:
        problems.append(str(error))
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    if (record := record_of(notebook) or {}).get("notebook") != path.stem:
        problems.append(f"its record is that of {record.get('notebook')}")
    rules = (_parameters, _outputs, _anatomy, _cells, _metadata, _prose)
    return problems + [problem for rule in rules for problem in rule(notebook)] + validate_record(record)


def hand_typed_speedups(text: str) -> list[str]:
    """Return the phrases of Markdown `text` that state a speed-up, which only a record may do."""
    return [match[0] for match in HAND_TYPED.finditer(text)]


def _tags(cell: Any) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _parameters(notebook: Any) -> Iterator[str]:
    for cell in code_cells(notebook):
        for line in cell.source.splitlines() if "parameters" in _tags(cell) else []:
            if "  # " not in line:
                yield f'the parameter "{line}" has no comment on its line'


def _outputs(notebook: Any) -> Iterator[str]:
    code = code_cells(notebook)
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"its execution counts are {counts}, not 1 to {len(code)}: run it whole in a fresh kernel"
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell [{number}] shows the error {output.ename}"
            elif output.get("name") == "stderr":
                yield f"cell [{number}] shows text on stderr: {output.text.strip()[:60]}"
    for number, cell in enumerate(notebook.cells):
        text = json.dumps([cell.source, cell.get("outputs")]).replace("\\n", " ").replace("\\\\", "\\")
        if found := ABSOLUTE_PATH.search(text):
            yield f"cell {number} holds the absolute path {found[0]}"
    records = sum(RECORD_MIME in output.get("data", {}) for cell in code for output in cell.outputs)
    if records != 1:
        yield f"{records} of its cells show a record, and one must"


def _anatomy(notebook: Any) -> Iterator[str]:
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    headings = " | ".join(re.findall(r"^#+ (.*)$", "\n".join(prose), re.MULTILINE)).lower()
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield "its first cell is not a title (`# ...`)"
    for words in HEADINGS:
        if words not in headings:
            yield f'no heading says "{words}"'
    if not any("<details" in text for text in prose):
        yield "no solution is collapsed in <details>"
    code = code_cells(notebook)
    if code and "parameters" not in _tags(code[0]):
        yield "its first code cell is not the parameters cell"
    if code and not re.search(r"\.save\(\)", code[-1].source):
        yield "its last code cell does not call run.save()"


def _cells(notebook: Any) -> Iterator[str]:
    code = code_cells(notebook)
    checked = [(number, cell) for number, cell in enumerate(code, 1) if CHECKED in _tags(cell)]
    if not checked:
        yield f"no cell is tagged {CHECKED}"
    for number, cell in checked:
        if not cell.execution_count or not cell.outputs:
            yield f"checked cell [{number}] has no count or no output, so nbval would compare nothing"
        saves = re.search(r"(?<!\btorch)\.save\(", cell.source)  # torch.save() shows nothing
        if any(set(output.get("data", {})) - {"text/plain"} for output in cell.outputs) or saves:
            yield f"checked cell [{number}] shows more than text, which differs from run to run"
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if not all(line.startswith("PASS ") for line in printed.splitlines()):
            yield f"checked cell [{number}] prints something else than lines that begin with PASS"
    if any(publishing.WIDGET_VIEW in output.get("data", {}) for cell in code for output in cell.outputs):
        yield "a cell shows a widget that is gone"
    if any(not cell.source.strip() for cell in code):
        yield "a code cell is empty"


def _metadata(notebook: Any) -> Iterator[str]:
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "its kernel is not python3"
    if stray := set(notebook.metadata) - {"kernelspec", "language_info"}:
        yield f"its metadata holds {', '.join(sorted(stray))}"
    for number, cell in enumerate(notebook.cells):
        if stray := (set(cell.metadata) - KEPT) | (_tags(cell) & STRAY_TAGS):
            yield f"cell {number} has the metadata or tag {', '.join(sorted(stray))}"


def _prose(notebook: Any) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for found in hand_typed_speedups(cell.source):
                yield f'cell {number} states a speed-up by hand, "{found}": draw it from a record'


# ---- small notebooks ----

PARAMETERS = """\
profile: str = "auto"  # auto | smoke | cpu | full
batch_size: int = 4  # samples per step
learning_rate: float | None = None  # None takes the recipe's
sizes: list[int] = [1, 2]  # what is tried
shuffle: bool = True  # in each epoch
workload: str = "audio"  # what is trained
"""


def code(source: str, *tags: str):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(path: Path, *cells) -> Path:
    """Write a notebook of `cells`, none of them run, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells), metadata={"kernelspec": dict(KERNELSPEC)}), path)
    return path


def plain(path: Path, *sources: str) -> Path:
    """Write a notebook with a parameters cell and cells of `sources`: it runs without importing torch."""
    return write(path, code(PARAMETERS, "parameters"), *map(code, sources))


def whole(path: Path, body: str = "total = 1 + 2") -> Path:
    """Write a notebook, not run, in the full anatomy, whose one free cell holds `body`."""
    begin = (
        "from speedkit.measure.record import start\n"
        f'run = start("{path.stem}", modules=["speedkit.errors"], profile=profile, workload=workload)'
    )
    return write(
        path,
        new_markdown_cell("# Tiny\n\nA sum does not depend on the order. It needs nothing.\n\nMore."),
        new_markdown_cell("## Predict first\n\nWhich is larger?"),
        code(PARAMETERS, "parameters"),
        code(begin),
        code(body),
        code('run.check("both orders agree", 1 + 2 == 2 + 1);', "nbval-check-output"),
        new_markdown_cell("## When it does not help\n\nNever."),
        new_markdown_cell("## Exercise\n\nTry three.\n\n<details><summary>Solution</summary>\n\nSix.\n\n</details>"),
        code("run.save();"),
        new_markdown_cell("## Next\n\nNothing."),
    )


def executed(path: Path) -> Path:
    """Write a notebook in the full anatomy as a run of it would have left it, without starting a kernel."""
    notebook = nbformat.read(whole(path), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
    cells[-2].outputs = [new_output("stream", text="PASS both orders agree\n")]
    data = {RECORD_MIME: a_record(path.stem, path), "text/plain": f"record of {path.stem}"}
    cells[-1].outputs = [new_output("display_data", data=data)]
    nbformat.write(notebook, path)
    return path


def a_record(name: str, path: Path) -> dict:
    """Return the record of a run on this machine of the notebook at `path`."""
    run = start(name, modules=["speedkit.errors"], profile="cpu", workload="audio")
    hashed = code_sha256(path, ["speedkit.errors"])
    return run.finished() | {"code_sha256": hashed}
