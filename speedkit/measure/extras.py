"""Packages that the light core leaves out, and the extras of pyproject.toml that bring them."""

EXTRAS = dict.fromkeys(("torchaudio", "soundfile", "torchcodec"), "audio")
EXTRAS |= {"torchvision": "image", "webdataset": "tars", "torchao": "int8", "distributed": "cluster"}
EXTRAS |= dict.fromkeys(("matplotlib", "IPython", "nbformat", "nbclient", "papermill"), "notebooks")


def missing_extra(error: BaseException) -> str:
    """Return in one sentence which extra brings the package that an import has missed; "" for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRAS:
        return ""
    return f'the package {package} is not installed: pip install "torch-speedkit[{EXTRAS[package]}]"'
