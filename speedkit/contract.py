"""What a published notebook must be, checked without a kernel; `clean` removes what running it left behind.

nbval passes a stripped notebook without comparing anything, so that outputs and counts are there is checked here.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedkit.errors import UsageError
from speedkit.parameters import RECORD_MIME, parameters_of, read_notebook, record_of

MAX_BYTES = 300_000
CHECKED = "nbval-check-output"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HEADINGS = ("predict", "does not help", "exercise", "next")
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
KEPT = {"tags", "jupyter"}  # of a cell's metadata; `jupyter` holds what is folded
STRAY_TAGS = {"injected-parameters", "papermill-error-cell-tag", "nbval-skip", "nbval-ignore-output"}

ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~/:-])(/(home|root|Users|tmp|private|work|workspace|usr|opt|var|mnt|srv|data|content|kaggle)/[\w.-]+"
    r"|[A-Z]:\\\w+)")  # fmt: skip
# "3x", "1.5 ×", "2-fold", "40 % faster", "twice as fast"; "3x3" and "3 × 3" are sizes.
HAND_TYPED = re.compile(
    r"(?<![\w.])\d+(\.\d+)?\s?([x×](?![\w-]|\s?\d)|-?fold\b|times\s+(as\s+)?(fast|slow|quick|less|more))"
    r"|\d\s?(%|per\s?cent)\s+(faster|slower|quicker|less|more|speed|saved|of the time)"
    r"|\b(twice|thrice)\s+as\s+(fast|slow|quick)", re.IGNORECASE)  # fmt: skip


def contract_problems(path: str | Path) -> list[str]:
    """Return what is wrong with the published notebook at `path`, a sentence each; [] when nothing is.

    That its outputs are current is another matter: see `publishing.is_stale`.
    """
    path, problems = Path(path), []
    try:
        notebook = read_notebook(path)
    except UsageError as error:
        return [str(error)]
    try:
        parameters_of(path)
    except UsageError as error:
        problems.append(str(error))
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    for rule in (_anatomy, _cells, _outputs, _metadata, _prose, _record):
        problems += rule(notebook)
    record = record_of(notebook)
    if record and record.get("notebook") != path.stem:
        problems.append(f"its record is that of {record.get('notebook')}")
    return problems


def hand_typed_speedups(text: str) -> list[str]:
    """Return the phrases of Markdown `text` that state a speed-up, which only a record may do."""
    return [match[0] for match in HAND_TYPED.finditer(text)]


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tags(cell: Any) -> set[str]:
    return set(cell.metadata.get("tags", []))


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
    code = _code(notebook)
    if code and "parameters" not in _tags(code[0]):
        yield "its first code cell is not the parameters cell"
    if code and not re.search(r"\.save\(\)", code[-1].source):
        yield "its last code cell does not call run.save()"


def _cells(notebook: Any) -> Iterator[str]:
    code = _code(notebook)
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"its execution counts are {counts}, not 1 to {len(code)}: run it from top to bottom in a fresh kernel"
    checked = [(number, cell) for number, cell in enumerate(code, 1) if CHECKED in _tags(cell)]
    if not checked:
        yield f"no cell is tagged {CHECKED}"
    for number, cell in checked:
        if not cell.execution_count or not cell.outputs:
            yield f"checked cell [{number}] has no count or no output, so nbval would compare nothing"
        if any(set(output.get("data", {})) - {"text/plain"} for output in cell.outputs) or ".save(" in cell.source:
            yield f"checked cell [{number}] shows more than text, which differs from run to run"
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if not all(line.startswith("PASS ") for line in printed.splitlines()):
            yield f"checked cell [{number}] prints something else than lines that begin with PASS"
    if any(not cell.source.strip() for cell in code):
        yield "a code cell is empty"


def _outputs(notebook: Any) -> Iterator[str]:
    for number, cell in enumerate(_code(notebook), 1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell [{number}] shows the error {output.ename}"
            if output.get("name") == "stderr":
                yield f"cell [{number}] shows text on stderr: {output.text.strip()[:60]}"
            if WIDGET_VIEW in output.get("data", {}):
                yield f"cell [{number}] shows a widget that is gone"
    for number, cell in enumerate(notebook.cells):
        data = [output.get("data", {}) for output in cell.get("outputs", [])]
        shown = [value for item in data for kind, value in item.items() if not kind.startswith("image/p")]
        text = json.dumps([cell.source, shown, [output.get("text", "") for output in cell.get("outputs", [])]])
        if found := ABSOLUTE_PATH.search(text.replace("\\n", " ").replace("\\\\", "\\")):
            yield f"cell {number} holds the absolute path {found[0]}"


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


def _record(notebook: Any) -> Iterator[str]:
    from speedkit.measure.schema import validate_record

    cells = [cell for cell in _code(notebook) if any(RECORD_MIME in output.get("data", {}) for output in cell.outputs)]
    if len(cells) != 1:
        yield f"{len(cells)} of its cells show a record, and one must"
        return
    yield from validate_record(record_of(notebook) or {})


def clean(notebook: Any) -> Any:
    """Return `notebook`, changed in place, without what papermill, widgets and timing left in it."""
    notebook.metadata = type(notebook.metadata)(kernelspec=dict(KERNELSPEC), language_info=dict(LANGUAGE))
    for cell in notebook.cells:
        cell.metadata = type(cell.metadata)({key: cell.metadata[key] for key in KEPT if cell.metadata.get(key)})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
            for output in cell.outputs:
                if "metadata" in output:
                    output.metadata = type(output.metadata)()
    return notebook


def current_hash(path: Path) -> str:
    """Return the hash that a record made by the notebook at `path` now would carry.

    The modules are those of its `start(..., modules=[...])`. Raises UsageError for one that does not exist.
    """
    from speedkit.measure.provenance import code_sha256

    return code_sha256(path, declared_modules(read_notebook(path)))


def declared_modules(notebook: Any) -> list[str]:
    """Return the modules that a notebook's `start(...)` names as those its figures depend on, [] if it names none."""
    for cell in _code(notebook):
        try:
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        except SyntaxError:  # a cell with a %magic
            continue
        for call in calls:
            if getattr(call.func, "attr", getattr(call.func, "id", "")) == "start":
                given = [item.value for item in call.keywords if item.arg == "modules"] + call.args[1:2]
                try:
                    return list(ast.literal_eval(given[0])) if given else []
                except ValueError:
                    raise UsageError("the modules of start(...) must be a list of names, written out there") from None
    return []
