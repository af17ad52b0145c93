"""What cached entries depend on: the transform's code and arguments, library versions, and each item's own file."""

import dataclasses
import functools
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from speedkit.errors import SpeedkitError

VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])


@dataclasses.dataclass(frozen=True)
class Sources:
    """The items of a list, as columns [N]; a file that is not there, or none at all, has size -1."""

    items: Sequence[Any]
    prefix: str  # of paths; the rest is the item's name
    keys: np.ndarray  # uint64, hashes of the names
    sizes: np.ndarray  # int64 bytes
    modified_ns: np.ndarray  # int64

    def name(self, index: int) -> str:
        """Return what the cache calls an item."""
        path = getattr(self.items[index], "path", None)
        return _Reader().text(self.items[index]) if path is None else str(path).removeprefix(self.prefix)


def sources_of(items: Sequence[Any], base: str) -> Sources:
    """Return what identifies the items and tells whether their files have changed; names are relative to `base`."""
    prefix = os.path.join(base, "") if base else ""
    keys, (sizes, modified_ns) = np.empty(len(items), np.uint64), np.full((2, len(items)), -1, np.int64)
    found = Sources(items, prefix, keys, sizes, modified_ns)
    text = _Reader().text
    for index, item in enumerate(items):  # a million in about a second
        path = getattr(item, "path", None)
        name = text(item) if path is None else str(path).removeprefix(prefix)
        keys[index] = xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))
        if path is not None:
            try:
                status = os.stat(path)  # of a member of a tar: the tar
            except (OSError, ValueError):
                continue
            sizes[index], modified_ns[index] = status.st_size, status.st_mtime_ns
    return found


def base_folder(items: Sequence[Any]) -> str:
    """Return the innermost folder that holds the files of all items, "" where an item has none."""
    paths = [str(path) for item in items if (path := getattr(item, "path", None)) is not None]
    if not paths or len(paths) < len(items):
        return ""
    first, last = min(paths), max(paths)  # what these two share, all share
    common = os.path.commonpath([first, last]) if os.path.isabs(first) == os.path.isabs(last) else ""
    return os.path.dirname(common) if common == first else common


def content(path: Any) -> int:
    """Return the hash of a file's content, 0 where there is none to read."""
    try:
        return xxh3_64_intdigest(path.read() if hasattr(path, "read") else Path(path).read_bytes())
    except (OSError, ValueError, TypeError):
        return 0


def fingerprint(workload: Any, load: Callable, cache_of: str) -> dict[str, str]:
    """Return all that every entry depends on, named for the reader: parameters, code, versions.

    The code is followed from `load` and `features` through the functions and constants that they use, up to the
    libraries; `workload.sources` adds to it. Raises SpeedkitError where it cannot be known and no sources are named.
    """
    reader = _Reader()
    steps = {"load": load} | ({"features": workload.features} if cache_of == "features" else {})
    found = {f"parameter {name}": reader.text(value) for name, value in sorted(workload.parameters.items())}
    found |= {f"{step} with its arguments": reader.text(function) for step, function in steps.items()}
    for source in workload.sources:
        reader.text(source)
    if reader.opaque and not workload.sources:
        raise SpeedkitError(
            f"whether {reader.opaque[0]} changes cannot be seen, so features of workload {workload.name} cannot be "
            "cached: name the functions they depend on in its `sources` and their settings in its `parameters`"
        )
    found |= {f"code of {name}": text for name, text in sorted(reader.code.items())}
    found |= {f"version of {name}": importlib.metadata.version(name) for name in VERSIONED}
    return found | {"version of Python": ".".join(platform.python_version_tuple()[:2])}


def digest(found: Mapping[str, str]) -> str:
    """Return 16 hex digits that stand for a fingerprint."""
    return xxh3_64_hexdigest(json.dumps(found, sort_keys=True).encode())


def difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what changed between two fingerprints, in words; "" where nothing did."""
    changed = []
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name, "absent"), now.get(name, "absent")
        if old != new:
            short = len(old) + len(new) < 80 and not name.startswith("code of")
            changed.append(f"{name} was {old}, is {new}" if short else f"{name} has changed")
    return "; ".join(changed)


class _Reader:
    """Turns values into text that is the same in every process, and notes the code they lead to."""

    def __init__(self) -> None:
        self.code: dict[str, str] = {}  # qualified name -> hash of its code and of what that uses
        self.opaque: list[str] = []  # what has no text
        self.inside: set[int] = set()  # objects being read: a cycle ends where it closes

    def text(self, value: Any) -> str:
        """Return what `value` is: its content, not its address; arrays and functions by their hashes."""
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous().flatten().view(-1).numpy(force=True)
        if isinstance(value, np.ndarray):
            return f"{value.dtype}{list(value.shape)} {xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(value[key])}" for key in sorted(value, key=str)) + "}"
        if isinstance(value, list | tuple | set | frozenset):
            parts = [self.text(part) for part in value]
            return "(" + ", ".join(sorted(parts) if isinstance(value, set | frozenset) else parts) + ")"
        if isinstance(value, functools.partial):
            return f"{self.text(value.func)}{self.text(value.args)}{self.text(value.keywords)}"
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, types.BuiltinFunctionType):
            return value.__qualname__  # of C code: the versions tell it
        if callable(value) and hasattr(value, "__wrapped__"):  # functools.wraps and lru_cache
            return self.text(inspect.unwrap(value))
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            return self._named(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if id(value) in self.inside:
            return "itself"
        if hasattr(value, "__dict__"):
            self.inside.add(id(value))
            text = f"{self.text(type(value))}{self.text(vars(value))}"
            self.inside.remove(id(value))
            return text
        if " at 0x" in (text := repr(value)):
            self.opaque.append(text)
        return text

    def _named(self, value: Any) -> str:
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
        name = module if isinstance(value, types.ModuleType) else f"{module}.{value.__qualname__}"
        if isinstance(value, type) and issubclass(value, BaseException):
            return name  # no value comes out of it
        if _of_library(value, module):
            return f"{name} {getattr(sys.modules.get(module.partition('.')[0]), '__version__', '')}".strip()
        if name not in self.code:
            self.code[name] = ""  # until it is known: functions may use each other
            self.code[name] = xxh3_64_hexdigest(self._definition(value).encode())
        return name

    def _definition(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            rest = self.text([value.__defaults__, value.__kwdefaults__, cells])
            return _code(value.__code__) + rest + self._used(_names(value.__code__), value.__globals__)
        try:  # compiled without docstrings, and comments and places are gone: what is left is what it does
            code = compile(textwrap.dedent(inspect.getsource(value)), "", "exec", optimize=2)
        except (OSError, TypeError, SyntaxError):
            self.opaque.append(repr(value))
            return ""
        used = {} if isinstance(value, types.ModuleType) else vars(sys.modules[value.__module__])
        return _code(code) + self._used(_names(code), used)

    def _used(self, names: set[str], known: Mapping[str, Any]) -> str:
        """Return the texts of what code with these names finds in its module: constants, functions, classes."""
        texts = []
        for name in sorted(names & known.keys()):
            value = known[name]
            if isinstance(value, types.ModuleType):
                library = _of_library(value, value.__name__)
                texts.append(self._named(value) if library else self._used(names - {name}, vars(value)))
            elif callable(value) or isinstance(value, np.ndarray | Tensor) or _plain(value):
                texts.append(f"{name} {self.text(value)}")
        return "\n".join(texts)


def _of_library(value: Any, module: str) -> bool:
    """Whether something comes with Python or an installed library, whose version stands for it."""
    built_in = "" if module == "__main__" else _LIBRARIES[0]  # neither has a file
    file = getattr(sys.modules.get(module, value), "__file__", None) or built_in
    file = value.__code__.co_filename if isinstance(value, types.FunctionType) else file
    return not module.startswith("speedkit") and any(library in file for library in _LIBRARIES)


def _plain(value: Any) -> bool:
    """Whether a value is made of numbers and strings only: a table of settings, not somebody's store of objects."""
    if isinstance(value, Mapping):
        return _plain(list(value.items()))
    return isinstance(value, PLAIN) or (
        isinstance(value, list | tuple | set | frozenset) and all(_plain(part) for part in value)
    )


def _names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that code uses, that of the functions within it included."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)


def _code(code: types.CodeType) -> str:
    """Return what code does, without its docstring: a function's first constant, or None."""
    constants = code.co_consts[0 if code.co_name.startswith("<") else 1 :]
    inner = [_code(part) if isinstance(part, types.CodeType) else _Reader().text(part) for part in constants]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"
