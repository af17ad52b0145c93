"""Settings: frozen pydantic dataclasses that say in one sentence what they cannot be, with YAML in and out."""

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import pydantic  # loads its parts when they are first used: importing this module is cheap
import yaml

from speedkit.errors import PlanError

T = TypeVar("T")

TYPES = {"integer": "an integer", "number": "a number", "boolean": "true | false", "null": "none"}  # of JSON
LIMITS = {"minimum": "from", "maximum": "to"}
# What other tools and guides call a setting, by what it is here: an option, or `option=value`, and what to add to it;
# where there is no such option, only that.
RENAMED = {
    old: new
    for new, names in {
        "workers": "num_workers dataloader_num_workers dataloader_workers",
        "batch_size": "batch train_batch_size",
        "micro_batch (samples per pass; accumulation follows from batch_size)": "gradient_accumulation grad_accum "
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps per_device_train_batch_size",
        "micro_batch=auto": "auto_batch_size auto_scale_batch_size auto_find_batch_size find_batch_size",
        "learning_rate": "lr",
        "epochs": "num_epochs max_epochs num_train_epochs",
        "steps": "max_steps",
        "clip_norm": "gradient_clip_val max_grad_norm",
        "precision": "amp use_amp mixed_precision autocast",
        "precision=default": "no_amp disable_amp no_mixed_precision",
        "precision=fp32": "precision=32 precision=32_true precision=float32",
        "precision=bf16": "bf16 precision=bf16_mixed precision=bfloat16",
        "precision=fp16": "fp16 precision=16 precision=16_mixed precision=fp16_mixed precision=float16",
        "precision=tf32": "tf32 allow_tf32",
        "precision=fp8": "fp8 use_fp8",
        "compile=default": "torch_compile use_compile compile_model compile=true",
        "compile=off": "no_compile disable_compile compile=false",
        "attention=flash": "flash_attention flash_attn use_flash_attention",
        "checkpointing=blocks": "gradient_checkpointing activation_checkpointing checkpointing=true",
        "fused_optimizer": "fused fused_adam",
        "cache=disk": "pregenerate precompute use_cache cache_spectrograms cache_images cache=true",
        "cache=off": "no_cache cache=false",
        "log_every": "log_interval log_every_n_steps logging_steps",
        "validate_every": "val_check_interval eval_steps val_interval eval_interval",
        "ranks": "gpus num_gpus devices world_size nproc_per_node",
        "device=cuda": "cuda gpu use_gpu",
        "data_dir": "audio_dir image_dir dataset_dir data_path manifest_filepath tarred_audio_filepaths",
        "cache_dir": "spectrogram_dir spec_dir features_dir",
        "out": "output_dir output save_dir default_root_dir",
        " it says what is learned, as an option of train, doctor, climb and compare: a plan must not change that": "seed "
        "batch_size learning_rate epochs steps weight_decay optimizer schedule label_smoothing",
        " `speedkit doctor WORKLOAD` shows where a step's time goes; of notebooks it is `-p profile NAME`": "profile",
        " history.json has peak_memory_bytes, and --micro-batch auto finds what fits": "memory profile_memory",
        " nothing is to be skipped: features are cached first, and augmented anew in each batch": "skip_augmented",
        " all files are taken, to train and to test on": "all",
    }.items()
    for old in names.split()
}
WORDS = {"none": None, "null": None, "true": True, "yes": True, "false": False, "no": False}


class Setting(NamedTuple):
    """A field of a settings class: its help with its unit, its default, and in words what it takes."""

    help: str
    default: Any
    takes: tuple[str, ...]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen pydantic dataclass that takes nothing but its fields, by name and exactly typed.

    The docstring under a field is its help. Making one raises PlanError for an unknown name or an impossible value.
    """
    config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    model: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)
    validate = model.__init__

    def __init__(self: Any, **values: Any) -> None:
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            name, value, fields = str(error.errors()[0]["loc"][0]), error.errors()[0]["input"], settings_of(model)
            if name not in fields:
                hint = spelling_of_today(name) or nearest(name, fields)
                raise PlanError(f"{name!r} is not a field of {cls.__name__}{hint}") from None
            words = "; it takes " + " | ".join(fields[name].takes) + nearest(str(value), fields[name].takes)
            hint = spelling_of_today(f"{name}={value}") or words
            raise PlanError(f"{name}={value!r} is not possible{hint}") from None

    model.__init__ = __init__
    return model


def settings_of(cls: type) -> dict[str, Setting]:
    """Return the fields of the settings class `cls` by name, in the order they are written."""
    fields = pydantic.TypeAdapter(cls).json_schema()["properties"]
    return {
        name: Setting(" ".join(field["description"].split()), field["default"], tuple(_values_in_words(field)))
        for name, field in fields.items()
    }


def _values_in_words(schema: Mapping[str, Any]) -> Iterable[str]:
    for variant in schema.get("anyOf", [schema]):
        if variant["type"] == "string":
            yield from variant.get("enum") or [variant["const"]]
        else:
            limits = [f" {word} {variant[key]:g}" for key, word in LIMITS.items() if key in variant]
            yield TYPES[variant["type"]] + "".join(limits)


def spelling_of_today(word: str, *, typed: bool = False) -> str:
    """Return `: here that is X` for what guides call `word`, X as a field or as it is `typed`; "" for any other."""
    here, space, note = RENAMED.get(word.lower().lstrip("-").replace("-", "_"), "").partition(" ")
    if typed:
        here = here and "--" + here.replace("_", "-").replace("=", " ")
    return f": here that is {here}{space}{note}" if here else f"{space and ': '}{note}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known word nearest to `word`, or "" where none is near."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a `cls` of `values`, among which texts may stand for numbers. Raises PlanError as `cls` itself does."""
    return cls(**{name: _from_text(value) if isinstance(value, str) else value for name, value in values.items()})


def _from_text(text: str) -> Any:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return WORDS.get(text.lower(), text)


def from_yaml(cls: type[T], path: str | Path) -> T:
    """Return the `cls` in the YAML file at `path`. Raises PlanError with the file and what is wrong in it."""
    try:
        # All values as texts, as on the command line: a YAML reader that tells types makes a bare `off` false.
        values = yaml.load(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader)
        if not isinstance(values, dict):
            raise PlanError(f"it must hold lines of `field: value`, not a {type(values).__name__}")
        return from_mapping(cls, values)
    except (OSError, ValueError, yaml.YAMLError, PlanError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PlanError(f"{path}: {why}") from error


def to_yaml(instance: Any) -> str:
    """Return `instance` as YAML: a line for each field, with its meaning as a comment."""
    helps = {name: setting.help for name, setting in settings_of(type(instance)).items()}
    lines = [f"{yaml.safe_dump({name: getattr(instance, name)}).strip()}  # {text}\n" for name, text in helps.items()]
    return "".join(lines)
