"""Changes in the text of a Python file, by the places of its syntax tree; all else stays byte for byte."""

import ast
import difflib
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch.utils.data import DataLoader

Node = TypeVar("Node", bound=ast.expr | ast.stmt)
Edit = tuple[int, int, str]  # from byte, to byte, and what stands there instead
LOADER_PARAMETERS = list(inspect.signature(DataLoader).parameters)
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
MOVES = ("to", "cuda")
PARTS = (*MOVES, "items", "values")  # methods that give what a batch holds


class Source:
    """The text of a Python file and the edits of it; an edit after which it were no Python is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = path.read_bytes()
        self.encoding, _ = tokenize.detect_encoding(io.BytesIO(self.before).readline)
        text = self.before.decode(self.encoding)
        self.tree = ast.parse(text)
        self.text = text.encode()  # in whose bytes the tree counts
        self.edits: list[Edit] = []
        self.top: dict[str, None] = {}  # what follows the first imports, each once
        self.line_end = "\r\n" if b"\r\n" in self.text else "\n"
        self.indentation = "\t" if b"\n\t" in self.text else "    "
        self.lines = [0]  # where they begin
        for line in self.text.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return from which byte to which `node` stands."""
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def around(self, line: int, column: int, kind: type[Node]) -> list[Node]:
        """Return the nodes of a kind that hold what begins at a place, the innermost first."""
        start = self.lines[line - 1] + column
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, kind)]
        holding = [node for node in nodes if self.span(node)[0] <= start < self.span(node)[1]]
        return holding[::-1]  # a walk comes to what is inside later

    def call_to(self, line: int, column: int) -> ast.Call | None:
        """Return the call that ends at a place."""
        end = self.lines[line - 1] + column
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.span(node)[1] == end)
        return next(calls, None)

    def mentions(self, name: str) -> bool:
        """Return whether an attribute, a keyword or a text of this name is in the file."""
        attributes = ("attr", "arg", "value")
        return any(getattr(node, attribute, None) == name for node in ast.walk(self.tree) for attribute in attributes)

    # ---- edits ----

    def take(self, *edits: Edit) -> bool:
        """Add edits, if the text is Python with them too; return whether it is."""
        try:
            compile(edited(self.text, [*self.edits, *edits]).decode(), str(self.path), "exec", dont_inherit=True)
        except SyntaxError:
            return False
        self.edits += edits
        return True

    def add_keywords(self, call: ast.Call, keywords: Mapping[str, str]) -> bool:
        """Give a call keywords that it does not have; return whether that is possible."""
        _, end = self.span(call)
        given = ", ".join(f"{name}={value}" for name, value in keywords.items())
        edits = [(end - 1, end - 1, f", {given}"), (end - 1, end - 1, given)]  # the other one where a comma is there
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if arguments:
            last = max(self.span(argument)[1] for argument in arguments)
            edits.insert(0, (last, last, f", {given}"))  # which a bracket around that argument would swallow
        for edit in edits:
            try:
                tree = ast.parse(edited(self.text, [edit]).decode())
            except SyntaxError:
                continue
            count = len(call.keywords) + len(keywords)
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.keywords) == count)
            if head(call) in map(head, calls):
                return self.take(edit)
        return False

    def insert_before(self, statement: ast.stmt, lines: Sequence[str]) -> bool:
        """Put lines before a statement, as far indented as it is; return whether that is possible."""
        start, _ = self.span(statement)
        line = self.lines[statement.lineno - 1]
        indented = self.text[line:start].decode()
        if indented.strip():  # other code stands before it in its line
            return self.take((start, start, "".join(f"{text}; " for text in lines)))
        inserted = "".join(indented + text.replace("    ", self.indentation) + self.line_end for text in lines)
        return self.take((line, line, inserted))

    def import_for(self, lines: str) -> None:
        """Import the modules that lines name."""
        for name in ("torch", "accelerate", "functools"):
            if f"{name}." in lines:
                self.top[f"import {name}"] = None

    def put_at_top(self, lines: str) -> None:
        """Put lines after the imports of the file."""
        self.import_for(lines)
        if "tree_map_only" in lines:
            self.top["from torch.utils._pytree import tree_map_only"] = None
        self.top[lines] = None

    def result(self) -> bytes:
        """Return the text with all edits, in the file's encoding."""
        edits = list(self.edits)
        if self.top:
            line, bound = self.imports()
            at = self.lines[line]
            lines = sorted((lines for lines in self.top if lines not in bound), key=kind_of_lines)
            text = "".join(f"{part}\n" for part in lines).replace("    ", self.indentation)
            if lines and lines[-1].startswith("\n") and not self.text[at:].lstrip(b" \t\r").startswith(b"\n"):
                text += "\n\n"
            edits.insert(0, (at, at, text.replace("\n", self.line_end)))
        return edited(self.text, edits).decode().encode(self.encoding)

    def imports(self) -> tuple[int, set[str]]:
        """Return after how many lines the imports at the top end, before all edits, and as what they bind modules."""
        first_edit = min((edit[0] for edit in self.edits), default=len(self.text))
        is_first = True
        bound: set[str] = set()
        line = 0
        for statement in self.tree.body:
            if isinstance(statement, BLOCKS) or self.span(statement)[1] > first_edit:
                break
            is_docstring = is_first and isinstance(statement, ast.Expr)
            is_first = False
            if isinstance(statement, ast.Import):
                bound |= {f"import {alias.asname or alias.name.partition('.')[0]}" for alias in statement.names}
            if is_docstring or isinstance(statement, ast.Import | ast.ImportFrom):
                line = statement.end_lineno or 0
        if not line:  # a file begins with comments that have to stay there
            line = min(node.lineno for node in ast.walk(self.tree) if isinstance(node, ast.expr | ast.stmt)) - 1
        return line, bound

    def diff(self, root: Path) -> bytes:
        """Return the change as a patch of the file, with its path from `root`; nothing where there is no change."""
        before, after = (lines_of(text) for text in (self.before, self.result()))
        name = self.path.relative_to(root).as_posix().encode()
        if b" " in name:
            name += b"\t"  # where it ends
        lines = difflib.diff_bytes(difflib.unified_diff, before, after, b"a/" + name, b"b/" + name)
        return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


