"""What holds the repository together: versions, words that must not appear, layers and sizes."""

import ast
import csv
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "speedkit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# From the ground up. A module imports from its own layer and from those above it in this list, never from one below.
LAYERS = (
    {"errors", "files", "config", "clock", "hardware", "ceilings"},
    {"recipe", "plan"},
    {"data"},
    {"workloads"},
    {"train"},
    {"measure"},
    {"deploy"},
    {"ladder", "climb_state", "trials", "proof", "climb"},
    {"show"},
    {"notebooks", "publishing", "commands", "cli", "__main__"},
)
PAGES = {"speedkit.train.loop.train", "speedkit.train.setup.setup_run"}  # read from top to bottom, stage by stage


# ---- versions ----


def locked() -> dict[str, Requirement]:
    """Return each pin of requirements.lock by its canonical name."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    pins = [Requirement(line) for line in lines]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert len(names) == len(set(names)), "requirements.lock pins a package twice"
    return dict(zip(names, pins, strict=True))


def version(pin: Requirement) -> Version:
    """Return the one version that `pin` allows."""
    (specifier,) = pin.specifier
    assert specifier.operator == "==" and pin.url is None, f"requirements.lock: {pin} is not an exact version"
    return Version(specifier.version)


def asked() -> list[Requirement]:
    """Return every requirement of pyproject.toml, those of all extras included."""
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def test_lock_pins_every_package_to_one_plain_version():
    for pin in locked().values():
        assert version(pin).local is None, f"requirements.lock: {pin} is a special build"


@pytest.mark.parametrize("requirement", asked(), ids=lambda requirement: requirement.name)
def test_lock_satisfies_pyproject(requirement):
    pin = locked().get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} is not in requirements.lock: run make lock"
    assert version(pin) in requirement.specifier
    assert pin.marker is None, f"{requirement.name} is pinned for some machines only"


def test_lock_leaves_nothing_to_resolve():
    pins, missing = locked(), []
    for name in pins:
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # pinned for another system or Python
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pin = pins.get(canonicalize_name(requirement.name))
                if pin is None or not requirement.specifier.contains(version(pin), prereleases=True):
                    missing.append(f"{name} needs {requirement}, locked: {pin}")
    assert not missing


def test_torch_family_belongs_together():
    pins = locked()
    torch, *others = (version(pins[name]) for name in ("torch", "torchaudio", "torchvision", "torchcodec"))
    minors = [(other.major, other.minor) for other in others]
    # One release number in four counts: torchvision began 15 behind, torchcodec counts from torch 2.0.
    assert minors == [(torch.major, torch.minor), (0, torch.minor + 15), (0, torch.minor)]
    assert f"torch=={torch}" in str([Requirement(text) for text in requires("torchvision") or []])


def test_conda_environment_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    conda = {entry.name: entry.specifier for entry in map(Requirement, environment["dependencies"][:-1])}
    assert environment["name"] == PROJECT["name"]
    assert pip == ["-r requirements.lock", "-e ."], "all versions come from the lock"
    assert conda["python"] == SpecifierSet(PROJECT["requires-python"])
    assert not set(conda) & set(locked()), "a package comes from conda or from the lock, never from both"


def test_makefile_takes_the_pythons_of_pyproject():
    makefile = (ROOT / "Makefile").read_text()
    lowest, highest = re.findall(r"\((3), (\d+)\)", makefile[makefile.index("fits = ") :].splitlines()[0])
    allowed = SpecifierSet(PROJECT["requires-python"])
    accepted = {minor for minor in range(30) if f"3.{minor}" in allowed}
    assert accepted == set(range(int(lowest[1]), int(highest[1]) + 1))


# ---- words ----


def tracked_texts() -> dict[str, str]:
    """Return the text of every file that git tracks or would track, by its path in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return texts


def found(pattern: str) -> list[str]:
    """Return the places in the repository where `pattern` occurs."""
    return [
        f"{name}: {match.group()}" for name, text in tracked_texts().items() for match in re.finditer(pattern, text)
    ]


def test_no_file_names_a_package_index():
    hosts = ("py" + "pi.org", "python" + "hosted", "anaconda" + ".org", "download." + "pytorch", "npm" + "js")
    options = (r"--(?:extra-)?" + r"index-url", r"--trusted" + r"-host", r"https?://[^\s\"']+/" + r"simple\b")
    assert not found("(?i)" + "|".join((*map(re.escape, hosts), *options)))


def test_no_file_holds_a_path_of_somebody_s_machine():
    assert not found(r"(?<![\w.~\-/])/(?:home|root|work|Users)/\w[\w./-]*")


def test_claims_have_their_columns_and_distinct_ids():
    with (ROOT / "notebooks" / "claims.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["id", "technique", "plan_field", "metric", "low", "high", "unit", "context", "guide"]
    assert all(None not in row and None not in row.values() for row in rows), "a row with too many or too few values"
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert re.fullmatch(r"C\d\d", row["id"]) and row["technique"] and row["metric"]
        low, high = row["low"], row["high"]
        if low in ("", "linear"):  # offered with no figure, or in proportion to the number of GPUs
            assert high == low, row
        else:
            assert row["metric"] != "rule" and row["unit"] and float(low) <= float(high), row


# ---- code ----


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name; the package's own lazy __init__ is left out."""
    paths = sorted(PACKAGE.rglob("*.py"))
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items() if name != "speedkit.__init__"}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that `path` loads, anywhere in it: not those that only name its types."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for block in list(tree.body):
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            tree.body.remove(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & set(known)


def layer(module: str) -> int:
    """Return the number of the layer that `module` belongs to."""
    numbers = [number for number, parts in enumerate(LAYERS) if module.split(".")[1] in parts]
    assert len(numbers) == 1, f"{module} belongs to no layer: put it in LAYERS of this test"
    return numbers[0]


def test_imports_run_one_way():
    known = modules()
    upward = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in sorted(imports(path, known))
        if layer(other) > layer(name)
    ]
    assert not upward


def test_modules_do_not_import_each_other_in_a_circle():
    known = modules()
    # Raises CycleError, which names the circle.
    TopologicalSorter({name: imports(path, known) - {name} for name, path in known.items()}).prepare()


def test_package_stays_small():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > 360} == {}
    assert sum(lines.values()) <= 13_100  # as formatted; the aim is 7 500 lines and 70 000 tokens


def test_functions_stay_short():
    long = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > 75 and f"{name}.{node.name}" not in PAGES:
                    long.append(f"{name}.{node.name}: {lines} lines")
    assert not long


def test_import_speedkit_loads_no_heavy_library():
    heavy = {
        "pydantic",
        "matplotlib",
        "pandas",
        "papermill",
        "torchaudio",
        "torchvision",
        "scipy",
        "IPython",
        "nbformat",
    }
    code = f"import sys, speedkit; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
