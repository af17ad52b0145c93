"""File -> waveform: decoded in the calling thread, mixed down to one channel, resampled, cut or padded to one length.

soundfile is the default, torchcodec (FFmpeg) knows more formats, librosa is what both are compared with.
"""

import functools
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

from speedkit.data.shards import TarMember
from speedkit.errors import SpeedkitError

# Read beyond what is kept, for a clip cut short to be resampled as the whole: the filter looks ahead some six samples.
_LOOK_AHEAD_S = 0.01


class BadItem(SpeedkitError):
    """One item of the data cannot be used: `path` is its file, `why` the reason."""

    def __init__(self, path: str | Path | TarMember, why: str):
        super().__init__(str(path), why)  # the arguments, with which it comes out of a loader's process too
        self.path, self.why = str(path), why

    def __str__(self) -> str:
        return f"{self.path} cannot be used: {self.why}"


def load_audio(
    source: str | Path | TarMember, sample_rate_hz: int, num_samples: int, decoder: str = "soundfile"
) -> Tensor:
    """Return the first `num_samples` samples of a recording at `sample_rate_hz`, mono: [T] float32 in -1..1.

    A longer one is cut (its end is never decoded), a shorter one is padded with zeros at the end. Several channels are
    averaged. Lossless files at their own rate give the same bits with each `decoder`: soundfile, torchcodec or librosa.
    Raises BadItem when `source` cannot be read, holds no samples, or holds NaN or infinity.
    """
    try:
        opened = io.BytesIO(source.read()) if isinstance(source, TarMember) else source
        duration_s = num_samples / sample_rate_hz + _LOOK_AHEAD_S
        waveform, rate_hz = _DECODERS[decoder](opened, duration_s, sample_rate_hz)  # [frames, channels]
    except (soundfile.SoundFileError, RuntimeError, OSError, ValueError) as error:
        # libsndfile calls a missing file a "System error".
        raise BadItem(source, reason(error) if Path(source).is_file() else "there is no such file") from error
    if len(waveform) == 0:
        raise BadItem(source, "it holds no samples")
    if waveform.dtype == torch.int16:
        waveform = waveform.float().mul_(1 / 32768)
    elif not torch.isfinite(waveform).all():
        raise BadItem(source, "it holds samples that are not finite numbers (NaN or infinity)")
    mono = waveform[:, 0] if waveform.shape[1] == 1 else waveform.mean(dim=1)
    if rate_hz != sample_rate_hz:
        mono = _resampler(rate_hz, sample_rate_hz)(mono)
    return torch.nn.functional.pad(mono, (0, num_samples - len(mono)))  # a negative padding cuts


def reason(error: Exception) -> str:
    """Return a decoder's own words for `error`, without the paths that it puts before them."""
    text = str(getattr(error, "error_string", "") or error or type(error).__name__)
    text = re.sub(r"^\w+, \S+\.cpp:\d+, ", "", text)  # torchcodec begins with the line of its own source
    if text.startswith("No audio frames were decoded"):
        return "it holds no samples"
    return f"it cannot be decoded ({text.strip().rstrip('.')})"


def _soundfile(source: Any, duration_s: float, _: int) -> tuple[Tensor, int]:
    with soundfile.SoundFile(source) as file:
        # 16-bit samples are read as they are and scaled later: libsndfile takes five times as long for WAV.
        dtype = "int16" if file.subtype == "PCM_16" else "float32"
        samples = file.read(math.ceil(duration_s * file.samplerate), dtype, always_2d=True)
        return torch.from_numpy(samples), file.samplerate


def _torchcodec(source: Any, duration_s: float, _: int) -> tuple[Tensor, int]:
    from torchcodec.decoders import AudioDecoder  # an extra; loads FFmpeg

    file = AudioDecoder(source)
    begin_s = file.metadata.begin_stream_seconds_from_header or 0.0  # of an MP3: what its encoder put before the sound
    samples = file.get_samples_played_in_range(stop_seconds=begin_s + duration_s)
    if samples.pts_seconds > begin_s:  # a short OGG begins later than its header says, and would end too early
        samples = file.get_samples_played_in_range(stop_seconds=samples.pts_seconds + duration_s)
    return samples.data.T, samples.sample_rate


def _librosa(source: Any, duration_s: float, to_hz: int) -> tuple[Tensor, int]:
    import librosa  # an extra

    try:  # mixed down and resampled as librosa does it
        samples, _ = librosa.load(soundfile.SoundFile(source), sr=to_hz, duration=duration_s)
    except librosa.ParameterError as error:  # NaN or infinity
        raise ValueError(str(error)) from error
    return torch.from_numpy(samples)[:, None], to_hz


_DECODERS = {"soundfile": _soundfile, "torchcodec": _torchcodec, "librosa": _librosa}


@functools.lru_cache(maxsize=32)
def _resampler(from_hz: int, to_hz: int) -> Callable[[Tensor], Tensor]:
    """Return torchaudio's windowed-sinc resampler; its kernel is computed once per pair of rates and process."""
    import torchaudio  # imported where it is used: most commands never resample

    return torchaudio.transforms.Resample(from_hz, to_hz)


# The functions that a cached waveform depends on.
SOURCES = (load_audio, _soundfile, _torchcodec, _librosa, _resampler)
