"""Several processes, accumulated parts, lower precision: the same training, as far as the arithmetic allows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="the trainer needs the extra 'train'")

import safetensors.torch

import runs
from retrograde.training import ConfigError, Options, backend_for

ROOT = Path(__file__).resolve().parents[2]
SHORT: dict[str, Any] = {"training_steps": 6, "model_dropout": 0.0, "output_save_every": 3}


def toml(tables: dict[str, dict[str, Any]]) -> str:
    return "".join(
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in tables.items()
    )


def under_torchrun(folder: Path, *options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(toml(runs.tables(folder, **{**SHORT, **changes})))
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "retrograde", "train"]
    return subprocess.run(
        [sys.executable, "-m", *command, str(folder / "config.toml"), *options],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def model_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "run" / "checkpoints" / f"step-{step:08}" / "model.safetensors"
    weights: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    return weights


def check_close(folder: Path, wanted: Path) -> None:
    weights, reference = model_of(folder, 6), model_of(wanted, 6)
    assert weights.keys() == reference.keys()
    for name in reference:
        torch.testing.assert_close(weights[name], reference[name], rtol=0, atol=1e-5)
    for (_, step, a), (_, other, b) in zip(runs.losses(folder), runs.losses(wanted), strict=True):
        assert step == other
        assert abs(a - b) < 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with the joined batch."""
    folder = tmp_path_factory.mktemp("alone")
    runs.trained(folder, **SHORT)
    return folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that share the batch."""
    folder = tmp_path_factory.mktemp(request.param)
    done = under_torchrun(folder, "--json", training_parallel=request.param, training_accumulate=2)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in done.stdout.splitlines() if '"event": "step"' in line]
    assert steps == [1, 2, 3, 4, 5, 6], "one process prints"
    return folder


def test_two_processes_train_as_one_does_on_the_joined_batch(alone: Path, together: Path) -> None:
    check_close(together, alone)


def test_a_run_of_two_processes_can_resume_in_one(alone: Path, together: Path, tmp_path: Path) -> None:
    """A checkpoint holds the full state, whatever number of processes wrote it."""
    shutil.copytree(together, tmp_path / "copy")
    start = tmp_path / "copy" / "run" / "checkpoints" / "step-00000003"
    assert runs.trained(tmp_path / "copy", Options(start=start), **SHORT).began == 3
    check_close(tmp_path / "copy", alone)


def test_accumulated_parts_train_as_the_whole_batch_does(alone: Path, tmp_path: Path) -> None:
    runs.trained(tmp_path, **SHORT, training_accumulate=4)
    check_close(tmp_path, alone)


def test_exact_streams_train_to_the_same_bits_in_every_memory_mode(tmp_path: Path) -> None:
    weights = []
    for memory in ("store", "checkpoint", "reverse"):
        folder = tmp_path / memory
        runs.trained(folder, **SHORT, model_memory=memory, model_exact=True)
        weights.append({name: tensor.numpy().tobytes() for name, tensor in model_of(folder, 6).items()})
    assert weights[0] == weights[1] == weights[2]


def test_bf16_trains_near_float32_and_is_not_the_same(alone: Path, tmp_path: Path) -> None:
    runs.trained(tmp_path, **SHORT, training_precision="bf16")
    differences = [abs(a[2] - b[2]) for a, b in zip(runs.losses(tmp_path), runs.losses(alone), strict=True)]
    assert 0 < max(differences) < 0.02


def test_a_batch_that_cannot_be_shared_is_refused_once(tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, training_batch=3, training_accumulate=1)
    assert done.returncode != 0
    assert done.stderr.count("training.batch = 3 cannot be shared by 2 processes") == 1
    with pytest.raises(ConfigError, match=r"cannot be cut into training\.accumulate = 3 equal parts"):
        runs.trained(tmp_path, training_accumulate=3)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mps", "gloo")],
)
def test_the_backend_follows_from_the_device(kind: str, backend: str) -> None:
    assert backend_for(torch.device(kind)) == backend
