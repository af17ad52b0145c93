"""The changes of a tuned script as a patch of its own files, in the words of its framework.

The words are those of `frameworks.csv`: keywords go into the call that the script has made, statements about the whole
process to the top of the script, and those about the model before the statement that makes its optimizer. What has no
such place is left to its author, with the reason.
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit.lab.frameworks import KEPT, rows_for
from speedkit.lab.script.calls import MADE, Calls, Unplaced
from speedkit.lab.script.model_lines import definitions, model_line
from speedkit.lab.script.places import LOOP, MODELS, ZERO_GRAD, Place, root_of
from speedkit.lab.script.source_edits import Sources, argument, copies_in
from speedkit.measure.optimizations import plan_of, text

SET_TO_NONE = "set_to_none"  # a field of no plan: gradients that a script sets to zero are dropped
KEPT_CLASS, _, _ = KEPT.rpartition("\n")


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
    optimizers: Sequence[Optimizer],
    loader: DataLoader | None,
    models: Sequence[nn.Module],
) -> Patch:
    """Return the patch that makes the changes `fields`, of a plan, in a script's own files.

    `places` are those that were recorded while it ran, the others what its loop trains with.
    """
    sources = Sources()
    calls = Calls(places, optimizers, loader, sources)
    patch = _Patch(
        script=script.resolve(),
        fields=fields,
        framework=framework,
        places=places,
        sources=sources,
        calls=calls,
        models=[model for model in models if not hasattr(model, "training_step")],  # Lightning's calls its parts
    )
    whys = {field: patch.place(field) for field in fields}
    whys |= calls.place_noted() | patch.place_lines()
    by_hand = patch.notes
    for field in filter(whys.get, fields):
        why = f"{text({field: fields[field]})}: not in the patch, for {whys[field]}"
        by_hand.append(f"{why}. By hand: {patch.in_words(field)}")
    root = root_of(script.parent)
    return Patch(b"".join(source.diff(root) for source in sources.values()), by_hand, root)


@dataclasses.dataclass(kw_only=True)
class _Patch:
    """A patch in the making."""

    script: Path
    fields: Mapping[str, Any]
    framework: str
    places: Sequence[Place]
    models: Sequence[nn.Module]
    sources: Sources
    calls: Calls
    notes: list[str] = dataclasses.field(default_factory=list)  # what is left to do beside what is placed
    lines: dict[Place, dict[str, str]] = dataclasses.field(default_factory=dict)  # line: field

    def __post_init__(self) -> None:
        self.plan = plan_of([{field: value for field, value in self.fields.items() if field != SET_TO_NONE}])

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
        trainers = [self.sources[place.path] for place in self.places if place.kind == "Trainer"]
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
            self.calls.note(kind, call.keywords, field)
        elif names == {"torch"}:
            self.put_process_wide(statement, field)
        elif field in ("channels_last", "compile") or (field, self.plan.precision) == ("precision", "bf16"):
            self.note_lines(field)
        else:
            raise Unplaced("it is no one line")

    # ---- calls ----

    def set_to_none(self) -> None:
        """Let gradients be dropped where the script has them filled with zeros."""
        self.calls.place_of(ZERO_GRAD)
        for place in self.places:
            if place.kind == ZERO_GRAD and place.direct:
                call = self.calls.at(place)
                source = self.sources[place.path]
                edit = (*source.span(argument(call, SET_TO_NONE) or call.args[0]), "True")
                if edit not in source.edits:
                    source.take(edit)

    def keep_samples(self) -> None:
        """Let the loader's data set keep each sample that it has made."""
        place = self.calls.place_of("DataLoader")
        source = self.sources[place.path]
        data = argument(self.calls.at(place), "dataset")
        if data is None:
            raise Unplaced(f"the call in {place} does not name the data set")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("loader.dataset"):
                raise Unplaced(
                    f"line {node.lineno} of {place.path.name} reads an attribute of {ast.unparse(node.value)}"
                )
        start, end = source.span(data)
        source.take((start, start, "Kept("), (end, end, ")"))
        source.put_at_top(f"\n\n{KEPT_CLASS}")

    def copy_asynchronously(self) -> None:
        """Let the loop over the loader go on while its pinned batches are copied."""
        places = [place for place in self.places if place.kind == LOOP and place.made() is self.calls.loader]
        for place in places[-1:]:
            source = self.sources[place.path]
            for loop in source.around(*place.start, ast.For)[:1]:
                copies = list(copies_in(loop))
                if copies and all(source.add_keywords(copy, {"non_blocking": "True"}) for copy in copies):
                    return
        self.notes.append(
            "pin_memory=True: give the copies of a batch non_blocking=True, by hand: inputs.to(device, ...)"
        )

    # ---- lines ----

    def put_process_wide(self, statement: ast.stmt, field: str) -> None:
        """Put a statement to the top of the script, or where the optimizer is made if it sets the same by itself."""
        line = ast.unparse(statement).replace("'", '"')
        source = self.sources[self.script]
        switch = ast.unparse(getattr(statement, "targets", [getattr(statement, "value", statement)])[0])
        if source.mentions(switch.partition("(")[0].rpartition(".")[2]):
            places = [place for place in self.places if place.kind in (MODELS, "Optimizer")]
            if not places:
                raise Unplaced(f"{source.path.name} sets it by itself")
            place = places[-1]
            self.lines.setdefault(place, {})[line] = field
            self.sources[place.path].import_for(line)
        else:
            source.put_at_top(line)

    def note_lines(self, field: str) -> None:
        """Note the lines that change the models, for before the statement that makes their optimizer."""
        if not self.models:
            raise Unplaced("the weights are in no module that is called")
        for model in self.models:
            place, name = self.name_of(model)
            source = self.sources[place.path]
            line = model_line(field, model, name, plan=self.plan, own_autocast=self.framework == "PyTorch")
            if ".forward = " in line and "forward" in vars(model):
                raise Unplaced(f"the forward of the {type(model).__name__} is its own, and not that of its class")
            source.import_for(line)
            self.lines.setdefault(place, {})[line] = field
            for function in definitions(line, model):
                source.put_at_top(function)

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
            source = self.sources[place.path]
            for statement in source.around(*place.start, ast.stmt):
                if source.insert_before(statement, list(lines)):
                    break
                if not isinstance(statement, ast.If):  # before an elif nothing can stand, but before its if
                    whys |= dict.fromkeys(lines.values(), f"no line can stand before {place}")
                    break
        return whys
