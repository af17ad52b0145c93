"""What is trained: the built-in workloads by name, and the user's own as `package.module:function`."""

import dataclasses
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit.config import nearest
from speedkit.errors import UsageError

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

BUILT_IN = {
    "audio": "speedkit.workloads.audio:audio",
    "image": "speedkit.workloads.image:image",
    "speech": "speedkit.workloads.speech:speech",
    "text": "speedkit.workloads.text:text",
}


def load_workload(name: str, **options: Any) -> "Workload":
    """Return the workload called `name`: a built-in one, or `package.module:function` for your own.

    `options` (`data_dir`, `labels`, `label_pattern`, `test_pattern`, `size` ...) go to the function that makes it.
    Raises UsageError when there is none, or when it does not take an option.
    """
    from speedkit.workloads.workload import Workload  # torch comes with it: processes that make data need none

    if ":" not in name and name not in BUILT_IN:
        raise UsageError(
            f"there is no workload {name!r}{nearest(name, BUILT_IN)}: "
            f"take {', '.join(BUILT_IN)}, or package.module:function for your own"
        )
    module_name, _, function_name = BUILT_IN.get(name, name).partition(":")
    if name not in BUILT_IN and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # one's own file is looked for here, whichever way this was started
    try:
        make = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"workload {name!r} cannot be loaded: {error}") from error
    given = {key: value for key, value in options.items() if value is not None}
    if not isinstance(make, Workload):
        if not callable(make):
            raise UsageError(f"{name} is of type {type(make).__name__}, and not a function that returns a Workload")
        takes = inspect.signature(make).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        if unknown := [] if any_name else [key for key in given if key not in takes]:
            has = ", ".join(takes) or "none"
            raise UsageError(f"workload {name!r} does not take these options: {', '.join(unknown)}; it has {has}")
    made = make if isinstance(make, Workload) else make(**given)
    if not isinstance(made, Workload):
        raise UsageError(f"{name} returned {type(made).__name__}, not a Workload: return one, as from_dataset does")
    # Absolute: a cache says how its workload is made again, wherever that is asked from.
    paths = {key: str(Path(given[key]).absolute()) for key in ("data_dir", "labels") if key in given}
    return dataclasses.replace(made, made_by={"name": name} | given | paths)
