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


def columns() -> Made:
    return models.RevCol(10, widths=(16, 32, 48), columns=5), torch.randn(4, 3, 32, 32)


def pyramid() -> Made:
    return models.RevBiFPN(10, widths=(16, 32, 48), depth=3), torch.randn(4, 3, 32, 32)


def differential_equation() -> Made:
    return models.ReversibleODE(mlp(64), steps=10, time="none"), torch.randn(8, 64, 64)


def graph_network() -> Made:
    model = models.DeepGraphNetwork(16, 7, width=64, depth=8, groups=2)
    return model, (torch.randn(1000, 16), torch.randint(1000, (2, 4000)))


def point_cloud() -> Made:
    model = models.PointCloudTransformer(8, 4, width=64, depth=4, heads=4)
    return model, (torch.randn(2, 64, 8), torch.randn(2, 64, 3))


def stages() -> Made:
    """Convolutions in three stages, down and up again, with transitions between them."""

    def convolutions(width: int) -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1))

    def stage(width: int, depth: int = 2) -> list[rg.Block]:
        return [rg.two_stream(convolutions(width), convolutions(width)) for _ in range(depth)]

    down = rg.transition(*(nn.Conv2d(16, 32, 2, stride=2) for _ in range(2)))
    up = rg.transition(*(nn.ConvTranspose2d(32, 16, 2, stride=2) for _ in range(2)))
    return rg.ReversibleSequence([*stage(16), down, *stage(32), up, *stage(16)]), torch.randn(4, 16, 32, 32)


def exact_momentum() -> Made:
    blocks = [rg.momentum(mlp(64), gamma=0.5) for _ in range(8)]
    return rg.ReversibleSequence(blocks, split="first", merge="first", exact=True), torch.randn(8, 64, 64)


def dropping_mlps() -> Made:
    blocks = [rg.two_stream(nn.Sequential(mlp(64), nn.Dropout(0.1)), mlp(64)) for _ in range(6)]
    return rg.ReversibleSequence(blocks), torch.randn(8, 64, 64)


def converted_t5() -> Made:
    import transformers as tf

    config = tf.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config)
    rg.convert(model, layers=["encoder.block", "decoder.block"])
    ids = torch.randint(256, (4, 64))
    return model, {"input_ids": ids, "labels": ids}


def converted_mixtral() -> Made:
    import transformers as tf

    config = tf.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = tf.MixtralForCausalLM(config)
    rg.convert(model)
    ids = torch.randint(256, (4, 64))
    return model, {"input_ids": ids, "labels": ids}


def converted_vit() -> Made:
    import transformers as tf

    config = tf.ViTConfig(
        hidden_size=64, num_hidden_layers=5, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    model = tf.ViTForImageClassification(config)
    rg.convert(model, "two_stream", exact=False)
    return model, {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}


def converted_mixtral_in_bfloat16() -> Made:
    model, batch = converted_mixtral()
    return model.to(torch.bfloat16), batch


HELD_OUT: dict[str, Callable[[], Made]] = {
    "RevCol": columns,
    "RevBiFPN": pyramid,
    "ReversibleODE, exact": differential_equation,
    "graph network": graph_network,
    "point cloud": point_cloud,
    "stages with transitions": stages,
    "momentum, exact": exact_momentum,
    "MLPs with dropout": dropping_mlps,
    "T5, converted": converted_t5,
    "Mixtral, converted": converted_mixtral,
    "Mixtral, converted, bfloat16": converted_mixtral_in_bfloat16,
    "ViT, converted": converted_vit,
}
"""Models that nothing was tuned with."""


def few_mlps() -> Made:
    return rg.ReversibleSequence([rg.two_stream(mlp(64), mlp(64)) for _ in range(6)]), torch.randn(4, 256, 64)


def wide_mlps() -> Made:
    """More bytes of parameters than of activations."""
    return rg.ReversibleSequence([rg.two_stream(mlp(128), mlp(128)) for _ in range(4)]), torch.randn(2, 64, 128)


def small_language_model() -> Made:
    return models.ReversibleLM(256, width=64, depth=5, heads=4), torch.randint(256, (4, 256))


RANKED: dict[str, Callable[[], Made]] = {
    "MLPs": few_mlps,
    "MLPs, few tokens": wide_mlps,
    "language model": small_language_model,
}
"""For several processes."""
