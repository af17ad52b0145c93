"""The rungs of the climb, a table: what each changes, what it promises, and what it should gain."""

import dataclasses
from collections.abc import Callable
from typing import Any

from speedkit.hardware import Hardware
from speedkit.plan import Plan
from speedkit.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where a step's time goes under the best plan so far, and what the machine could do: a prediction's ground."""

    step_s: float
    data_s: float  # of it, getting the batch to the device with nothing else going on
    matmul: dict[str, float]  # measured FLOP/s by number format

    @property
    def data_share(self) -> float:
        """The share of a step that getting its batch takes."""
        return min(0.95, self.data_s / self.step_s)


Predicted = tuple[float, float]  # least and greatest gain to expect: time before / time after
Change = dict[str, Any]  # plan fields and their new values


@dataclasses.dataclass(frozen=True)
class Rung:
    """One optimization: `changes` gives what to try, in order; each is compared with the best plan so far."""

    name: str
    changes: Callable[[Plan, Recipe, Hardware], list[Change]]
    promises: str  # bit-equal | loss-equal
    predict: Callable[[Profile, Change], Predicted]
    claims: tuple[str, ...]
    notebook: str
    needs: str = ""  # a capability of the machine without which there is nothing to try
    extra_s: float = 0.0  # what trying it costs beside a comparison, and using it afterwards


def amdahl(share: float, factor: float) -> float:
    """Return the gain of the whole when `share` of it becomes `factor` times as fast (Amdahl 1967)."""
    return 1 / (1 - share + share / factor)


def _overlapped(profile: Profile, change: Change) -> Predicted:
    # At best the workers hide all loading behind the computing; at worst they compete with it for the same cores.
    compute_s = profile.step_s - profile.data_s
    return 1.0, max(1.0, profile.step_s / max(compute_s, profile.data_s / change["workers"], 1e-9))


def _quicker(part: str, low: float, high: float) -> Callable[[Profile, Change], Predicted]:
    """Predict that one `part` of a step, loading or computing, becomes `low` to `high` times as fast."""

    def predict(profile: Profile, _: Change) -> Predicted:
        share = profile.data_share if part == "loading" else 1 - profile.data_share
        return amdahl(share, low), amdahl(share, high)

    return predict


def _faster_matmul(profile: Profile, change: Change) -> Predicted:
    # The measured ceilings bound it from above: not all of a step is matrix products, and few run at the ceiling.
    fp32, low_bits = profile.matmul.get("fp32"), profile.matmul.get(change["precision"])
    gain = amdahl(1 - profile.data_share, low_bits / fp32 if fp32 and low_bits else 2.0)
    return min(1.0, gain), max(1.0, gain)


def _workers(plan: Plan, _: Recipe, hardware: Hardware) -> list[Change]:
    counts = [hardware.cores] if hardware.cores <= 4 else [4, min(16, hardware.cores - 1)]
    pinned = {"pin_memory": True} if hardware.supports("pin_memory") else {}
    return [{"workers": count, "persistent_workers": True, **pinned} for count in counts if plan.cache == "off"]


def _cache(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    places = ["disk", "ram"] if hardware.device.type == "cpu" else ["ram", "device"]
    return [{"cache": place, "cache_dtype": "float16", "workers": 0, "persistent_workers": False} for place in places]


def _micro_batch(_: Plan, recipe: Recipe, __: Hardware) -> list[Change]:
    return [{"micro_batch": recipe.batch_size // parts} for parts in (2, 4) if recipe.batch_size // parts >= 4]


def _precision(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    # On a GPU fp16 needs loss scaling and is rarely faster than bf16: it is tried only where bf16 is missing.
    wanted = ["tf32", "bf16"] if hardware.supports("bf16") else ["fp16"]
    return [{"precision": name} for name in wanted if hardware.supports(name)]


def _compile(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    if not hardware.supports("compile"):
        return []
    # Each costs a compilation, half a minute and more on a few cores: there only the plainest is tried.
    more = [{"compile": "default", "compile_scope": "step"}, {"compile": "reduce-overhead", "compile_scope": "model"}]
    return [{"compile": "default"}, *(more if hardware.supports("cuda_graphs") else [])]


def _attention(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    # Left alone, PyTorch takes flash where it can; on a CPU there is nothing else that is fast.
    return [{"attention": "cudnn"}] if hardware.supports("flash_attention") and hardware.device.type == "cuda" else []


LADDER: tuple[Rung, ...] = (
    Rung("workers", _workers, "bit-equal", _overlapped, ("C06", "C07", "C08"), "10_dataloader"),
    Rung("cache", _cache, "loss-equal", _quicker("loading", 3.0, 1e9), ("C09", "C10"), "12_feature_cache"),
    Rung("host_syncs", lambda *_: [{"fused_optimizer": True, "log_every": 50}], "loss-equal",
         _quicker("computing", 1.0, 1.1), ("C22",), "26_host_syncs"),
    Rung("micro_batch", _micro_batch, "loss-equal", _quicker("computing", 0.9, 1.15), (), "20_batch_size"),
    Rung("precision", _precision, "loss-equal", _faster_matmul, ("C01", "C02", "C04", "C38"), "21_mixed_precision",
         needs="bf16"),
    Rung("channels_last", lambda *_: [{"channels_last": True}], "loss-equal", _quicker("computing", 0.9, 1.2),
         ("C19",), "24_channels_last"),
    # Compiling takes 13 to 40 s on two cores, and some more whenever the plan starts anew, from Inductor's cache.
    Rung("compile", _compile, "loss-equal", _quicker("computing", 1.0, 1.3), ("C16", "C18"), "23_compile",
         needs="compile", extra_s=45.0),
    Rung("attention", _attention, "loss-equal", _quicker("computing", 0.95, 1.1), ("C35",), "25_attention"),
    # Against bf16 and compiled: 8-bit layers that are not compiled round in kernels of their own.
    Rung("fp8", lambda *given: [{"precision": "fp8"}] * given[-1].supports("fp8"), "loss-equal", _faster_matmul,
         ("C34",), "22_fp8", needs="fp8", extra_s=60.0),
)  # fmt: skip
