"""What is trained: the built-in workloads by name, and the user's own as `package.module:function`."""

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from speedkit.config import nearest
from speedkit.errors import UsageError
from speedkit.lab.workloads.sizes import net_size
from speedkit.measure.extras import missing_extra
from speedkit.own_workload import from_loader
from speedkit.workload import Workload

BUILT_IN = ("audio", "image", "speech", "text")  # each a function of the module of the same name
# The package that each takes which is built for some releases of torch, and for which.
TORCHAUDIO = ("torchaudio", "torch 2.11 to 2.14, but no build for CPUs alone")
TORCHVISION = ("torchvision", "the torch that pip installs together with it")
BUILT_FOR = {"audio": TORCHAUDIO, "speech": TORCHAUDIO, "image": TORCHVISION}


def load_workload(name: str, **options: Any) -> Workload:
    """Return the workload called `name`: a built-in one, or `package.module:function` for your own.

    `options` (`data_dir`, `labels`, `size`, `width`, `depth` ...) go to the function that makes it. Of (model, sample
    batch), which a function may return in place of a workload, it is that of `of_sample`.
    Raises UsageError when there is none, or when it does not take an option.
    """
    if name in BUILT_IN:
        module_name = f"{__name__}.{name}"
        function_name = name
    elif ":" in name:
        module_name, _, function_name = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # where the user's file is looked for, however this was started
    else:
        builtin = f"take {', '.join(BUILT_IN)}, or package.module:function for your own"
        raise UsageError(f"there is no workload {name!r}{nearest(name, BUILT_IN)}: {builtin}")
    options = {key: value for key, value in options.items() if value is not None}
    try:
        module = _imported(module_name, *BUILT_FOR.get(name, ()))
        if name in BUILT_IN:
            numbers = {key: options.pop(key) for key in ("width", "depth") if key in options}
            options["size"] = net_size(module.SIZES, options.get("size", "small"), **numbers)
        workload = getattr(module, function_name)(**options)
        if isinstance(workload, tuple) and len(workload) == 2 and isinstance(workload[0], nn.Module):
            workload = of_sample(*workload)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"workload {name!r} cannot be loaded: {missing_extra(error) or error}") from error
    if not isinstance(workload, Workload):
        raise UsageError(f"{name} returned {type(workload).__name__}, not a Workload: return one, as from_dataset does")
    return workload


def of_sample(model: nn.Module, sample: Any) -> Workload:
    """Return the workload that learns from one batch over and over: what a step of `model` takes, without any data.

    `sample` is a tensor, or a tuple or mapping of what the model takes. The loss is the `loss` of what the model
    returns, or else the mean square of all its outputs.
    """

    def step(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            outputs = model(**batch)
        elif isinstance(batch, Tensor):
            outputs = model(batch)
        else:
            outputs = model(*batch)
        loss = getattr(outputs, "loss", None)
        if loss is not None:
            return loss
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise UsageError(f"{type(model).__name__} returns no tensor that can be learned from")
        return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()

    return from_loader(model, [sample] * 1000, step, name=type(model).__name__)


def _imported(module: str, package: str = "", takes: str = "") -> ModuleType:
    """Return a module. Raises UsageError where a compiled `package` that it imports is not for this torch."""
    try:
        return importlib.import_module(module)
    except (OSError, RuntimeError) as error:
        if not package:
            raise
        misfit = f"{package} {version(package)} does not fit torch {torch.__version__}"
        raise UsageError(f"{misfit}: it takes {takes}") from error
