"""Replacing published modules by drop-ins, shown on packages that the test writes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import retrograde.adapters
from retrograde.adapters import axial_attention, nuwa_pytorch, nuwa_pytorch_video_audio

SYSTEMS = ("routing_transformer", "lie_transformer_pytorch", "nuwa_pytorch", "axial_attention", "reformer_pytorch")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with the published names, which import from their reversible modules."""
    for name in ("axial_attention", "nuwa_pytorch"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("from .model import ReversibleSequence\n")
        (folder / "model.py").write_text(f"from {name}.reversible import ReversibleSequence\n")
        (folder / "reversible.py").write_text("class ReversibleSequence: published = True\n")
    (tmp_path / "nuwa_pytorch" / "reversible_video_audio.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = [m for m in sys.modules if m.partition(".")[0] in SYSTEMS]
    assert not imported, "a test before this one left a published package imported"
    return tmp_path


def test_install_makes_the_package_run_on_retrograde_until_it_is_undone(packages: Path) -> None:
    handle = retrograde.adapters.install("axial_attention")
    module = importlib.import_module("axial_attention")
    assert module.ReversibleSequence is axial_attention.ReversibleSequence
    retrograde.adapters.install("axial_attention")  # a second call does nothing
    handle.undo()
    assert importlib.import_module("axial_attention").ReversibleSequence.published
    assert module.ReversibleSequence is axial_attention.ReversibleSequence
    for name in [m for m in sys.modules if m.startswith("axial_attention")]:
        del sys.modules[name]


def test_install_as_a_context_replaces_both_modules_of_nuwa(packages: Path) -> None:
    with retrograde.adapters.install("nuwa_pytorch"):
        assert sys.modules["nuwa_pytorch.reversible"] is nuwa_pytorch
        assert sys.modules["nuwa_pytorch.reversible_video_audio"] is nuwa_pytorch_video_audio
        importlib.import_module("nuwa_pytorch")
    assert not [m for m in sys.modules if m.startswith("nuwa_pytorch")]


def test_install_after_the_import_is_an_error_that_says_what_to_do(packages: Path) -> None:
    importlib.import_module("axial_attention")
    with pytest.raises(RuntimeError, match=r"already imported.*before the first import of axial_attention"):
        retrograde.adapters.install("axial_attention")
    for name in [m for m in sys.modules if m.startswith("axial_attention")]:
        del sys.modules[name]


def test_unknown_names_and_a_second_undo_are_errors() -> None:
    with pytest.raises(ValueError, match="no drop-in for 'x_transformers'; there is one for each of routing"):
        retrograde.adapters.install("x_transformers")
    handle = retrograde.adapters.install("reformer_pytorch")
    handle.undo()
    with pytest.raises(RuntimeError, match="was not called, or was undone already"):
        retrograde.adapters.uninstall("reformer_pytorch")


def test_the_adapters_import_no_third_party_package() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import retrograde.adapters as a\n"
        f"for name in {SYSTEMS}: a.install(name).undo()\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split()) - {"torch", "retrograde"} - sys.stdlib_module_names
    assert not loaded


@pytest.mark.interop
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_name_that_published_files_import_from_the_replaced_modules_exists(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {name}: install the extra 'interop'")
    names = 0
    with retrograde.adapters.install(name):
        for path in Path(spec.origin).parent.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{name}.reversible"):
                    for alias in node.names:
                        assert hasattr(sys.modules[node.module or ""], alias.name), alias.name
                        names += 1
    assert names
