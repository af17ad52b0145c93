"""Generated recordings of a night outdoors, as audio files in class-named subfolders.

Made by several fresh interpreters at once, which need numpy, scipy and soundfile only.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import soundfile

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, write_json
from speedkit.workloads.synthesis import CLASSES, clip

TEST_PATTERN = r"_test\."  # every third clip of a class carries this in its file name
_VERSION = 1  # part of the folder's name: raise it when the sound of a clip changes
_FORMATS = (("wav", "PCM_16"), ("flac", "PCM_16"), ("wav", "PCM_16"), ("ogg", "VORBIS"))


def clip_path(folder: Path, index: int) -> Path:
    """Return where clip `index` lies; its format and its side of the split follow from the index, evenly."""
    take = index // len(CLASSES)
    side = "test" if take % 3 == 2 else "train"
    return folder / CLASSES[index % len(CLASSES)] / f"{take:05d}_{side}.{_FORMATS[take % len(_FORMATS)][0]}"


def _write(folder: Path, index: int, seed: int, duration_s: float, sample_rate_hz: int) -> None:
    """Write one clip, whole or not at all. (An OGG file's bytes differ between two writings: libsndfile draws
    a random stream number. Its samples do not.)"""
    path = clip_path(folder, index)
    kind, subtype = _FORMATS[index // len(CLASSES) % len(_FORMATS)]
    samples = clip(index, seed, duration_s, sample_rate_hz)
    with atomic(path) as temporary:
        soundfile.write(temporary, samples, sample_rate_hz, format=kind.upper(), subtype=subtype)


def generate(
    folder: str | Path | None = None,
    clips: int = 1000,
    duration_s: float = 4.0,
    sample_rate_hz: int = 16000,
    seed: int = 0,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return a folder of class-named subfolders with `clips` recordings (WAV, FLAC, OGG), made unless it is whole.

    It lies in `folder` (by default the cache's), under a name that carries its parameters, so that sets never mix.
    What an interrupted call left is completed. `processes` defaults to the cores this process may use;
    `progress(done, total)` is called after each clip. Raises UsageError for impossible parameters or an unwritable
    folder, SpeedkitError when a clip cannot be written.
    """
    if clips < 1 or duration_s < 0.5 or sample_rate_hz < 8000:
        raise UsageError(
            f"night sounds need at least 1 clip, 0.5 s and 8000 Hz, not {clips} clips of {duration_s} s at "
            f"{sample_rate_hz} Hz"
        )
    if folder is None:
        from speedkit.hardware import cache_root  # imported here: the generating processes do without torch

        folder = cache_root() / "night_sounds"
    parameters = {"clips": clips, "duration_s": float(duration_s), "sample_rate_hz": sample_rate_hz, "seed": seed}
    code = hashlib.sha256(json.dumps({**parameters, "version": _VERSION}, sort_keys=True).encode()).hexdigest()[:8]
    target = Path(folder) / f"{clips}_clips_{duration_s:g}s_seed{seed}_{code}"
    manifest = target / "night_sounds.json"
    try:
        for name in CLASSES:
            (target / name).mkdir(parents=True, exist_ok=True)
        missing = [index for index in range(clips) if not clip_path(target, index).exists()]
        if missing or not manifest.exists():
            _make(target, missing, (seed, float(duration_s), sample_rate_hz), processes, progress)
            write_json(manifest, {**parameters, "classes": CLASSES, "version": _VERSION})
    except OSError as error:
        raise UsageError(
            f"night sounds cannot be written to {target} ({error.strerror}): free some space, or name another folder "
            "in the environment variable SPEEDKIT_CACHE_DIR"
        ) from error
    return target


def _make(target: Path, missing: list[int], sound: tuple, processes: int | None, progress) -> None:
    """Write the missing clips, a few in this process, many in several."""
    count = processes or min(len(os.sched_getaffinity(0)), 1 + len(missing) // 100)
    done = _written(target, missing, sound) if count == 1 else _written_by_processes(target, missing, sound, count)
    for number, _ in enumerate(done, start=1):
        if progress is not None:
            progress(number, len(missing))


def _written(target: Path, indices: list[int], sound: tuple) -> Iterator[int]:
    for index in indices:
        _write(target, index, *sound)
        yield index


def _written_by_processes(target: Path, indices: list[int], sound: tuple, count: int) -> Iterator[int]:
    """Yield each index as one of `count` fresh interpreters has written it.

    Not a multiprocessing pool: that forks a process with threads, or imports the caller's main module again,
    and a notebook has none. The interpreters end by themselves, on a broken pipe, when this process is killed.
    """
    read_end, write_end = os.pipe()
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "speedkit.workloads.night_sounds"]
    workers: list[subprocess.Popen] = []
    try:
        try:
            for first in range(count):
                job = json.dumps({"folder": str(target), "indices": indices[first::count], "sound": sound})
                worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment
                )
                workers.append(worker)
                assert worker.stdin is not None
                worker.stdin.write(job)
                worker.stdin.close()
        finally:
            os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as lines:
            for line in lines:
                yield int(line)
        for worker in workers:
            assert worker.stderr is not None
            said = worker.stderr.read().strip()
            if worker.wait() != 0:
                why = said.splitlines()[-1] if said else f"exit code {worker.returncode}"
                raise SpeedkitError(f"making night sounds in {target} failed ({why}): run it again to go on")
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()


def _work() -> None:
    """Do the part of the work that the job on standard input names, one line of output for each clip written."""
    job = json.load(sys.stdin)
    for index in _written(Path(job["folder"]), job["indices"], job["sound"]):
        sys.stdout.write(f"{index}\n")  # in one piece, since several processes share the pipe
        sys.stdout.flush()


if __name__ == "__main__":
    _work()
