"""Small Hugging Face Transformers models with random weights, and a plain stack of residual layers, with batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Batch = dict[str, Any]


class Layer(nn.Module):
    """A pre-norm residual layer as people write it."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Mixing(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Mixing(nn.Module):
    """Mixes positions that a mask allows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return scores.softmax(-1) @ self.value(x)


class Model(nn.Module):
    """Layers in a row between two projections."""

    def __init__(self, depth: int = 4, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


def _ids() -> tuple[Tensor, Tensor]:
    """Tokens, and a mask by which the first sample is shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (3, 10), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return ids, mask


def _text() -> Batch:
    ids, mask = _ids()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gpt2(**changes: Any) -> tuple[nn.Module, Batch]:
    tf = pytest.importorskip("transformers")
    config = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
    config |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "loss_type": "ForCausalLM"}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**config | changes)), _text()


def llama() -> tuple[nn.Module, Batch]:
    tf = pytest.importorskip("transformers")
    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        attention_dropout=0.1,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config), _text()


def bert() -> tuple[nn.Module, Batch]:
    tf = pytest.importorskip("transformers")
    config = tf.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return tf.BertForMaskedLM(config), _text()


def vit() -> tuple[nn.Module, Batch]:
    tf = pytest.importorskip("transformers")
    config = tf.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=16, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.1,
    )  # fmt: skip
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return tf.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2])}


TRANSFORMERS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
}


def gradients(model: nn.Module, batch: Batch, seed: int = 3) -> dict[str, Tensor]:
    """The gradients of one training step from a seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(**batch)
    loss = output.loss if hasattr(output, "loss") else output.square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(actual[name], expected[name])]
