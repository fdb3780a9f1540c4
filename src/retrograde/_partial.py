"""Partial replay: what is dear to compute and cheap to hold is kept, the rest of a branch runs again.

Attention over long sequences costs time that grows with their square, and its result is as large as a stream. Matrix
products are most of the rest of a transformer's time, and their results most of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Policy = Literal["attention", "products"] | Sequence[Any] | Callable[..., Any]
"""What a partial replay keeps of a branch: a name, operators (`torch.ops.aten.mm.default`), or a policy of torch's."""

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
)
_Operator = type(torch.ops.aten.mm.default)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution")
_NAMES = {"attention": _ATTENTION, "products": _ATTENTION + _PRODUCTS}


def check_keeps(keeps: Policy) -> Policy:
    """What was given, if it says what to keep."""
    if callable(keeps) or (isinstance(keeps, str) and keeps in _NAMES):
        return keeps
    if isinstance(keeps, (list, tuple)) and all(isinstance(operator, _Operator) for operator in keeps):
        return tuple(keeps)
    raise ValueError(
        f"keeps={keeps!r} is not known; give {', '.join(map(repr, _NAMES))}, a list of operators "
        "(torch.ops.aten.mm.default), or a policy as torch.utils.checkpoint takes it."
    )


class Keeping:
    """Contexts for a branch's first run, which keeps results, and for its replay, which takes them."""

    __slots__ = ("_runs", "first", "replay")

    def __init__(self, keeps: Policy) -> None:
        self._runs: list[Any] | None = None  # of the operators that are kept
        if not callable(keeps):
            self._runs = []
            keeps = _noting(keeps, self._runs)
        self.first, self.replay = create_selective_checkpoint_contexts(keeps)
        if hasattr(self.first, "respect_saved_tensors_hooks"):  # torch 2.15 asks; what is kept is not rebuilt
            self.first.respect_saved_tensors_hooks = False

    def found_nothing(self) -> bool:
        """Whether none of the operators ran. Of a user's policy nothing is known: it may decide anew each time."""
        return self._runs == []


def _noting(keeps: str | Sequence[Any], runs: list[Any]) -> Callable[..., CheckpointPolicy]:
    """A policy that keeps the results of some operators, and notes that they ran."""
    if isinstance(keeps, str):
        keeps = [getattr(torch.ops.aten, name).default for name in _NAMES[keeps] if hasattr(torch.ops.aten, name)]
    operators = frozenset(keeps)

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        runs.append(operator)
        return CheckpointPolicy.MUST_SAVE

    return policy
