"""The calls by which a script makes what it trains with, and keywords for them."""

import ast
import builtins
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit.lab.script.places import Place
from speedkit.lab.script.source_edits import Sources, argument

# What a class is called in the table's words -> what it is among the places.
FRAMEWORKS = ("Trainer", "TrainingArguments", "Accelerator")
MADE = {name: name for name in ("DataLoader", *FRAMEWORKS)} | {"AdamW": "Optimizer"}
# Where a call has one keyword, another one of its own gives way.
GIVES_WAY = {
    ("fused", "True"): {"foreach": "False"},
    ("bf16", "True"): {"fp16": "False"},
    ("num_workers", "0"): {"persistent_workers": "False", "prefetch_factor": "None"},
}


class Unplaced(Exception):
    """A change has no place in the script; says why."""


@dataclasses.dataclass
class Calls:
    """A script's calls, of those recorded, that made what its loop trains with; keywords are noted, then placed."""

    places: Sequence[Place]
    optimizers: Sequence[Optimizer]
    loader: DataLoader | None
    sources: Sources
    keywords: dict[Place, dict[str, tuple[str, str]]] = dataclasses.field(default_factory=dict)  # name: value, field

    def place_of(self, kind: str, of: Any = None) -> Place:
        """Return where the script makes what its loop has of a kind, and is `of` where that is given."""
        first = next((n for n, place in enumerate(self.places) if place.made() in self.optimizers), None)
        found = [place for place in self.places if place.kind == kind and (of is None or place.made() is of)]
        if kind == "DataLoader":
            if self.loader is None:
                raise Unplaced("the loop takes its batches from no DataLoader")
            data = id(self.loader.dataset)  # of which a framework makes another loader
            found = [place for place in found if place.dataset == data]
            found = [place for place in found if place.made() is self.loader] or found
        elif kind in FRAMEWORKS:  # another one may be made later, for a test
            found = [place for place in self.places[:first] if place.kind == kind]
        direct = [place for place in found if place.direct]
        if not found:
            raise Unplaced(f"no {kind} is called in the script's own files")
        if not direct:
            raise Unplaced(f"a library makes the {kind}, called in {found[-1]}")
        return direct[-1]

    def at(self, place: Place) -> ast.Call:
        """Return the call at a place, of a class or the like: a built-in function, as map, is none."""
        call = self.sources[place.path].call_to(*place.end)
        if call is None or (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
            raise Unplaced(f"{place} is no call of a {place.kind}")
        return call

    def note(self, kind: str, keywords: Iterable[ast.keyword], field: str) -> None:
        """Note keywords for the calls that make what the loop has of a kind."""
        places = [self.place_of(kind, of) for of in (self.optimizers if kind == "Optimizer" else [None])]
        noted = []
        for place in places:
            call = self.at(place)
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
                if name in keys or self.sources[place.path].mentions(name):
                    return f"**{options}"
        return ""

    def place_noted(self) -> dict[str, str]:
        """Put the noted keywords into their calls; return why not, by field."""
        whys: dict[str, str] = {}
        for place, keywords in self.keywords.items():
            source = self.sources[place.path]
            call = self.at(place)
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
                source.import_for(value)
            if added and not source.add_keywords(call, added):
                whys |= {keywords[name][1]: f"the call in {place} takes no keyword" for name in added}
        return whys
