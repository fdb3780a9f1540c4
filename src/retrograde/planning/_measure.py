"""Blocks measured one by one, on their real inputs, in every memory mode that they allow."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._before import Before
from retrograde._block import Block
from retrograde._drive import drive, runner_for
from retrograde._plan import INVERTING, Memory, Plan
from retrograde._sequence import ReversibleSequence
from retrograde._streams import Streams
from retrograde.diagnose import MemoryTracker

from ._costs import BlockCost, ModeCost

Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many measurements are done, and how many there are."""

_ROUNDS = 3
_PATIENCE = 2.0  # seconds, for more rounds where blocks are quick


def measure_blocks(
    stack: ReversibleSequence, streams: Streams, context: Mapping[str, Any], progress: Progress | None = None
) -> tuple[list[BlockCost], dict[Memory, ModeCost], Streams]:
    """The costs of every block, those of the last one with the graph of its last step kept, and the last streams.

    Blocks of the same modules, shapes and context are measured once.
    """
    blocks: list[Block] = list(stack.blocks)  # type: ignore[arg-type]
    known: dict[Hashable, dict[Memory, ModeCost]] = {}
    costs: list[BlockCost] = []
    last: dict[Memory, ModeCost] = {}
    for i, block in enumerate(blocks):
        key = _likeness(block, streams)
        if key not in known:
            if progress is not None:
                progress(f"block {i}", i, len(blocks))
            known[key] = _all_modes(stack, block, streams, context, keeps_last=False)
        if i == len(blocks) - 1:
            last = _all_modes(stack, block, streams, context, keeps_last=True)
        costs.append(BlockCost(_bytes(streams), _gradient_bytes(block), known[key]))
        with torch.enable_grad(), untouched(block):
            outputs = drive([block], stack.names, Plan(("store",)), [0], streams, context)
        streams = tuple(o.detach().requires_grad_(o.requires_grad) for o in outputs)
        del outputs
    if progress is not None:
        progress("blocks", len(blocks), len(blocks))
    return costs, last, streams


def _likeness(block: Block, streams: Streams) -> Hashable:
    """What two blocks have in common that cost the same."""
    modules = tuple(type(m).__qualname__ for m in block.modules())
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
    branches = tuple(step.name for step in block.each_step())
    shapes = tuple((tuple(s.shape), s.dtype) for s in streams)
    return modules, parameters, branches, block.training, shapes, tuple(_distinct(streams)[1])


def _distinct(streams: Streams) -> tuple[list[Tensor], list[int]]:
    """The streams as the leaves of a graph, each tensor once, and for each stream which of them it is."""
    leaves: dict[int, tuple[int, Tensor]] = {}
    for s in streams:
        leaves.setdefault(s.data_ptr(), (len(leaves), s.detach().requires_grad_(s.requires_grad)))
    return [leaf for _, leaf in leaves.values()], [leaves[s.data_ptr()][0] for s in streams]


def _all_modes(
    stack: ReversibleSequence, block: Block, streams: Streams, context: Mapping[str, Any], *, keeps_last: bool
) -> dict[Memory, ModeCost]:
    modes: list[Memory] = ["store", "checkpoint"]
    if block.invertible:
        modes += INVERTING
    if any(s.device.type != "cpu" for s in streams):
        modes.append("offload")
    runs = {mode: _Run(stack, block, streams, context, mode, keeps_last=keeps_last) for mode in modes}
    with untouched(block):
        sizes = {mode: run.bytes() for mode, run in runs.items()}
        if "partial" in runs and sizes["partial"] == sizes["reverse"]:  # no attention inside: nothing is kept
            del runs["partial"], sizes["partial"]
        seconds: dict[Memory, float] = dict.fromkeys(runs, math.inf)
        rounds, start = 0, time.perf_counter()
        while rounds < _ROUNDS or (rounds < 4 * _ROUNDS and time.perf_counter() - start < _PATIENCE):
            for mode, run in runs.items():  # the least time is the one that nothing else on the machine disturbed
                seconds[mode] = min(seconds[mode], run.seconds())
            rounds += 1
    return {mode: ModeCost(seconds[mode], *sizes[mode]) for mode in runs}


