"""The changes of a tuned script as a patch of its own files, in the words of its framework.

The words are those of `frameworks.csv`: keywords go into the call that the script has made, statements about the whole
process to the top of the script, and those about the model before the statement that makes its optimizer. What has no
such place is left to its author, with the reason.
"""

import ast
import builtins
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit.lab.frameworks import KEPT, rows_for
from speedkit.lab.model_lines import definitions, model_line
from speedkit.lab.source_edits import Source, argument, copies_in
from speedkit.measure.optimizations import plan_of, text
from speedkit.measure.script_places import LOOP, MODELS, ZERO_GRAD, Place, root_of

SET_TO_NONE = "set_to_none"  # a field of no plan: gradients that a script sets to zero are dropped
# What a class is called in the table's words -> what it is among the places.
FRAMEWORKS = ("Trainer", "TrainingArguments", "Accelerator")
MADE = {name: name for name in ("DataLoader", *FRAMEWORKS)} | {"AdamW": "Optimizer"}
# Where a call has one keyword, another one of its own gives way.
GIVES_WAY = {
    ("fused", "True"): {"foreach": "False"},
    ("bf16", "True"): {"fp16": "False"},
    ("num_workers", "0"): {"persistent_workers": "False", "prefetch_factor": "None"},
}
KEPT_CLASS, _, _ = KEPT.rpartition("\n")


class Patch(NamedTuple):
    """A patch for `git apply` in the folder `root`, and a line for each change that its author has to make."""

    diff: bytes
    by_hand: list[str]
    root: Path


class Unplaced(Exception):
    """A change has no place in the script; says why."""


def patch_of(  # noqa: PLR0917  # what was measured, then what was recorded
    script: Path,
    fields: Mapping[str, Any],
    framework: str,
    places: Sequence[Place],
    *,
    optimizers: Sequence[Optimizer],
    loader: DataLoader | None,
    models: Sequence[nn.Module],
) -> Patch:
    """Return the patch that makes the changes `fields`, of a plan, in a script's own files.

    `places` are those that were recorded while it ran, the others what its loop trains with.
    """
    patch = _Patch(
        script=script.resolve(),
        fields=fields,
        framework=framework,
        places=places,
        optimizers=optimizers,
        loader=loader,
        models=[model for model in models if not hasattr(model, "training_step")],  # Lightning's calls its parts
    )
    whys = {field: patch.place(field) for field in fields}
    whys |= patch.place_keywords() | patch.place_lines()
    by_hand = patch.notes
    for field in filter(whys.get, fields):
        why = f"{text({field: fields[field]})}: not in the patch, for {whys[field]}"
        by_hand.append(f"{why}. By hand: {patch.in_words(field)}")
    root = root_of(script.parent)
    return Patch(b"".join(source.diff(root) for source in patch.sources.values()), by_hand, root)


