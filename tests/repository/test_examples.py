"""The examples run at small size, and print what they claim. How well they learn shows only at full size."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ["routed_language_model", "axial_image_completion", "point_cloud", "video_and_audio"]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONUNBUFFERED": "1"}


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, *arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of an example with --small; each is run once."""
    folder = tmp_path_factory.mktemp(request.param)
    done = run(request.param, "--small", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    if pictures := re.findall(r"^Picture: (\S+)$", done.stdout, re.MULTILINE):
        assert all((folder / picture).stat().st_size > 1000 for picture in pictures)
    assert bool(pictures) == (HAS_MATPLOTLIB and request.param not in ("routed_language_model", "mixture_of_experts"))
    return done.stdout


def of(*names: str) -> pytest.MarkDecorator:
    """Give a test the outputs of these examples."""
    marks = {"axial_image_completion": needs_sklearn}
    chosen = [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]
    return pytest.mark.parametrize("output", chosen, indirect=True, scope="module")


def number(pattern: str, text: str) -> float:
    """The number in the first group of the pattern's only match."""
    [match] = re.findall(pattern, text)
    return float(match)


@of(*EXAMPLES)
def test_storing_grows_with_depth_and_reversing_does_not(output: str) -> None:
    growth = dict(re.findall(r"^  (store|reverse): \w+, ([\d.]+) times the memory for 4 times", output, re.MULTILINE))
    assert float(growth["store"]) > 3
    assert float(growth["reverse"]) < 1.01
    assert "reverse: flat" in output
    assert "store: grows" in output


@of(*EXAMPLES)
def test_progress_is_printed_up_to_the_last_step(output: str) -> None:
    assert re.search(r"step +8/8  loss \d+\.\d+", output)


@of("routed_language_model")
def test_the_auxiliary_loss_balances_the_experts(output: str) -> None:
    unused = number(r"not in use +[\d.]+ +([\d.]+)", output)
    used = number(r"  in use +[\d.]+ +([\d.]+)", output)
    assert 1 <= used < unused
    rows = re.findall(r"^  \d +((?:\d+% *){8})$", output, re.MULTILINE)
    assert len(rows) == 4  # two blocks, twice
    assert all(abs(sum(map(int, re.findall(r"\d+", row))) - 100) <= 4 for row in rows)
    assert re.search(r"A sample of the last model:\n  \| The .", output)


@of("axial_image_completion")
def test_the_image_model_is_compared_with_the_mean_image_and_its_digits_are_drawn(output: str) -> None:
    errors = [number(rf"{name} +([\d.]+) ", output) for name in ("this model", "training image", "the mean image")]
    assert all(0 < error < 1 for error in errors)
    assert "@@" in output


@of("point_cloud")
def test_a_rotation_changes_no_energy_and_rotates_the_forces(output: str) -> None:
    stretched = number(r"when stretched by 1%: (\S+)", output)
    assert number(r"largest change of an energy: (\S+)", output) < 2e-5 < stretched
    assert number(r"largest change of a force, rotated as the molecule is: (\S+)", output) < 1e-4


@of("point_cloud")
def test_gradients_reach_coords_and_edges(output: str) -> None:
    for name in ("coords", "edges"):
        assert number(rf"gradient to {name}: +RMS (\S+) ", output) > 0


@of("video_and_audio")
def test_the_video_example_compares_blocks_with_and_without_attention_between_modalities(output: str) -> None:
    for name in ("itself and each other", "shown another clip's video", "itself only", "the mean of many clips"):
        assert 0 < number(rf"{name} +([\d.]+) ", output) < 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (("--steps", "0"), "argument --steps: '0' is not a whole number of 1 or more"),
        (("--steps", "many"), "argument --steps: 'many' is not a whole number of 1 or more"),
        (("--smal1",), "unrecognized arguments: --smal1"),
    ],
)
def test_a_bad_argument_is_refused_with_a_message(argument: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run("point_cloud", *argument, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_ends_an_example_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("point_cloud", "--steps", "1000000"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # it is ignored where tests run in the background
    ) as process:
        try:
            assert process.stdout is not None
            assert "Training" in process.stdout.readline()
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert printed.endswith("Stopped.\n")
    assert not errors


@of("mixture_of_experts")
def test_decided_routing_never_flips(output: str) -> None:
    rows = re.findall(r"^  (float32|bfloat16) +([\d.]+)% +([\d.]+)% +(\S+) +(\S+)$", output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["float32", "bfloat16"]
    assert all(float(decided_flips) == 0 for _, _, decided_flips, _, _ in rows)
    _, flips, _, free, decided = rows[1]
    assert float(flips) > 0.1
    assert float(decided) < float(free)
