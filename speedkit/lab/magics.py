"""`%load_ext speedkit`: profile a cell's training loop, compare two cells in turns, and write a plan in a line."""

import ast
import functools
import re
from collections.abc import Sequence
from typing import Any

from IPython import display
from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit.config import from_mapping, settings_of
from speedkit.errors import PlanError, UsageError
from speedkit.machine import this_machine
from speedkit.measure.compare import compare_functions, pair_table
from speedkit.measure.profile import LoopProfile
from speedkit.measure.profile import profile as profile_loop
from speedkit.plan import PRESETS, Plan, as_plan

TYPING = re.compile(r"(\w+)=[\"']?([\w-]*)$")  # a field, and as much of its value as is typed
OF_A_PLAN = re.compile(r"(%plan |Plan\()[^()]*$")
PAIRS = 40


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics in `shell`, and the values of a plan's fields with Tab."""
    magics = SpeedkitMagics(shell)
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(magics.values_of_field)


@magics_class
class SpeedkitMagics(Magics):
    """The magics, which see the names of the notebook."""

    shell: Any
    first: tuple[str, Any] | None = None  # name and code of the cell that the next %%compare takes turns with

    @context_matcher()
    def values_of_field(self, context: CompletionContext) -> SimpleMatcherResult:
        """Return what Tab completes behind `%plan precision=` and `Plan(precision="`, and nothing else there."""
        line = context.text_until_cursor
        field = TYPING.search(line)
        takes: tuple[str, ...] = ()
        if field is not None and OF_A_PLAN.search(line) and field[1] in settings_of(Plan):
            takes = settings_of(Plan)[field[1]].takes
        values = [value for value in takes if " " not in value and value.startswith(context.token)]
        return {"completions": [SimpleCompletion(value) for value in values], "suppress": bool(values)}

    @line_magic
    def plan(self, line: str) -> Plan:
        """Return a plan: `%plan bf16 cache=ram`. A bare word is a preset, or a value that only one field takes."""
        words = line.split()
        fields: dict[str, Any] = {}
        if words and words[0] in PRESETS:
            fields |= vars(as_plan(words.pop(0)))
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                name, value = field_of(word), word
            fields[name] = value
        return from_mapping(Plan, fields)

    @no_var_expand
    @cell_magic
    def profile(self, line: str, cell: str) -> LoopProfile:
        """Profile the training loop of a cell: `%%profile model optimizer loader`, or those that the cell names."""
        source = self.shell.transform_cell(cell)
        names = line.split() or [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
        objects = [self.shell.user_ns[name] for name in names if name in self.shell.user_ns]
        modules = [one for one in objects if isinstance(one, nn.Module) and [*one.parameters()]]  # a loss has none
        parts = [first_of(nn.Module, modules), first_of(Optimizer, objects), first_of(DataLoader, objects)]
        with profile_loop(*parts, show=False) as seen:
            exec(self.compiled(cell), self.shell.user_ns)
        return seen

    @no_var_expand
    @cell_magic
    def compare(self, line: str, cell: str) -> None:
        """Keep a cell, `%%compare NAME`; a second one takes turns with it, and how much faster it is comes out."""
        named = (line.strip() or f"cell {1 + (self.first is not None)}", self.compiled(cell))
        if self.first is None:
            self.first = named
            print(f"the next %%compare takes turns with {named[0]}")
            return
        codes = dict([self.first, named])
        self.first = None
        if len(codes) < 2:
            raise UsageError(f"both cells are called {named[0]}: name one otherwise")
        turns = {name: functools.partial(exec, code, self.shell.user_ns) for name, code in codes.items()}
        a, b = turns
        row = compare_functions(f"{b} against {a}", turns, PAIRS, device=this_machine().device)
        told = "{name}: {ratio:.3f} ({low:.3f} to {high:.3f}): {decision}".format_map(row)
        display.display({"text/plain": told, "text/html": pair_table(told, row)}, raw=True)

    def compiled(self, cell: str) -> Any:
        """Return the code of a cell, with IPython's own syntax."""
        return compile(self.shell.transform_cell(cell), "<cell>", "exec")


def field_of(value: str) -> str:
    """Return the field of a plan that takes a value. Raises PlanError where none does, or several."""
    names = [name for name, setting in settings_of(Plan).items() if value in setting.takes]
    if len(names) != 1:
        raise PlanError(f"{value!r} is a value of {len(names)} fields: write which, as in cache=ram")
    return names[0]


def first_of(kind: type, objects: Sequence[Any]) -> Any:
    """Return the first of `objects` that is of a kind. Raises UsageError where there is none."""
    for one in objects:
        if isinstance(one, kind):
            return one
    raise UsageError(f"the cell names no {kind.__name__}: write %%profile model optimizer loader")
