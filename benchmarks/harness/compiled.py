"""torch.compile: plain autograd as a whole, with an activation budget, and branches or blocks compiled one by one.

Each takes tens of seconds to compile, so they run in one setting only.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

from .contenders import OURS_AND_TORCH, PAIR, REVERSE, Contender, Run, block_range
from .peers import PEERS
from .settings import Network, Pairs


def with_own_code(run: Any) -> Any:
    """The function with a code object of its own: the compiler caches by code object."""
    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def whole(budget: float) -> Callable[[Network], Run]:
    """Plain autograd as one compiled graph that saves at most this fraction of its activations."""

    def build(network: Network) -> Run:
        import torch._functorch.config as config  # the only place of the budget, as read in torch 2.13

        compiled = torch.compile(with_own_code(_unrolled(network)), fullgraph=True)
        with config.patch(activation_memory_budget=budget):
            compiled(network.x).sum().backward()
        return compiled

    return build


def _unrolled(network: Network) -> Run:
    pairs = network.pairs

    def run(x: Tensor) -> Tensor:
        first = second = x
        for f, g in pairs:
            first = first + f(second)
            second = second + g(first)
        return (first + second) / 2

    return run


def compiled_branches(network: Network) -> list[nn.Module]:
    return [torch.compile(branch) for branch in network.branches]


def compiled_reverse(network: Network) -> Run:
    branches = compiled_branches(network)
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    return rg.ReversibleSequence(blocks, dim=network.dim)


def by_rule(network: Network) -> Run:
    """The stack in one compiled graph, cut by the rule of our backend."""
    blocks = [rg.two_stream(f, g) for f, g in network.pairs]
    return torch.compile(rg.ReversibleSequence(blocks, dim=network.dim), backend="retrograde", fullgraph=True)


def checkpoint_of_compiled_blocks(network: Network) -> Run:
    from torch.utils.checkpoint import checkpoint

    block: Any = torch.compile(with_own_code(block_range))
    parts: list[Pairs] = [[pair] for pair in network.pairs]

    def run(x: Tensor) -> Tensor:
        first = second = x
        for part in parts:
            first, second = checkpoint(block, part, first, second, use_reentrant=False)
        return (first + second) / 2

    return run


_EAGER = {"plain", PAIR, REVERSE, "checkpoint, non-reentrant", "RevTorch"}

COMPILED_CONTENDERS = (
    *(contender for contender in (*OURS_AND_TORCH, *PEERS) if contender.name in _EAGER),
    Contender("compiled plain", "plain", whole(1.0), note="the whole stack in one graph"),
    Contender("compiled, budget 0.5", "torch", whole(0.5), note="activation_memory_budget"),
    Contender("compiled, budget 0.0", "torch", whole(0.0), note="activation_memory_budget"),
    Contender("checkpoint of compiled blocks", "torch", checkpoint_of_compiled_blocks),
    Contender("retrograde, compiled branches", "retrograde", compiled_reverse),
    Contender("retrograde, compiled", "retrograde", by_rule, note='backend="retrograde"'),
)
