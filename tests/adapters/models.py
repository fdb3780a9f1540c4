"""The published models under test, small, with the loss each is trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from published import Twins


def routing_lm(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {
        "num_tokens": 64,
        "dim": 32,
        "depth": 3,
        "max_seq_len": 64,
        "heads": 4,
        "dim_head": 8,
        "window_size": 16,
        "local_attn_window_size": 16,
        "causal": True,
        "reversible": True,
        "_register_kmeans_update": False,
        "ff_dropout": dropout,
        "attn_dropout": dropout,
        "attn_layer_dropout": dropout,
    }
    return wake(package.RoutingTransformerLM(**{**settings, **options}))


def routing_encoder_decoder(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    each = {
        "num_tokens": 80,
        "depth": 2,
        "max_seq_len": 64,
        "heads": 4,
        "dim_head": 8,
        "window_size": 16,
        "reversible": True,
    }
    each |= {"ff_dropout": dropout, "attn_dropout": dropout}
    settings = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in each.items()}
    return package.RoutingTransformerEncDec(dim=32, **{**settings, **options})


def reformer_lm(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {
        "num_tokens": 64,
        "dim": 32,
        "depth": 3,
        "max_seq_len": 64,
        "heads": 4,
        "dim_head": 8,
        "bucket_size": 8,
        "n_hashes": 2,
        "ff_chunks": 2,
        "causal": True,
        "lsh_dropout": dropout,
        "ff_dropout": dropout,
    }
    return wake(package.ReformerLM(**{**settings, **options}))


def axial_image(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {"dim": 12, "depth": 2, "heads": 3, "reversible": True, "axial_pos_emb_shape": (6, 6)}
    return package.AxialImageTransformer(**{**settings, **options})


def lie(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {
        "dim": 16,
        "num_tokens": 10,
        "depth": 3,
        "heads": 2,
        "dim_head": 8,
        "nbhd": 6,
        "liftsamples": 2,
        "reversible": True,
    }
    return package.LieTransformer(**{**settings, **options})


def lie_with_edges(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    return lie(package, **{"num_edge_types": 4, "edge_dim": 3, **options})


def _vae(package: Any) -> nn.Module:
    return package.VQGanVAE(
        dim=16,
        image_size=16,
        num_layers=2,
        vq_codebook_size=16,
        vq_codebook_dim=8,
        use_attn=False,
        use_vgg_and_gan=False,
    )


_TEXT_TO_VIDEO: dict[str, Any] = {
    "dim": 16,
    "max_video_frames": 3,
    "text_num_tokens": 20,
    "text_max_seq_len": 6,
    "text_enc_depth": 2,
    "text_enc_dim_head": 4,
    "text_enc_heads": 2,
    "dec_depth": 3,
    "dec_dim_head": 4,
    "dec_heads": 2,
    "enc_reversible": True,
    "dec_reversible": True,
}


def nuwa(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {**_TEXT_TO_VIDEO, "attn_dropout": dropout, "ff_dropout": dropout, **options}
    return package.NUWA(vae=_vae(package), **settings)


def nuwa_video_audio(package: Any, dropout: float = 0.0, **options: Any) -> nn.Module:
    settings = {
        "image_size": 16,
        "num_audio_tokens": 12,
        "num_audio_tokens_per_video_frame": 2,
        "cross_modality_attn_every": 2,
        "attn_dropout": dropout,
        "ff_dropout": dropout,
        "sparse_3dna_rel_pos_bias": False,  # theirs works for a batch of one only
    }
    return package.NUWAVideoAudio(vae=_vae(package), **{**_TEXT_TO_VIDEO, **settings, **options})


def wake(model: nn.Module) -> nn.Module:
    """ReZero starts its branches at zero, where most gradients vanish."""
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "ReZero":
                next(iter(module.parameters(recurse=False))).fill_(0.7)
    return model


def _tokens(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def language_loss(model: Any, seed: int = 0) -> Tensor:
    """Squared logits, plus the weighted auxiliary loss if there is one."""
    out = model(_tokens(64, 2, 64, seed=seed))
    if isinstance(out, tuple):
        return out[0].square().mean() + 100 * out[1].sum()
    return out.square().mean()


def _distinct(high: int, batch: int, length: int) -> Tensor:
    """No token twice. Equal tokens without positions are tied in k-means, and rounding unties them."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([1 + torch.randperm(high - 1, generator=generator)[:length] for _ in range(batch)])


def translation_loss(model: Any, make: Callable[..., Tensor] = _distinct) -> Tensor:
    mask = torch.ones(2, 64).bool()
    loss, aux = model(make(80, 2, 64), make(80, 2, 65), return_loss=True, enc_input_mask=mask)
    return (loss + aux).sum()


def translation_loss_of_equal_tokens(model: Any) -> Tensor:
    return translation_loss(model, _tokens)


def image_loss(model: Any) -> Tensor:
    image = torch.randn(2, 12, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model(image.to(_dtype(model))).square().mean()


def cloud_loss(model: Any, coords: Tensor | None = None) -> Tensor:
    mask = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    if coords is None:
        coords = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edges = _tokens(4, 2, 8, 8) if model.edge_emb is not None else None
    return model(_tokens(10, 2, 8), coords.to(_dtype(model)), edges=edges, mask=mask).square().mean()


def video_loss(model: Any, **options: Any) -> Tensor:
    return model(text=_tokens(20, 2, 6), video=_tokens(16, 2, 3, 4, 4), return_loss=True, **options)


def video_audio_loss(model: Any, **options: Any) -> Tensor:
    return video_loss(model, audio=_tokens(12, 2, 6), **options)


@dataclass(frozen=True)
class Model:
    """A published model: its package, how it is made, its loss, and what embeds its input."""

    package: str
    make: Callable[..., nn.Module]
    loss: Callable[[Any], Tensor]
    embeddings: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def freeze_embeddings(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(self.embeddings):
                parameter.requires_grad_(False)


MODELS = {
    "routing": Model("routing_transformer", routing_lm, language_loss, ("token_emb",)),
    "lie": Model("lie_transformer_pytorch", lie_with_edges, cloud_loss, ("token_emb", "edge_emb")),
    "nuwa": Model("nuwa_pytorch", nuwa, video_loss, ("text_emb", "image_emb", "video_bos", "video_pos")),
    "video-audio": Model(
        "nuwa_pytorch",
        nuwa_video_audio,
        video_audio_loss,
        ("text_", "image_emb", "video_bos", "video_pos", "audio_bos", "audio_pos", "audio_emb"),
    ),
    "axial": Model("axial_attention", axial_image, image_loss, ("pos_emb",)),
    "reformer": Model("reformer_pytorch", reformer_lm, language_loss, ("token_emb",)),
}


class _DoubleTorch:
    """torch, in which float32 means float64: nuwa's attention asks for float32 whatever the model's dtype."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(twins: Twins) -> Iterator[None]:
    """Let a package's model compute in float64 throughout."""
    modules = [vars(package).get("nuwa_pytorch") for package in (twins.published, twins.ours)]
    for module in modules:
        if module is not None:
            module.torch = _DoubleTorch()
    try:
        yield
    finally:
        for module in modules:
            if module is not None:
                module.torch = torch
