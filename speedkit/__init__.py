"""speedkit: PyTorch training as fast as this machine allows, with proof."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what an editor shows of the public names; when the program runs they are loaded by __getattr__
    from speedkit.dry.dry_run import dry_run as dry_run
    from speedkit.fallbacks import resolve as resolve
    from speedkit.lab.record import start as start
    from speedkit.lab.tuning import tune as tune
    from speedkit.lab.workbench import explore as explore
    from speedkit.lab.workloads import load_workload as load_workload
    from speedkit.machine import this_machine as this_machine
    from speedkit.measure.compare import compare as compare
    from speedkit.measure.profile import profile as profile
    from speedkit.own_workload import from_dataset as from_dataset
    from speedkit.own_workload import from_loader as from_loader
    from speedkit.plan import Plan as Plan
    from speedkit.recipe import Recipe as Recipe
    from speedkit.train.fit import fit as fit
    from speedkit.train.micro_batch import find_micro_batch as find_micro_batch
    from speedkit.train.prepare import prepare as prepare
    from speedkit.workload import Batch as Batch
    from speedkit.workload import Workload as Workload

__version__ = "0.1.0"

# Where each public name lives. Loaded when first used, so that importing the package costs next to nothing.
_HOMES = {
    "Recipe": "speedkit.recipe",
    "Plan": "speedkit.plan",
    "Workload": "speedkit.workload",
    "Batch": "speedkit.workload",
    "resolve": "speedkit.fallbacks",
    "fit": "speedkit.train.fit",
    "prepare": "speedkit.train.prepare",
    "find_micro_batch": "speedkit.train.micro_batch",
    "from_dataset": "speedkit.own_workload",
    "from_loader": "speedkit.own_workload",
    "profile": "speedkit.measure.profile",
    "compare": "speedkit.measure.compare",
    "dry_run": "speedkit.dry.dry_run",
    "tune": "speedkit.lab.tuning",
    "explore": "speedkit.lab.workbench",
    "load_workload": "speedkit.lab.workloads",
    "this_machine": "speedkit.machine",
    "start": "speedkit.lab.record",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name == "load_ipython_extension":
        from speedkit.lab.magics import load_ipython_extension

        return load_ipython_extension
    from speedkit.renamed import spelling_of_today

    raise AttributeError(f"module 'speedkit' has no attribute {name!r}{spelling_of_today(name)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
