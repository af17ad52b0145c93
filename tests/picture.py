"""What a program may have set for itself in its process, as a dictionary that can be compared: no speedkit in it."""

import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

PRODUCTS = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]
# Variables that torch itself sets.
TORCHS_OWN = ("TORCHINDUCTOR_", "TRITON_", "KINETO_USE_DAEMON")
# What its profiler and Inductor leave where something is measured.
LEFT_BY_MEASURING = ("KINETO_LOG_LEVEL", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")


def older(switch):
    """What one of the older switches says, or why it says nothing beside newer ones."""
    try:
        return switch()
    except RuntimeError as error:
        return str(error)


def picture(torchs_own=TORCHS_OWN):
    """All that a program may have set for itself, by name."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    loggers = {"": logging.getLogger()} | logging.root.manager.loggerDict
    return {
        "torch's random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "GPUs' random states": [state.tolist() for state in torch.cuda.get_rng_state_all()],
        "numpy's random state": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "Python's random state": hash(random.getstate()),
        "products": [torch._C._get_fp32_precision_getter(*which) for which in PRODUCTS],
        "threads": torch.get_num_threads(),
        "float32 products": older(torch.get_float32_matmul_precision),
        "matmul": (older(lambda: matmul.allow_tf32), matmul.allow_fp16_reduced_precision_reduction),
        "cudnn": (older(lambda: cudnn.allow_tf32), cudnn.benchmark, cudnn.deterministic, cudnn.enabled),
        "reproducible": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "autograd": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")),
        "stance": str(torch._dynamo.eval_frame._stance),
        "recompiles": torch._dynamo.config.recompile_limit,
        "profilers": (torch.autograd._profiler_enabled(), sys.getprofile()),
        "patched": (torch.autograd.backward, torch.save, torch.Tensor.cpu, DataLoader.__iter__, nn.Module.__init__),
        "signals": {which: signal.getsignal(which) for which in signal.valid_signals() - {signal.SIGCHLD}},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(torchs_own)},
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "log levels": {name: logger.level for name, logger in loggers.items() if getattr(logger, "level", 0)},
    }


def differences(before, after):
    return {name: (value, after[name]) for name, value in before.items() if after[name] != value}
