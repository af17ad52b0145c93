"""What a script asks of a GPU that is not there: it runs until one of its steps was counted."""

import gc
import runpy
import sys
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from speedkit.dry.counts import counted
from speedkit.dry.dry_run import TIMEOUT_S, row_of
from speedkit.dry.gpus import Gpu
from speedkit.dry.process import run
from speedkit.dry.step import WARM_UP, number_format, step_facts
from speedkit.errors import SpeedkitError, UsageError
from speedkit.lab.script.models import models_of
from speedkit.measure.roofline import OperatorCounter
from speedkit.measure.warm_up import compilations
from speedkit.train.memory import is_out_of_memory


class Counted(BaseException):
    """What ends a script, with what was counted: no error that the script would handle."""


def dry_run_script(script: Path, arguments: Sequence[str], *, plan: str, gpu: Gpu) -> dict[str, Any]:
    """Return what a step of a script takes on a GPU, as `dry_run` does; `plan` is what the row calls the script's own.

    Raises UsageError for what does not fit there, and SpeedkitError for a script that fails.
    """
    facts = run("speedkit.lab.script.dry:counted_script", gpu, TIMEOUT_S, script=str(script), argv=list(arguments))
    if facts is None:
        raise UsageError(f"{script} does not fit on {gpu.name} as it is: take smaller batches")
    return row_of(script.name, plan, gpu, counted=facts)


def counted_script(script: str, argv: Sequence[str]) -> dict[str, Any] | None:
    """Return what a step of a script asks of this process's GPU, as plain values; None where it runs out of memory.

    A step lasts from one update to the next, by the optimizer that is the first to make one. Raises UsageError for a
    script that fails or makes too few, and for one that compiles: in compiled code no operators are seen.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # its graphs ask more of an engine than the stand-in offers
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).resolve().parent))
    optimizers: list[Optimizer] = []
    steps = counting()
    next(steps)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        optimizers.append(optimizer)
        if optimizer is optimizers[0]:
            steps.send(optimizer)

    register_optimizer_step_post_hook(after_step)
    try:
        runpy.run_path(script, run_name="__main__")
    except Counted as end:
        return end.args[0]
    except SpeedkitError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            return None
        places = [place for place in traceback.extract_tb(error.__traceback__) if place.filename == script]
        where = f"line {places[-1].lineno}: " if places else ""
        raise UsageError(f"{where}{type(error).__name__}: {error}") from error
    raise UsageError(f"it made {len(optimizers)} optimizer steps, too few to count one: it takes {WARM_UP + 2}")


def counting() -> Generator[None, Optimizer, None]:
    """Raise Counted with what a script's step asks for, once it is known; what is sent has made the step that ends."""
    for _ in range(WARM_UP):
        yield
    torch.cuda.reset_peak_memory_stats()
    with counted() as counts:
        optimizer = yield
    if compilations():
        raise UsageError("it compiles its model: TORCHDYNAMO_DISABLE=1 shows it as it is without")
    if not counts.launches:
        raise UsageError("it computes nothing on the GPU: its model and its batches stay on the CPU")
    models = models_of([optimizer], [item for item in gc.get_objects() if issubclass(type(item), nn.Module)])
    facts = step_facts(counts, models, optimizer)
    with OperatorCounter() as counter:
        yield
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "default"
    facts |= {
        "flops": dict(counter.flops),
        "moved_bytes": dict(counter.moved_bytes),
        "number_format": number_format(counter, precision),
    }
    raise Counted(facts)
