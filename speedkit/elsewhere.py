"""What other tools and older guides call a setting, and how it is spelled here."""

# Today's spelling, a setting or a setting and its value, and the words that it goes by elsewhere. A recipe's settings
# are no plan's: a YAML plan that holds one is told so.
NAMES_ELSEWHERE = {
    "workers": "num_workers dataloader_num_workers dataloader_workers",
    "workers=auto": "auto_workers",
    "precision": "amp use_amp mixed_precision use_mixed_precision autocast",
    "precision=fp32": "no_amp disable_amp no_mixed_precision",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16 use_fp16",
    "precision=tf32": "tf32 allow_tf32",
    "precision=fp8": "fp8 use_fp8",
    "compile": "torch_compile use_compile compile_mode compile_model",
    "compile=off": "no_compile disable_compile no_torch_compile",
    "micro_batch (accumulation follows from the recipe's batch_size)": (
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum grad_accum_steps"
    ),
    "micro_batch=auto": "auto_batch auto_batch_size find_batch_size auto_scale_batch_size auto_find_batch_size",
    "checkpointing": "activation_checkpointing",
    "checkpointing=blocks": "gradient_checkpointing use_gradient_checkpointing grad_checkpoint use_checkpointing",
    "checkpointing=off": "no_gradient_checkpointing",
    "on_nonfinite=recover": "recover_nan nan_recovery auto_recover",
    "on_nonfinite=skip": "skip_nan skip_nan_batches ignore_nan",
    "log_every": "log_interval log_every_n_steps logging_steps",
    "validate_every": "val_check_interval eval_steps check_val_every_n_epoch val_every eval_interval",
    "prefetch": "non_blocking async_copy",
    "cache": "cache_spectrograms use_cache cache_images cache_features",
    "cache=disk": "pregenerate pre_generate precompute pregenerate_spectrograms precompute_features",
    "cache=ram": "cache_in_ram cache_in_memory",
    "cache=off": "no_cache",
    "channels_last": "memory_format nhwc use_channels_last",
    "attention": "use_flash_attention attn_implementation",
    "attention=flash": "flash_attention flash_attn",
    "fused_optimizer": "fused fused_adam use_fused",
    "ranks": "devices gpus num_gpus world_size nproc_per_node",
    "strategy=fsdp": "fsdp use_fsdp",
    "a field of the Recipe": "batch_size learning_rate lr epochs seed weight_decay",
}
FORMERLY = {name: here for here, names in NAMES_ELSEWHERE.items() for name in names.split()}
OPTIONS_ELSEWHERE = {"lr": "--learning-rate", "batch": "--batch-size", "num_epochs": "--epochs"}


def option_today(word: str) -> str:
    """Return how the command-line option `word` of another tool is spelled here; "" where it is not known."""
    name = word.lstrip("-").replace("-", "_").lower()
    if name in OPTIONS_ELSEWHERE:
        return OPTIONS_ELSEWHERE[name]
    here, _, note = FORMERLY.get(name, "").partition(" ")
    if not here or here == "a":  # what a YAML plan is told of a recipe's fields: they are options as they are
        return ""
    setting, _, value = here.partition("=")
    return f"--{setting.replace('_', '-')}{' ' * bool(value)}{value}{' ' * bool(note)}{note}"
