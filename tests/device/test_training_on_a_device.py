"""The trainer, checkpoints and the choice of a backend, on an accelerator."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.training import ConfigError, TrainingError, backend_for, config_of, load_model, train

TEXT = "\n".join(f"{i} green bottles, hanging on the wall; {i * i} of them fall." for i in range(120))


def trained(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train a small model on the device that "auto" finds; the events of its log."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    model = {"width": 16, "depth": 2, "heads": 2, "dropout": 0.1, **changes.pop("model", {})}
    training = {"steps": 6, "batch": 4, "warmup": 2, "threads": 1, "device": "auto", **changes}
    train(
        config_of(
            {
                "data": {"path": str(folder / "text.txt"), "length": 16, "validation": 0.1},
                "model": model,
                "training": training,
                "evaluation": {"every": 3, "batches": 2},
                "output": {"folder": str(folder / "run"), "save_every": 3, "keep": 3, "log_every": 1},
            }
        )
    )
    return [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]


def losses(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in events if "loss" in event]


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16"}, {"model": {"exact": True}}, {"model": {"memory": "offload"}}],
    ids=["reverse", "bf16", "exact", "offload"],
)
def test_the_trainer_trains_on_the_accelerator_it_finds_as_on_the_cpu(
    device: torch.device, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {**changes, "model": {"dropout": 0.0, **changes.get("model", {})}}
    events = trained(tmp_path / "device", **changes)
    assert events[0]["device"] == f"{device.type}:0"
    assert all(event["peak_memory"] > 0 for event in events if event["event"] == "step")
    tolerance = 2e-2 if "precision" in changes else 1e-4
    for found, wanted in zip(losses(events), losses(trained(tmp_path / "cpu", device="cpu", **changes)), strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)


def test_a_run_on_a_device_resumes_bit_identically_and_its_model_loads_on_the_cpu(
    device: torch.device, tmp_path: Path
) -> None:
    whole = losses(trained(tmp_path))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert losses(trained(tmp_path)) == whole  # steps 4 to 6 a second time
    model, _ = load_model(tmp_path / "run")
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_state_dict_of_a_device_loads_on_the_cpu_and_back(device: torch.device) -> None:
    torch.manual_seed(0)

    def make() -> rg.ReversibleSequence:
        return rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])

    stack, x = make().to(device), torch.randn(4, 8)
    stack(x.to(device)).sum().backward()
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    host, back = make(), make().to(device)
    host.load_state_dict(state)
    back.load_state_dict(state)
    for other in (host, back):
        other.eval()
    stack.eval()
    torch.testing.assert_close(host(x), stack(x.to(device)).cpu(), rtol=1e-5, atol=1e-5)
    assert torch.equal(back(x.to(device)), stack(x.to(device)))


def test_a_run_that_fills_the_device_ends_with_a_sentence(toy: Any, tmp_path: Path) -> None:
    toy.limit = toy.allocated + 60_000
    with pytest.raises(TrainingError, match="ran out of memory: toy device out of memory"):
        trained(tmp_path)


def test_a_device_without_a_backend_is_refused_in_a_sentence(toy: Any) -> None:
    with pytest.raises(ConfigError, match="torch knows no backend that moves tensors of toy devices"):
        backend_for(torch.device("toy"))
