"""Public training scripts run as they are and under `speedkit profile`: same exit code, same lines, and what is found.

With --tune they are tuned, and the patched script takes turns with the plain one.

`python benchmarks/scripts.py CHECKOUTS` takes a folder that holds the checkouts of scripts.csv, each in a folder of its
repository's name. What the scripts import must be installed or on PYTHONPATH. All data is generated.
"""

import argparse
import copy
import csv
import functools
import json
import os
import random
import shlex
import shutil
import string
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

LIST = Path(__file__).with_suffix(".csv")
MOST_S = 600.0  # that a run may take: what takes longer is hung
BUDGET = "120s"  # of a tuning
TURNS = 3
WORDS = ["the", "sea", "a", "ship", "of", "light", "and", "wind", "on", "grey", "stone", "under", "rain"]


# ---- generated data, in the formats that the scripts read ----


def mnist(folder: Path, counts: tuple[int, int] = (6000, 1000)) -> None:
    """Write digits as the four files of MNIST, so many to train and to test with."""
    rng = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in zip(("train", "t10k"), counts, strict=True):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 64, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 8, 4:24] += 150
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def images(folder: Path) -> None:
    """Write JPEG files of four classes in train, val and test, and some without a class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 48), ("val", 8), ("test", 8)):
        for number in range(4 * count):
            place = folder / part / f"class{number % 4}"
            if "BSDS300" in folder.parts:  # a flat folder of larger ones
                place = folder / part
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((320, 320)).save(place / f"{number}.jpg")


def masks(folder: Path) -> None:
    """Write images and a mask for each."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("imgs", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(60):
        pixels = rng.integers(0, 255, (96, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "imgs" / f"{number}.jpg")
        Image.fromarray((pixels[:, :, 0] > 128).astype(np.uint8)).save(folder / "masks" / f"{number}.png")


def sentences(count: int) -> list[str]:
    """Return so many sentences, the same each time."""
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(count)]


def words(folder: Path) -> None:
    """Write text for training, validation and test."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 3000), ("valid", 300), ("test", 300)):
        (folder / f"{part}.txt").write_text("\n".join(sentences(count)))


def chars(path: Path) -> None:
    """Write one text that has all letters."""
    path.write_text("\n".join([string.printable, *sentences(3000)]))


def texts(folder: Path) -> None:
    """Write a data set of texts in JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": text}) for text in sentences(240)]
    (folder / "train.jsonl").write_text("\n".join(rows))


