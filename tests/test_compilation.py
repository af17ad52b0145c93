"""Compiled training: the same losses in every scope, a failure that costs nothing, and a report that explains itself.

Quick tests compile with a backend that generates no code; the slow ones with the real one.
"""

import pytest
import torch
from tiny import loss
from torch import nn

from speedkit.measure.graphs import Watch
from speedkit.plan import Plan
from speedkit.recipe import Recipe, learning_rates
from speedkit.train import compilation, optimizer

SCOPES = ("model", "blocks", "step")


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * size, size))

    def forward(self, x):  # [B, D] -> [B, D]
        return x + self.body(x)


def stack(size=8, depth=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), *(Block(size) for _ in range(depth)), nn.Linear(size, 2))


@pytest.fixture
def quick(monkeypatch):
    """Trace as ever, backward graphs too, and run what was traced as it is."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")


def batch_of(seed, length=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, length, generator=generator), torch.randint(2, (16,), generator=generator)


def train(plan, count=6, model=None, recipe=None, batches=None, loss_of=loss, parts=1):
    """Losses of `count` steps of `model`, and the model: the training loop's calls without the rest of it."""
    recipe, model = recipe or Recipe(clip_norm=1.0), model or stack()
    step = optimizer.build(model.parameters(), recipe, plan.fused_optimizer, compilation.compiles_update(plan))
    forward = compilation.apply(model, plan)
    loss_of, update = compilation.loss(loss_of, plan), compilation.update(forward, step)
    move = optimizer.schedule(step, learning_rates(recipe, count), None)
    losses = []
    for number in range(count):
        move(number)
        random = torch.get_rng_state()
        while True:
            try:
                step.zero_grad()
                for part in zip(*(tensor.chunk(parts) for tensor in (batches or batch_of)(number)), strict=True):
                    value, _ = loss_of(forward, part, recipe)
                    (value / parts).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                update()
                break
            except Exception as error:
                if not compilation.gave_up(forward, error):
                    raise
                torch.set_rng_state(random)
        losses.append(float(value.detach()))
    return losses, forward


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_scope_learns_the_same(quick, scope, parts):
    watch = Watch()
    losses, forward = train(Plan(compile="default", compile_scope=scope), parts=parts)
    assert watch.report().graphs > 0
    assert losses == pytest.approx(train(Plan(), parts=parts)[0], rel=1e-5)
