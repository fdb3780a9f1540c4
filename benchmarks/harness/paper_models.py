"""Models that fit here, for which a plan on paper is held against real training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from retrograde import models

Made = tuple[Any, ...]


def mlp(width: int, hidden: int | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden or 4 * width), nn.GELU(), nn.Linear(hidden or 4 * width, width)
    )


def mlps(depth: int = 8) -> Made:
    blocks = [rg.two_stream(mlp(128), mlp(128)) for _ in range(depth)]
    return rg.ReversibleSequence(blocks), torch.randn(8, 128, 128)


def exact_mlps() -> Made:
    blocks = [rg.two_stream(mlp(128), mlp(128)) for _ in range(8)]
    return rg.ReversibleSequence(blocks, exact=True), torch.randn(8, 128, 128)


def language_model(depth: int = 6) -> Made:
    model = models.ReversibleLM(512, width=128, depth=depth, heads=4, kv_heads=2)
    return model, torch.randint(512, (4, 128)), lambda logits: logits.float().logsumexp(-1).mean()


def exact_language_model() -> Made:
    model = models.ReversibleLM(512, width=128, depth=6, heads=4, exact=True)
    return model, torch.randint(512, (4, 128))


def wide_language_model() -> Made:
    model = models.ReversibleLM(256, width=256, depth=4, heads=4)
    return model, torch.randint(256, (2, 64)), None, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Experts(nn.Module):
    """Two of several experts per token, all of which see every token, and a loss that balances them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.route = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp(width, 2 * width) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.norm(x)
        odds = self.route(tokens).softmax(-1)
        indices = rg.decide(odds.topk(2).indices)
        weights = odds.gather(-1, indices)
        update = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            update = update + (weights * (indices == i)).sum(-1, keepdim=True) * expert(tokens)
        used = F.one_hot(indices, len(self.experts)).float()
        return update, (used.mean((0, 1, 2)) * odds.mean((0, 1))).sum()


def mixture_of_experts() -> Made:
    blocks = [rg.two_stream(mlp(96), Experts(96, 4), aux=("g",)) for _ in range(6)]
    return rg.ReversibleSequence(blocks), torch.randn(4, 128, 96)


def revnet() -> Made:
    return models.RevNet(10, widths=(32, 64), depths=(4, 4)), torch.randn(8, 3, 32, 32)


def momentum_resnet() -> Made:
    return models.MomentumResNet(10, widths=(32, 48), depths=(4, 4)), torch.randn(8, 3, 32, 32)


def vision_transformer() -> Made:
    return models.RevViT(10, 32, 4, width=128, depth=6, heads=4), torch.randn(8, 3, 32, 32)


def axial_transformer() -> Made:
    return models.AxialImageTransformer(3, 4, (24, 24), width=64, depth=4, heads=4), torch.randn(4, 3, 24, 24)


def two_modalities() -> Made:
    model = models.TwoModalityTransformer({"video": 48, "audio": 16}, width=96, depth=4, heads=4)
    batch = {"streams": {"video": torch.randn(4, 96, 48), "audio": torch.randn(4, 128, 16)}}
    return model, (batch["streams"],)


def encoder_decoder() -> Made:
    model = models.EncoderDecoder(256, 256, 128, 3, 4)
    return model, (torch.randint(256, (4, 96)), torch.randint(256, (4, 96)))


def converted_gpt2() -> Made:
    import transformers as tf

    config = tf.GPT2Config(
        vocab_size=512, n_positions=128, n_embd=128, n_layer=6, n_head=4, loss_type="ForCausalLM", attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = tf.GPT2LMHeadModel(config)
    rg.convert(model)
    ids = torch.randint(512, (4, 128))
    return model, {"input_ids": ids, "labels": ids}


def converted_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(128, 4, 512, norm_first=True, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    rg.convert(model, "two_stream", exact=False)
    return model, torch.randn(4, 128, 128)


MODELS: dict[str, Callable[[], Made]] = {
    "MLPs": mlps,
    "MLPs, exact": exact_mlps,
    "language model": language_model,
    "language model, exact": exact_language_model,
    "language model, SGD": wide_language_model,
    "mixture of experts": mixture_of_experts,
    "RevNet (convolutions)": revnet,
    "MomentumResNet (convolutions)": momentum_resnet,
    "RevViT": vision_transformer,
    "axial transformer": axial_transformer,
    "two modalities": two_modalities,
    "encoder and decoder": encoder_decoder,
    "GPT-2, converted": converted_gpt2,
    "TransformerEncoder, converted": converted_encoder,
}


def many_tokens() -> Made:
    blocks = [rg.two_stream(mlp(64), mlp(64)) for _ in range(6)]
    return rg.ReversibleSequence(blocks), torch.randn(16, 512, 64)


def long_language_model() -> Made:
    return models.ReversibleLM(256, width=64, depth=5, heads=4), torch.randint(256, (8, 512))


RANKED: dict[str, Callable[[], Made]] = {"MLPs": many_tokens, "language model": long_language_model}
"""For several processes: many tokens, so that the buffers which gloo's threads release late weigh little."""
