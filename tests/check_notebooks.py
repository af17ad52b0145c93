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
from speedkit.measure.record import RECORD_MIME, code_cells, displayed_records, read_notebook, record_of, start
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
        declared_parameters(path)
    except UsageError as error:
        return [str(error)]
    problems = validate_record(record_of(notebook))
    if (record_of(notebook) or {}).get("notebook") != path.stem:
        problems.append("its record is that of another notebook")
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    return problems + [problem for rule in (_anatomy, _cells, _outputs, _checked) for problem in rule(notebook)]


def hand_typed_speedups(text: str) -> list[str]:
    """Return the phrases of Markdown `text` that state a speed-up, which only a record may do."""
    return [match[0] for match in HAND_TYPED.finditer(text)]


def _tags(cell: Any) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _anatomy(notebook: Any) -> Iterator[str]:
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = " | ".join(re.findall(r"^#+ (.*)$", prose, re.MULTILINE)).lower()
    code = code_cells(notebook)
    if not notebook.cells[0].source.startswith("# "):
        yield "its first cell is not a title (`# ...`)"
    yield from (f'no heading says "{words}"' for words in HEADINGS if words not in headings)
    if "<details" not in prose:
        yield "no solution is collapsed in <details>"
    if "parameters" not in _tags(code[0]):
        yield "its first code cell is not the parameters cell"
    if not all("  # " in line for line in code[0].source.splitlines()):
        yield "a parameter has no comment on its line"
    if ".save()" not in code[-1].source:
        yield "its last code cell does not call run.save()"
    yield from (
        f'it states a speed-up by hand, "{words}": draw it from a record' for words in hand_typed_speedups(prose)
    )


def _cells(notebook: Any) -> Iterator[str]:
    if stray := set(notebook.metadata) - {"kernelspec", "language_info"}:
        yield f"its metadata holds {', '.join(sorted(stray))}"
    for number, cell in enumerate(notebook.cells):
        if stray := (set(cell.metadata) - KEPT) | (_tags(cell) & STRAY_TAGS):
            yield f"cell {number} has the metadata or tag {', '.join(sorted(stray))}"
        text = json.dumps([cell.source, cell.get("outputs")]).replace("\\n", " ").replace("\\\\", "\\")
        if path := ABSOLUTE_PATH.search(text):
            yield f"cell {number} holds the absolute path {path[0]}"


def _outputs(notebook: Any) -> Iterator[str]:
    code = code_cells(notebook)
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "its execution counts do not run from 1: run it whole in a fresh kernel"
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell [{number}] shows the error {output.ename}"
            elif output.get("name") == "stderr":
                yield f"cell [{number}] shows text on stderr: {output.text.strip()[:60]}"
            elif publishing.WIDGET_VIEW in output.get("data", {}):
                yield f"cell [{number}] shows a widget that is gone"
    if len(displayed_records(notebook)) != 1:
        yield f"{len(displayed_records(notebook))} of its cells show a record, and one must"


def _checked(notebook: Any) -> Iterator[str]:
    checked = [cell for cell in code_cells(notebook) if CHECKED in _tags(cell)]
    if not checked:
        yield f"no cell is tagged {CHECKED}"
    for cell in checked:
        if not cell.execution_count or not cell.outputs:
            yield "a checked cell has no count or no output, so nbval would compare nothing"
        for output in cell.outputs:
            if not all(line.startswith("PASS ") for line in output.get("text", "?").splitlines()):
                yield "a checked cell shows something else than lines that begin with PASS"


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
    notebook = read_notebook(whole(path))
    cells = code_cells(notebook)
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