def gpt(folder: Path) -> None:
    """Write a small language model with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    fast.save_pretrained(folder)
    config = GPT2Config(vocab_size=len(vocabulary), n_positions=64, n_embd=128, n_layer=2, n_head=4, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)


def unet(folder: Path) -> None:
    """Write the configuration of a small diffusion model."""
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    UNet2DModel(sample_size=32, block_out_channels=(32, 64), layers_per_block=1, **blocks).save_config(folder)


def run_first(path: Path) -> None:
    """Run a script that prepares data."""
    subprocess.run([sys.executable, path.name], cwd=path.parent, check=True, capture_output=True)


MAKERS: dict[str, Callable[[Path], None]] = {
    "mnist": mnist,
    "whole-mnist": functools.partial(mnist, counts=(60_000, 10_000)),
    "images": images,
    "masks": masks,
    "words": words,
    "chars": chars,
    "texts": texts,
    "gpt": gpt,
    "unet": unet,
    "run": run_first,
    "folder": functools.partial(Path.mkdir, exist_ok=True),
}


# ---- runs ----


class Script:
    """A row of the list, in a copy of its checkout with its data."""

    def __init__(self, row: dict[str, str], checkouts: Path, scratch: Path) -> None:
        self.row = row
        source = checkouts / row["repository"].split("/")[1]
        self.root = scratch / row["name"]
        shutil.copytree(source, self.root, ignore=shutil.ignore_patterns(".git"))
        subprocess.run(["git", "init", "--quiet", self.root], check=True)  # all its files are the author's own
        self.folder = self.root / row["folder"]
        for part in row["data"].split():
            kind, place = part.split(":")
            MAKERS[kind](self.folder / place)

    def patched(self, diff: Path) -> "Script":
        """Return the script in a copy of its checkout to which `diff` was applied. Raises where it does not apply."""
        patched = copy.copy(self)
        patched.root = self.root.with_name(f"{self.root.name}-patched")
        patched.folder = patched.root / self.row["folder"]
        shutil.copytree(self.root, patched.root)
        subprocess.run(["git", "apply", diff], cwd=patched.root, check=True)
        return patched

    def run(self, *before: str) -> tuple[int, list[str], float]:
        """Run it behind the words `before`; return exit code, printed lines and seconds."""
        paths = [self.root, self.root / "src", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "WANDB_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, *before, self.row["script"], *shlex.split(self.row["arguments"])]
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:  # of the script's children, too
            ended = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=MOST_S,
                check=False,
            )
            output.seek(0)
            lines = output.read().splitlines()
        return ended.returncode, lines, time.monotonic() - began_s


def profiled(script: Script) -> dict[str, object]:
    """Run a script twice as it is and once profiled; return what is the same and what was found."""
    code, first, plain_s = script.run()
    _, second, _ = script.run()
    steady = set(first) & set(second)  # no seconds, no dates
    expected = [line for line in first if line in steady]
    out = script.root / "speedkit-out"
    with_profile, lines, profiled_s = script.run("-m", "speedkit", "profile", "--out", str(out))
    missing = set(expected) - set(lines)
    found: list[str] = []
    if (path := out / "breakdown.json").exists():
        found = [row["cause"] for row in json.loads(path.read_text())["bottlenecks"]]
    return {
        "name": script.row["name"],
        "code": code,
        "code_profiled": with_profile,
        "same_lines": len(expected) - len(missing),
        "missing_lines": sorted(missing)[:3],
        "seconds": round(plain_s, 1),
        "seconds_profiled": round(profiled_s, 1),
        "found": found,
        "told": [line for line in lines if line.startswith("speedkit:")],
        "end": lines[-3:],
    }


def tuned(script: Script) -> dict[str, object]:
    """Tune a script; where that leaves a patch, return the seconds of the plain and the patched script, in turns."""
    out = script.root.with_name(f"{script.root.name}-out")
    code, lines, tuning_s = script.run("-m", "speedkit", "tune", "--keep", "--budget", BUDGET, "--out", str(out))
    result: dict[str, object] = {"name": script.row["name"], "code_tuned": code, "seconds_tuned": round(tuning_s, 1)}
    if not (out / "tune.json").exists():
        return result | {"end": lines[-3:]}
    record = json.loads((out / "tune.json").read_text())
    rows = [row for row in record["optimizations"] if row["ratio"]]
    result["tried"] = {row["change"]: [row["ratio"], row["low"], row["high"], row["why"]] for row in rows}
    result |= {"kept": record["plan"], "speedup": record["speedup"], "notes": record["notes"]}
    if not (out / "tune.diff").exists():
        return result
    turns = {"plain": script, "patched": script.patched(out / "tune.diff")}
    runs: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(TURNS):
        for name in random.sample(list(turns), len(turns)):
            code, _, seconds = turns[name].run()
            runs[name].append(round(seconds, 1))
            result[f"code_{name}"] = code
    return result | {"seconds": runs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all scripts, or those that are named, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, help="folder of checkouts")
    parser.add_argument("--tune", action="store_true", help="tune them instead of profiling them")
    parser.add_argument("names", nargs="*", help="of scripts.csv, by default all")
    asked = parser.parse_args(arguments)
    with LIST.open() as lines:
        rows = [row for row in csv.DictReader(lines) if not asked.names or row["name"] in asked.names]
    for row in rows:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                work = tuned if asked.tune else profiled
                result = work(Script(row, asked.checkouts.resolve(), Path(scratch)))
            except subprocess.TimeoutExpired as error:
                result = {"name": row["name"], "hung": str(error)}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
