"""Converted models under DeepSpeed ZeRO, in a group of one process. DeepSpeed is not among the test dependencies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import retrograde as rg

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed: Any = pytest.importorskip("deepspeed")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]  # DeepSpeed has many of its own

TOKENS = torch.arange(32).reshape(2, 16)


@pytest.fixture(autouse=True)
def _group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    deepspeed.ops.__compatible_ops__.clear()  # it would compile an operator of its own
    deepspeed.init_distributed(dist_backend="gloo")


def losses(stage: int, recipe: str | None, memory: str = "store") -> list[float]:
    """The losses of three steps of a small model under a stage of ZeRO."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    if recipe is not None:
        rg.convert(model, recipe, memory=memory)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2)
    )
    taken = []
    for _ in range(3):
        loss = engine(input_ids=TOKENS, labels=TOKENS).loss
        engine.backward(loss)
        engine.step()
        taken.append(loss.item())
    return taken


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_up_to_two_train_as_without_conversion(stage: int) -> None:
    assert losses(stage, "unchanged", "checkpoint") == losses(stage, None)
    assert losses(stage, "momentum", "reverse") == losses(stage, "momentum", "store")


def test_stage_three_trains_what_is_stored_and_refuses_what_is_recomputed() -> None:
    assert losses(3, "unchanged", "store") == losses(3, None)
    with pytest.raises(RuntimeError, match="partitioned by DeepSpeed ZeRO-3"):
        losses(3, "unchanged", "checkpoint")
    with pytest.raises(RuntimeError, match="partitioned by DeepSpeed ZeRO-3"):
        losses(3, "momentum", "reverse")
