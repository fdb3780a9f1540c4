"""Small whole numbers packed into bytes: the bits that a coupling keeps aside."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, bits: int) -> Tensor:
    """Small whole numbers as bytes, of which each takes `bits`."""
    flat = values.reshape(-1).to(torch.uint8)
    if bits == 0:
        return flat.new_empty(0)
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for i in range(1, per_byte):
        packed |= padded[:, i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """The numbers that `pack` was given, as float64."""
    if bits == 0:
        return torch.zeros(shape, dtype=torch.float64, device=packed.device)
    mask = (1 << bits) - 1
    flat = torch.stack([(packed >> (bits * i)) & mask for i in range(8 // bits)], dim=1).reshape(-1)
    return flat[: shape.numel()].view(shape).double()
