"""Reversible and converted models under Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainer_models import Counting, Reversible, assert_same, converted_gpt2, state

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.interop


def train(model: Any, folder: Path, *, steps: int, resume: bool = False, **options: Any) -> list[float]:
    """A loop as Accelerate's users write it; it saves after 4 steps, or resumes from there."""
    accelerate.state.AcceleratorState._reset_state(True)  # of an earlier test
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Counting(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("run")
    losses: list[float] = []
    batches = list(loader)  # before the generators are set: making it draws
    if resume:
        accelerator.load_state(str(folder))
    model.train()
    for step in range(4 if resume else 0, steps):
        with accelerator.accumulate(model):
            loss: Tensor = model(**batches[step % len(batches)])["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        accelerator.log({"loss": losses[-1]}, step=step)
        if step == 3 and not resume:
            accelerator.save_state(str(folder))
    accelerator.end_training()
    accelerator.free_memory()
    return losses


class Notebook(accelerate.tracking.GeneralTracker):  # type: ignore[misc,name-defined]  # as its users write one
    """A tracker that records what it gets."""

    name, requires_logging_directory = "notebook", False

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int, float]] = []

    @property
    def tracker(self) -> list[tuple[int, float]]:
        return self.pages

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int | None, **options: Any) -> None:
        assert step is not None
        self.pages.append((step, values["loss"]))


@pytest.fixture(params=["converted", "reversible"], name="make")
def _make(request: pytest.FixtureRequest) -> Any:
    if request.param == "converted":
        pytest.importorskip("transformers")

    def make(memory: str = "reverse") -> Any:
        torch.manual_seed(0)
        return converted_gpt2(memory=memory).model if request.param == "converted" else Reversible(memory, exact=True)

    return make


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_recomputed_and_stored_activations_train_the_same_parameters_under_accelerate(
    make: Any, precision: str, tmp_path: Path
) -> None:
    ends = []
    for memory in ("store", "reverse"):
        model = make(memory)
        torch.manual_seed(1)
        losses = train(model, tmp_path / memory, steps=20, mixed_precision=precision)
        ends.append(state(model))
    assert_same(ends[1], ends[0])
    assert losses[-1] < losses[0] - 0.3


def test_a_saved_state_resumes_to_the_same_parameters_and_logs(make: Any, tmp_path: Path) -> None:
    whole, resumed = make(), make()
    torch.manual_seed(1)
    losses = train(whole, tmp_path, steps=8)
    notebook = Notebook()
    assert train(resumed, tmp_path, steps=8, resume=True, log_with=notebook) == losses[4:]
    assert_same(state(resumed), state(whole))
    assert notebook.pages == list(enumerate(losses))[4:]
