"""One block by itself, forward and backward, in one memory mode: what it costs inside a chain."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine.call import CallEnvironment
from retrograde.engine.outputs import Losses
from retrograde.engine.run import Segment, run_blocks
from retrograde.engine.torch_internals import tree_flatten, tree_map
from retrograde.measure import MemoryTracker
from retrograde.measure.batches import detached_leaf
from retrograde.measure.device_memory import accelerator_of
from retrograde.measure.memory_tracker import storage_bytes
from retrograde.measure.timing import wait_for_devices
from retrograde.measure.training_step import clear_gradients
from retrograde.measure.work_counter import WorkCounter
from retrograde.memory import SELECTIVE, SELECTIVE_CHECKPOINT, STORE, MemoryMode
from retrograde.network.block import Block
from retrograde.network.step import StreamName
from retrograde.network.streams import Streams

_SAVING_CALL = 15e-6  # seconds that an operator takes longer where a policy is asked whether to save its result


@dataclass(frozen=True)
class Surroundings:
    """What all blocks of a call run with: the names of the streams, the context, autocast."""

    names: tuple[StreamName, ...]
    context: Mapping[str, Any]
    environment: CallEnvironment
    autocasts: bool

    @classmethod
    def of_call(cls, names: tuple[StreamName, ...], streams: Streams, context: Mapping[str, Any]) -> Surroundings:
        """Those of now, at the start of a call. The context is detached from the graph that made it."""
        devices = list(dict.fromkeys(s.device for s in streams))
        autocasts = any(torch.is_autocast_enabled(d.type) for d in devices if d.type != "meta")
        return cls(names, tree_map(detached_leaf, dict(context)), CallEnvironment(devices, ()), autocasts)

    def restored(self) -> AbstractContextManager[Any]:
        """Autocast as in the call. Where there was none, no context for it: a branch's own autocast empties its cache
        when it ends, unless it is inside of another."""
        restores = self.autocasts or not self.environment.is_current()
        return self.environment.restored() if restores else nullcontext()

    def leaves(self) -> list[Tensor]:
        """The tensors of the context that get a gradient."""
        return [t for t in tree_flatten(dict(self.context))[0] if isinstance(t, Tensor) and t.requires_grad]

    def run(
        self, block: Block, streams: Streams, mode: MemoryMode, *, keep_last_graph: bool = True
    ) -> tuple[Streams, Losses]:
        """A block as it runs inside a chain, on streams that are on their grid; with its auxiliary losses."""
        segments = [Segment(mode.make_tape, (0,))]
        with torch.enable_grad(), self.restored():
            outputs = run_blocks(
                [block], self.names, segments, streams, self.context, keep_last_graph=keep_last_graph, placements={}
            )
        return tuple(outputs), outputs.aux_by_block.get(0, ())


@dataclass(frozen=True)
class BlockAlone:
    """A block by itself, to be run in any mode as often as needed.

    Attributes:
        own: its parameters that no block after it shares.
        parameters: all of them, those of other modules that its branches reach among them.
        is_last: whether it is the last block of its chain.
        keep_last_graph: whether it keeps the graph of its last step, as the last block of most chains does.
    """

    block: Block
    streams: Streams
    around: Surroundings
    own: list[Tensor]
    parameters: list[Tensor]
    is_last: bool = False
    keep_last_graph: bool = False

    @cached_property
    def distinct(self) -> tuple[list[Tensor], list[int]]:
        """The streams as the leaves of a graph, each tensor once, and for each stream which of them it is."""
        leaves: dict[tuple[int, int], tuple[int, Tensor]] = {}
        for s in self.streams:
            leaves.setdefault(_place(s), (len(leaves), detached_leaf(s)))
        return [leaf for _, leaf in leaves.values()], [leaves[_place(s)][0] for s in self.streams]

    def _inputs(self) -> Streams:
        """Streams that were computed, as those inside a chain are: autograd frees them if nothing saves them."""
        leaves, positions = self.distinct
        with torch.enable_grad():
            computed = [leaf * 1 for leaf in leaves]
        return tuple(computed[position] for position in positions)

    def _step(self, inputs: Streams, mode: MemoryMode) -> None:
        """Forward and backward."""
        outputs, losses = self.around.run(self.block, inputs, mode, keep_last_graph=self.keep_last_graph)
        ends = [o for o in (*outputs, *losses) if o.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(o) for o in ends])

    def seconds(self, mode: MemoryMode) -> float:
        self.clear()
        inputs = self._inputs()
        wait_for_devices(inputs)
        start = time.perf_counter()
        self._step(inputs, mode)
        wait_for_devices(inputs)
        return time.perf_counter() - start

    def work(self, mode: MemoryMode) -> float:
        """What a step takes, counted: see `WorkCounter`."""
        self.clear()
        inputs = self._inputs()
        counter = WorkCounter()
        with counter:
            self._step(inputs, mode)
        return counter.seconds + (_SAVING_CALL * counter.calls if mode in (SELECTIVE, SELECTIVE_CHECKPOINT) else 0.0)

    def trained(self) -> list[Tensor]:
        """The parameters that get a gradient in a step."""
        self.clear()
        self._step(self._inputs(), STORE)
        trained = [p for p in self.parameters if p.grad is not None]
        self.clear()
        return trained

    def bytes(self, mode: MemoryMode) -> tuple[int, int, int, int, int, int]:
        """Saved for the backward, how much of that is input and output, both peaks, and what autocast caches."""
        self.clear()
        # The outputs are not always the block's own: a chain counts its last streams and a reversed part's end.
        ends_count_elsewhere = self.is_last or mode.needs_inverse
        shared = set(self.parameters) - set(self.own)
        ignored: list[Tensor | nn.Module] = [self.block, *self.parameters, *self.distinct[0]]
        with MemoryTracker(ignore=ignored, kind=accelerator_of(self.streams)) as memory:
            with memory.phase("forward") as forward:
                inputs = self._inputs()
                alive_inputs = _AliveStorages(inputs)
                with self.around.restored():  # autocast's cache lives until here
                    outputs, losses = self.around.run(self.block, inputs, mode, keep_last_graph=self.keep_last_graph)
                    del inputs
                    cached = memory.live
                cached -= memory.live
            loss = _loss_without_saves((*outputs, *losses))
            alive_outputs, saved_input = _AliveStorages(outputs), alive_inputs.bytes()
            del outputs, losses
            saved_output = alive_outputs.bytes()
            saved = memory.live - storage_bytes([loss]) - (saved_output if ends_count_elsewhere else 0)
            with memory.phase("backward") as backward, _dropping_gradients(shared):
                if loss.requires_grad:
                    loss.backward()
        self.clear()
        return saved, saved_input, saved_output, forward.peak, backward.peak, cached

    def clear(self) -> None:
        clear_gradients([*self.distinct[0], *self.around.leaves(), *self.parameters])


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's values are. Not by their address: tensors without values have none."""
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def _loss_without_saves(outputs: Streams) -> Tensor:
    """A loss that saves nothing of the streams, and whose gradient for each is alive in autograd only."""
    with torch.enable_grad():
        half = [torch.full((), 0.5, dtype=o.dtype, device=o.device) for o in outputs]
        return torch.stack([(o * h).sum().float() for o, h in zip(outputs, half, strict=True)]).sum()


class _AliveStorages:
    """Which of some tensors' storages are still alive, without keeping them alive."""

    def __init__(self, tensors: Streams) -> None:
        storages = {_place(t): t.untyped_storage() for t in tensors}.values()
        self._storages = [(weakref.ref(storage), storage.nbytes()) for storage in storages]

    def bytes(self) -> int:
        return sum(size for storage, size in self._storages if storage() is not None)


def _dropping_gradients(parameters: Iterable[Tensor]) -> ExitStack:
    """Drop the gradients of some parameters as soon as they are there: a block after this one counts them already."""
    hooks = ExitStack()
    for parameter in parameters:
        hooks.enter_context(parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
    return hooks
