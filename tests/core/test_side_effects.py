"""What is the process's own is afterwards as before: importing and training leave no trace in it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from picture import differences, picture
from tiny import every_number_format, points

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.train.fit import fit
from speedkit.train.setup import setup_run


def failing(model, batch, recipe):
    raise ValueError("of the loss")


@pytest.fixture(autouse=True)
def set_by_the_user():
    """Switches that are not at their defaults, and random numbers in the middle of their course."""
    torch.manual_seed(7)
    torch.rand(3)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    fit(points(train=32, test=8), device="cpu", progress=False)  # what the first use of torch's parts sets is torch's
    torch.manual_seed(8)
    yield
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


PLANS = {
    "baseline": Plan(),
    "fp16": Plan(precision="fp16", fused_optimizer=True, cudnn_benchmark=True),
    "tf32": Plan(precision="tf32"),
    "fp32": Plan(precision="fp32", workers=1, micro_batch=4),
    "auto": Plan(micro_batch="auto", cache="ram"),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_training_leaves_the_process_as_it_was(plan, deterministic):
    before = picture()
    with every_number_format():
        fit(points(), plan=PLANS[plan], device="cpu", progress=False, deterministic=deterministic)
    assert differences(before, picture()) == {}


def test_so_does_one_that_raises_and_one_that_cannot_be_set_up():
    before = picture()
    options = {"plan": Plan(precision="fp32"), "device": "cpu", "progress": False, "deterministic": True}
    with pytest.raises(ValueError, match="of the loss"):
        fit(dataclasses.replace(points(), loss=failing), **options)
    with pytest.raises(SpeedkitError, match="no readable item"):
        fit(dataclasses.replace(points(), test=()), **options)
    assert differences(before, picture()) == {}


def test_a_run_that_was_set_up_alone_gives_back_what_it_set_when_it_is_closed():
    before = picture()
    run = setup_run(points(), plan=Plan(precision="fp32"), device="cpu", progress=False)
    assert {"torch's random state", "cudnn"} <= set(differences(before, picture()))
    run.close()
    assert differences(before, picture()) == {}


IMPORTED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from picture import differences, picture
before = picture()
import speedkit
import speedkit.train.compile, speedkit.train.fit, speedkit.train.micro_batch, speedkit.train.prepare
print(differences(before, picture()))
"""


def test_importing_changes_nothing():
    command = [sys.executable, "-c", IMPORTED, str(Path(__file__).parents[1])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "{}\n"
