"""Partial replay: what is dear to compute and cheap to hold is kept, the rest of a branch runs again.

Attention over long sequences costs time that grows with their square, and its result is as large as a stream. Matrix
products are most of the rest of a transformer's time, and their results most of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ._torch_private import let_others_run, tree_flatten

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


_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_UNSAFE = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
"""Their results are views of which nothing is known: an edit of one raises no version of the other."""


class Keeping:
    """Contexts for a branch's first run, which keeps results, and for its replay, which takes them.

    A result that the branch edits later (relu_ after a product, the gates of a GRU) cannot be taken again, nor can one
    that drew random numbers: a replay that did not draw them would draw others after it. Such a branch keeps nothing.
    """

    __slots__ = ("_asks", "_notes", "first", "replay")

    def __init__(self, keeps: Policy) -> None:
        self._asks = callable(keeps)  # a policy of the user's, which may decide anew each time
        self._notes = _Notes()
        self.first, self.replay = create_selective_checkpoint_contexts(_noting(as_policy(keeps), self._notes))
        if hasattr(self.first, "respect_saved_tensors_hooks"):  # torch 2.15 asks; what is kept is not rebuilt
            self.first.respect_saved_tensors_hooks = False

    def end(self) -> Literal["kept", "nothing", "not this time"]:
        """After the first run: whether a replay can take results."""
        kept, self._notes.kept = self._notes.kept, []
        if kept and not self._notes.spoilt and all(tensor._version == seen for tensor, seen in kept):
            let_others_run(self.replay)
            return "kept"
        return "not this time" if self._asks else "nothing"


class _Notes:
    """What a first run keeps, each with its version, and whether a replay could not take it."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, int]] = []
        self.spoilt = False


def _noting(policy: Callable[..., Any], notes: _Notes) -> Callable[..., Any]:
    """The policy, with notes of what it keeps."""

    def noting(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator in _UNSAFE and any(_same_storage(args[0], kept) for kept, _ in notes.kept):
            notes.spoilt = True
        answer = policy(context, operator, *args, **kwargs)
        if answer in _SAVES:
            notes.spoilt = notes.spoilt or _draws(operator, args, kwargs)
            found = [value for value in tree_flatten(context.op_output)[0] if isinstance(value, Tensor)]
            notes.kept += [(tensor, tensor._version) for tensor in found]
        return answer

    return noting


def as_policy(keeps: Policy) -> Callable[..., Any]:
    """What to keep, as a policy of torch's selective checkpoint."""
    if callable(keeps):
        return keeps
    if isinstance(keeps, str):
        keeps = [getattr(torch.ops.aten, name).default for name in _NAMES[keeps] if hasattr(torch.ops.aten, name)]
    operators = frozenset(keeps)

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def keeping_nothing() -> Any:
    """A context in which a branch runs as it does where results are kept: torch takes other kernels there."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)[0]


def _draws(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention does if its dropout, its one number by position, is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    given = (*args, kwargs.get("dropout_p", 0.0))
    return "attention" not in str(operator) or any(isinstance(value, float) and value > 0 for value in given)


def _same_storage(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
