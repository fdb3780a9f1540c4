"""Blocks measured one by one, on their real inputs, in every memory mode that they allow."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._before import Before
from retrograde._block import Block
from retrograde._drive import runner_for
from retrograde._exactness import OnGrid
from retrograde._outputs import Losses
from retrograde._plan import INVERTING, Memory
from retrograde._record import Call
from retrograde._replay import Ambient
from retrograde._sequence import ReversibleSequence
from retrograde._step import StreamName
from retrograde._streams import Streams
from retrograde._torch_private import tree_flatten, tree_map
from retrograde.diagnose import MemoryTracker

from ._batches import leaf
from ._costs import BlockCost, ModeCost

Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many measurements are done, and how many there are."""

ROUNDS = 3
_PATIENCE = 2.0  # seconds, for more rounds where blocks are quick


@dataclass(frozen=True)
class Surroundings:
    """What all blocks of a call run with: the names of the streams, the context, autocast as it was."""

    names: tuple[StreamName, ...]
    context: Mapping[str, Any]
    ambient: Ambient
    autocasts: bool

    @classmethod
    def of_call(cls, names: tuple[StreamName, ...], streams: Streams, context: Mapping[str, Any]) -> Surroundings:
        """As they are now, at the start of a call. The context is cut from the graph that made it."""
        own = tree_map(leaf, dict(context))
        devices = list(dict.fromkeys(s.device for s in streams))
        autocasts = any(torch.is_autocast_enabled(d.type) for d in devices if d.type != "meta")
        return cls(names, own, Ambient(devices, ()), autocasts)

    def again(self) -> AbstractContextManager[Any]:
        """Autocast as it was. Where there was none, no context for it: a branch's own autocast empties its cache when
        it ends, unless it is inside of another."""
        return self.ambient.again() if self.autocasts or not self.ambient.holds_now() else nullcontext()

    def leaves(self) -> list[Tensor]:
        """The tensors of the context that get a gradient."""
        return [t for t in tree_flatten(dict(self.context))[0] if isinstance(t, Tensor) and t.requires_grad]

    def run(self, block: Block, streams: Streams, mode: Memory, *, keeps_last: bool) -> tuple[Streams, Losses]:
        """One block as it runs inside a chain, on streams that are prepared; with its auxiliary losses."""
        with torch.enable_grad(), self.again():
            call = None if mode == "store" else Call(self.names, streams, self.context)
            runner = runner_for(mode, call, self.names, [block], keeps_last=keeps_last)
            try:
                streams, losses = runner.run(block, streams, self.context)
                runner.close(streams)
            finally:
                runner.leave()
        return streams, losses


def measure_blocks(
    stack: ReversibleSequence, streams: Streams, around: Surroundings, progress: Progress | None = None
) -> tuple[list[BlockCost], dict[Memory, ModeCost], Streams]:
    """The costs of every block, those of the last one with the graph of its last step kept, and the last streams.

    Blocks of the same modules, shapes and context are measured once.
    """
    blocks: list[Block] = list(stack.blocks)  # type: ignore[arg-type]
    own = _own_parameters(blocks)
    grid = OnGrid(blocks, stack.names)
    known: dict[Hashable, dict[Memory, ModeCost]] = {}
    costs: list[BlockCost] = []
    last: dict[Memory, ModeCost] = {}
    for i, block in enumerate(blocks):
        with torch.no_grad():
            streams = tuple(_alike(new, old) for new, old in zip(grid.before(block, streams), streams, strict=True))
        measured = _Alone(block, streams, around, own[i])
        key = measured.likeness()
        if key not in known:
            if progress is not None:
                progress(f"block {i}", i, len(blocks))
            known[key] = measured.all_modes(keeps_last=False)
        if i == len(blocks) - 1:
            last = measured.all_modes(keeps_last=True)
        costs.append(BlockCost(_bytes(streams), sum(p.numel() * p.element_size() for p in own[i]), known[key]))
        with untouched(block):
            outputs, _ = around.run(block, streams, "store", keeps_last=True)
        grid.after(block)
        streams = tuple(leaf(o) for o in outputs)
        del outputs
    if progress is not None:
        progress("blocks", len(blocks), len(blocks))
    return costs, last, streams


def _alike(new: Tensor, old: Tensor) -> Tensor:
    return new if new is old else new.detach().requires_grad_(old.requires_grad)


@dataclass(frozen=True)
class _Alone:
    """A block to be measured by itself. `own` are its parameters that no block after it shares."""

    block: Block
    streams: Streams
    around: Surroundings
    own: list[nn.Parameter]

    def likeness(self) -> Hashable:
        """What two blocks have in common that cost the same."""
        own = set(self.own)
        modules = tuple((type(m).__qualname__, m.training, _settings(m)) for m in self.block.modules())
        parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad, p in own) for p in self.block.parameters())
        steps = tuple((_code(step.branch), repr(step.coupling)) for step in self.block.each_step())
        shapes = tuple((tuple(s.shape), s.dtype, s.requires_grad) for s in self.streams)
        return modules, parameters, steps, shapes, tuple(_distinct(self.streams)[1])

    def all_modes(self, *, keeps_last: bool) -> dict[Memory, ModeCost]:
        """The costs of every mode that the block allows."""
        modes: list[Memory] = ["store", "checkpoint"]
        if self.block.invertible:
            modes += INVERTING
        if any(s.device.type != "cpu" for s in self.streams):
            modes.append("offload")
        runs = {mode: _Run(self, mode, keeps_last=keeps_last) for mode in modes}
        with untouched(self.block):
            for run in runs.values():
                run.seconds()  # a first replay takes more than later ones: it looks at all that it does
            sizes = {mode: run.bytes() for mode, run in runs.items()}
            if "partial" in runs and sizes["partial"] == sizes["reverse"]:  # no attention inside: nothing is kept
                del runs["partial"], sizes["partial"]
            seconds: dict[Memory, float] = dict.fromkeys(runs, math.inf)
            for _ in rounds():
                for mode, run in runs.items():
                    seconds[mode] = min(seconds[mode], run.seconds())
        return {mode: ModeCost(seconds[mode], *sizes[mode]) for mode in runs}


