"""Hugging Face Transformers architectures as tiny models with random weights, with batches and lists to convert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from small_models import Batch, _text

WORDS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**WORDS, **WIDTHS, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
GPT = {**WORDS, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64}
IMAGE = {**WIDTHS, "image_size": 16, "patch_size": 4, "num_labels": 3}
STATES = {**WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 3}
PAIR = {
    **WORDS, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    **WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
AUDIO = {
    **WIDTHS, "vocab_size": 64, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "pad_token_id": 0,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
STAGES = {"embed_dim": 8, "depths": [2, 3], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 2}
NO_GATE = {"num_labels": 3, "depths": [2, 2], "num_encoder_blocks": 2, "hidden_sizes": [8, 16]}
LAYERS = ("model.encoder.layers", "model.decoder.layers")
BLOCKS = ("encoder.block[1:]", "decoder.block[1:]")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _unmasked() -> Batch:
    """Without padding, for which Longformer itself returns NaN in float64."""
    text = _text()
    return {"input_ids": text["input_ids"], "labels": text["input_ids"]}


def _pairs() -> Batch:
    text = _text()
    return {**text, "labels": text["labels"][:, :6].contiguous()}


def _pixels(size: int = 16) -> Batch:
    return {"pixel_values": _random(3, 3, size, size), "labels": torch.tensor([0, 1, 2])}


def _sound() -> Batch:
    mask = torch.ones(3, 160, dtype=torch.long)
    mask[0, 100:] = 0
    return {"input_values": _random(3, 160), "attention_mask": mask, "labels": _text()["labels"][1:2, :4].expand(3, 4)}


@dataclass(frozen=True)
class Architecture:
    """A model's class, its config's values, its batch, and the lists of layers to convert."""

    model: str
    config: dict[str, Any]
    batch: Callable[[], Batch] = _text
    layers: tuple[str | None, ...] = (None,)
    text: bool = field(default=False, kw_only=True)  # whether it generates

    def make(self) -> tuple[nn.Module, Batch]:
        tf = pytest.importorskip("transformers")
        torch.manual_seed(0)
        model = getattr(tf, self.model)
        return model(model.config_class(**self.config)), self.batch()


def _causal(model: str, config: dict[str, Any], **changes: Any) -> Architecture:
    return Architecture(f"{model}ForCausalLM", {**config, **changes}, text=True)


ARCHITECTURES: dict[str, Architecture] = {
    "mistral": _causal("Mistral", GROUPED, sliding_window=4),
    "mixtral": _causal("Mixtral", EXPERTS, num_local_experts=4),
    "qwen3": _causal("Qwen3", GROUPED, head_dim=4),
    "gemma2": _causal("Gemma2", GROUPED, head_dim=4, sliding_window=4),
    "phi": _causal("Phi", GROUPED),
    "gpt-neox": _causal("GPTNeoX", TEXT),
    "gpt-j": _causal("GPTJ", GPT, rotary_dim=4),
    "codegen": _causal("CodeGen", GPT, rotary_dim=4),
    "openai-gpt": Architecture("OpenAIGPTLMHeadModel", GPT, text=True),
    "opt": _causal("OPT", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "bloom": _causal("Bloom", WORDS, hidden_size=16, n_layer=3, n_head=2),
    "falcon": _causal("Falcon", TEXT),
    "mpt": _causal("Mpt", WORDS, d_model=16, n_layers=3, n_heads=2, max_seq_len=64),
    "mamba": _causal("Mamba", STATES, time_step_rank=2),
    "jamba": Architecture(
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        layers=("model.layers",),
    ),
    "deberta": Architecture("DebertaForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "distilbert": Architecture(
        "DistilBertForMaskedLM", {"vocab_size": 64, "dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2}
    ),
    "modernbert": Architecture(
        "ModernBertForMaskedLM", {**TEXT, "cls_token_id": 0, "sep_token_id": 0, "local_attention": 4}
    ),
    "longformer": Architecture("LongformerForMaskedLM", {**TEXT, "attention_window": 4}, _unmasked),
    "mpnet": Architecture("MPNetForMaskedLM", TEXT),
    "funnel": Architecture(
        "FunnelForMaskedLM",
        {"vocab_size": 64, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [2, 2]},
        layers=("funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"),
    ),
    "t5": Architecture("T5ForConditionalGeneration", T5, _pairs, BLOCKS, text=True),
    "bart": Architecture("BartForConditionalGeneration", PAIR, _pairs, LAYERS, text=True),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
        lambda: {"input_features": _random(3, 8, 40), "labels": _pairs()["labels"]},
        LAYERS,
    ),
    "beit": Architecture("BeitForImageClassification", {**IMAGE, "drop_path_rate": 0.3}, _pixels),
    "dinov2": Architecture("Dinov2WithRegistersForImageClassification", IMAGE, _pixels),
    "swin": Architecture(
        "SwinForImageClassification",
        {**STAGES, "num_labels": 3},
        lambda: _pixels(32),
        ("swin.encoder.layers.0.blocks", "swin.encoder.layers.1.blocks"),
    ),
    "poolformer": Architecture(
        "PoolFormerForImageClassification",
        {**NO_GATE, "patch_sizes": [4, 2], "strides": [4, 2], "padding": [0, 0]},
        lambda: _pixels(32),
        ("poolformer.encoder.block.0", "poolformer.encoder.block.1"),
    ),
    "wav2vec2": Architecture("Wav2Vec2ForCTC", AUDIO, _sound),
    "wavlm": Architecture("WavLMForCTC", AUDIO, _sound, ("wavlm.encoder.layers[1:]",)),
}
