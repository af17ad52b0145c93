"""File -> waveform: decoded in the calling thread, mixed down to one channel, resampled, cut or padded to one length.

soundfile is the default, torchcodec (FFmpeg) knows more formats.
"""

import functools
import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedkit.errors import BadItem
from speedkit.lab.tars import TarMember

LOOK_AHEAD_S = 0.01  # read beyond what is kept, for the filter that resamples looks ahead some six samples


def load_audio(
    source: str | Path | TarMember, sample_rate_hz: int, num_samples: int, *, decoder: str = "soundfile"
) -> Tensor:
    """Return the first `num_samples` samples of a recording at `sample_rate_hz`, mono: [T] float32 in -1..1.

    A longer one is cut (its end is never decoded), a shorter one is padded with zeros at the end. Lossless files at
    their own rate give the same bits with each `decoder`: soundfile or torchcodec.
    Raises BadItem when `source` cannot be read, holds no samples, or holds NaN or infinity.
    """
    decode = {"soundfile": read_soundfile, "torchcodec": read_torchcodec}[decoder]
    try:
        os.stat(source.tar if isinstance(source, TarMember) else source)  # libsndfile's "System error" says less
        opened = io.BytesIO(source.read()) if isinstance(source, TarMember) else source
        waveform, rate_hz = decode(opened, num_samples / sample_rate_hz + LOOK_AHEAD_S)
    except Exception as error:  # of many kinds: libsndfile's are RuntimeErrors, torchcodec has some of its own
        raise BadItem(source, f"it cannot be decoded ({error})") from error
    if len(waveform) == 0 or not torch.isfinite(waveform).all():
        raise BadItem(source, "it holds no samples, or some that are not finite numbers (NaN or infinity)")
    mono = waveform[:, 0] if waveform.shape[1] == 1 else waveform.mean(dim=1)
    if rate_hz != sample_rate_hz:
        mono = resampler(rate_hz, sample_rate_hz)(mono)
    return torch.nn.functional.pad(mono, (0, num_samples - len(mono)))  # a negative padding cuts


# Each returns (samples [frames, channels], their rate in Hz).


def read_soundfile(source: Any, duration_s: float) -> tuple[Tensor, int]:
    import soundfile  # an extra

    with soundfile.SoundFile(source) as file:
        # 16-bit samples are read as they are and scaled here: libsndfile takes five times as long for WAV.
        dtype = "int16" if file.subtype == "PCM_16" else "float32"
        samples = torch.from_numpy(file.read(math.ceil(duration_s * file.samplerate), dtype, always_2d=True))
    return samples.float().mul_(1 / 32768) if dtype == "int16" else samples, file.samplerate


def read_torchcodec(source: Any, duration_s: float) -> tuple[Tensor, int]:
    from torchcodec.decoders import AudioDecoder  # an extra

    file = AudioDecoder(source)
    # An MP3 of 8 kHz begins 0.14 s after 0, and an OGG some hundredths, which its header does not say.
    begin_s = (file.metadata.begin_stream_seconds or 0) + 0.1
    samples = file.get_samples_played_in_range(stop_seconds=begin_s + duration_s)
    return samples.data.T, samples.sample_rate


@functools.lru_cache(maxsize=32)
def resampler(from_hz: int, to_hz: int) -> Callable[[Tensor], Tensor]:
    """Return torchaudio's windowed-sinc resampler; its kernel is computed once per pair of rates and process."""
    import torchaudio  # most commands never resample

    return torchaudio.transforms.Resample(from_hz, to_hz)
