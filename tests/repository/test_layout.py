"""The package's shape: which file may import which, what is public, and what `import retrograde` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "retrograde"

# The rooms of the package, in layers: a room imports rooms of lower layers, and itself.
LAYERS = (
    {"couplings"},
    {"network"},
    {"engine"},
    {"compiled", "fused_optimizer", "memory", "nn"},
    {"sequence"},
    {"adapters", "measure", "models"},
    {"conversion", "diagnose", "planning", "training"},
    {"cli"},
    {"__main__"},
)
LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}

VAGUE_NAMES = {"found", "kept", "known", "again", "held"}

PUBLIC = {
    PACKAGE / "__init__.py": {
        "Block",
        "DriftError",
        "FusedOptimizer",
        "Guard",
        "MemoryMode",
        "Observer",
        "Outputs",
        "Plan",
        "ReversibleSequence",
        "Step",
        "convert",
        "couplings",
        "decide",
        "grouped",
        "is_replaying",
        "midpoint",
        "momentum",
        "multimodal",
        "nn",
        "transition",
        "two_stream",
    },
    PACKAGE / "models" / "__init__.py": {
        "AxialImageTransformer",
        "ChunkedFeedForward",
        "DeepGraphNetwork",
        "EncoderDecoder",
        "KVCache",
        "MomentumResNet",
        "PointCloudTransformer",
        "RevBiFPN",
        "RevCol",
        "RevNet",
        "RevViT",
        "ReversibleLM",
        "ReversibleODE",
        "TwoModalityTransformer",
        "chunked_cross_entropy",
    },
    PACKAGE / "couplings" / "__init__.py": {
        "Additive",
        "Affine",
        "Coupling",
        "Exact",
        "ExactCoupling",
        "ExactScaled",
        "OutOfRangeError",
        "Replace",
        "Scaled",
        "SideBitCoupling",
        "bits_for",
    },
}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    parts = ("retrograde", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, *, at_import: bool = False) -> set[str]:
    """The modules and names of the package that a file imports: anywhere in it, or only when it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("retrograde", *path.relative_to(PACKAGE).parent.parts)
    imported: set[str] = set()
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            imported |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in imported if name.startswith("retrograde.")}


def test_the_package_has_at_most_17_rooms_and_each_has_a_layer() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()}
    assert len(rooms) <= 17
    assert rooms == LAYER.keys(), "A new room needs a layer here and a line in ARCHITECTURE.md."


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_lower_layers(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in {name.split(".")[1] for name in imported_modules(path)} - {room}:
        if other in LAYER:  # otherwise it is a name of the package's surface
            assert LAYER[other] < LAYER[room], f"{room} imports {other}, which is not in a lower layer."
        else:
            assert room == "cli", f"{room} imports {other} from the package; import it from the file it lives in."


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in sources()}
    imports = {name: imported_modules(path, at_import=True) & modules.keys() for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in imports[name] - {name, name.rpartition(".")[0]}:
                visit(other, (*way, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def test_the_import_tests_see_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "couplings" / "new.py"
    path.parent.mkdir()
    path.write_text(
        "from ..engine import tape\nfrom ..memory import Plan\nfrom .base import Coupling\n"
        "def f():\n    import retrograde.cli.main\n    from retrograde import Block\n"
    )
    rooms = {name.split(".")[1] for name in imported_modules(path)}
    assert rooms == {"engine", "memory", "couplings", "cli", "Block"}
    assert {name.split(".")[1] for name in imported_modules(path, at_import=True)} == {"engine", "memory", "couplings"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        names |= {
            getattr(node, field) for field in ("id", "attr", "arg") if isinstance(getattr(node, field, None), str)
        }
    assert not names & VAGUE_NAMES, f"{names & VAGUE_NAMES}: name the thing itself."


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.parent.name)
def test_the_public_names_are_those_agreed_on(path: Path) -> None:
    """By the source and not by `dir()`, which also shows what other tests have imported."""
    bound = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
            unmarked = [alias.name for alias in node.names if alias.asname != alias.name]
            assert not unmarked, (
                f"Write `import {unmarked[0]} as {unmarked[0]}`: type checkers take others for private."
            )
    assert {name for name in bound if not name.startswith("_")} == PUBLIC[path]


def test_import_retrograde_loads_torch_and_the_standard_library_alone() -> None:
    """NumPy, where installed, is loaded by torch itself; so the comparison is with `import torch`."""
    code = (
        "import sys, torch; before = set(sys.modules); import retrograde\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split()) - {"torch", "retrograde"} - sys.stdlib_module_names
    assert not loaded, f"`import retrograde` also loads {sorted(loaded)}; import them where they are used."


def test_import_retrograde_loads_no_tool_of_its_own() -> None:
    code = "import sys, retrograde; print(*(n for n in sys.modules if n.startswith('retrograde.')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in run.stdout.split()}
    assert "sequence" in loaded
    assert not loaded & {"adapters", "cli", "diagnose", "measure", "models", "planning", "training"}


def test_no_file_is_named_after_nothing() -> None:
    unnamed = {"utils", "util", "misc", "helpers", "helper", "common"}
    found = [path for path in PACKAGE.rglob("*") if path.stem.strip("_") in unnamed]
    assert not found, f"{found}: a file that is hard to name is two files or none."


REGISTRY = r"index-url|find-links|trusted-host|https?://\S*(pypi|pythonhosted|download\.pytorch|/simple|artifactory)"
MACHINE_PATH = r"(?<![\w.$~}/-])/(home|root|opt|work|Users|mnt)/\w"
FORBIDDEN = re.compile(f"{REGISTRY}|{MACHINE_PATH}")


def test_the_search_for_addresses_finds_them() -> None:
    for line in ("--index-url x", "https://pypi.example/torch", "cd /home/me", "open('/root/x')"):
        assert FORBIDDEN.search(line), line
    for line in ("examples/work/x", "the work/home balance", "https://example.org/paper"):
        assert not FORBIDDEN.search(line), line


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so that which files belong to it is unknown")
    found = []
    for path in (ROOT / name for name in names if name):
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{path}:{i}: {line.strip()[:100]}" for i, line in enumerate(lines, 1) if FORBIDDEN.search(line)]
    assert not found, "\n".join(found)
