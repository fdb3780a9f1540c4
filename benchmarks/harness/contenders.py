"""The contenders: plain autograd, retrograde in its memory modes, and torch's checkpoint. Peers are in peers.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import retrograde as rg

from .settings import Network

Run = Callable[[Tensor], Tensor]
Family = Literal["plain", "retrograde", "torch", "peer"]
Arithmetic = Literal["two streams", "momentum"]

BASELINES: dict[Arithmetic, str] = {"two streams": "plain", "momentum": "plain momentum"}
PAIR = "plain, a pair"
REVERSE = "retrograde reverse"
EXACT = "retrograde exact"
GAMMA = 0.9


@dataclass(frozen=True)
class Contender:
    """A way to run the network.

    `package` is what it needs from PyPI.
    """

    name: str
    family: Family
    build: Callable[[Network], Run]
    package: str = ""
    arithmetic: Arithmetic = "two streams"
    note: str = ""


def plain(network: Network) -> Run:
    pairs, dim = network.pairs, network.dim

    def run(x: Tensor) -> Tensor:
        both = torch.cat([x, x], dim)
        for f, g in pairs:
            first, second = both.chunk(2, dim)
            first = first + f(second)
            second = second + g(first)
            both = torch.cat([first, second], dim)
        return merge(both, dim)

    return run


def pair(network: Network) -> Run:
    pairs = network.pairs

    def run(x: Tensor) -> Tensor:
        first, second = block_range(pairs, x, x)
        return (first + second) / 2

    return run


def merge(both: Tensor, dim: int) -> Tensor:
    first, second = both.chunk(2, dim)
    return (first + second) / 2


def block_range(pairs: Sequence[tuple[nn.Module, nn.Module]], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    for f, g in pairs:
        first = first + f(second)
        second = second + g(first)
    return first, second


def plain_momentum(network: Network) -> Run:
    branches = network.branches

    def run(x: Tensor) -> Tensor:
        velocity = torch.zeros_like(x)
        for branch in branches:
            velocity = GAMMA * velocity + (1 - GAMMA) * branch(x)
            x = x + velocity
        return x

    return run


def retrograde(plan: Callable[[int], Any], **options: Any) -> Callable[[Network], Run]:
    """retrograde with the memory that `plan` gives a stack of that depth."""

    def build(network: Network) -> Run:
        blocks = [rg.two_stream(f, g) for f, g in network.pairs]
        return rg.ReversibleSequence(blocks, dim=network.dim, memory=plan(len(blocks)), **options)

    return build


def last_stored(share: float) -> Callable[[int], list[str]]:
    """The last blocks stored, the others reversed: backward has freed the stored ones when it starts to recompute."""

    def plan(depth: int) -> list[str]:
        stored = max(1, round(share * depth))
        return ["reverse"] * (depth - stored) + ["store"] * stored

    return plan


def retrograde_momentum(network: Network) -> Run:
    blocks = [rg.momentum(branch, gamma=GAMMA) for branch in network.branches]
    return rg.ReversibleSequence(blocks, split="first", merge="first", dim=network.dim)


def torch_checkpoint(*, use_reentrant: bool, segments: Callable[[int], int] = lambda depth: depth) -> Any:
    """torch.utils.checkpoint around each of so many segments of the blocks."""

    def build(network: Network) -> Run:
        from torch.utils.checkpoint import checkpoint

        size = math.ceil(len(network.pairs) / segments(len(network.pairs)))
        parts = [network.pairs[i : i + size] for i in range(0, len(network.pairs), size)]

        def run(x: Tensor) -> Tensor:
            first = second = x
            for part in parts:
                streams: Any = checkpoint(block_range, part, first, second, use_reentrant=use_reentrant)
                first, second = streams
            return (first + second) / 2

        return run

    return build


def _root(depth: int) -> int:
    return max(1, round(math.sqrt(depth)))


OURS_AND_TORCH = (
    Contender("plain", "plain", plain, note="stored activations, both streams in one tensor: the baseline"),
    Contender(PAIR, "plain", pair, note="stored activations, without concatenation"),
    Contender("retrograde store", "retrograde", retrograde(lambda _: "store")),
    Contender("retrograde, half stored", "retrograde", retrograde(last_stored(1 / 2)), note="the last half of them"),
    Contender("retrograde, quarter stored", "retrograde", retrograde(last_stored(1 / 4)), note="the last quarter"),
    Contender("retrograde checkpoint", "retrograde", retrograde(lambda _: "checkpoint")),
    Contender(REVERSE, "retrograde", retrograde(lambda _: "reverse")),
    Contender(EXACT, "retrograde", retrograde(lambda _: "reverse", exact=True), note="reverse, bit-identical inverse"),
    Contender("checkpoint, non-reentrant", "torch", torch_checkpoint(use_reentrant=False), note="torch.utils"),
    Contender("checkpoint, reentrant", "torch", torch_checkpoint(use_reentrant=True), note="torch.utils"),
    Contender(
        "checkpoint, √n segments", "torch", torch_checkpoint(use_reentrant=False, segments=_root), note="torch.utils"
    ),
    Contender("plain momentum", "plain", plain_momentum, arithmetic="momentum", note="v = 0.9 v + 0.1 f(x), x += v"),
    Contender("retrograde momentum", "retrograde", retrograde_momentum, arithmetic="momentum"),
)
