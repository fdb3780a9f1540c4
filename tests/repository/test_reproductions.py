"""The reproductions run at toy size, and their pages have the results. The figures mean something only at full size."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reproductions"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
NEEDS_TRANSFORMERS = set() if importlib.util.find_spec("transformers") else {"retrofit_minilm"}
RUNNABLE = [name for name in SCRIPTS if name not in NEEDS_TRANSFORMERS]
DRAWN = {"drift", "memory_by_depth", "retrofit_minilm", "reversible_against_residual", "throughput_under_a_cap"}
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")


def start(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--results", str(folder)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every script's page; each is run once, two at a time."""
    folder = tmp_path_factory.mktemp("results")
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(RUNNABLE, pool.map(lambda name: start(name, folder), RUNNABLE), strict=True):
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
            assert re.search(r"(\d+)/\1, \d+ s, 0 s left", done.stderr), f"{name} prints no progress: {done.stderr}"
            assert done.stdout == (folder / f"{name}.md").read_text(encoding="utf-8")
    return {name: folder / f"{name}.md" for name in RUNNABLE}


def rows(page: Path, *, under: str = "# ", table: int = 0) -> list[dict[str, str]]:
    """The rows of a table, by column: by default of the first table below a line that starts with `under`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    below = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith(under)) :])
    table_lines = re.findall(r"(?:^\|.*\|$\n?)+", below, re.MULTILINE)[table].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def in_bytes(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_page_names_its_script_date_hardware_and_versions_and_that_it_was_a_quick_run(
    name: str, pages: Mapping[str, Path]
) -> None:
    text = pages[name].read_text(encoding="utf-8")
    assert f"`python reproductions/{name}.py`" in text
    for pattern in (r"date: \d{4}-\d\d-\d\d, commit: ", r"hardware: .+ \d+ cores", r"torch \d+\.\d+", "quick run"):
        assert re.search(pattern, text), pattern
    assert str(FOLDER) not in text
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert pictures == ([f"{name}.png"] if name in DRAWN and HAS_MATPLOTLIB else [])
    assert all((pages[name].parent / picture).stat().st_size > 5000 for picture in pictures)


def test_the_documents_link_every_page_and_no_other() -> None:
    text = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `reproductions/(\w+)\.py`", text, re.MULTILINE)) == SCRIPTS
    pages = sorted(path.stem for path in (ROOT / "reproductions" / "results").glob("*.md"))
    assert sorted(re.findall(r"\(\.\./reproductions/results/(\w+)\.md\)", text)) == pages
    assert set(pages) <= set(SCRIPTS)


@pytest.mark.parametrize("model", ["Character model", "Digit classifier"])
def test_training_on_a_grid_is_bit_identical_with_reversed_and_stored_activations(
    model: str, pages: Mapping[str, Path]
) -> None:
    results = rows(pages["exact_training"], under=f"## {model}", table=1)
    assert {row["grid"] for row in results} == {"none", "2^-16", "2^-12"}
    differing = []
    for row in results:
        same, of = row["same parameters and buffers at the end"].split(" of ")
        if row["grid"] == "none":
            differing.append(same != of)
        else:
            assert same == of
            assert set(row["first step whose loss differs"].split(", ")) == {"none"}
    assert any(differing)  # without a grid, so that the comparison is known to see differences


def test_the_quality_of_training_is_compared_over_seeds(pages: Mapping[str, Path]) -> None:
    for model in ("Character model", "Digit classifier"):
        results = rows(pages["exact_training"], under=f"## {model}")
        assert [row["grid"] for row in results] == ["none", "2^-16", "2^-12"]
        assert all(re.fullmatch(r"\d\.\d+ ± \d\.\d+", row["loss on unseen data"]) for row in results)


def test_reversing_is_flat_in_depth_and_storing_is_not(pages: Mapping[str, Path]) -> None:
    for part in ("## After", "## Peak"):
        by_memory = {row["memory"]: row for row in rows(pages["memory_by_depth"], under=part)}
        shallow, deep = (
            {memory: in_bytes(row[depth]) for memory, row in by_memory.items()} for depth in ("2 layers", "6 layers")
        )
        assert deep["reverse"] == shallow["reverse"]
        assert by_memory["reverse"]["added per layer"] == "0 B"
        assert deep["store"] > 2.5 * shallow["store"]
        assert shallow["checkpoint"] < deep["checkpoint"] < deep["store"]
    [measured] = [row for row in rows(pages["memory_by_depth"], under="## Resident") if row["memory"] == "reverse"]
    assert in_bytes(measured["6 layers"]) > 0


@pytest.mark.parametrize("model", ["Language model", "Image classifier"])
def test_reversible_and_residual_twins_have_the_same_parameters_and_the_residual_one_gets_more_compute(
    model: str, pages: Mapping[str, Path]
) -> None:
    stored, checkpointed, longer, reversible, deeper = rows(pages["reversible_against_residual"], under=f"## {model}")
    assert stored["parameters"] == checkpointed["parameters"] == longer["parameters"] == reversible["parameters"]
    assert float(stored["compute"]) < float(reversible["compute"]) == 1 <= float(longer["compute"])
    assert stored["loss on unseen data"] == checkpointed["loss on unseen data"] != reversible["loss on unseen data"]
    assert in_bytes(reversible["peak"]) == in_bytes(deeper["peak"]) < in_bytes(stored["peak"])


@pytest.mark.skipif(bool(NEEDS_TRANSFORMERS), reason="transformers is not installed")
def test_a_retrofit_recomputes_the_gradients_of_stored_activations_and_holds_less_per_layer(
    pages: Mapping[str, Path],
) -> None:
    results = {row["recipe"]: row for row in rows(pages["retrofit_minilm"])}
    for name in set(results) - {"original", "original, gradient checkpointing"}:
        same, of = results[name]["gradients equal to stored, to the bit"].split(" of ")
        assert same == of, name
    added = {row["way"]: in_bytes(row["added per layer"]) for row in rows(pages["retrofit_minilm"], under="## Memory")}
    assert added["two streams"] < added["momentum, β = 1/2"] < added["momentum, β = 1/16"] < added["unchanged"]
    assert added["unchanged"] < added["original"]


def test_a_stopped_run_continues_after_its_finished_results(tmp_path: Path) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from report import Kept, Options
    finally:
        sys.path.remove(str(FOLDER))
    first = Kept("page", Options(quick=False, results=tmp_path), "10 steps")
    assert [first("loss: a", lambda: 1.5), first("time: a", lambda: 2.0)] == [1.5, 2.0]
    assert Kept("page", Options(quick=False, results=tmp_path), "10 steps")("loss: a", lambda: 9) == 1.5
    assert Kept("page", Options(quick=False, results=tmp_path), "20 steps")("loss: a", lambda: 9) == 9
    again = Kept("page", Options(quick=False, results=tmp_path, times_only=True), "10 steps")
    assert [again("loss: a", lambda: 9), again("time: a", lambda: 3.0)] == [1.5, 3.0]
    assert Kept("page", Options(quick=False, results=tmp_path), "10 steps")("time: a", lambda: 9) == 3.0


def test_under_a_cap_reversing_allows_the_largest_batch_at_any_depth(pages: Mapping[str, Path]) -> None:
    largest = {
        (int(row["depth"]), row["memory"]): int(row["largest batch"]) for row in rows(pages["throughput_under_a_cap"])
    }
    for depth in (2, 6):
        assert largest[depth, "store"] < largest[depth, "checkpoint"] < largest[depth, "reverse"]
    assert largest[2, "reverse"] == largest[6, "reverse"]
    assert largest[2, "store"] > 2 * largest[6, "store"]


def test_exact_arithmetic_does_not_drift_and_bf16_drifts_more_than_float32(pages: Mapping[str, Path]) -> None:
    by_arithmetic = {(row["arithmetic"], int(row["depth"])): row for row in rows(pages["drift"])}
    for (arithmetic, _), row in by_arithmetic.items():
        errors = [float(row[name]) for name in ("drift of the first input", "gradients", "first block's")]
        assert (max(errors) == 0 and row["same bits"] == "100.0%") == arithmetic.endswith("exact"), row
    for name in ("drift of the first input", "gradients"):
        assert float(by_arithmetic["pure bf16", 12][name]) > 100 * float(by_arithmetic["float32", 12][name])
        assert float(by_arithmetic["pure bf16", 12][name]) > 2 * float(by_arithmetic["pure bf16", 2][name])


def test_exactness_costs_no_activation_memory(pages: Mapping[str, Path]) -> None:
    by_contender = {row["contender"]: row for row in rows(pages["cost_of_exactness"])}
    for column in ("bytes after forward", "bytes at the peak"):
        taken = {name: int(row[column].replace(",", "")) for name, row in by_contender.items()}
        assert taken["reversed, exact"] == taken["reversed, guard not due"] == taken["reversed"] < taken["stored"]
        assert taken["reversed, guard due in every call"] > taken["reversed"]  # the measurement sees a sample


@pytest.mark.parametrize("model", ["RevCol", "RevBiFPN"])
def test_columns_and_pyramids_compares_networks_of_the_same_size_and_reversing_holds_less(
    model: str, pages: Mapping[str, Path]
) -> None:
    twin, stored, reversed_ = rows(pages["columns_and_pyramids"], under=f"## {model}")
    assert twin["parameters"] == stored["parameters"] == reversed_["parameters"]
    deeper = [in_bytes(row["peak, depth 2"]) for row in (twin, stored, reversed_)]
    assert deeper[2] < 0.7 * min(deeper[:2])
