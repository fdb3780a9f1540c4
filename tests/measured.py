"""Stacks whose bytes are counted: blocks of attention and an MLP, and one training step of them, measured."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.tape import Tape
from retrograde.measure import Event, MemoryTracker

WIDTH = 16
SHAPE = (4, 128, WIDTH)  # many rows for a small width: a parameter's gradient is small beside a stream
STREAM = 4 * 128 * WIDTH * 4
S = 2 * STREAM


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, 3 * width)
        self.write = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.read(self.norm(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.dropout(self.write(mixed))


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def dropping_gradients(model: nn.Module) -> nn.Module:
    """The model, with each parameter's gradient dropped as soon as it is complete."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def stack(depth: int, memory: Any = "reverse", *, width: int = WIDTH, dropout: float = 0.0) -> rg.ReversibleSequence:
    blocks = [
        rg.two_stream(Attention(width, dropout=dropout), FeedForward(width, dropout=dropout)) for _ in range(depth)
    ]
    sequence = rg.ReversibleSequence(blocks, memory=memory)
    dropping_gradients(sequence)
    return sequence


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that saves nothing of the output, and gives each stream of a stack a gradient of its own."""
    outputs = model.run(x) if isinstance(model, rg.ReversibleSequence) else (model(x),)
    return torch.stack([(y * torch.full((), 0.5 + i)).sum() for i, y in enumerate(outputs)]).sum()


class Measured(NamedTuple):
    held: int
    """After the forward pass, with the loss in hand."""
    forward_peak: int
    backward_peak: int
    left: int
    """After the backward pass, once the loss and the input's gradient are dropped."""


def measure(model: nn.Module, events: list[Event] | None = None) -> Measured:
    x = torch.randn(SHAPE, requires_grad=True)
    with MemoryTracker(ignore=[model, x], events=events) as memory:
        with memory.phase("forward") as forward:
            loss = loss_of(model, x)
        held = memory.live
        with memory.phase("backward") as backward:
            loss.backward()
        x.grad = None
        del loss
    return Measured(held, forward.peak, backward.peak, memory.live)


def live_tapes() -> int:
    """How many tapes there are in this process; tests before this one may hold some."""
    return sum(issubclass(type(thing), Tape) for thing in gc.get_objects())
