"""Attention kernels that really ran."""

import os
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# By the profiler's names of their operations.
OPERATIONS = {f"aten::_scaled_dot_product_{kernel}_attention": kernel for kernel in ("flash", "efficient", "cudnn")} | {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_attention_math": "math",
    "torch_attn::_varlen_attn": "flash, lengths",
}


def which_ran(function: Callable[[], Any]) -> list[dict[str, str]]:
    """Call `function()`; return {kernel} of each attention kernel that ran.

    In compiled code math is no operation of its own, and has no entry.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no message on machines without a GPU
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run:
        function()
    return [{"kernel": OPERATIONS[event.key]} for event in run.key_averages() if event.key in OPERATIONS]
