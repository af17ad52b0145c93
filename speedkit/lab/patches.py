"""The changes of a tuned script as a patch of its own files, in the words of its framework.

The words are those of `frameworks.csv`: keywords go to the call that the script has made, statements about the whole
process to the top of the script, and those about the model before the statement that makes its optimizer. What has no
such place is left to its author, with the reason.
"""

import ast
import builtins
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit.lab.frameworks import KEPT, change_in_words, rows_for
from speedkit.lab.source_edits import Source
from speedkit.measure.optimizations import plan_of, text
from speedkit.measure.script_places import LOOP, MODELS, ZERO_GRAD, Place, root_of
from speedkit.plan import Plan
from speedkit.train.compile import repeated_blocks

# What a class is called in the table's words -> what it is among the places.
MADE = {name: name for name in ("DataLoader", "Trainer", "TrainingArguments", "Accelerator")} | {"AdamW": "Optimizer"}
# Where a call has one keyword, another one of its own has to give way.
GIVES_WAY = {
    ("fused", "True"): {"foreach": "False"},
    ("bf16", "True"): {"fp16": "False"},
    ("num_workers", "0"): {"persistent_workers": "False", "prefetch_factor": "None"},
}
LOADER_PARAMETERS = list(inspect.signature(DataLoader).parameters)
KEPT_CLASS, _, _ = KEPT.rpartition("\n")
# Given the class's forward and the model, it is copied along with it, and is the same where a script sets it twice.
IN_BF16 = """

def in_bf16(forward, *inputs, **named):  # whose outputs are float32, as they were
    with torch.autocast("{device}", torch.bfloat16):
        outputs = forward(*inputs, **named)
    return tree_map_only(torch.Tensor, lambda leaf: leaf.float() if leaf.dtype == torch.bfloat16 else leaf, outputs)"""
MOVES = ("to", "cuda")
PARTS = (*MOVES, "items", "values")  # methods that give what a batch holds


class Patch(NamedTuple):
    """A patch for `git apply` in the folder `root`, and a line for each change that its author has to make."""

    diff: bytes
    by_hand: list[str]
    root: Path


def patch_of(  # noqa: PLR0917  # what was measured, then what was recorded
    script: Path,
    fields: Mapping[str, Any],
    framework: str,
    places: Sequence[Place],
    *,
    optimizer: Optimizer,
    loader: DataLoader | None,
    models: Sequence[nn.Module],
) -> Patch:
    """Return the patch that makes the changes `fields`, of a plan, in a script's own files.

    `places` are those recorded while it ran, the others what its loop trains with; zero_grad=True is set_to_none there.
    """
    script = script.resolve()
    plan = plan_of([{field: value for field, value in fields.items() if field in vars(Plan())}])
    patch = _Patch(script, places, framework, optimizer=optimizer, loader=loader, models=models, plan=plan)
    whys: dict[str, str] = {}
    for field in fields:
        whys[field] = patch.place(field, set(fields))
    whys |= patch.place_keywords() | patch.place_lines()
    if plan.pin_memory and framework == "PyTorch" and not whys["pin_memory"]:
        whys["pin_memory"] = patch.copy_asynchronously()
    by_hand = []
    for field, why in whys.items():
        change = text({field: fields[field]})
        words = change_in_words(change, framework) or "optimizer.zero_grad(set_to_none=True)"
        if why:
            by_hand.append(f"{change} is not in the patch: {why}. By hand: {words}")
    root = root_of(script.parent)
    return Patch(b"".join(source.diff(root) for source in patch.sources.values()), by_hand, root)


