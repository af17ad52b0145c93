"""Figures from records, and the report. The records here are input made up for the tests, of the shape a climb leaves."""

import copy

import pytest

from speedkit.show import figures

HARDWARE = {"device": "cpu", "gpu": None, "cpu": "Intel(R) Xeon(R) Processor", "cores": 2}
GPU = {"device": "cuda", "gpu": "NVIDIA H200", "cpu": "AMD EPYC 9554", "cores": 16}


def measurement(name, ratio, spread=0.03, floor=1.02):
    return {"name": name, "a": "fp32", "b": name, "seconds_a": [1.0, 1.1], "seconds_b": [0.9, 1.0], "ratio": ratio,
            "low": ratio * (1 - spread), "high": ratio * (1 + spread), "noise_floor": floor}  # fmt: skip


def rung(name, change, before_s, ratio, kept, why="", **values):
    measured = ratio is not None
    row = {"rung": name, "change": change, "predicted_low": None, "predicted_high": None, "ratio": ratio,
           "low": ratio * 0.97 if measured else None, "high": ratio * 1.03 if measured else None,
           "noise_floor": 1.015 if measured else None, "parity": "losses bit-equal" if measured else "not tried",
           "kept": kept, "why": why, "step_s_before": before_s,
           "step_s_after": before_s / ratio if measured else None}  # fmt: skip
    return {**row, **values}


def curves(total_s, offset_s):
    return [{"seed": seed, "points": [[offset_s + total_s * (epoch + 1) / 6, 0.9 - 0.7 * 0.45 ** (epoch + 1 + 0.1 * seed)]
                                      for epoch in range(6)]} for seed in range(3)]  # fmt: skip


def climb_record():
    return {
        "notebook": "90_climb", "profile": "cpu", "parameters": {"workload": "audio"}, "hardware": HARDWARE,
        "workload": {"name": "audio", "train": 800, "test": 400},
        "versions": {"torch": "2.11.0"}, "measurements": [],
        "rungs": [
            rung("loader", "workers=2, persistent_workers=true", 0.42, 1.31, True, "low end above the noise floor",
                 predicted_low=1.2, predicted_high=1.9),
            rung("cache", "cache=ram, cache_dtype=float16", 0.32, 1.86, True, "low end above the noise floor",
                 predicted_low=1.4, predicted_high=1.8),
            rung("micro_batch", "micro_batch=16", 0.171, 0.93, False, "slower: the interval lies below 1"),
            rung("precision", "precision=bf16", 0.172, 1.61, True, "low end above the noise floor"),
            rung("channels_last", "channels_last=true", 0.107, 1.008, False, "the interval 0.978 to 1.038 includes 1.0"),
            rung("fused", "fused_optimizer=true", None, None, False, "not tried: the budget was spent"),
            rung("compile", "compile=default", 0.107, 1.35, False, "losses differ by 0.03, beyond the 0.01 of another seed"),
        ],
        "speedup": {"ratio": 3.92, "low": 3.81, "high": 4.03}, "speedup_careful": {"ratio": 2.98, "low": 2.9, "high": 3.06},
        "step_s": {"baseline": 0.42, "careful": 0.319, "final": 0.107},
        "quality": {"metric": "accuracy", "higher_is_better": True, "margin": 0.03, "baseline": [0.89, 0.9, 0.88],
                    "final": [0.9, 0.89, 0.89], "mean_change": 0.003, "lower": -0.01, "passed": True},
        "time_to_quality": {"target": 0.8, "baseline_s": 31.0, "final_s": 14.0, "ratio": 2.21,
                            "curves": {"baseline": curves(84, 0), "final": curves(21, 6)}},
    }  # fmt: skip
