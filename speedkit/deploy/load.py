"""Load a model that `speedkit deploy` has exported. This file needs PyTorch alone: it goes where the model goes.

model = load("model.pt2")                 # call it under torch.no_grad()
model = load("model.pt2", compiled=True)  # the INT8 kernels of int8-static; needs a C++ compiler
"""

import importlib
import json
import warnings
import zipfile
from typing import Any

import torch

# What registers the operators of a namespace: nothing else is imported, whatever a file asks for.
REGISTERED_BY = {"quantized_decomposed": "torch.ao.quantization.fx._decomposed", "torchao": "torchao"}


def facts(path: Any) -> dict[str, Any]:
    """Return what was noted in the exported model at `path`; {} where it is none."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/extra/speedkit.json")]
        return dict(json.loads(archive.read(names[0]))) if names else {}


def load(path: Any, compiled: bool = False) -> Any:
    """Return the model: a function of tensors [B, ...] on the device it was exported for. Raises RuntimeError."""
    if not (about := facts(path)):
        raise RuntimeError(f"{path} is no model that speedkit deploy wrote, or was cut short: deploy it again")
    again = f"{path} was made on {about['machine']} by {about['method']}: deploy its checkpoint again where it runs"
    if about["device"] != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(f"there is no {about['device']} device here, and {again}, or with --device cpu")
    if about["method"] == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError(f"this GPU does not multiply in FP8, and {again}")
    if about["method"] == "int8-static" and about["vnni"] and not vnni():
        warnings.warn(f"this CPU has no VNNI, so that sums in INT8 may overflow, and {again}", stacklevel=2)
    for space in REGISTERED_BY.keys() & about["needs"]:
        importlib.import_module(REGISTERED_BY[space])
    try:
        model = torch.export.load(path).module()
    except Exception as error:
        raise RuntimeError(f"torch {torch.__version__} cannot read that of {about['torch']}: {again}") from error
    if not compiled:
        return model
    # INT8 kernels want weights as constants; weights that are multiplied as float32 would be kept as such.
    torch._inductor.config.freezing = about["method"] == "int8-static"
    return torch.compile(model, dynamic=False)


def vnni() -> bool:
    """Whether the CPU multiplies INT8 numbers and adds the products up in one instruction."""
    return any(torch.cpu.get_capabilities().get(flag) for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
