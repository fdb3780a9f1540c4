"""How far one list of tensors is from another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from retrograde._guard import norm, relative_error


def rms(tensors: Sequence[Tensor]) -> float:
    """The root mean square of all entries."""
    return norm(tensors) / math.sqrt(max(sum(t.numel() for t in tensors), 1))


def compared(found: Sequence[Tensor], true: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """The relative error between two lists of gradients, and the cosine of the angle between them."""
    if not true:
        return None, None
    a = torch.cat([t.detach().double().flatten() for t in found])
    b = torch.cat([t.detach().double().flatten() for t in true])
    sizes = float(a.norm() * b.norm())
    cosine = float(a @ b) / sizes if sizes else float(bool((a == b).all()))
    return relative_error([a], [b]), max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else cosine


def worst(values: Iterable[float | None]) -> float | None:
    """The largest of the values that are known; NaN is worse than any."""
    known = [v for v in values if v is not None]
    return max(known, key=lambda v: math.inf if math.isnan(v) else v, default=None)


def noise_like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same random numbers each time, drawn from no generator of anybody else."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in tensors)
