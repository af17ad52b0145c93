"""An install that is no checkout: the light core, what the wheel brings along, and a climb from anybody's folder."""

import json
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_repository import PROJECT, ROOT
from test_your_workload import EXISTING

from speedkit.errors import EXTRAS

MAIN = "from speedkit import cli; cli.main()"
DOCTOR = pytest.param("doctor text", marks=pytest.mark.slow)


def python(program, *words, **options):
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The command line where only what the core depends on can be imported, in a folder with a workload."""
    folder, needed = tmp_path_factory.mktemp("light"), [*PROJECT["dependencies"]]
    core = {"torch-speedkit", "packaging"}  # setuptools, which torch needs, has its own
    (folder / "mine.py").write_text(EXISTING)
    while needed:
        requirement = Requirement(needed.pop())
        name = canonicalize_name(requirement.name)
        if name not in core and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            core.add(name)
            needed += requires(name) or []
    packages = {package: {*map(canonicalize_name, names)} for package, names in packages_distributions().items()}
    absent = [package for package, names in packages.items() if not names & core]
    assert {*EXTRAS} <= {*absent} and "pandas" not in absent
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); {MAIN}"
    return lambda *words: python(program, *words, cwd=folder)


@pytest.mark.parametrize("words", ["train text --steps 3", "train mine:mine --steps 3", DOCTOR])
def test_the_light_core_trains_and_diagnoses(light, words, tmp_path):
    done = light(*words.split(), "--size", "tiny", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("train audio", "torchaudio", "audio"),
        ("train image", "torchvision", "image"),
        ("train text --size tiny --steps 2 --precision fp8-emulated --out fp8", "torchao", "deploy"),
        ("climb text", "papermill", "notebooks"),  # before the budget is spent
    ],
)
def test_what_needs_an_extra_says_which(light, words, package, extra):
    done = light(*words.split())
    sentence = f"the package {package} is not installed: install speedkit with its extra [{extra}]\n"
    assert done.returncode == 2 and done.stderr.endswith(sentence), done.stderr


def test_each_package_that_may_be_missing_is_in_its_extra():
    distributions = packages_distributions()
    for package, extra in EXTRAS.items():
        names = {canonicalize_name(Requirement(text).name) for text in PROJECT["optional-dependencies"][extra]}
        assert names & {*map(canonicalize_name, distributions[package])}, (package, extra)


def test_a_torchaudio_for_another_torch_is_one_sentence(tmp_path):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text(
        "raise OSError('Could not load this library:\\n_torchaudio.so')"
    )
    done = python(MAIN, "train", "speech", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "does not fit torch" in done.stderr and "torch 2.11 to 2.14" in done.stderr


def test_a_wheel_brings_along_what_a_climb_and_a_run_need(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel], site = tmp_path.glob("torch_speedkit-*.whl"), tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = """
import json, sys
sys.path.insert(0, "site")
from speedkit.measure.provenance import code_sha256
from speedkit.notebooks import find_notebooks
from speedkit.show.frameworks import read_table
modules = ["notebooks.claims", "speedkit.climb"]
print(json.dumps({str(path): code_sha256(path, modules) for path in find_notebooks()} | {"words": len(read_table())}))
"""
    shipped = json.loads(python(program, cwd=tmp_path).stdout)
    assert shipped.pop("words") > 20
    assert [Path(path).name for path in shipped] == sorted(path.name for path in ROOT.glob("notebooks/*.ipynb"))
    assert all(Path(path).is_relative_to(site / "speedkit") for path in shipped)
    done = python(f"import sys; sys.path.insert(0, 'site'); {MAIN}", "publish", "21", cwd=tmp_path)
    assert done.returncode == 2 and "a checkout" in done.stderr


@pytest.mark.slow
def test_a_climb_of_ones_own_workload_ends_with_its_notebook(tmp_path):
    (tmp_path / "data.txt").write_text("200")
    own = EXISTING.replace("def mine(size):", "def mine():\n    size = open('data.txt').read()")
    (tmp_path / "mine.py").write_text(own)
    words = "climb mine:mine --rungs host_syncs --seeds 2 --budget 60 --out run"
    done = python(MAIN, *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"climb.ipynb", "report.html", "plan.yaml", "record.json"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_compiled_code_is_kept_by_the_command_and_cold_where_that_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "speedkit"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = """
import sys
from speedkit import cli
cli.distributed.leave = print  # the code: this process goes on
cli.main()
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
print(cache_dir())
with fresh_cache():
    print(cache_dir())
"""
    kept, cold = python(program, "--version", cwd=tmp_path).stdout.splitlines()[-2:]
    assert kept == str(tmp_path / "speedkit" / "inductor") and not cold.startswith(kept)