class _Patch:
    """A patch in the making. What places a change returns "" or why it has no place."""

    def __init__(
        self,
        script: Path,
        places: Sequence[Place],
        framework: str,
        *,
        optimizer: Optimizer,
        loader: DataLoader | None,
        models: Sequence[nn.Module],
        plan: Plan,
    ) -> None:
        self.script = script
        self.places = places
        self.framework = framework
        self.optimizer = optimizer
        self.loader = loader
        self.models = [model for model in models if not hasattr(model, "training_step")]  # Lightning's calls its parts
        self.plan = plan
        self.sources: dict[Path, Source] = {}
        self.keywords: dict[Place, dict[str, tuple[str, str]]] = {}  # their values and fields
        self.lines: dict[tuple[Path, int, int], dict[str, str]] = {}  # by place, lines and their fields

    def source(self, path: Path) -> Source:
        """Return a file's text with the edits so far."""
        if path not in self.sources:
            self.sources[path] = Source(path)
        return self.sources[path]

    def place(self, field: str, fields: set[str]) -> str:
        """Place a field of the plan; keywords and lines are only noted yet, for several go to one call."""
        if field == ZERO_GRAD:
            return self.set_to_none()
        whys = []
        for row in rows_for(self.plan, fields | {"workers"}):  # which the script may have set itself
            if row[self.framework] and (row["field"] == field or (row["value"] and row["needs"] == field)):
                whys.append(self.place_row(row, field))
        return "; ".join(filter(None, whys)) if whys else f"{self.framework} has no words for it"

    def place_row(self, row: Mapping[str, str], field: str) -> str:
        """Place the words that a row of the table has for a field."""
        if field == "cache":
            return self.keep_samples()
        values = vars(self.plan)
        words = row[self.framework].format(**values, value=values[row["field"]])
        for statement in ast.parse(words).body:
            call = getattr(statement, "value", None)
            known = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            why = ""
            if isinstance(call, ast.Call) and (kind := MADE.get(ast.unparse(call.func).rpartition(".")[2])):
                why = self.note_keywords(kind, call.keywords, field)
            elif known == {"torch"}:
                self.put_at_top(self.script, ast.get_source_segment(words, statement) or "")
            else:
                why = self.note_lines(field)
            if why:
                return why
        return ""

    # ---- calls ----

    def made(self, kind: str) -> Place | str:
        """Return where the script makes its optimizer, its loader, or what a framework trains with; or why not."""
        candidates = [place for place in self.places if place.kind == kind]
        if kind == "Optimizer":
            candidates = [place for place in candidates if place.made() is self.optimizer]
        if kind in ("DataLoader", LOOP):  # a framework makes another loader of the same data
            same = [place for place in candidates if place.made() is self.loader]
            data = id(getattr(self.loader, "dataset", None))
            candidates = [place for place in candidates if place.dataset == data and place.direct] or same
        direct = [place for place in candidates if place.direct or kind == LOOP]
        if direct:
            return direct[-1]
        if candidates:
            place = candidates[-1]
            return f"the {kind} is made by a library that {place.path.name}, line {place.line}, calls"
        return f"the script makes no {kind} of its own"

    def call(self, place: Place) -> ast.Call | None:
        """Return the call at a place, if it is one of a class; a built-in function may have made the call, as map."""
        [*calls] = self.source(place.path).around(place.line, place.column, ast.Call)
        for call in calls[:1]:
            if not (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
                return call
        return None

    def note_keywords(self, kind: str, keywords: Iterable[ast.keyword], field: str) -> str:
        """Note keywords for the call that makes an object of a kind."""
        place = self.made(kind)
        if isinstance(place, str):
            return place
        call = self.call(place)
        if call is None:
            return f"line {place.line} of {place.path.name} is no call of a {kind}"
        for keyword in keywords:
            name = str(keyword.arg)
            if why := why_no_keyword(call, name, place):
                return why
            self.keywords.setdefault(place, {})[name] = (ast.unparse(keyword.value).replace("'", '"'), field)
        return ""

    def place_keywords(self) -> dict[str, str]:
        """Put the noted keywords into their calls; return why not, by field."""
        whys: dict[str, str] = {}
        for place, keywords in self.keywords.items():
            source = self.source(place.path)
            call = self.call(place)
            assert call is not None  # of which it was noted
            added = {}
            replaced = {name: value for name, (value, _) in keywords.items()}
            for given in list(replaced.items()):
                replaced |= {name: value for name, value in GIVES_WAY.get(given, {}).items() if argument(call, name)}
            for name, value in replaced.items():
                if own := argument(call, name):
                    source.take((*source.span(own), value))
                else:
                    added[name] = value
                self.import_for(place.path, value)
            if added and not source.add_keywords(call, added):
                whys |= {
                    keywords[name][1]: f"line {place.line} of {place.path.name} takes no keyword" for name in added
                }
        return whys

    def set_to_none(self) -> str:
        """Let gradients be freed where the script has them filled with zeros."""
        places = {(place.path, place.line, place.column): place for place in self.places if place.kind == ZERO_GRAD}
        calls = [(self.source(place.path), self.call(place)) for place in places.values() if place.direct]
        for source, call in calls:
            given = call and (argument(call, "set_to_none") or next(iter(call.args), None))
            if given:
                source.take((*source.span(given), "True"))
        return "" if calls else "a library sets gradients to zero"

    def keep_samples(self) -> str:
        """Let the loader's data set keep each sample that it has made."""
        place = self.made("DataLoader")
        if isinstance(place, str):
            return place
        call = self.call(place)
        data = call and argument(call, "dataset")
        if data is None or isinstance(data, ast.Starred):
            return f"line {place.line} of {place.path.name} does not name the data set"
        source = self.source(place.path)
        start, end = source.span(data)
        source.take((start, start, "Kept("), (end, end, ")"))
        self.put_at_top(place.path, f"\n\n{KEPT_CLASS}")
        return ""

    # ---- lines ----

    def put_at_top(self, path: Path, lines: str) -> None:
        """Put lines after the imports of a file, and those imports that they need."""
        self.import_for(path, lines)
        self.source(path).top[lines] = None

    def import_for(self, path: Path, lines: str) -> None:
        """Import what lines name, in a file that does not."""
        source = self.source(path)
        for name in ("torch", "accelerate", "functools"):
            if f"{name}." in lines and not source.imports(name):
                source.top[f"import {name}"] = None

    def note_lines(self, field: str) -> str:
        """Note the lines that change the models, for before the statement that makes their optimizer."""
        if field == "precision" and self.plan.precision != "bf16":
            return "the loop itself has to take part in it"
        if field not in ("precision", "channels_last", "compile"):
            return "it has no one place"
        if not self.models:
            return "the weights are in no module that is called"
        for model in self.models:
            found = self.name_of(model)
            if found is None:
                return f"where the optimizer is made, the {type(model).__name__} has no name"
            place, name = found
            lines = self.model_lines(field, model, name)
            self.lines.setdefault((place.path, place.line, place.column), {}).update(dict.fromkeys(lines, field))
            if field == "precision":
                source = self.source(place.path)
                source.top["from torch.utils._pytree import tree_map_only"] = None
                self.put_at_top(place.path, IN_BF16.format(device=next(model.parameters()).device.type))
            for line in lines:
                self.import_for(place.path, line)
        return ""

    def name_of(self, model: nn.Module) -> tuple[Place, str] | None:
        """Return where the model's optimizer is made, and what the model is called there, or the one that it wraps."""
        places = [place for place in self.places if place.kind == MODELS]
        places.sort(key=lambda place: place.made() is self.optimizer, reverse=True)
        weights = len(list(model.parameters()))
        for inner in model.modules():  # it comes first
            if len(list(inner.parameters())) == weights:
                for place in places:
                    for name, module in place.modules.items():
                        if module() is inner:
                            return place, name
        return None

    def model_lines(self, field: str, model: nn.Module, name: str) -> list[str]:
        """Return what makes a change of a plan in the model `name`, in place: its names in a checkpoint stay."""
        mode = f'mode="{self.plan.compile}"'
        if field == "channels_last":
            return [f"{name}.to(memory_format=torch.channels_last)"]
        if field == "precision":
            return [f"{name}.forward = functools.partial(in_bf16, type({name}).forward, {name})"]
        if self.plan.compile_scope == "blocks":
            classes = sorted({type(block).__name__ for block in repeated_blocks(model)})
            has_class = f"type(block).__name__ in {classes}".replace("'", '"')
            return [f"for block in {name}.modules():", f"    if {has_class}:", f"        block.compile({mode})"]
        if type(model).__module__.startswith("torch.") and self.plan.precision != "bf16":
            return [f"{name}.forward = torch.compile({name}.forward, {mode})"]  # whose own code .compile() skips
        return [f"{name}.compile({mode})"]

    def place_lines(self) -> dict[str, str]:
        """Put the noted lines before their statements; return why not, by field."""
        whys: dict[str, str] = {}
        for (path, line, column), lines in self.lines.items():
            source = self.source(path)
            statements = source.around(line, column, ast.stmt)
            if not any(source.insert_before(statement, list(lines)) for statement in statements[:2]):  # elif: before if
                whys |= dict.fromkeys(lines.values(), f"no line can stand before line {line} of {path.name}")
        return whys

    def copy_asynchronously(self) -> str:
        """Let the loop over the loader go on while its batches are copied."""
        place = self.made(LOOP)
        if isinstance(place, str):
            return f"the loader's memory is pinned, but copies need non_blocking=True: {place}"
        source = self.source(place.path)
        loops = [loop for loop in source.around(place.line, place.column, ast.stmt) if isinstance(loop, ast.For)]
        calls = [call for loop in loops[:1] for call in copies_in(loop)]
        if not all(source.add_keywords(call, {"non_blocking": "True"}) for call in calls) or not calls:
            return "the loader's memory is pinned, but no .to(device) of a batch is seen in the loop"
        return ""


def argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return what a call gives for a parameter by its name, to a DataLoader also by its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name in LOADER_PARAMETERS[: len(call.args)] and not any(isinstance(value, ast.Starred) for value in call.args):
        return call.args[LOADER_PARAMETERS.index(name)]
    return None


def why_no_keyword(call: ast.Call, name: str, place: Place) -> str:
    """Return why a call may have a keyword already, in what it unpacks; "" where it has not."""
    if place.kind == "DataLoader" and any(isinstance(value, ast.Starred) for value in call.args):
        return f"line {place.line} of {place.path.name} unpacks a sequence of arguments"
    for keyword in call.keywords:
        if keyword.arg is None:
            options = ast.unparse(keyword.value)
            keys = place.keys.get(options)
            if keys is None or name in keys:
                return f"**{options} in line {place.line} of {place.path.name} may have {name}"
    return ""


def copies_in(loop: ast.For) -> list[ast.Call]:
    """Return the calls in a loop that copy what comes from its batch to a device."""
    batch = stored(loop.target)
    count = 0
    while count < len(batch):  # more names come from it
        count = len(batch)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and root_name(node.value) in batch:
                batch |= {name for target in node.targets for name in stored(target)}
            if isinstance(node, ast.comprehension) and root_name(node.iter) in batch:
                batch |= stored(node.target)
    return [node for node in ast.walk(loop) if isinstance(node, ast.Call) and is_copy(node, batch)]


def is_copy(call: ast.Call, batch: set[str]) -> bool:
    """Return whether a call copies a part of `batch` to a device, and waits for that."""
    to_cpu = any(isinstance(value, ast.Constant) and value.value == "cpu" for value in call.args)
    waits = not to_cpu and argument(call, "non_blocking") is None
    return waits and isinstance(call.func, ast.Attribute) and call.func.attr in MOVES and root_name(call) in batch


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