def _settings(module: nn.Module) -> Hashable:
    """The plain attributes of a module: its number of heads, its window, its probability of dropping."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    found = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(module).items()}
    return tuple((name, value) for name, value in found.items() if all(isinstance(part, plain) for part in value))


def _code(branch: Any) -> Hashable:
    """Of a branch that is no module: what it runs, or itself if it closes over something."""
    if isinstance(branch, nn.Module):
        return None
    return id(branch if getattr(branch, "__closure__", None) else getattr(branch, "__code__", branch))


def _distinct(streams: Streams) -> tuple[list[Tensor], list[int]]:
    """The streams as the leaves of a graph, each tensor once, and for each stream which of them it is."""
    leaves: dict[int, tuple[int, Tensor]] = {}
    for s in streams:
        leaves.setdefault(s.data_ptr(), (len(leaves), s.detach().requires_grad_(s.requires_grad)))
    return [leaf for _, leaf in leaves.values()], [leaves[s.data_ptr()][0] for s in streams]


def rounds(patience: float = 1.0) -> Iterator[int]:
    """How often to take a time, of which the least counts: it is the one that nothing else on the machine disturbed."""
    start = time.perf_counter()
    for i in range(4 * ROUNDS):
        if i < ROUNDS or time.perf_counter() - start < patience * _PATIENCE:
            yield i


class _Run:
    """One block alone, forward and backward, in one mode, as it would run inside a chain."""

    def __init__(self, alone: _Alone, mode: Memory, *, keeps_last: bool) -> None:
        self._block = alone.block
        self._leaves, self._places = _distinct(alone.streams)
        self._around = alone.around
        self._shared = set(alone.block.parameters()) - set(alone.own)
        self._mode: Memory = mode
        self._keeps_last = keeps_last

    def _forward(self, streams: Streams) -> tuple[Streams, Losses]:
        return self._around.run(self._block, streams, self._mode, keeps_last=self._keeps_last)

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
        outputs, losses = self._forward(entered)
        ends = [o for o in (*outputs, *losses) if o.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(o) for o in ends])
        wait(entered)
        return time.perf_counter() - start

    def bytes(self) -> tuple[int, int, int, int, int, int]:
        """Held after the forward, how much of that is input and output, both peaks, and what autocast caches."""
        self._clear()
        with MemoryTracker(ignore=[self._block, *self._leaves]) as memory:
            with memory.phase("forward") as forward:
                entered = self._entered()
                inputs = Alive(entered)
                with self._around.again():  # which holds its cache until here
                    outputs, losses = self._forward(entered)
                    del entered
                    cached = memory.live
                cached -= memory.live
            loss = _with_gradients_of_its_own((*outputs, *losses))
            ends, kept_input = Alive(outputs), inputs.bytes()
            del outputs, losses
            kept_output = ends.bytes()
            held = memory.live - _bytes([loss]) - (kept_output if self._ends_count_elsewhere() else 0)
            with memory.phase("backward") as backward, _added_elsewhere(self._shared):
                if loss.requires_grad:
                    loss.backward()
        self._clear()
        return held, kept_input, kept_output, forward.peak, backward.peak, cached

    def _ends_count_elsewhere(self) -> bool:
        """Whether the outputs are not the block's own: a chain counts its last streams and a reversed part's end."""
        return self._keeps_last or self._mode in INVERTING

    def _clear(self) -> None:
        for tensor in (*self._leaves, *self._around.leaves(), *self._block.parameters()):
            tensor.grad = None


def _with_gradients_of_its_own(outputs: Streams) -> Tensor:
    """A loss that saves nothing of the streams, and whose gradient for each is held by autograd alone."""
    with torch.enable_grad():
        half = [torch.full((), 0.5, dtype=o.dtype, device=o.device) for o in outputs]
        return torch.stack([(o * h).sum().float() for o, h in zip(outputs, half, strict=True)]).sum()


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


@contextmanager
def _added_elsewhere(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Drop the gradients of some parameters when they are there, as if they were added to one that counts already."""
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in parameters if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own_parameters(blocks: Sequence[Block]) -> list[list[nn.Parameter]]:
    """For each block the parameters whose gradients it is the first to make in a backward pass."""
    seen: set[nn.Parameter] = set()
    found: list[list[nn.Parameter]] = []
    for block in reversed(blocks):
        found.append([p for p in block.parameters() if p.requires_grad and p not in seen])
        seen.update(found[-1])
    return found[::-1]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def wait(tensors: Sequence[Tensor]) -> None:
    """Accelerators work on while Python goes ahead; a clock must wait for them."""
    for device in {t.device for t in tensors if t.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
