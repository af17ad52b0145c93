"""What is trained: the built-in workloads by name, and the user's own as `package.module:function`."""

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit.config import nearest
from speedkit.errors import UsageError

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

BUILT_IN = ("audio", "image", "speech", "text")  # each a function of the module of the same name


def load_workload(name: str, **options: Any) -> "Workload":
    """Return the workload called `name`: a built-in one, or `package.module:function` for your own.

    `options` (`data_dir`, `labels`, `label_pattern`, `test_pattern`, `size` ...) go to the function that makes it.
    Raises UsageError when there is none, or when it does not take an option.
    """
    from speedkit.workloads.workload import Workload  # torch comes with it: processes that make data need none

    if ":" not in name and name not in BUILT_IN:
        builtin = f"take {', '.join(BUILT_IN)}, or package.module:function for your own"
        raise UsageError(f"there is no workload {name!r}{nearest(name, BUILT_IN)}: {builtin}")
    module_name, _, function_name = name.partition(":")
    if name in BUILT_IN:
        module_name, function_name = f"{__name__}.{name}", name
    elif os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's file is looked for here, whichever way this was started
    try:
        module = importlib.import_module(module_name)
        make = getattr(module, function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"workload {name!r} cannot be loaded: {error}") from error
    given = {key: value for key, value in options.items() if value is not None}
    if name in BUILT_IN and "size" in given and given["size"] not in module.SIZES:
        raise UsageError(f"size {given['size']!r} is unknown: the net of {name} comes in {', '.join(module.SIZES)}")
    try:
        workload = make(**given) if callable(make) else make
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"workload {name!r} does not take an option: {error}") from error
    if not isinstance(workload, Workload):
        raise UsageError(f"{name} returned {type(workload).__name__}, not a Workload: return one, as from_dataset does")
    # Absolute: a cache says how its workload is made again, wherever that is asked from.
    paths = {key: str(Path(given[key]).absolute()) for key in ("data_dir", "labels") if key in given}
    return dataclasses.replace(workload, made_by={"name": name} | given | paths)
