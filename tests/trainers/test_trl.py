"""A converted model in TRL's SFTTrainer. TRL is not among the test dependencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import retrograde as rg

trl: Any = pytest.importorskip("trl")
tokenizers: Any = pytest.importorskip("tokenizers")
datasets: Any = pytest.importorskip("datasets")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


def weights(recipe: str | None, memory: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after three steps on tokenised rows."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if recipe is not None:
        rg.convert(model, recipe, memory=memory)
    rows = datasets.Dataset.from_dict({"input_ids": [[3 + (i + j) % 60 for j in range(12)] for i in range(8)]})
    options = trl.SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, seed=0, bf16=False,
    )  # fmt: skip
    trl.SFTTrainer(model=model, args=options, train_dataset=rows, processing_class=tokenizer()).train()
    return {name: value.detach().clone() for name, value in model.state_dict().items() if "rescaled" not in name}


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(3, 64)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def test_the_trainer_trains_a_converted_model_to_the_bit(tmp_path: Path) -> None:
    expected = weights(None, "store", tmp_path)
    for name, value in weights("unchanged", "checkpoint", tmp_path).items():
        assert torch.equal(value, expected[name]), name
    stored = weights("momentum", "store", tmp_path)
    for name, value in weights("momentum", "reverse", tmp_path).items():
        assert torch.equal(value, stored[name]), name
