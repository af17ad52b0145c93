"""What a program may have set for itself in its process, as a dictionary that can be compared: no speedkit in it."""

import gc
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import warnings

import numpy as np
import torch

PRODUCTS = [
    *(("cuda", operator) for operator in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operator) for operator in ("all", "matmul", "conv", "rnn")),
    ("generic", "all"),
]
TORCHS_OWN = ("TORCHINDUCTOR_", "TRITON_", "KINETO_USE_DAEMON")  # variables that torch itself sets


def picture():
    """All that a program may have set for itself, by name."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    loggers = {"": logging.getLogger()} | logging.root.manager.loggerDict
    return {
        "torch's random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy's random state": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),  # noqa: NPY002
        "Python's random state": hash(random.getstate()),
        "products": [torch._C._get_fp32_precision_getter(*which) for which in PRODUCTS],
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "matmul": (matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction),
        "cudnn": (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, cudnn.enabled),
        "reproducible": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "signals": [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": list(warnings.filters),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(TORCHS_OWN)},
        "garbage collection": (gc.isenabled(), gc.get_freeze_count()),
        "loggers": {
            name: logger.level for name, logger in loggers.items() if name == "" or name.startswith("speedkit")
        },
        "torch's compiler logger": logging.getLogger("torch.utils.cpp_extension").level,
    }


def differences(before, after):
    return {name: (value, after[name]) for name, value in before.items() if after[name] != value}
