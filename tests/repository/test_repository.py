"""What holds the repository together: versions, words that must not appear, and imports that run one way."""

import ast
import contextlib
import json
import re
import subprocess
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, requires

import pandas
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from processes import ROOT, python

import speedkit

PACKAGE = ROOT / "speedkit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# From the ground up: a module imports from its own folder and from those before it, never from one behind.
LAYERS = ("core", "measure", "dry", "lab", "lessons", "cli")
# Types of what is built in one piece still run in circles here.
CIRCLES = {"speedkit.data", "speedkit.train"}


# ---- versions ----


@pytest.fixture(scope="module")
def pins():
    """Each pin of requirements.lock by its canonical name."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    pins = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(pins) == len(lines), "requirements.lock pins a package twice"
    return pins


def version(pin):
    """Return the one version that `pin` allows."""
    [specifier] = pin.specifier
    assert specifier.operator == "==" and pin.url is None, f"requirements.lock: {pin} is not an exact version"
    return Version(specifier.version)


def test_lock_pins_what_pyproject_asks_for_and_leaves_nothing_to_resolve(pins):
    assert not [pin for pin in pins.values() if version(pin).local], "a special build is pinned"
    groups = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    needed = [("pyproject.toml", Requirement(text)) for group in groups for text in group]
    for name in pins:
        with contextlib.suppress(PackageNotFoundError):  # pinned for another system or Python
            needed += [(name, requirement) for requirement in map(Requirement, requires(name) or [])]
    for name, requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            pin = pins.get(canonicalize_name(requirement.name))
            fits = pin and requirement.specifier.contains(version(pin), prereleases=True)
            assert fits, f"{name} needs {requirement}, locked: {pin}; run make lock"


def test_each_place_names_the_same_pythons():
    asked, language = SpecifierSet(PROJECT["requires-python"]), "Programming Language :: Python :: "
    pythons = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in asked]
    assert [f"{language}{name}" for name in pythons] == [name for name in PROJECT["classifiers"] if language in name]
    for page in ("Makefile", "README.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / page).read_text()
    first, last = (name.replace(".", ", ") for name in (pythons[0], pythons[-1]))
    assert f"({first}) <= sys.version_info[:2] <= ({last})" in (ROOT / "Makefile").read_text()


def test_torchcodec_which_names_no_torch_fits_the_one_that_is_pinned(pins):
    assert version(pins["torchcodec"]).minor == version(pins["torch"]).minor, "it counts from torch 2.0"


def test_conda_environment_installs_the_same(pins):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *packages, pip = environment["dependencies"]
    conda = {entry.name: entry.specifier for entry in map(Requirement, packages)}
    [extras] = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pip == {"pip": ["-c requirements.lock", f"-e .[{extras}]"]}, "all versions come from the lock"
    assert conda["python"] == SpecifierSet(PROJECT["requires-python"])
    assert not set(conda) & set(pins), "a package comes from conda or from the lock, never from both"


# ---- words ----

HOSTS = r"py[p]i\.org|python[h]osted|anaconda[.]org|download[.]pytorch|npm[j]s"
INDEX_OPTIONS = r"--(extra-)?index[-]url|--trusted[-]host|https?://[^\s\"']+/simpl[e]\b"
# Whole words of before, in sentences and in names.
FORBIDDEN = "(?<![a-z])(clim[b]|run[g]|ladde[r]|ledge[r]|ceilin[g]|naiv[e]|docto[r]|watc[h])s?(?![a-z])"
EXEMPT = [":!CHANGELOG.md", ":!speedkit/renamed.csv", ":!notebooks/records", ":!*.ipynb"]  # with their outputs
PATTERNS = {
    "package index": [f"(?i)({HOSTS}|{INDEX_OPTIONS})"],
    "own path": [r"(?<![\w.~\-/])/(home|root|work|Users)/\w[\w./-]*"],
    "words of before": [f"(?i){FORBIDDEN}", "--", *EXEMPT],
}


@pytest.mark.parametrize("words", PATTERNS)
def test_no_file_names(words):
    command = ["git", "grep", "--untracked", "-IPe", *PATTERNS[words]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1, found.stdout + found.stderr  # 0 where there are any, more where git cannot look


def test_no_notebook_says_what_was_said_before():
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
        assert not re.findall(rf".*{FORBIDDEN}.*", cells, re.IGNORECASE), path.name


def test_claims_are_figures_or_rules_with_distinct_ids():
    claims = pandas.read_csv(PACKAGE / "lessons" / "claims.csv", keep_default_na=False)
    assert claims["id"].is_unique
    for low, high in zip(claims["low"], claims["high"], strict=True):
        assert low == high == "" or float(low) <= float(high)  # empty where no figure is promised


# ---- code ----


def modules():
    """Return every module of the package by its dotted name; the package's own lazy __init__ is left out."""
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items() if name != "speedkit.__init__"}


def imports(path, known):
    """Return which of the `known` modules `path` imports, anywhere in it, for its types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                home = speedkit._HOMES.get(alias.name, "") if node.module == "speedkit" else node.module
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else home)
    return found & {*known}


def layer(module):
    """Return the folder that `module` belongs to."""
    folder = module.split(".")[1].replace("__main__", "cli")
    return folder if folder in LAYERS else "core"


def test_imports_run_down_only_and_in_no_circle():
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    height = {name: LAYERS.index(layer(name)) for name in known}
    assert not [f"{name} imports {other}" for name in graph for other in graph[name] if height[other] > height[name]]
    for name in graph:
        if name.rpartition(".")[0] in CIRCLES or name == "speedkit.workload":
            graph[name] = {other for other in graph[name] if other.rpartition(".")[0] not in CIRCLES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_editors_are_shown_the_public_names_that_there_are():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        alias.asname: f"{line.module}:{alias.name}"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    loaded = {name: home if ":" in home else f"{home}:{name}" for name, home in speedkit._HOMES.items()}
    assert shown == loaded and (PACKAGE / "py.typed").exists()


def test_import_speedkit_loads_no_heavy_library():
    heavy = "pydantic matplotlib pandas papermill torchaudio torchvision scipy IPython nbformat"
    done = python("-c", f"import sys, speedkit; print(*set({heavy.split()}) & set(sys.modules))")
    assert (done.returncode, done.stdout) == (0, "\n")
