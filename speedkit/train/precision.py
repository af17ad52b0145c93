"""Number formats: process-wide switches, autocast, 8-bit layers, and loss scaling that never makes the host wait."""

import dataclasses

import torch
from torch import Tensor, nn

from speedkit.errors import UsageError
from speedkit.plan import Plan

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp8-emulated": torch.bfloat16}
SCALINGS = ("tensorwise", "rowwise")


def apply(plan: Plan) -> None:
    """Set the process-wide switches that `plan.precision` needs; call again whenever another plan takes its turn.

    cudnn has its own TF32 switch, on by default: without it "fp32" convolutions already run in TF32
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    tf32 = plan.precision not in ("default", "fp32")  # by default PyTorch lets convolutions take TF32
    # The newer switches outrank these two where somebody has set them, and then the older getters raise.
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if tf32 and torch.cuda.is_available() else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision != "fp32"


def autocast(plan: Plan, device: torch.device) -> torch.autocast | None:
    """Return the autocast context of `plan`, to be entered at each step, or None where there is nothing to cast."""
    dtype = AUTOCAST.get(plan.precision)
    return torch.autocast(device.type, dtype) if dtype else None


def convert(model: nn.Module, plan: Plan, scaling: str = "tensorwise") -> list[str]:
    """Make the linear layers of `model` multiply in 8 bits where `plan.precision` says so, in place.

    Weights stay float32 parameters of the same names. Products of the forward pass are of e4m3 numbers, and with
    `scaling` "tensorwise" those of gradients of e5m2, each tensor with one scale found as it is rounded: the fastest
    recipe, on every GPU that has units for it. "rowwise" has a scale per row and e4m3 throughout: an outlier spoils its
    own row only, for more work (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
    Return a note per group of layers that are left alone. Raises UsageError without torchao.
    """
    if not plan.precision.startswith("fp8"):
        return []
    if scaling not in SCALINGS:
        raise UsageError(f'scaling "{scaling}" is unknown: take {" or ".join(SCALINGS)}')
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"precision={plan.precision} needs the package torchao: install the extra `quant`") from error
    kept = _kept_from_fp8(model)
    # Padding is done only where the rows of a batch are no multiple of 16, as those of an epoch's last may be.
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(scaling), emulate=plan.precision == "fp8-emulated", pad_inner_dim=True
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name not in kept)
    notes = [f"{why}: {', '.join(name for name in kept if kept[name] == why)}" for why in dict.fromkeys(kept.values())]
    if not any(type(layer).__name__ == "Float8Linear" for layer in model.modules()):
        notes.insert(0, "no layer of this model multiplies in 8 bits, so that all of it trains as in bf16")
    return notes


def _kept_from_fp8(model: nn.Module) -> dict[str, str]:
    """Return why for each linear or convolutional layer of `model`, by name, that 8 bits are not for.

    Which layers are too small to gain by it is nobody's rule but the measurement's.
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    output = next(reversed(linear), None)  # the last registered, as in torchao's own example
    kept = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.conv._ConvNd):
            kept[name] = "convolutions have no 8-bit form"
        elif name in linear and type(layer) is not nn.Linear:
            kept[name] = f"a {type(layer).__name__} is not called as a layer"  # attention reads its weight itself
        elif name == output:
            kept[name] = "what comes out of the last layer goes into the loss unrounded"
        elif name in linear and (layer.in_features % 16 or layer.out_features % 16):
            kept[name] = "dimensions that 16 does not divide have no 8-bit product"
    return kept


class LossScale:
    """Loss scaling for float16, all of it on the device: Micikevicius et al. 2018, section 3.2.

    The rule and kernels of torch.amp.GradScaler (halve on overflow, double after 2000 good steps), but the host never
    asks whether a step was good. The fused optimizer reads `found_inf` and skips a bad step by itself; `steps` counts
    the good ones. All attributes are tensors, and together they are its state.
    """

    def __init__(self, device: torch.device, initial: float = 2.0**14):
        self.scale = torch.full((), initial, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place, and note on the device whether any is not finite."""
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self.scale.reciprocal())

    def update(self) -> None:
        """Move the scale by what the last step found, and count the step if it was good."""
        torch._amp_update_scale_(self.scale, self.growth, self.found_inf, 2.0, 0.5, 2000)
        self.steps.add_(self.found_inf == 0)