class _Run:
    """One block alone, forward and backward, in one mode, as it would run inside a chain."""

    def __init__(
        self,
        stack: ReversibleSequence,
        block: Block,
        streams: Streams,
        context: Mapping[str, Any],
        mode: Memory,
        *,
        keeps_last: bool,
    ) -> None:
        self._names = stack.names
        self._block = block
        self._leaves, self._places = _distinct(streams)
        self._context = context
        self._plan = Plan((mode,))
        self._keeps_last = keeps_last

    def _forward(self, streams: Streams) -> Streams:
        def make_runner(*args: Any, keeps_last: bool) -> Any:
            return runner_for(*args, keeps_last=self._keeps_last)

        with torch.enable_grad():
            return tuple(
                drive([self._block], self._names, self._plan, [0], streams, self._context, make_runner=make_runner)
            )

    def _entered(self) -> Streams:
        """Streams that were computed, as those inside a chain are: autograd lets them go if nobody saves them."""
        with torch.enable_grad():
            entered = [leaf * 1 for leaf in self._leaves]
        return tuple(entered[place] for place in self._places)

    def seconds(self) -> float:
        self._clear()
        entered = self._entered()
        wait(entered)
        start = time.perf_counter()
        outputs = [o for o in self._forward(entered) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
        wait(entered)
        return time.perf_counter() - start

    def bytes(self) -> tuple[int, int, int, int, int]:
        """Held after the forward, how much of that is input and output, and the peaks of forward and backward."""
        self._clear()
        with MemoryTracker(ignore=[self._block, *self._leaves]) as memory:
            with memory.phase("forward") as forward:
                entered = self._entered()
                inputs = Alive(entered)
                outputs = self._forward(entered)
                del entered
            edges = [torch.autograd.graph.get_gradient_edge(o) for o in outputs if o.requires_grad]
            gradients = [torch.ones_like(o) for o in outputs if o.requires_grad]
            ends, made = Alive(outputs), _bytes(outputs)
            kept_input = inputs.bytes()
            del outputs
            kept_output = 0 if self._plan.memory[0] in INVERTING else ends.bytes()
            held = memory.live - _bytes(gradients) - self._counted_elsewhere(ends.bytes(), made)
            with memory.phase("backward") as backward:
                if edges:
                    torch.autograd.backward(edges, gradients)
        self._clear()
        return held, kept_input, kept_output, forward.peak, backward.peak

    def _counted_elsewhere(self, alive: int, made: int) -> int:
        """What of the outputs is not the block's own: a chain counts its last streams and a reversed part's end."""
        if self._keeps_last:
            return alive
        return made if self._plan.memory[0] in INVERTING else 0

    def _clear(self) -> None:
        for tensor in (*self._leaves, *self._block.parameters()):
            tensor.grad = None


class Alive:
    """Which of some tensors' storages are still alive, without holding them."""

    def __init__(self, tensors: Streams) -> None:
        distinct = {t.data_ptr(): t.untyped_storage() for t in tensors}.values()
        self._storages = [(weakref.ref(storage), storage.nbytes()) for storage in distinct]

    def bytes(self) -> int:
        return sum(size for storage, size in self._storages if storage() is not None)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Gradients, buffers and generators are afterwards as they were before."""
    gradients = [(p, p.grad) for p in module.parameters()]
    before = Before([module], list(dict.fromkeys(p.device for p, _ in gradients)))
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()


def _gradient_bytes(block: Block) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def wait(tensors: Sequence[Tensor]) -> None:
    """Accelerators work on while Python goes ahead; a clock must wait for them."""
    for device in {t.device for t in tensors if t.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
