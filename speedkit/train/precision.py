"""Number formats: process-wide switches, autocast, 8-bit layers, loss scaling."""

import contextlib

import torch
from torch import nn

from speedkit.plan import Plan
from speedkit.train.process_state import set_threads

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp8-emulated": torch.bfloat16}
INITIAL_SCALE = 2.0**14  # a gradient of 1 stays well below 65504, float16's largest number


class Precision:
    """The number format of a plan: autocast, loss scaling, 8-bit layers and process-wide switches.

    Loss scaling is that of float16 (Micikevicius et al. 2018, section 3.2), disabled in other formats. With a fused
    optimizer it reads nothing on the host: the device skips a step that overflows.
    """

    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.dtype = AUTOCAST.get(plan.precision)  # of products in a forward pass; None: that of their factors
        self.context: contextlib.AbstractContextManager = contextlib.nullcontext()  # of forward passes, one by one
        if self.dtype is not None:
            self.context = torch.autocast(device.type, self.dtype)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=plan.precision == "fp16")

    def set_switches(self) -> None:
        """Set the process-wide switches, cuDNN's search and threads too; call it when another plan takes its turn.

        TF32 has two switches: that of matrix products is off by default, cuDNN's is on
        (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
        "default" is PyTorch's choice of both, "fp32" means IEEE arithmetic everywhere, all others allow TF32.
        """
        # The newer switches outrank these two where somebody has set them, and then the older getters raise.
        torch.backends.cudnn.fp32_precision = "none"
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        tf32_products = self.plan.precision not in ("default", "fp32") and torch.cuda.is_available()
        torch.set_float32_matmul_precision("high" if tf32_products else "highest")
        torch.backends.cudnn.allow_tf32 = self.plan.precision != "fp32"
        set_threads(self.plan.threads)
        torch.backends.cudnn.benchmark = self.plan.cudnn_benchmark and not torch.are_deterministic_algorithms_enabled()

    def convert(self, model: nn.Module) -> str:
        """Make the linear layers of `model` multiply in 8 bits, in place, where that is the format.

        Weights stay float32 parameters of the same names. Products of the forward pass are of e4m3 numbers, those of
        gradients of e5m2, each tensor with one scale: the fastest recipe on every GPU that has units for it
        (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
        Return which layers stay in bf16.
        """
        if not self.plan.precision.startswith("fp8"):
            return ""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # an extra

        eight, rest = eight_bit_layers(model)
        # Padding is done only where the rows of a batch are no multiple of 16, as those of an epoch's last may be.
        config = Float8LinearConfig(emulate=self.plan.precision == "fp8-emulated", pad_inner_dim=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in eight)
        return f"these layers multiply in bf16, for their kind, their size or their place at the end: {', '.join(rest)}"


def eight_bit_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the layers that can multiply in 8 bits, and of all others that multiply."""
    names = []
    eight = []
    last = ""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            names.append(name)
        if type(layer) is not nn.Linear:  # attention reads the weight of its output layer, of its own class, itself
            continue
        last = name
        if layer.in_features % 16 == layer.out_features % 16 == 0:  # others have no 8-bit product
            eight.append(name)
    if last in eight:
        eight.remove(last)  # its output goes into the loss unrounded
    return eight, [name for name in names if name not in eight]
