"""Out of memory in all its forms: how to know it, and what to free before trying again."""

import gc
import re

import torch

# The texts of RuntimeErrors by which a size shows that it does not fit. The libraries that multiply and convolve say
# that they found no room for their workspace, or no algorithm that could do without; a launch over more than 65 535
# blocks, or over more elements than 32 bits count, is "out of" another resource, and a smaller batch cures it as well.
TEXTS = re.compile(
    r"""out\ of\ memory | not\ enough\ memory
    | DefaultCPUAllocator:\ can't\ allocate\ memory | std::bad_alloc
    | CU(BLAS|SOLVER|SPARSE|DNN)_STATUS_ALLOC_FAILED | CUFFT_ALLOC_FAILED
    | CUDNN_STATUS_NOT_SUPPORTED | unable\ to\ find\ an\ engine | Unable\ to\ find\ a\ valid\ cuDNN\ algorithm
    | invalid\ configuration\ argument | canUse32BitIndexMath""",
    re.VERBOSE | re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from (`__cause__`), says that a smaller batch could have fitted.

    Linux may also end a process that takes too much RAM (man 5 proc, oom_score), which no exception announces: on a
    CPU, sizes must be kept from it by a budget.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(cause, RuntimeError) and TEXTS.search(str(cause)):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def release(device: torch.device) -> None:
    """Free what a failed step left behind. Call it outside the `except` block: there the error still holds its frames.

    Gradients, parts of a batch and the graph are in reference cycles now and then; what the allocator holds in blocks
    cut for the larger size would not serve the smaller one.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
