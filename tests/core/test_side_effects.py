"""What is the process's own is afterwards as before: importing and training leave no trace in it."""

import dataclasses

import pytest
import torch
from faults import limited
from picture import differences, picture
from processes import python
from tiny import points, trained

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.train import compile


@pytest.fixture(scope="module", autouse=True)
def used_before():
    """What the first use of torch's parts sets is torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "BACKEND", "aot_eager")  # which generates no code
        for plan in (Plan(), Plan(compile="default")):
            trained(points(train=32, test=8), plan=plan)
        yield


@pytest.fixture(autouse=True)
def set_by_the_user():
    """Switches that are not at their defaults, and random numbers in the middle of their course."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(8)
    torch.rand(3)
    with torch._dynamo.config.patch(recompile_limit=9):
        yield
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


PLANS = {
    "baseline": Plan(),
    "fp16": Plan(precision="fp16", fused_optimizer=True, cudnn_benchmark=True),
    "tf32": Plan(precision="tf32"),
    "fp32": Plan(precision="fp32", workers=1, micro_batch=4),
    "auto": Plan(micro_batch="auto", cache="ram"),
    "compile": Plan(compile="default"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("every_format")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_training_leaves_the_process_as_it_was(plan, deterministic):
    before = picture()
    trained(points(), plan=PLANS[plan], deterministic=deterministic)
    assert differences(before, picture()) == {}


def test_so_does_one_that_raises_and_one_that_cannot_be_set_up():
    before = picture()
    options = {"plan": Plan(precision="fp32"), "deterministic": True}
    with pytest.raises(ValueError, match="of the loss"):
        trained(limited(points(), 0, raises=ValueError("of the loss")), **options)
    with pytest.raises(SpeedkitError, match="no readable item"):
        trained(dataclasses.replace(points(), test=()), **options)
    assert differences(before, picture()) == {}


IMPORTED = """
import torch
from processes import python
from picture import differences, picture
before = picture()
import speedkit
import speedkit.train.compile, speedkit.train.fit, speedkit.train.micro_batch, speedkit.train.prepare
print(differences(before, picture()))
"""


def test_importing_changes_nothing():
    assert python("-c", IMPORTED).stdout == "{}\n"
