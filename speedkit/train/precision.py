"""Number formats: process-wide switches, autocast, and loss scaling that never makes the host wait."""

import torch
from torch import Tensor

from speedkit.plan import Plan

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply(plan: Plan) -> None:
    """Set the process-wide switches that `plan.precision` needs; call again whenever another plan takes its turn.

    cudnn has its own TF32 switch, on by default: without it "fp32" convolutions already run in TF32
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    tf32 = plan.precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 and torch.cuda.is_available() else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def autocast(plan: Plan, device: torch.device) -> torch.autocast | None:
    """Return the autocast context of `plan`, to be entered at each step, or None where there is nothing to cast."""
    dtype = AUTOCAST.get(plan.precision)
    return torch.autocast(device.type, dtype) if dtype else None


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