@dataclasses.dataclass(kw_only=True)
class _Patch:
    """A patch in the making."""

    script: Path
    fields: Mapping[str, Any]
    framework: str
    places: Sequence[Place]
    optimizers: Sequence[Optimizer]
    loader: DataLoader | None
    models: Sequence[nn.Module]
    sources: dict[Path, Source] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # what is left to do beside what is placed
    keywords: dict[Place, dict[str, tuple[str, str]]] = dataclasses.field(default_factory=dict)  # name: value, field
    lines: dict[Place, dict[str, str]] = dataclasses.field(default_factory=dict)  # line: field

    def __post_init__(self) -> None:
        self.plan = plan_of([{field: value for field, value in self.fields.items() if field != SET_TO_NONE}])

    def source(self, path: Path) -> Source:
        """Return a file's text with the edits so far."""
        if path not in self.sources:
            self.sources[path] = Source(path)
        return self.sources[path]

    def place(self, field: str) -> str:
        """Place a field, or note its keywords and lines, for several go to one call; return "" or why it cannot be."""
        try:
            if field == SET_TO_NONE:
                self.set_to_none()
                return ""
            rows = [row for row in self.rows(field) if row[self.framework]]
            statements = [part for row in rows for part in ast.parse(self.words(row)).body]
            if field == "fused_optimizer" and self.clips_gradients():
                return "beside mixed precision Lightning refuses gradient_clip_val with it"
            if not statements:
                return f"{self.framework} has no words for it"
            for statement in statements:
                self.place_statement(statement, field)
            if field == "pin_memory" and self.framework == "PyTorch":
                self.copy_asynchronously()
        except Unplaced as why:
            return str(why)
        return ""

    def clips_gradients(self) -> bool:
        """Return whether Lightning clips gradients, beside mixed precision."""
        trainers = [self.source(place.path) for place in self.places if place.kind == "Trainer"]
        mixed = "precision" in self.fields or any(source.mentions("precision") for source in trainers)
        return mixed and any(source.mentions("gradient_clip_val") for source in trainers)

    def rows(self, field: str) -> list[dict[str, str]]:
        """Return the rows of the table that are about a field."""
        rows = rows_for(self.plan, {*self.fields, "workers"})  # which the script may have set itself
        return [row for row in rows if row["field"] == field or (row["value"] and row["needs"] == field)]

    def words(self, row: Mapping[str, str]) -> str:
        """Return what a row of the table says for this framework."""
        values = vars(self.plan)
        words = row[self.framework] or row["otherwise"]
        return words.format(**values, value=values[row["field"]], kept="dataset = Kept(dataset)")

    def in_words(self, field: str) -> str:
        """Return what to do by hand."""
        if field == SET_TO_NONE:
            return "optimizer.zero_grad(set_to_none=True)"
        if field == "cache":
            return "keep each sample that was made"
        return "; ".join(filter(None, map(self.words, self.rows(field))))

    def place_statement(self, statement: ast.stmt, field: str) -> None:
        """Place a statement of the table."""
        call = getattr(statement, "value", None)
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if field == "cache":
            self.keep_samples()
        elif isinstance(call, ast.Call) and (kind := MADE.get(ast.unparse(call.func).rpartition(".")[2])):
            self.note_keywords(kind, call.keywords, field)
        elif names == {"torch"}:
            self.put_process_wide(statement, field)
        elif field in ("channels_last", "compile") or (field, self.plan.precision) == ("precision", "bf16"):
            self.note_lines(field)
        else:
            raise Unplaced("it is no one line")

    # ---- calls ----

    def made(self, kind: str, of: Any = None) -> Place:
        """Return where the script makes what its loop has of a kind, and is `of` where that is given."""
        first = next((n for n, place in enumerate(self.places) if place.made() in self.optimizers), None)
        found = [place for place in self.places if place.kind == kind and (of is None or place.made() is of)]
        if kind == "DataLoader":
            if self.loader is None:
                raise Unplaced("the loop takes its batches from no DataLoader")
            data = id(self.loader.dataset)  # of which a framework makes another loader
            found = [place for place in found if place.dataset == data]
        elif kind in FRAMEWORKS:  # another one may be made later, for a test
            found = [place for place in self.places[:first] if place.kind == kind]
        direct = [place for place in found if place.direct]
        if not found:
            raise Unplaced(f"no {kind} is called in the script's own files")
        if not direct:
            raise Unplaced(f"a library makes the {kind}, called in {found[-1]}")
        return direct[-1]

    def call(self, place: Place) -> ast.Call:
        """Return the call at a place, of a class or the like: a built-in function, as map, is none."""
        call = self.source(place.path).call_to(*place.end)
        if call is None or (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
            raise Unplaced(f"{place} is no call of a {place.kind}")
        return call

    def note_keywords(self, kind: str, keywords: Iterable[ast.keyword], field: str) -> None:
        """Note keywords for the calls that make what the loop has of a kind."""
        places = [self.made(kind, of) for of in (self.optimizers if kind == "Optimizer" else [None])]
        noted = []
        for place in places:
            call = self.call(place)
            for keyword in keywords:
                name, value = str(keyword.arg), ast.unparse(keyword.value).replace("'", '"')
                if argument(call, name) is None:
                    if kind == "DataLoader" and str(getattr(self.loader, name)) == value:
                        continue  # it is so
                    if unpacked := self.may_unpack(call, name, place):
                        raise Unplaced(f"{unpacked} in {place} may hold {name}")
                noted.append((place, name, value))
        for place, name, value in noted:
            self.keywords.setdefault(place, {})[name] = (value, field)

    def may_unpack(self, call: ast.Call, name: str, place: Place) -> str:
        """Return what a call unpacks that may hold a keyword, here or elsewhere; "" where nothing does."""
        for value in call.args:
            if isinstance(value, ast.Starred) and place.kind == "DataLoader":
                return ast.unparse(value)
        for keyword in call.keywords:
            if keyword.arg is None:
                options = ast.unparse(keyword.value)
                keys = place.keys.get(options, {name})
                if name in keys or self.source(place.path).mentions(name):
                    return f"**{options}"
        return ""

    def place_keywords(self) -> dict[str, str]:
        """Put the noted keywords into their calls; return why not, by field."""
        whys: dict[str, str] = {}
        for place, keywords in self.keywords.items():
            source = self.source(place.path)
            call = self.call(place)
            values = {name: value for name, (value, _) in keywords.items()}
            for given in list(values.items()):
                others = GIVES_WAY.get(given, {})
                values = {name: value for name, value in others.items() if argument(call, name)} | values
            added = {}
            for name, value in values.items():
                if own := argument(call, name):
                    source.take((*source.span(own), value))
                else:
                    added[name] = value
                self.import_for(source, value)
            if added and not source.add_keywords(call, added):
                whys |= {keywords[name][1]: f"the call in {place} takes no keyword" for name in added}
        return whys

    def set_to_none(self) -> None:
        """Let gradients be dropped where the script has them filled with zeros."""
        self.made(ZERO_GRAD)
        for place in self.places:
            if place.kind == ZERO_GRAD and place.direct:
                call = self.call(place)
                source = self.source(place.path)
                edit = (*source.span(argument(call, SET_TO_NONE) or call.args[0]), "True")
                if edit not in source.edits:
                    source.take(edit)

    def keep_samples(self) -> None:
        """Let the loader's data set keep each sample that it has made."""
        place = self.made("DataLoader")
        source = self.source(place.path)
        data = argument(self.call(place), "dataset")
        if data is None:
            raise Unplaced(f"the call in {place} does not name the data set")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("loader.dataset"):
                raise Unplaced(
                    f"line {node.lineno} of {place.path.name} reads an attribute of {ast.unparse(node.value)}"
                )
        start, end = source.span(data)
        source.take((start, start, "Kept("), (end, end, ")"))
        self.put_at_top(source, f"\n\n{KEPT_CLASS}")

    def copy_asynchronously(self) -> None:
        """Let the loop over the loader go on while its pinned batches are copied."""
        places = [place for place in self.places if place.kind == LOOP and place.made() is self.loader]
        for place in places[-1:]:
            source = self.source(place.path)
            for loop in source.around(*place.start, ast.For)[:1]:
                copies = list(copies_in(loop))
                if copies and all(source.add_keywords(copy, {"non_blocking": "True"}) for copy in copies):
                    return
        self.notes.append(
            "pin_memory=True: give the copies of a batch non_blocking=True, by hand: inputs.to(device, ...)"
        )

    # ---- lines ----

    def import_for(self, source: Source, lines: str) -> None:
        """Import the modules that lines name."""
        for name in ("torch", "accelerate", "functools"):
            if f"{name}." in lines:
                source.top[f"import {name}"] = None

    def put_at_top(self, source: Source, lines: str) -> None:
        """Put lines after the imports of a file."""
        self.import_for(source, lines)
        if "tree_map_only" in lines:
            source.top["from torch.utils._pytree import tree_map_only"] = None
        source.top[lines] = None

    def put_process_wide(self, statement: ast.stmt, field: str) -> None:
        """Put a statement to the top of the script, or where the optimizer is made if it sets the same by itself."""
        line = ast.unparse(statement).replace("'", '"')
        source = self.source(self.script)
        switch = ast.unparse(getattr(statement, "targets", [getattr(statement, "value", statement)])[0])
        if source.mentions(switch.partition("(")[0].rpartition(".")[2]):
            places = [place for place in self.places if place.kind in (MODELS, "Optimizer")]
            if not places:
                raise Unplaced(f"{source.path.name} sets it by itself")
            place = places[-1]
            self.lines.setdefault(place, {})[line] = field
            self.import_for(self.source(place.path), line)
        else:
            self.put_at_top(source, line)

    def note_lines(self, field: str) -> None:
        """Note the lines that change the models, for before the statement that makes their optimizer."""
        if not self.models:
            raise Unplaced("the weights are in no module that is called")
        for model in self.models:
            place, name = self.name_of(model)
            source = self.source(place.path)
            line = model_line(field, model, name, plan=self.plan, own_autocast=self.framework == "PyTorch")
            self.import_for(source, line)
            self.lines.setdefault(place, {})[line] = field
            for function in definitions(line, model):
                self.put_at_top(source, function)

    def name_of(self, model: nn.Module) -> tuple[Place, str]:
        """Return where the model's optimizer is made, and what the model is called there, or the one that it wraps."""
        weights = len(list(model.parameters()))
        for inner in model.modules():  # it comes first
            if len(list(inner.parameters())) == weights:
                for place in self.places[::-1]:
                    for name, module in place.modules.items():
                        if module() is inner:
                            return place, name
        raise Unplaced(f"where the optimizer is made, the {type(model).__name__} has no name")

    def place_lines(self) -> dict[str, str]:
        """Put the noted lines before their statements; return why not, by field."""
        whys: dict[str, str] = {}
        for place, lines in self.lines.items():
            source = self.source(place.path)
            for statement in source.around(*place.start, ast.stmt):
                if source.insert_before(statement, list(lines)):
                    break
                if not isinstance(statement, ast.If):  # before an elif nothing can stand, but before its if
                    whys |= dict.fromkeys(lines.values(), f"no line can stand before {place}")
                    break
        return whys
