"""What all four workloads promise: data, gradients of parts, a step without host reads, number formats, learning."""

import contextlib
import dataclasses
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_losses import WORKLOADS, make, words

from speedkit.data.loader import BatchStream
from speedkit.errors import UsageError
from speedkit.hardware import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workloads import load_workload

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("words"))


def batch_of(workload, size=6, device=CPU):
    """The first batch of the test set."""
    return next(BatchStream(workload, workload.test, Plan(), batch_size=size, seed=None, device=device).one_epoch())


def augmented(workload, batch, seed=0):
    return workload.augment(batch, torch.Generator(batch[0].device).manual_seed(seed))


# ---- data ----


def test_a_generated_workload_is_whole_and_pickles(workload):
    again = pickle.loads(pickle.dumps(workload))
    assert len(workload.train) >= 30 and len(workload.test) >= 10
    assert not set(map(str, workload.train)) & set(map(str, workload.test))
    for item in (workload.train[0], workload.test[-1]):
        features = workload.features(workload.load(item))
        assert torch.equal(again.features(again.load(item)), features) and again.target(item) == workload.target(item)
        assert workload.length is None or features.shape[-1] == workload.length(item)
    if workload.classes:
        assert {workload.target(item) for item in workload.test} == set(range(len(workload.classes)))


def test_augmentation_follows_its_generator_and_leaves_the_batch_alone(workload):
    batch = batch_of(workload)
    before = [tensor.clone() for tensor in batch]
    one, again, other = (augmented(workload, batch, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, again)) and not all(map(torch.equal, one, other))
    assert all(map(torch.equal, batch, before))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        *((name, {"size": "huge"}, "size 'huge' is unknown.*tiny, small, medium") for name in WORKLOADS),
        ("audio", {"label_pattern": "(a)"}, "needs audio files.*--data-dir"),
        ("image", {"test_pattern": "a"}, "needs image files.*--data-dir"),
        ("audio", {"data_dir": ".", "clips": 100}, "leave it out"),
        ("audio", {"data_dir": "nowhere"}, "does not exist"),
        ("image", {"data_dir": "."}, r"no image files \(.jpg"),
        ("image", {"max_duration_s": 3.0}, "does not take an option.*max_duration_s"),
        ("speech", {"clips": 8, "max_duration_s": 0.1}, "too few clips last up to 0.1 s"),
        ("text", {"labels": "a.csv"}, "does not take an option.*labels"),
        ("text", {"data_dir": "."}, "holds no text files"),
        ("text", {"clips": 10**9}, "1000000000 asked for"),
        ("text", {"test_pattern": "nothing like it"}, "matches 0 of "),
    ],
)
def test_what_cannot_be_used_is_one_sentence(name, options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=sentence) as caught:
        load_workload(name, **options)
    assert "\n" not in str(caught.value)


def test_a_loaded_workload_says_how_it_is_made_again_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(words(tmp_path).parent)
    made_by = load_workload("text", data_dir=tmp_path.name, size="tiny", clips=None).made_by
    assert made_by == {"name": "text", "data_dir": str(tmp_path), "size": "tiny"}
    monkeypatch.chdir("/")
    assert load_workload(**made_by).made_by == made_by


# ---- a step ----


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(workload, micro_batch):
    def gradients(**plan):
        recipe = dataclasses.replace(workload.recipe, batch_size=6, steps=1, epochs=None)
        with contextlib.closing(setup_run(workload, recipe, Plan(**plan), device="cpu", progress=False)) as run:
            next(steps(run))
            return [weight.grad for weight in run.model.parameters()], float(run.last_loss)

    (whole, whole_loss), (parts, parts_loss) = gradients(), gradients(micro_batch=micro_batch)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_never_asks_the_device_for_a_number(workload, device):
    if (workload.name, device) == ("image", "cpu"):
        pytest.skip("one_hot looks at its labels on a CPU, and there alone")
    net, batch, generator = workload.model().to(device), batch_of(workload, device=device), torch.Generator(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        batch = workload.augment(batch, generator)
        count = workload.count(batch) if workload.count else len(batch[0])
        (workload.loss(net, batch, workload.recipe)[0] * count).backward()
    assert not {event.name for event in profile.events()} & {"aten::_local_scalar_dense", "aten::nonzero"}


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_the_loss_is_float32_and_near_and_each_sample_has_a_score(workload, device):
    torch.manual_seed(0)
    net, batch = workload.model().to(device), batch_of(workload, device=device)
    wide, _ = workload.loss(net, batch, workload.recipe)
    with torch.autocast(device, torch.bfloat16):
        short, outputs = workload.loss(net, batch, workload.recipe)
    assert short.dtype == torch.float32 and short.item() == pytest.approx(wide.item(), rel=0.03)
    assert workload.score(outputs, batch).shape == (len(batch[0]),)


def test_the_loop_learns(workload):
    recipe = Recipe(steps=30, epochs=None, batch_size=10, learning_rate=3e-3, clip_norm=1.0)
    plan = Plan(cache="ram", log_every=5, validate_every=0)
    history = fit(workload, recipe, plan, device="cpu", progress=False)
    assert history.loss[-1] < 0.85 * history.loss[0]
    assert history.evaluation["metric"] == workload.metric and math.isfinite(history.evaluation["value"])


@pytest.mark.slow
def test_compiled_bfloat16_gradients_are_finite_and_near(workload):
    """amax in place of max gave NaN here: its gradient compares rounded with unrounded values."""
    if not this_machine("cpu").supports("compile"):
        pytest.skip(this_machine("cpu").why_not("compile"))
    torch.manual_seed(0)
    net, batch = workload.model(), augmented(workload, batch_of(workload))
    gradients = []
    for forward in (net, torch.compile(net, dynamic=False, fullgraph=True)):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward is not net):
            value, _ = workload.loss(forward, batch, workload.recipe)
        value.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    assert gradients[1].isfinite().all() and F.cosine_similarity(*gradients, dim=0) > 0.98
