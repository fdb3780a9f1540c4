"""Generation of tokens one by one: the cache of keys and values, and the sampling of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class KVCache:
    """The keys and values of the tokens seen so far, for each attention of a model.

    Give an empty one to a model's first call under `torch.no_grad()` and the same one to its further calls,
    each with only the next tokens. `length` is the number of tokens seen.
    """

    def __init__(self) -> None:
        self.length = 0
        self._buffers: dict[nn.Module, Tensor] = {}

    def extend(self, attention: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values `(batch, heads, new tokens, width)` of an attention; return all of them."""
        end = self.length + keys.shape[-2]
        buffer = self._buffers.get(attention)
        if buffer is None or buffer.shape[-2] < end:
            larger = keys.new_empty(2, *keys.shape[:-2], max(64, 2 * end), keys.shape[-1])
            if buffer is not None:
                larger[..., : self.length, :] = buffer[..., : self.length, :]
            buffer = self._buffers[attention] = larger
        buffer[0, ..., self.length : end, :] = keys
        buffer[1, ..., self.length : end, :] = values
        return buffer[0, ..., :end, :], buffer[1, ..., :end, :]

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen; the model does so at the end of a call."""
        self.length += tokens


def positions_of(tokens: Tensor, cache: KVCache | None = None) -> Tensor:
    """The positions of a call's tokens, which follow those that the cache has seen."""
    if cache is not None and torch.is_grad_enabled():
        raise RuntimeError(
            f"A cache ({cache.length} tokens seen) was given while gradients are recorded. Branches fill it as they "
            "run, and they run again in the backward pass, so it cannot be used in training: call the model under "
            "torch.no_grad(), or omit the cache."
        )
    start = 0 if cache is None else cache.length
    return torch.arange(start, start + tokens.shape[-1], device=tokens.device)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest if `temperature` is 0, otherwise at random among the `top_k` likeliest."""

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
    """The tokens and `steps` more; `logits` is called with those that it has not seen."""
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
    """The model in evaluation mode and without gradients; afterwards each module has its training flag back.

    Not `engine.preserve`, which would restore the RNG state that sampling must advance.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
