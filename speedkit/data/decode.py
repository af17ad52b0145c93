"""File -> waveform: decoding by soundfile, mixed down to one channel, resampled, cut or padded to one length."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from speedkit.errors import SpeedkitError

# Frames read beyond those that are kept, so that a clip cut short is resampled as if it had been read whole:
_LOOK_AHEAD = 16  # torchaudio's filter looks about six samples ahead, at the lower of the two rates


class BadItem(SpeedkitError):
    """One item of the data cannot be used: `path` is its file, `why` the reason."""

    def __init__(self, path: str | Path, why: str):
        super().__init__(f"{path} cannot be used: {why}")
        self.path = str(path)
        self.why = why

    def __reduce__(self) -> tuple:
        """Survive the way from a loader's worker process to the training process."""
        return BadItem, (self.path, self.why)


def load_audio(path: str | Path, sample_rate_hz: int, num_samples: int) -> Tensor:
    """Return the first `num_samples` samples of an audio file at `sample_rate_hz`, mono: [T] float32 in -1..1.

    A longer file is cut (its end is never read), a shorter one is padded with zeros at the end. Several channels
    are averaged. Raises BadItem when the file cannot be read, holds no samples, or holds NaN or infinity.
    """
    try:
        with soundfile.SoundFile(path) as file:
            rate_hz, frames = file.samplerate, num_samples
            if rate_hz != sample_rate_hz:
                frames = math.ceil((num_samples + _LOOK_AHEAD) * rate_hz / sample_rate_hz) + _LOOK_AHEAD
            # 16-bit samples are read as they are and scaled here: libsndfile takes five times as long for WAV.
            dtype = "int16" if file.subtype == "PCM_16" else "float32"
            waveform = torch.from_numpy(file.read(frames, dtype=dtype, always_2d=True))  # [frames, channels]
    except (soundfile.SoundFileError, RuntimeError, OSError, ValueError) as error:
        # libsndfile calls a missing file a "System error".
        raise BadItem(path, reason(error) if Path(path).is_file() else "there is no such file") from error
    if len(waveform) == 0:
        raise BadItem(path, "it holds no samples")
    if waveform.dtype == torch.int16:
        waveform = waveform.float().mul_(1 / 32768)
    elif not torch.isfinite(waveform).all():
        raise BadItem(path, "it holds samples that are not finite numbers (NaN or infinity)")
    mono = waveform[:, 0] if waveform.shape[1] == 1 else waveform.mean(dim=1)
    if rate_hz != sample_rate_hz:
        mono = _resampler(rate_hz, sample_rate_hz)(mono)
    return torch.nn.functional.pad(mono, (0, num_samples - len(mono)))  # a negative padding cuts


def reason(error: Exception) -> str:
    """Return libsndfile's own words for `error`, without the path that it puts before them."""
    text = str(getattr(error, "error_string", "") or error or type(error).__name__)
    return f"it cannot be decoded ({text.strip().rstrip('.')})"


@functools.lru_cache(maxsize=32)
def _resampler(from_hz: int, to_hz: int) -> Callable[[Tensor], Tensor]:
    """Return torchaudio's windowed-sinc resampler; its kernel is computed once per pair of rates and process."""
    import torchaudio  # imported where it is used: most commands never resample

    return torchaudio.transforms.Resample(from_hz, to_hz)


SOURCES = (load_audio, _resampler)  # the functions that a cached waveform depends on
