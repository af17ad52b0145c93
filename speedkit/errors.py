"""The errors a user can cause or must know of. Each carries one sentence: what, where, what to do."""

# The extra of pyproject.toml that brings each package which the light core leaves out.
EXTRAS = dict.fromkeys(("torchaudio", "soundfile", "torchcodec"), "audio")
EXTRAS |= {"torchvision": "image", "webdataset": "tars", "torchao": "int8", "distributed": "cluster"}
EXTRAS |= dict.fromkeys(("matplotlib", "IPython", "nbformat", "nbclient", "papermill"), "notebooks")


def missing_extra(error: BaseException) -> str:
    """Return in one sentence which extra brings the package that an import has missed; "" for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRAS:
        return ""
    return f"the package {package} is not installed: install speedkit with its extra [{EXTRAS[package]}]"


class SpeedkitError(Exception):
    """A run failed for a reason the user can read and act on; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(SpeedkitError):
    """What was asked cannot be done as asked: a missing folder, an unknown name, an output that is in use."""

    exit_code = 2


class PlanError(UsageError):
    """A plan or recipe field has an unknown name or an impossible value."""


class DataError(SpeedkitError):
    """Batches can be loaded no more: a loader process failed, died or hangs."""


class Interrupted(SpeedkitError):
    """Ctrl-C or SIGTERM ended a run after its checkpoint was written; `exit_code` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number
