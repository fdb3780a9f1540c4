"""The package's shape: which file may import which, what is public, and what `import retrograde` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "retrograde"

# design.md: "Imports point up this list, never down." A part imports parts of a lower rank, and itself.
RANKS = {
    "couplings": 0,
    "_streams": 0,
    "_branch": 0,
    "_torch_private": -1,
    "_randomness": 0,
    "_step": 1,
    "_block": 2,
    "_modalities": 3,
    "_context": 3,
    "_structure": 3,
    "_outputs": 3,
    "_exactness": 3,
    "_guard": 3,
    "_decide": 3,
    "_replay": 3,
    "_fused": 3,
    "_spent": 0,
    "_single_graph": 3,
    "_record": 4,
    "_tape": 5,
    "_habits": 1,
    "_before": 1,
    "_reverse": 6,
    "_offload": 5,
    "_partial": 0,
    "_packing": 0,
    "_plan": 6,
    "_drive": 7,
    "_drift": 8,
    "_sequence": 9,
    "models": 10,
    "diagnose": 10,
    "training": 11,
    "planning": 11,
    "adapters": 11,
    "conversion": 12,
    "cli": 13,
}
# Tools that look at a run from outside: the code they look at does not know of them.
SEEN_ONLY_BY = {"diagnose": {"diagnose", "planning", "training", "conversion", "cli"}}

PUBLIC = {
    PACKAGE / "__init__.py": {
        "Block",
        "DriftError",
        "FusedOptimizer",
        "Guard",
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
        "RevNet",
        "RevViT",
        "ReversibleLM",
        "TwoModalityTransformer",
        "chunked_cross_entropy",
    },
    PACKAGE / "couplings" / "__init__.py": {
        "Additive",
        "Affine",
        "Coupling",
        "Exact",
        "ExactScaled",
        "OutOfRangeError",
        "Replace",
        "Scaled",
        "SupportsCoupling",
        "bits_for",
    },
}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The top-level file or folder of the package that a path belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports, anywhere in it: inside functions too."""
    found = set()
    package = ("retrograde", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "retrograde":
                found.add(rest.partition(".")[0] or "__init__")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up_the_list(path: Path) -> None:
    part = part_of(path)
    assert part in RANKS, f"{part} has no rank. Find its place in the order of design.md and give it one in RANKS."
    for seen in imported_parts(path) - {part}:
        if seen not in RANKS:
            assert part == "cli", (
                f"{part} imports {seen!r} of the package's surface; import it from the file it lives in."
            )
            continue
        assert RANKS[seen] < RANKS[part], (
            f"{part} (rank {RANKS[part]}) imports {seen} (rank {RANKS[seen]}), which is down."
        )
        assert part in SEEN_ONLY_BY.get(seen, {part}), (
            f"{part} imports {seen}, which is for {SEEN_ONLY_BY[seen]} alone."
        )


def test_the_import_test_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "couplings" / "new.py"
    path.parent.mkdir()
    path.write_text(
        "from .. import _tape\nfrom .._plan import Plan\nfrom ._base import Coupling\n"
        "def f():\n    import retrograde.cli.main\n    from retrograde import _block, _step\n"
    )
    assert imported_parts(path) == {"_tape", "_plan", "couplings", "cli", "_block", "_step"}


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
    assert "_sequence" in loaded
    assert not loaded & {"cli", "diagnose", "adapters", "models"}


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
