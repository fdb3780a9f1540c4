"""Reversible and converted models under Lightning's Trainer and Fabric."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_models import Counting, Reversible, assert_same, converted_gpt2, state

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.interop


class Module(lightning.LightningModule):
    """What users write for any model, plus a seed: Lightning's checkpoints do not contain the RNG state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        torch.manual_seed(self.global_step)
        loss: Tensor = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(params=["converted", "reversible"], name="make")
def _make(request: pytest.FixtureRequest) -> Any:
    if request.param == "converted":
        pytest.importorskip("transformers")

    def make(memory: str = "reverse") -> nn.Module:
        torch.manual_seed(0)
        return converted_gpt2(memory=memory).model if request.param == "converted" else Reversible(memory, exact=True)

    return make


def fit(model: nn.Module, folder: Path, *, steps: int, resume: str | None = None, **options: Any) -> Any:
    logger = lightning.pytorch.loggers.CSVLogger(folder)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=steps,
        default_root_dir=folder,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        **quiet | options,
    )
    module = Module(model).train()
    trainer.fit(module, DataLoader(Counting(), batch_size=8), ckpt_path=resume)
    return trainer


def logged_losses(folder: Path) -> list[float]:
    """The losses in the table that Lightning's logger wrote."""
    (table,) = folder.rglob("metrics.csv")
    with table.open() as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_trains_the_same_parameters_in_every_memory_mode(make: Any, precision: Any, tmp_path: Path) -> None:
    ends, losses = [], []
    for memory in ("store", "reverse"):
        model = make(memory)
        trainer = fit(model, tmp_path / memory, steps=24, precision=precision, gradient_clip_val=1.0)
        ends.append(state(model))
        losses.append(float(trainer.callback_metrics["loss"]))
    assert_same(ends[1], ends[0])
    assert losses[0] == losses[1] < 2.3
    logged = logged_losses(tmp_path / "reverse")
    assert len(logged) == 24
    assert logged[-1] == pytest.approx(losses[1])


def test_a_resumed_lightning_run_ends_with_the_same_parameters(make: Any, tmp_path: Path) -> None:
    whole, resumed = make(), make()
    for model, resume in ((whole, None), (resumed, str(tmp_path / "saved" / "step=8.ckpt"))):
        save = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / "saved", "{step}", every_n_train_steps=8, save_top_k=-1
        )
        fit(model, tmp_path, steps=16, resume=resume, callbacks=[save], enable_checkpointing=True)
    assert_same(state(resumed), state(whole))


def test_fabric_trains_logs_and_resumes_to_the_same_parameters(make: Any, tmp_path: Path) -> None:
    def run(model: nn.Module, steps: range, logs: Path, *, resume: bool = False) -> list[float]:
        logger = lightning.fabric.loggers.CSVLogger(logs)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", loggers=logger)
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        batches = list(fabric.setup_dataloaders(DataLoader(Counting(), batch_size=8)))
        if resume:
            loaded = fabric.load(tmp_path / "half", {"model": model, "optimizer": optimizer})
            torch.set_rng_state(loaded["rng"])
        model.train()
        for step in steps:
            loss = model(**batches[step % len(batches)])["loss"]
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            fabric.log("loss", loss, step=step)
            if step == 3 and not resume:
                state = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}
                fabric.save(tmp_path / "half", state)
        logger.finalize("success")
        return logged_losses(logs)

    whole, resumed = make(), make()
    losses = run(whole, range(8), tmp_path / "whole")
    assert len(losses) == 8
    assert run(resumed, range(4, 8), tmp_path / "resumed", resume=True) == losses[4:]
    assert_same(state(resumed), state(whole))
