"""Predicted peaks of converted models of Hugging Face Transformers, beside real steps under plans for three budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrograde as rg
from retrograde.measure.training_step import step_peak
from retrograde.planning import _blocks, _compare, _measure, choose, compare, measure, predict, smallest

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]

WIDTH, LENGTH = 32, 32
COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {
    "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip


def llama(depth: int) -> Any:
    config = transformers.LlamaConfig(**COMMON, **WIDE, num_hidden_layers=depth, num_key_value_heads=4)
    return transformers.LlamaForCausalLM(config)


def gpt2(depth: int) -> Any:
    config = transformers.GPT2Config(**COMMON, n_embd=WIDTH, n_layer=depth, n_head=4, n_positions=LENGTH)
    return transformers.GPT2LMHeadModel(config)


def bert(depth: int) -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**COMMON, **WIDE, num_hidden_layers=depth))


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bytes are asked for; plans are chosen by counted work."""
    monkeypatch.setattr(_measure, "least_seconds", lambda *_: {})
    monkeypatch.setattr(_blocks, "rounds", lambda: range(1))


@pytest.mark.parametrize(
    ("make", "depth", "recipe"), [(llama, 16, "unchanged"), (gpt2, 6, "unchanged"), (bert, 6, "momentum")]
)
def test_predicted_peaks_are_those_of_real_steps(make: Any, depth: int, recipe: str) -> None:
    torch.manual_seed(0)
    model = make(depth).train()
    stack = rg.convert(model, recipe).stack
    tokens = torch.randint(1, 64, (4, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    chain = measure(model, batch)
    least, most = smallest(chain), predict(chain, ["store"] * depth).peak
    plans = [choose(chain, budget).plan for budget in (least, (2 * least + most) // 3, most)]
    assert len(set(plans)) == 3
    for plan in plans:
        stack.memory = plan
        step_peak(model, batch)  # the engine inspects the layers when they first run so
        assert predict(chain, plan.memory).peak == pytest.approx(step_peak(model, batch), rel=0.02), plan


@pytest.mark.parametrize(("recipe", "are_groups"), [("unchanged", False), ("momentum", True)])
def test_groups_of_blocks_are_compared_with_only_where_they_can_run(
    recipe: str, are_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of "unchanged" run one by one, when the model calls them: a row of groups would repeat the row above."""
    monkeypatch.setattr(_compare, "least_seconds", lambda ways, *_: dict.fromkeys(ways, 1.0))
    torch.manual_seed(0)
    model = llama(4).train()
    rg.convert(model, recipe)
    tokens = torch.randint(1, 64, (4, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    found = compare(model, batch, choose(measure(model, batch), 1 << 40))
    peaks = {row.name: row.peak for row in found.rows}
    assert ("checkpoint √n" in peaks) is ("checkpoint √n: the same" in found.table()) is are_groups
    assert ("reverse" in peaks) is ("reverse: the input" in found.table()) is are_groups
    if are_groups:
        assert peaks["checkpoint √n"] > peaks["checkpoint each block"]
