"""LoRA (peft) on converted models, and models converted after LoRA was added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde import convert
from trainer_models import Counting, assert_same, converted_gpt2, state

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interop


def lora(model: nn.Module) -> Any:
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


def train(model: nn.Module, steps: int = 10) -> list[float]:
    torch.manual_seed(3)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    tokens, losses = Counting().tokens, []
    for step in range(steps):
        batch: Tensor = tokens[8 * (step % 8) : 8 * (step % 8) + 8]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
@pytest.mark.parametrize("order", ["converted first", "peft first"])
def test_lora_trains_bit_identical_parameters_on_recomputed_and_stored_activations(recipe: str, order: str) -> None:
    ends, losses = [], []
    for memory in ("store", "reverse"):
        conversion = converted_gpt2(recipe, memory)
        if order == "peft first":
            model = lora(conversion.undo())
            convert(model, recipe, memory=memory)  # type: ignore[arg-type]
        else:
            model = lora(conversion.model)
        frozen = {name: value for name, value in state(model).items() if "lora" not in name}
        losses = train(model, 30)
        ends.append(state(model))
        assert_same({name: value for name, value in ends[-1].items() if "lora" not in name}, frozen)
    assert_same(ends[1], ends[0])
    assert losses[-1] < losses[0] - 0.1


def test_adapters_of_a_converted_model_load_into_the_original_one(tmp_path: Path) -> None:
    conversion = converted_gpt2()
    base = state(conversion.model)
    model = lora(conversion.model)
    train(model)
    model.save_pretrained(tmp_path)
    original = transformers.GPT2LMHeadModel(conversion.model.config)
    original.load_state_dict(base)
    loaded = peft.PeftModel.from_pretrained(original, tmp_path).eval()
    tokens = Counting(4).tokens
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_gradient_checkpointing_enable_works_through_peft() -> None:
    conversion = converted_gpt2(memory="store")
    model = lora(conversion.model)
    model.gradient_checkpointing_enable()
    assert str(conversion.stack.memory) == "blocks 0-2 reverse"
    assert train(model, 2)
