"""Generation of tokens one by one: the keys and values kept meanwhile, and the choice of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class KVCache:
    """The keys and values of the tokens seen so far, for each attention of a model.

    Give an empty one to a model's first call under `torch.no_grad()` and the same one to its further calls,
    each with the next tokens alone. `length` is the number of tokens seen.
    """

    def __init__(self) -> None:
        self.length = 0
        self._kept: dict[nn.Module, Tensor] = {}

    def extend(self, attention: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values `(batch, heads, new tokens, width)` of an attention; return all of them."""
        end = self.length + keys.shape[-2]
        kept = self._kept.get(attention)
        if kept is None or kept.shape[-2] < end:
            larger = keys.new_empty(2, *keys.shape[:-2], max(64, 2 * end), keys.shape[-1])
            if kept is not None:
                larger[..., : self.length, :] = kept[..., : self.length, :]
            kept = self._kept[attention] = larger
        kept[0, ..., self.length : end, :] = keys
        kept[1, ..., self.length : end, :] = values
        return kept[0, ..., :end, :], kept[1, ..., :end, :]

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen; the model does so at the end of a call."""
        self.length += tokens


def check_cache(cache: KVCache | None) -> None:
    if cache is not None and torch.is_grad_enabled():
        raise RuntimeError(
            f"A cache ({cache.length} tokens seen) was given while gradients are recorded. It is filled as branches "
            "run, and they run again in the backward pass, so that it cannot be used in training: call the model under "
            "torch.no_grad(), or leave the cache out."
        )


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest if `temperature` is 0, else at random, among the `top_k` likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: give 0 for the likeliest token, or a positive number.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: give 1 or more, or None for all tokens.")

    def choose(self, logits: Tensor) -> Tensor:
        """A token for each row of logits, `(batch, 1)`."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return logits.softmax(-1).multinomial(1, generator=self.generator)


def continued(tokens: Tensor, steps: int, logits: Callable[[Tensor], Tensor], sampling: Sampling) -> Tensor:
    """The tokens and `steps` more; `logits` is called with the tokens that it has not seen."""
    if tokens.ndim != 2 or tokens.shape[1] == 0 or tokens.is_floating_point():
        raise ValueError(
            f"The prompt has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; give whole numbers of shape "
            "(batch, length), with a length of 1 or more."
        )
    new, parts = tokens, [tokens]
    for _ in range(steps):
        new = sampling.choose(logits(new))
        parts.append(new)
    return torch.cat(parts, 1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards each of its modules is as it was."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
