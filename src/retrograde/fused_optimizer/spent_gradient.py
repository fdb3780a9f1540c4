"""The placeholder that a fused optimiser puts into `parameter.grad`, and its error messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class SpentGradient(Tensor):
    """The placeholder of a gradient that a fused optimiser has used. It has a shape and no values."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} needs a gradient that was freed: a FusedOptimizer stepped the parameter as soon as its gradient "
            "was complete. Call optimizer.step() after every backward pass; gradients of several passes cannot be "
            "added up. Clip with the optimiser's clip_value or clip_norm, not after the backward pass. To inspect "
            "them, use parameter.register_hook. DistributedDataParallel and GradScaler need all gradients at once: "
            "use an ordinary optimiser with them."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)})"


def check_clipping(clip_value: float | None, clip_norm: float | None) -> None:
    if clip_value is not None and clip_norm is not None:
        raise ValueError(f"clip_value={clip_value} and clip_norm={clip_norm}: choose one way to clip.")
    for name, value in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: give a number above 0, or None not to clip.")


def twice(which: str) -> RuntimeError:
    return RuntimeError(
        f"A FusedOptimizer got a second gradient for a parameter, {which}, before step() was called, and has stepped "
        "it with the first. Call step() after every backward pass. Gradients of several passes cannot be added up: use "
        "one pass over a larger batch, or an ordinary optimiser. (A weight that two reentrant checkpoints share gets "
        "two gradients in one pass; use_reentrant=False gives it one.)"
    )


def shared(which: str) -> RuntimeError:
    return RuntimeError(
        f"Two FusedOptimizers have the same parameter, {which}, and the other one has used its gradient. Call detach() "
        "on the one that is no longer needed."
    )


def unmeasured(which: str) -> RuntimeError:
    return RuntimeError(
        f"A parameter, {which}, has a gradient that was not part of norm_pass(), so the norm is not that of all "
        "gradients. Differentiate the same loss in norm_pass() and after it."
    )
