"""speedkit: PyTorch training as fast as this machine allows, with proof."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what an editor shows of the public names; when the program runs they are loaded by __getattr__
    from speedkit.climb import climb as climb
    from speedkit.hardware import this_machine as this_machine
    from speedkit.measure.compare import compare as compare
    from speedkit.measure.diagnose import diagnose as doctor  # noqa: F401
    from speedkit.measure.record import start as start
    from speedkit.measure.watch import watch as watch
    from speedkit.plan import Plan as Plan
    from speedkit.plan import resolve as resolve
    from speedkit.recipe import Recipe as Recipe
    from speedkit.train.fit import fit as fit
    from speedkit.train.prepare import prepare as prepare
    from speedkit.workloads import load_workload as load_workload
    from speedkit.workloads.yours import from_dataset as from_dataset
    from speedkit.workloads.yours import from_loader as from_loader

__version__ = "0.1.0"

# Where each public name lives. Loaded when first used, so that importing the package costs next to nothing.
_HOMES = {
    "Recipe": "speedkit.recipe",
    "Plan": "speedkit.plan",
    "resolve": "speedkit.plan",
    "this_machine": "speedkit.hardware",
    "load_workload": "speedkit.workloads",
    "from_dataset": "speedkit.workloads.yours",
    "from_loader": "speedkit.workloads.yours",
    "fit": "speedkit.train.fit",
    "compare": "speedkit.measure.compare",
    "doctor": "speedkit.measure.diagnose:diagnose",
    "watch": "speedkit.measure.watch",
    "prepare": "speedkit.train.prepare",
    "climb": "speedkit.climb",
    "start": "speedkit.measure.record",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, called = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(module), called or name)
        globals()[name] = value  # also over the submodule of the same name, such as speedkit.climb
        return value
    raise AttributeError(f"module 'speedkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
