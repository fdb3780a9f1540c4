"""`retrograde demo`, in its quick form: three modes that give one loss curve, and memory that does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
pytest.importorskip("matplotlib", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

from retrograde.cli import _demo_run as work
from retrograde.cli._app import app
from retrograde.cli.demo import _conclude

Shown = tuple[Any, Path]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the demo prints with --quick; it is run once."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return CliRunner().invoke(app, ["demo", "--quick", "--output", str(folder)], env={"COLUMNS": "100"}), folder


def test_it_reports_bit_identical_losses_with_status_zero(shown: Shown) -> None:
    result, _ = shown
    assert result.exit_code == 0, result.output
    assert "All 4 losses, and all weights after them, are bit-identical in the three modes" in result.stdout
    assert result.stdout.count("bit-identical") == 3


def test_it_prints_progress_a_sample_and_the_path_of_the_picture(shown: Shown) -> None:
    result, folder = shown
    assert "reverse     step 6/6 · loss" in result.stderr
    assert "tokens/s · peak" in result.stderr
    assert "│ The " in result.stdout
    assert str(folder / "demo.png") in result.stdout.replace("\n", "")
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("The ")


def test_the_report_has_equal_curves_and_flat_memory(shown: Shown) -> None:
    report = json.loads((shown[1] / "report.json").read_text())
    curves = {run["memory"]: run["losses"] for run in report["runs"]}
    assert curves["store"] == curves["checkpoint"] == curves["reverse"][:4]
    assert len(curves["reverse"]) == 6
    assert report["size"]["depth"] == 48
    peaks = report["peaks"]
    assert peaks["reverse"][-1] == peaks["reverse"][0]
    assert peaks["store"][-1] > 3 * peaks["store"][0]
    assert peaks["store"][-1] > peaks["checkpoint"][-1] > peaks["reverse"][-1]


@pytest.mark.parametrize("what", ["loss", "weights"])
def test_a_difference_in_the_last_bit_is_reported(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    losses, weights = [4.0, 3.0], [torch.ones(3)]
    runs = [work.Training(memory, list(losses), 0.1, 9, [w.clone() for w in weights]) for memory in work.MODES]
    size = work.Size(steps=2, compared=2)
    assert _conclude(runs, size, Console())
    if what == "loss":
        runs[1].losses[1] = torch.tensor(3.0).nextafter(torch.tensor(4.0)).item()
    else:
        runs[1].weights[0][2] += 2**-23
    assert not _conclude(runs, size, Console())
    assert "The losses of checkpoint differ from those of reverse" in capsys.readouterr().out


def test_a_folder_that_cannot_be_created_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(tmp_path / "file" / "x")])
    assert result.exit_code == 2
    assert "Not a directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "120"})
    for words in ("retrograde demo --quick --json", "demo.png", "Exit status"):
        assert words in result.stdout
