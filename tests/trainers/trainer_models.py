"""Models and data for the trainers: small enough to train in a second, with something to learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from retrograde.conversion import Conversion, convert
from retrograde.models import ReversibleLM


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random number."""

    def __init__(self, samples: int = 64, length: int = 12, vocabulary: int = 16) -> None:
        starts = torch.randint(vocabulary, (samples, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Reversible(nn.Module):
    """A reversible language model with the outputs that trainers expect, as users write it for any model."""

    def __init__(self, memory: Any = "reverse", exact: bool = False) -> None:
        super().__init__()
        self.model = ReversibleLM(16, width=16, depth=3, heads=2, dropout=0.1, memory=memory, exact=exact)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.model(input_ids)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def converted_gpt2(recipe: str = "bdia", memory: Any = "reverse") -> Conversion:
    """A GPT-2 with random weights, converted."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return convert(transformers.GPT2LMHeadModel(config), recipe, memory=memory)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(actual[name], expected[name])]
