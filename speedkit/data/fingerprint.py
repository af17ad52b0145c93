"""What cached entries depend on: parameters, code by the files that it is written in, versions of libraries."""

import functools
import importlib.metadata
import inspect
import pickle
import types
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from speedkit.data.decode import with_decoder
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, type(None))


def fingerprint(workload: Any, plan: Plan) -> dict[str, str]:
    """Return all that every entry depends on, named for the reader.

    Of code the whole file counts in which `load`, `features`, `length` and each of `sources` is defined; what these
    files import from elsewhere has to be named in `sources`. Raises SpeedkitError for what has no content to compare.
    """
    waveform = plan.cache_of == "waveform"
    values = {
        "cache_of": plan.cache_of,
        "dtype": workload.kept_as if waveform else plan.cache_dtype,
        "load": with_decoder(workload, plan.decoder),
        "features": None if waveform else workload.features,
        "length": workload.length,
        "sources": workload.sources,
        **{f"parameter {name}": value for name, value in workload.parameters.items()},
        **{f"version of {name}": importlib.metadata.version(name) for name in VERSIONED},
    }
    try:
        return {name: described(value) for name, value in sorted(values.items())}
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise SpeedkitError(
            f"{plan.cache_of} of workload {workload.name} cannot be cached, for whether they change cannot be seen "
            f"({error}): open files, locks and the like where they are used, not in parameters, load or features"
        ) from error


def described(value: Any) -> str:
    """Return a plain value as text, and the hash of what anything else consists of: the same in every process."""
    if isinstance(value, PLAIN):
        return repr(value)
    content = xxh3_128()
    pickler = _Content(types.SimpleNamespace(write=content.update), protocol=4)
    pickler.fast = True  # equal values count as equal, whether or not they are one object
    pickler.dump(value)
    return content.hexdigest()


class _Content(pickle.Pickler):
    """Pickles functions and classes as the source they are written in, tensors as their values. For hashing only."""

    def reducer_override(self, value: Any) -> Any:
        parts: Any = None
        if isinstance(value, Tensor):
            flat = value.detach().cpu().flatten().view(torch.uint8)
            parts = str(value.dtype), tuple(value.shape), xxh3_128_hexdigest(flat.numpy().data)
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, sorted(value.keywords.items())
        elif isinstance(value, types.FunctionType):
            # Its own code too: its file may have been edited since it was imported, and all lambdas have one name.
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = value.__qualname__, _source(value), value.__code__, value.__defaults__, value.__kwdefaults__, cells
        elif isinstance(value, types.CodeType):
            constants = [sorted(map(repr, part)) if isinstance(part, frozenset) else part for part in value.co_consts]
            parts = value.co_code, value.co_names, constants
        elif isinstance(value, type):
            methods = [part for part in vars(value).values() if isinstance(part, types.FunctionType)]
            parts = value.__qualname__, _source(value) or methods  # a class of a notebook has no file
        elif isinstance(value, types.ModuleType):
            parts = value.__name__, _source(value)
        elif callable(value) and hasattr(value, "__wrapped__"):  # functools.lru_cache
            parts = value.__wrapped__
        return NotImplemented if parts is None else (repr, (parts,))  # any function: this is never unpickled


def _source(code: Any) -> str:
    """Return the hash of the whole file, or notebook cell, that defines a function, class or module; "" without one."""
    try:
        lines, _ = inspect.findsource(code)
    except (OSError, TypeError):  # written in C, or typed into an interpreter that keeps no lines
        return ""
    return xxh3_128_hexdigest("".join(lines).encode())
