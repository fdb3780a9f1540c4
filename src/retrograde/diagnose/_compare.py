"""What the doctor compares besides `engine.drift`: directions of gradients, and sizes of streams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from retrograde.engine.drift import norm, relative_error


def rms(tensors: Sequence[Tensor]) -> float:
    """The root mean square of all entries."""
    return norm(tensors) / math.sqrt(max(sum(t.numel() for t in tensors), 1))


def compared(gradients: Sequence[Tensor], true: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """The relative error of gradients, and the cosine of the angle between them and the true ones."""
    if not true:
        return None, None
    a = torch.cat([t.detach().double().flatten() for t in gradients])
    b = torch.cat([t.detach().double().flatten() for t in true])
    sizes = float(a.norm() * b.norm())
    cosine = float(a @ b) / sizes if sizes else float(bool((a == b).all()))
    return relative_error([a], [b]), max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else cosine


def worst(values: Iterable[float | None]) -> float | None:
    """The largest of the values that are there."""
    return max((value for value in values if value is not None), default=None)
