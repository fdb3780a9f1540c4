"""Computing in chunks: what is large for all tokens together is never allocated for all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.engine.torch_internals import inside_function_transform
from retrograde.network.choices import check_choice
from retrograde.network.ready_made import transition
from retrograde.sequence import ReversibleSequence

Reduction = Literal["mean", "sum", "none"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without the logits of all tokens.

    The logits are computed for `chunk_size` tokens at a time, in the forward pass and again in the backward pass: the
    peak holds one chunk of them, at the cost of one more product with the weight. Losses are computed in float32 where
    the logits have lower precision. Second derivatives are right, but take the memory of all logits.

    Args:
        hidden: the hidden states, `(..., width)`.
        weight: of the linear head, `(classes, width)`.
        target: the class of each token, `(...)`.
        bias: of the linear head, `(classes,)`.
        ignore_index, label_smoothing, reduction: as in `torch.nn.functional.cross_entropy`.

    Examples:
        >>> import torch
        >>> from retrograde.models import chunked_cross_entropy
        >>> hidden, weight = torch.randn(2, 9, 16), torch.randn(1000, 16)
        >>> target = torch.randint(1000, (2, 9))
        >>> loss = chunked_cross_entropy(hidden, weight, target, chunk_size=4)
        >>> plain = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten())
        >>> torch.allclose(loss, plain)
        True
    """
    _check(hidden, weight, target, reduction)
    head = _Head(_at_least_one("chunk_size", chunk_size), ignore_index, label_smoothing)
    arguments = (hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1), head)
    apply = _all_losses if inside_function_transform() else _ChunkedLosses.apply
    losses: Tensor = apply(*arguments)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


class _Head(NamedTuple):
    """The options of a linear head with cross-entropy."""

    chunk_size: int
    ignore_index: int
    label_smoothing: float

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, target, reduction="none", ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )

    def slopes(self, odds: Tensor, target: Tensor, grad: Tensor) -> Tensor:
        """The gradient to the logits, whose softmax is `odds`, where `grad` is that to the losses."""
        counts = target != self.ignore_index
        index = target.where(counts, 0)[:, None]
        odds = odds.scatter_add(1, index, odds.new_full(index.shape, self.label_smoothing - 1))
        if self.label_smoothing:
            odds = odds - self.label_smoothing / odds.shape[-1]
        return odds * (grad * counts)[:, None]


def _all_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head) -> Tensor:
    parts = zip(hidden.split(head.chunk_size), target.split(head.chunk_size), strict=True)
    return torch.cat([head.losses(_wide(F.linear(h, weight, bias)), t) for h, t in parts])


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _ChunkedLosses(torch.autograd.Function):
    """The loss of each token. Its backward consists of differentiable operators, so it can be differentiated too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.head, ctx.dtype = head, _working_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):  # so that the weight is cast once, not once per chunk
            shift = None if bias is None else bias.to(ctx.dtype)
            return _all_losses(hidden.to(ctx.dtype), weight.to(ctx.dtype), shift, target, head)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        size, dtype = ctx.head.chunk_size, ctx.dtype
        to_hidden: list[Tensor] = []
        to_weight = torch.zeros_like(weight) if wants_weight else None
        to_bias = torch.zeros_like(bias) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            used = weight.to(dtype)
            shift = None if bias is None else bias.to(dtype)
            for h, t, g in zip(hidden.split(size), target.split(size), grads[0].split(size), strict=True):
                read = h.to(dtype)
                slopes = ctx.head.slopes(_wide(F.linear(read, used, shift)).softmax(-1), t, g)
                if to_bias is not None:
                    to_bias += slopes.sum(0)
                slopes = slopes.to(dtype)
                if to_weight is not None:
                    to_weight += slopes.T @ read
                if wants_hidden:
                    to_hidden.append((slopes @ used).to(hidden.dtype))
                del slopes  # before the next chunk is allocated
        return torch.cat(to_hidden) if wants_hidden else None, to_weight, to_bias, None, None


def _working_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a product with `hidden`: under autocast a lower one, except for float64."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class ChunkedFeedForward(nn.Module):
    """Runs a module on chunks of its input along `dim`, and never holds the activations of more than one chunk.

    For branches that treat all entries of `dim` the same way (a feed-forward and its tokens): their wide inner
    activations set the peak of a transformer step. Each chunk is checkpointed: the backward pass runs it once more.

    Args:
        module: a module of one tensor, or a bound method, whose module is then not registered here.
        chunks: how many chunks; fewer if `dim` is shorter than that.
        dim: the dimension that is cut and concatenated.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.models import ChunkedFeedForward
        >>> wide = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> block = rg.two_stream(torch.nn.Linear(8, 8), ChunkedFeedForward(wide, chunks=4))
        >>> rg.ReversibleSequence([block])(torch.randn(2, 10, 8)).shape
        torch.Size([2, 10, 8])
    """

    def __init__(self, module: Callable[[Tensor], Tensor], chunks: int, dim: int = 1) -> None:
        super().__init__()
        self.chunks = _at_least_one("chunks", chunks)
        self.dim = dim
        # The last step of a stack keeps its graph: an empty step after the module, so that the module's is not kept.
        blocks = [transition(module), transition(nn.Identity())]
        self.stack = ReversibleSequence(blocks, merge="first", memory="checkpoint")

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.stack(chunk) for chunk in x.chunk(self.chunks, self.dim)], self.dim)

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, dim={self.dim}"


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value}: give a whole number of 1 or more.")
    return value


def _check(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> None:
    check_choice("reduction", reduction, get_args(Reduction))
    if target.is_floating_point():
        raise TypeError(
            f"The target has dtype {target.dtype}, which would mean probabilities; chunked_cross_entropy takes the "
            "number of each token's class. For probabilities, use torch.nn.functional.cross_entropy."
        )
    if hidden.shape[:-1] != target.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} do not fit: "
            "give hidden (..., width), weight (classes, width) and target (...)."
        )
