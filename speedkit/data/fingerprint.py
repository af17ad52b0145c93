"""What cached entries depend on: the transform's code and arguments, library versions, and each item's own file."""

import contextlib
import functools
import importlib.metadata
import inspect
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from speedkit.errors import SpeedkitError

VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])


def name_of(item: Any, base: str) -> str:
    """Return what the cache calls an item: its path without the beginning `base`, or what it is made of."""
    path = getattr(item, "path", None)
    if path is not None:
        return str(path).removeprefix(base)
    return repr(item) if isinstance(item, PLAIN) else _Reader().text(item)


def sources_of(items: Sequence[Any], base: str) -> dict[str, np.ndarray]:
    """Return columns [N] about the items: keys (hashes of their names), sizes and modified_ns, -1 without a file."""
    keys, (sizes, modified_ns) = np.empty(len(items), np.uint64), np.full((2, len(items)), -1, np.int64)
    for index, item in enumerate(items):  # a million in about a second
        keys[index] = xxh3_64_intdigest(name_of(item, base).encode("utf-8", "surrogateescape"))
        if (path := getattr(item, "path", None)) is not None:
            with contextlib.suppress(OSError, ValueError):
                status = os.stat(path)  # of a member of a tar: the tar
                sizes[index], modified_ns[index] = status.st_size, status.st_mtime_ns
    return {"keys": keys, "sizes": sizes, "modified_ns": modified_ns}


def base_folder(items: Sequence[Any]) -> str:
    """Return what the paths of all items begin with, up to a folder's "/"; "" where an item has none."""
    paths = [str(path) for item in items if (path := getattr(item, "path", None)) is not None]
    if not paths or len(paths) < len(items):
        return ""
    shared = os.path.commonprefix(paths)  # noqa: RUF071 - of a million paths, and no need to split each
    return shared[: shared.rfind("/") + 1]


def content(path: Any) -> int:
    """Return the hash of a file's content, 0 where there is none to read."""
    try:
        return xxh3_64_intdigest(path.read() if hasattr(path, "read") else Path(path).read_bytes())
    except (OSError, ValueError, TypeError):
        return 0


def fingerprint(workload: Any, load: Callable, cache_of: str) -> dict[str, str]:
    """Return all that every entry depends on, named for the reader: parameters, code, versions.

    The code is followed from `load`, `features` and `workload.sources` through the functions and constants that they
    use, up to the libraries. Raises SpeedkitError where it cannot be known and no sources are named.
    """
    reader = _Reader()
    steps = {"load": load} | ({"features": workload.features} if cache_of == "features" else {})
    found = {f"parameter {name}": reader.text(value) for name, value in sorted(workload.parameters.items())}
    found |= {f"{step} with its arguments": reader.text(function) for step, function in steps.items()}
    reader.text(workload.sources)
    if reader.opaque and not workload.sources:
        raise SpeedkitError(
            f"whether {reader.opaque[0]} changes cannot be seen, so features of workload {workload.name} cannot be "
            "cached: name the functions they depend on in its `sources` and their settings in its `parameters`"
        )
    found |= {f"code of {name}": text for name, text in sorted(reader.code.items())}
    found |= {f"version of {name}": importlib.metadata.version(name) for name in VERSIONED}
    return found | {"version of Python": ".".join(platform.python_version_tuple()[:2])}


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
        self.code: dict[str, str] = {}  # qualified name -> hashes of the code of that name and of what it uses
        self.opaque: list[str] = []  # what has no text
        self.inside: set[int] = set()  # objects being read, a cycle ends where it closes; functions that were

    def text(self, value: Any) -> str:
        """Return what `value` is: its content, not its address; arrays and functions by their hashes."""
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, np.ndarray | Tensor):
            raw: Any = value
            if isinstance(value, Tensor):
                raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return f"{value.dtype}{list(value.shape)} {xxh3_64_hexdigest(raw.tobytes())}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {self.text(value[key])}" for key in sorted(value, key=str)) + "}"
        if isinstance(value, list | tuple | set | frozenset):
            parts = [self.text(part) for part in value]
            return str(sorted(parts) if isinstance(value, set | frozenset) else parts)
        if isinstance(value, functools.partial):
            return self.text([value.func, value.args, value.keywords])
        if isinstance(value, types.MethodType):
            return self.text([value.__func__, value.__self__])
        if callable(value) and hasattr(value, "__wrapped__"):  # functools.wraps and lru_cache
            return self.text(inspect.unwrap(value))
        if isinstance(value, types.BuiltinFunctionType | types.FunctionType | type | types.ModuleType):
            return self._named(value)
        if id(value) in self.inside or not hasattr(value, "__dict__"):
            text = "itself" if id(value) in self.inside else repr(value)
            self.opaque += [text] * (" at 0x" in text)
            return text
        self.inside.add(id(value))
        text = self.text([type(value), vars(value)])
        self.inside.remove(id(value))
        return text

    def _named(self, value: Any) -> str:
        """Return the name of a function, class or module, with its library's version, or after noting its code."""
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or "builtins"
        name = module if isinstance(value, types.ModuleType) else f"{module}.{value.__qualname__}"
        if _of_library(module) or isinstance(value, types.BuiltinFunctionType):
            return f"{name} {getattr(sys.modules.get(module.partition('.')[0]), '__version__', '')}"
        if id(value) not in self.inside:  # functions may use each other, and lambdas have one name
            self.inside.add(id(value))
            found = xxh3_64_hexdigest(self._definition(value).encode())
            self.code[name] = self.code.get(name, "") + found
        return name

    def _definition(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            rest = self.text([value.__defaults__, value.__kwdefaults__, cells])
            return self._code(value.__code__) + rest + self._used(_names(value.__code__), value.__globals__)
        known = vars(value).items()
        members = {name: getattr(member, "fget", getattr(member, "func", member)) for name, member in known}
        names = {name for name, member in members.items() if callable(member) or not name.startswith("__")}
        return self._used(names, members) + self.text(getattr(value, "__bases__", ()))

    def _used(self, names: set[str], known: Mapping[str, Any]) -> str:
        """Return the texts of what code with these names finds in its module: constants, functions, classes."""
        texts = []
        for name in sorted(names & known.keys()):
            value = known[name]
            if isinstance(value, types.ModuleType) and not _of_library(value.__name__):
                texts.append(self._used(names - {name}, vars(value)))
            elif callable(value) or isinstance(value, types.ModuleType | np.ndarray | Tensor) or _plain(value):
                texts.append(f"{name} {self.text(value)}")
        return "\n".join(texts)

    def _code(self, code: types.CodeType) -> str:
        """Return what code does, without its docstring: a function's first constant, or None."""
        constants = code.co_consts[0 if code.co_name.startswith("<") else 1 :]
        inner = [self._code(part) if isinstance(part, types.CodeType) else self.text(part) for part in constants]
        return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"


def _of_library(module: str) -> bool:
    """Whether a module comes with Python or an installed library, whose version stands for it."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    installed = package in sys.builtin_module_names or any(folder in file for folder in _LIBRARIES)
    return installed and package not in ("speedkit", "__main__")


def _plain(value: Any) -> bool:
    """Whether a value is made of numbers and strings only: a table of settings, not somebody's store of objects."""
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return isinstance(value, PLAIN) or (isinstance(parts, list | tuple | set | frozenset) and all(map(_plain, parts)))


def _names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that code uses, that of the functions within it included."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)
