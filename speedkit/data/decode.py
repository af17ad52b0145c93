"""File -> waveform: decoded in the calling thread, mixed down to one channel, resampled, cut or padded to one length.

soundfile is the default, torchcodec (FFmpeg) knows more formats.
"""

import dataclasses
import functools
import io
import math
import os
import tarfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speedkit.errors import SpeedkitError

LOOK_AHEAD_S = 0.01  # read beyond what is kept, for the filter that resamples looks ahead some six samples
BAD_SHARE = 0.05  # with more bad files than this, what is learned is no longer what was asked


@dataclasses.dataclass(frozen=True, slots=True)
class TarMember:
    """A file inside a tar, in place of a path: what takes paths alone refuses it, and does not read the tar."""

    tar: str
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"

    def read(self) -> bytes:
        """Return its bytes. Raises OSError when the tar is gone or cut short."""
        file = opened(self.tar)
        if hasattr(os, "pread"):  # by any number of threads
            data = os.pread(file.fileno(), self.size, self.offset)
        else:  # on Windows
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) != self.size:
            raise OSError(f"only {len(data)} of {self.size} bytes are there")
        return data

    def open(self) -> BinaryIO:
        """Return it as a file, for what reads some of it, such as a header: by one reader at a time."""
        info = tarfile.TarInfo(self.name)
        info.offset_data, info.size = self.offset, self.size
        return tarfile.ExFileObject(types.SimpleNamespace(fileobj=opened(self.tar)), info)  # type: ignore


@functools.lru_cache(maxsize=256)
def opened(tar: str) -> BinaryIO:
    """Return the open tar, once per process: an open may be a round trip, and `pread` leaves no position behind."""
    return open(tar, "rb", buffering=0)


class BadItem(SpeedkitError):
    """One item of the data cannot be used: `path` is its file, `why` the reason."""

    def __init__(self, path: str | Path | TarMember, why: str):
        super().__init__(str(path), why)  # the arguments, with which it comes out of a loader's process too
        self.path = str(path)
        self.why = " ".join(why.split())

    def __str__(self) -> str:
        return f"{self.path} cannot be used: {self.why}"


class TooManyBad(SpeedkitError):
    """Over 5 % of `count` files are bad: `bad` is path -> why. Names their folder, and the first five in it."""

    def __init__(self, bad: Mapping[str, str], count: int):
        self.bad = dict(bad)
        paths = sorted(bad)
        folder = os.path.dirname(os.path.commonprefix(paths))  # noqa: RUF071 (a path may be any text)
        names = [path.removeprefix(folder).lstrip("/") for path in paths[:5]]
        share = f"{len(bad)} of {count} files cannot be used, over {BAD_SHARE:.0%}"
        first = f"{', '.join(names)} (the first one: {bad[paths[0]]})"
        super().__init__(f"{share}, in {folder or os.curdir}: {first}: repair or remove them")


def check_bad_share(bad: Mapping[str, str], count: int) -> None:
    """Raise TooManyBad when over 5 % of `count` files are bad; `bad` is path -> why."""
    if len(bad) > BAD_SHARE * count:
        raise TooManyBad(bad, count)


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