class Sources(dict[Path, Source]):
    """Files by their paths, read where one is asked for."""

    def __missing__(self, path: Path) -> Source:
        self[path] = Source(path)
        return self[path]


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines of a text with their ends, as git counts them."""
    *lines, rest = text.split(b"\n")
    return [line + b"\n" for line in lines] + [rest] * bool(rest)


def head(call: ast.Call) -> tuple[int | None, ...]:
    """Return where a call begins and its function ends."""
    return call.lineno, call.col_offset, call.func.end_lineno, call.func.end_col_offset


def edited(text: bytes, edits: Sequence[Edit]) -> bytes:
    """Return `text` with edits; of several at one place the first stands first."""
    for start, end, inserted in sorted(edits, key=first_byte)[::-1]:
        text = text[:start] + inserted.encode() + text[end:]
    return text


def kind_of_lines(lines: str) -> int:
    """Return where lines stand at the top of a file: first imports, then statements, then definitions."""
    return 2 if lines.startswith("\n") else int(not lines.startswith(("import ", "from ")))


def first_byte(edit: Edit) -> int:
    """Return where an edit begins."""
    return edit[0]


def argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return what a call gives for a parameter by its name, to a DataLoader also by its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name in LOADER_PARAMETERS[: len(call.args)] and not any(isinstance(value, ast.Starred) for value in call.args):
        return call.args[LOADER_PARAMETERS.index(name)]
    return None


# ---- copies of a batch ----


def copies_in(loop: ast.For) -> Iterator[ast.Call]:
    """Yield the calls in a loop that copy a part of its batch to a device, and wait for that."""
    batch = stored(loop.target)
    count = 0
    while count < len(batch):  # more names come from it
        count = len(batch)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and root_name(node.value) in batch:
                batch |= {name for target in node.targets for name in stored(target)}
            if isinstance(node, ast.comprehension) and root_name(node.iter) in batch:
                batch |= stored(node.target)
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
            waits = "non_blocking" not in {keyword.arg for keyword in node.keywords}
            back = any(isinstance(value, ast.Constant) and value.value == "cpu" for value in node.args)
            if waits and not back and root_name(node) in batch:
                yield node


def stored(target: ast.expr) -> set[str]:
    """Return the names that an assignment to `target` sets."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def root_name(value: ast.expr) -> str:
    """Return of which name `value` is a part, or a copy; "" where it is computed."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in PARTS:
        return root_name(value.func.value)
    if isinstance(value, ast.Subscript | ast.Attribute):
        return root_name(value.value)
    return ""
