"""Where a script makes what it trains with: the calls in its own files, recorded while it runs."""

import contextlib
import dataclasses
import functools
import importlib.machinery
import itertools
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

ZERO_GRAD = "zero_grad"  # with set_to_none=False
LOOP = "loop"  # over a DataLoader
MODELS = "models"  # where an optimizer is made and its models have names
# By module, the class that is hooked once the script imports it, and the method that each construction goes through.
CLASSES = {
    "lightning.pytorch.trainer.trainer": ("Trainer", "__init__"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "__init__"),
    "transformers.training_args": ("TrainingArguments", "__post_init__"),
    "accelerate.accelerator": ("Accelerator", "__init__"),
}
OTHERS = [Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parents[1]]  # Python's files and ours


@dataclasses.dataclass(frozen=True)
class Place:
    """A call in a script's file: its first and last line and column, in bytes of UTF-8, as `ast` counts them.

    Those of one call are equal, whatever it has made.
    """

    kind: str  # the class of what is made, or one of the words above
    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    # Whether the script itself makes it, and no library that the script calls here.
    direct: bool = dataclasses.field(compare=False)
    made: weakref.ref[Any] = dataclasses.field(compare=False)
    dataset: int = dataclasses.field(compare=False)  # identity of a DataLoader's
    # The modules with weights of an optimizer, and the keys of dictionaries, by their names here.
    modules: dict[str, weakref.ref[nn.Module]] = dataclasses.field(compare=False)
    keys: dict[str, frozenset[Any]] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"line {self.start[0]} of {self.path.name}"


def root_of(folder: Path) -> Path:
    """Return the root of the git repository around `folder`, or `folder` where there is none."""
    folder = folder.resolve()
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)


class Recorder:
    """Records the places of a script whose own files are those in the repository around its folder."""

    def __init__(self, folder: Path) -> None:
        self.root = root_of(folder)
        self.start = Path.cwd()  # to which names of code may be relative
        self.own: dict[str, Path | None] = {}  # by the name of its code
        self.seen: set[Any] = set()  # calls that come again in each step
        self.places: list[Place] = []
        self.stack = contextlib.ExitStack()

    def own_file(self, frame: FrameType) -> Path | None:
        """Return the file of the script's own that a frame is in."""
        name = frame.f_code.co_filename
        if name not in self.own:
            path = (self.start / name).resolve()
            others = "site-packages" in path.parts or any(path.is_relative_to(other) for other in OTHERS)
            is_own = path.is_relative_to(self.root) and path.is_file() and not others
            self.own[name] = path if is_own else None
        return self.own[name]

    def record(self, kind: str, made: Any) -> None:
        """Record where the script makes `made`, or calls what makes it."""
        frame: FrameType | None = sys._getframe(2)
        while frame and not self.own_file(frame) and is_method_of(made, frame):
            frame = frame.f_back
        direct = True
        while frame and not self.own_file(frame):
            direct = False
            frame = frame.f_back
        if frame is None or (kind == ZERO_GRAD and (frame.f_code, frame.f_lasti) in self.seen):
            return
        self.seen.add((frame.f_code, frame.f_lasti))
        self.add(kind, made, frame, direct=direct)
        if isinstance(made, Optimizer) and kind != ZERO_GRAD:
            weights = {id(weight) for group in made.param_groups for weight in group["params"]}
            while frame and not (self.own_file(frame) and (modules := modules_in(frame, weights))):
                frame = frame.f_back
            if frame:
                self.add(MODELS, made, frame, modules=modules)

    def add(self, kind: str, made: Any, frame: FrameType, *, direct: bool = True, modules: Any = None) -> None:
        """Add the place where `frame` is now."""
        positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
        line, end_line, column, end_column = next(positions)
        path = self.own_file(frame)
        if path is None or line is None or column is None or end_line is None or end_column is None:
            return  # as by python -X no_debug_ranges
        names: dict[str, Any] = {}
        if kind not in (LOOP, ZERO_GRAD):  # a frame keeps alive what it was asked for: not a batch
            names = {**frame.f_globals, **frame.f_locals}
        place = Place(
            kind,
            path,
            start=(line, column),
            end=(end_line, end_column),
            direct=direct,
            made=weakref.ref(made),
            dataset=id(getattr(made, "dataset", None)),
            modules=modules or {},
            keys={name: frozenset(value) for name, value in names.items() if type(value) is dict},
        )
        self.places.append(place)

    def hook(self, owner: type, method: str, kind: str) -> None:
        """Record each call of a method of `owner`."""
        original: Callable[..., Any] = vars(owner)[method]

        @functools.wraps(original)
        def call(made: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(made, *args, **kwargs)
            if kind != ZERO_GRAD or False in (*args[:1], kwargs.get("set_to_none")):
                self.record(kind, made)
            return result

        self.stack.enter_context(patch.object(owner, method, call))

    def hook_class_of(self, module: ModuleType) -> None:
        """Record constructions of the class that is known of a framework's `module`."""
        name, method = CLASSES[module.__name__]
        self.hook(getattr(module, name), method, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find a framework's module as Python does, and hook its class when it has been executed."""
        if name not in CLASSES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.hook_class_of(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def is_method_of(made: Any, frame: FrameType) -> bool:
    """Return whether `frame` is a call on `made` itself: its constructor, or that of a base class."""
    first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    return first is made or (isinstance(first, tuple) and any(item is made for item in first[:1]))


def modules_in(frame: FrameType, weights: set[int]) -> dict[str, weakref.ref[nn.Module]]:
    """Return, by how it is written in `frame`, each module that has a parameter of these identities."""
    if frame.f_code.co_name in ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>"):  # no statements stand there
        return {}
    names = {**frame.f_locals, **frame.f_globals, **frame.f_locals}
    attributes = getattr(names.get("self"), "__dict__", {})
    for name, value in {**attributes, **attributes.get("_modules", {})}.items():
        if name.isidentifier():
            names[f"self.{name}"] = value
    modules = {name: value for name, value in names.items() if issubclass(type(value), nn.Module)}
    return {
        name: weakref.ref(module)
        for name, module in modules.items()
        if any(id(weight) in weights for weight in module.parameters())
    }


@contextlib.contextmanager
def recorded_places(folder: Path) -> Iterator[list[Place]]:
    """Record inside the block where a script makes loaders, optimizers and what frameworks train with, in order.

    Its own files are those of the git repository around `folder`, where it lies. What it does and learns is the same.
    """
    recorder = Recorder(folder)
    with recorder.stack:
        recorder.hook(DataLoader, "__init__", "DataLoader")
        recorder.hook(DataLoader, "__iter__", LOOP)
        recorder.hook(Optimizer, "__init__", "Optimizer")
        recorder.hook(Optimizer, "zero_grad", ZERO_GRAD)
        recorder.hook(nn.Module, "zero_grad", ZERO_GRAD)
        for name in CLASSES.keys() & sys.modules.keys():
            recorder.hook_class_of(sys.modules[name])
        sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
        recorder.stack.callback(sys.meta_path.remove, recorder)
        yield recorder.places
