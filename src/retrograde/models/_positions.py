"""Positions of tokens: rotary angles for attention, and sinusoids to be added to an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""The cosines and sines of each position, `(length, head width / 2)`."""


def rotary_angles(positions: Tensor, head_width: int, base: float = 10_000.0) -> Rotary:
    """The rotary embedding of positions (Su et al., "RoFormer", 2021), in float32 whatever the model's precision."""
    if head_width % 2:
        raise ValueError(f"Rotary positions turn pairs of entries, but a head has {head_width}: make it even.")
    angles = positions.float()[:, None] * _frequencies(head_width // 2, base, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs `(i, i + head width / 2)` of `(..., length, head width)` by the angles of their positions."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def sinusoids(x: Tensor) -> Tensor:
    """Sinusoidal positions for `(..., length, width)` (Vaswani et al., 2017), to be added to it."""
    length, width = x.shape[-2:]
    positions = torch.arange(length, device=x.device).float()[:, None]
    angles = positions * _frequencies((width + 1) // 2, 10_000.0, x.device)
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(x.dtype)


def _frequencies(count: int, base: float, device: torch.device) -> Tensor:
    return torch.pow(base, -torch.arange(count, device=device).float() / count)
