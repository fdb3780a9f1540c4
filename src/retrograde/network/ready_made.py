"""Ready-made blocks of the literature: two streams, momentum, midpoint, grouped, and stage transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from retrograde.couplings import Coupling, Replace, Scaled

from .block import Block
from .branch import TakesArgument
from .save_ops import SaveOps
from .step import Step


def two_stream(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *,
    coupling: Coupling | None = None,
    takes: TakesArgument | Mapping[str, TakesArgument] = None,
    aux: Literal["f", "g"] | Sequence[Literal["f", "g"]] = (),
    compute: torch.dtype | None = None,
    save_ops: SaveOps = "attention",
) -> Block:
    """The block of RevNet and Reformer: `0 += f(1)`, then `1 += g(0)`.

    Args:
        coupling: how the updates enter both streams; additive by default.
        takes: the context that both branches receive, as in `Step`; or `{"f": ..., "g": ...}`
            to say it for each of them. By default what their signatures name.
        aux: which of the two return `(update, auxiliary loss)`, as in `aux="f"` or `aux=("f", "g")`.
        compute: the dtype that the branches compute in, if it differs from the streams'.
        save_ops: which results memory="selective" saves in both branches, as in `Step`.
    """
    each = isinstance(takes, Mapping) and set(takes) <= {"f", "g"}
    by_branch: Mapping[str, Any] = cast("Mapping[str, Any]", takes) if each else {"f": takes, "g": takes}
    if unknown := set(aux) - {"f", "g"}:
        raise ValueError(f"two_stream has the branches 'f' and 'g', but aux names {sorted(unknown)}.")
    return Block(
        *(
            Step(
                branch,
                target,
                (source,),
                coupling=coupling,
                takes=by_branch.get(name),
                aux=_aux(name in aux),
                compute=compute,
                save_ops=save_ops,
            )
            for branch, name, target, source in ((f, "f", 0, 1), (g, "g", 1, 0))
        )
    )


def _aux(has_loss: bool) -> Literal["none", "loss"]:
    return "loss" if has_loss else "none"


def momentum(f: Callable[..., Any], /, *, gamma: float = 0.9, takes: TakesArgument = None) -> Block:
    """A momentum residual block: `v = gamma v + (1 - gamma) f(x)`, then `x += v`.

    Stream 0 is x and stream 1 the velocity v. `split="first"` starts it at zero, and
    `merge="first"` returns x.
    """
    return Block(
        Step(f, target=1, sources=(0,), coupling=Scaled(keep=gamma, scale=1 - gamma), takes=takes),
        Step(_same, target=0, sources=(1,), name="velocity"),
    )


def midpoint(f: Callable[..., Any], /, *, step: float = 1.0, takes: TakesArgument = None) -> Block:
    """An explicit midpoint (leapfrog) block: `next = previous + 2 step f(current)`; the streams swap roles."""
    return Block(Step(f, target=0, sources=(1,), coupling=Scaled(scale=2 * step), takes=takes), order=(1, 0))


def grouped(*branches: Callable[..., Any], takes: TakesArgument = None) -> Block:
    """The grouped block of RevGNN: one stream per branch.

    The first branch reads the sum of the other streams; each further one reads the stream
    before it, already updated.
    """
    if len(branches) < 2:
        raise ValueError(f"A grouped block needs two branches or more, one per stream, not {len(branches)}.")
    others = range(1, len(branches))
    return Block(
        Step(branches[0], target=0, sources=tuple(others), reads="sum", takes=takes),
        *(Step(branches[i], target=i, sources=(i - 1,), takes=takes) for i in others),
    )


def transition(*branches: Callable[..., Any], takes: TakesArgument = None) -> Block:
    """A stage transition: each stream is replaced by its branch of it, in a new shape or width.

    It has no inverse: where the stack is reversed, it is checkpointed.
    """
    return Block(*(Step(b, target=i, sources=(i,), coupling=Replace(), takes=takes) for i, b in enumerate(branches)))


def _same(stream: Tensor) -> Tensor:
    return stream
