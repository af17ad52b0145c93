"""What is compiled for a GPU that is not there: each plan that compiles, and code for clips of every length.

The plans of speech, whose eight lengths take ten minutes to compile, are recorded, and counted by test_dry.py alone.
Compiled for a T4 are those of text alone: what differs there, float16 with a loss scale, is in them.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from test_dry import COMPILED, COUNTED_ON, check

from speedkit.data.batch import Batch
from speedkit.dry.process import run
from speedkit.lab.workloads import load_workload
from speedkit.lab.workloads.speech import draw_mask
from speedkit.measure.warm_up import compilations
from speedkit.plan import Plan
from speedkit.train.precision import Precision
from speedkit.train.setup import transform_model

LENGTHS = (67, 87, 122, 158, 286)  # frames of the net that are no multiples of 8, from buckets of generated speech


@pytest.fixture(autouse=True)
def functions_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.slow  # minutes of compiling
@pytest.mark.parametrize(
    ("name", "gpu"), [("text", "sm_75"), ("text", "sm_90"), ("image", "sm_90"), ("audio", "sm_90")]
)
def test_each_plan_that_compiles_asks_of_the_gpu_what_it_should(name, gpu):
    check(name, gpu, COMPILED)


def compiled_speech():
    """Train on a batch of each length, forward and backward, with compiled code; return how many graphs there are."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    workload = load_workload("speech", size="tiny", depth=1, clips=16)
    plan = Plan(compile="default", bucket=True, precision="bf16")
    model = workload.model().cuda()
    precision = Precision(plan, torch.device("cuda"))
    transform_model(model, plan, precision=precision, workload=workload)
    generator = torch.Generator("cuda")
    for length in LENGTHS:
        inputs = torch.zeros(4, 80, 4 * length, device="cuda")
        lengths = torch.full((4,), 4 * length, device="cuda")
        batch = Batch(inputs, torch.zeros(4, device="cuda", dtype=torch.long), lengths)
        batch = dataclasses.replace(batch, extra=(draw_mask(batch, generator),))
        with precision.context:
            loss, _ = workload.loss(model, batch, workload.recipe)
        loss.backward()
    return compilations()


@pytest.mark.slow
def test_compiled_speech_takes_every_length():
    assert run("test_compiled:compiled_speech", COUNTED_ON["sm_90"], 1200) == len(LENGTHS)
