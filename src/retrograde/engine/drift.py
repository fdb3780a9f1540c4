"""How far recomputed tensors are from the true ones: the one measure of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def relative_error(given: Tensor | Sequence[Tensor], true: Tensor | Sequence[Tensor]) -> float:
    """The size of the difference in units of the true size, of all tensors together.

    In units of 1 where the true ones are all zero, as a velocity is at its start. Infinite where it is not a number.
    """
    given = [given] if isinstance(given, Tensor) else given
    true = [true] if isinstance(true, Tensor) else true
    difference = norm(_wide(a) - _wide(b) for a, b in zip(given, true, strict=True))
    size = norm(true) or math.sqrt(sum(tensor.numel() for tensor in true)) or 1.0
    error = difference / size
    return error if error == error else math.inf


def worst_error(given: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """The largest relative error of any pair: the drift of streams."""
    return max(relative_error(a, b) for a, b in zip(given, true, strict=True))


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors together."""
    return math.sqrt(sum(float(_wide(tensor).square().sum()) for tensor in tensors))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
