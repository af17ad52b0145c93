"""What holds the repository together: versions, words that must not appear, layers and sizes."""

import ast
import contextlib
import re
import subprocess
import sys
import tokenize
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pandas
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import speedkit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "speedkit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# From the ground up. A module imports from its own layer and from those above it in this list, never from one below.
LAYERS = (
    {"errors", "files", "config", "clock", "hardware", "peaks"},
    {"recipe", "plan"},
    {"data"},
    {"workloads"},
    {"train"},
    {"measure"},
    {"deploy"},
    {"table of optimizations", "trials", "tune"},
    {"show"},
    {"notebooks", "script", "options", "cli", "__main__"},
)
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}  # tokens that say nothing
PAGES = {"speedkit.train.loop.train", "speedkit.train.setup.__init__"}  # read from top to bottom, stage by stage


# ---- versions ----


@pytest.fixture(scope="module")
def pins() -> dict[str, Requirement]:
    """Each pin of requirements.lock by its canonical name."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    pins = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(pins) == len(lines), "requirements.lock pins a package twice"
    return pins


def version(pin: Requirement) -> Version:
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


def test_torch_family_belongs_together(pins):
    torch, *others = (version(pins[name]) for name in ("torch", "torchaudio", "torchvision", "torchcodec"))
    minors = [(other.major, other.minor) for other in others]
    # One release number in four counts: torchvision began 15 behind, torchcodec counts from torch 2.0.
    assert minors == [(torch.major, torch.minor), (0, torch.minor + 15), (0, torch.minor)]
    assert f"torch=={torch}" in str([Requirement(text) for text in requires("torchvision") or []])


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
PATTERNS = {
    "package index": f"(?i)({HOSTS}|{INDEX_OPTIONS})",
    "own path": r"(?<![\w.~\-/])/(home|root|work|Users)/\w[\w./-]*",
}


@pytest.mark.parametrize("words", PATTERNS)
def test_no_file_names(words):
    command = ["git", "grep", "--untracked", "-IPe", PATTERNS[words]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1, found.stdout + found.stderr  # 0 where there are any, more where git cannot look


def test_claims_are_figures_or_rules_with_distinct_ids():
    claims = pandas.read_csv(PACKAGE / "lessons" / "claims.csv", keep_default_na=False)
    assert list(claims) == ["id", "technique", "plan_field", "metric", "low", "high", "unit", "context", "guide"]
    assert claims["id"].is_unique
    for low, high, unit in zip(claims["low"], claims["high"], claims["unit"], strict=True):
        # Both are empty or "linear" where no figure is promised.
        assert low == high if low in ("", "linear") else unit and float(low) <= float(high)


# ---- code ----


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name; the package's own lazy __init__ is left out."""
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items() if name != "speedkit.__init__"}


def imports(path: Path) -> set[str]:
    """Return what `path` may import, anywhere in it: not what only names its types."""
    tree = ast.parse(path.read_text())
    tree.body = [block for block in tree.body if not ast.unparse(block).startswith("if TYPE_CHECKING")]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    homes = [(getattr(node, "module", ""), alias.name) for node in nodes for alias in node.names]
    return {name for home, imported in homes for name in (home, imported, f"{home}.{imported}")}


def layer(module: str) -> int:
    """Return the number of the layer that `module` belongs to."""
    [number] = [number for number, parts in enumerate(LAYERS) if module.split(".")[1] in parts]
    return number


def test_imports_run_one_way_and_in_no_circle():
    known = modules()
    graph = {name: imports(path) & set(known) - {name} for name, path in known.items()}
    assert not [f"{name} imports {other}" for name in graph for other in graph[name] if layer(other) > layer(name)]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_package_stays_small():
    """In lines, as they are formatted, and in tokens, which width does not hide. The aim is 7 500 and 70 000."""
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > 360} == {}
    assert sum(lines.values()) <= 10_805
    assert sum(tokens_in(path) for path in modules().values()) <= 86_100
    assert not [name for name, path in modules().items() if "# fmt:" in path.read_text()], "kept from the formatter"


def tokens_in(path):
    with path.open("rb") as stream:
        names = [tokenize.tok_name[token.type] for token in tokenize.tokenize(stream.readline)]
    depth = count = 0
    for name in names:  # an f-string is one token, as before Python 3.12
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
        count += depth == 0 and name not in LAYOUT
    return count


def test_functions_stay_short():
    trees = {name: ast.walk(ast.parse(path.read_text())) for name, path in modules().items()}
    functions = [(name, node) for name in trees for node in trees[name] if isinstance(node, ast.FunctionDef)]
    assert {f"{name}.{node.name}" for name, node in functions if node.end_lineno - node.lineno >= 75} <= PAGES


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
    code = f"import sys, speedkit; print(*set({heavy.split()}) & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split() == []
