"""All blocks of a stack, measured one by one on their real inputs, in every memory mode that they allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from retrograde.engine.exactness import grid_placements, placed_on_grid
from retrograde.engine.fake_internals import has_values
from retrograde.engine.preserve import preserve
from retrograde.measure.batches import detached_leaf
from retrograde.measure.memory_tracker import storage_bytes
from retrograde.measure.stacks import parameters_of
from retrograde.measure.timing import Progress, rounds
from retrograde.memory import (
    CHECKPOINT,
    MODES,
    REVERSE,
    SELECTIVE,
    SELECTIVE_CHECKPOINT,
    STORE,
    MemoryMode,
    Mode,
)
from retrograde.network.block import Block
from retrograde.network.streams import Streams
from retrograde.sequence import ReversibleSequence

from ._block_kinds import exact_kind, kind
from ._block_run import BlockAlone, Surroundings
from ._costs import BlockCost, ModeCost, no_faster_than_storing

Clock = Callable[[BlockAlone, Mapping[Mode, MemoryMode]], dict[Mode, float]]
"""Takes the time of a block, forward and backward, in each of several modes."""


def least_of_rounds(alone: BlockAlone, modes: Mapping[Mode, MemoryMode]) -> dict[Mode, float]:
    """The least seconds of several runs in each mode, taken in turn."""
    seconds: dict[Mode, float] = dict.fromkeys(modes, math.inf)
    for _ in rounds():
        for name, mode in modes.items():
            seconds[name] = min(seconds[name], alone.seconds(mode))
    return seconds


def measure_blocks(
    stack: ReversibleSequence,
    streams: Streams,
    around: Surroundings,
    progress: Progress,
    *,
    clock: Clock = least_of_rounds,
) -> tuple[list[BlockCost], dict[Mode, ModeCost], Streams]:
    """The costs of every block, those of the last one with the graph of its last step kept, and the last streams.

    Equal blocks are measured once.
    """
    blocks = list(stack)
    own = _own_parameters(stack, streams, around)
    measurer = _Measurer(clock)
    costs: list[BlockCost] = []
    last: dict[Mode, ModeCost] = {}
    for i, alone in enumerate(_blocks_alone(stack, streams, around)):
        alone = replace(alone, own=own[i])
        progress(f"block {i}", i, len(blocks))
        modes = measurer.all_modes(alone)
        if i == len(blocks) - 1:
            last = measurer.all_modes(replace(alone, is_last=True, keep_last_graph=stack.keeps_last_graph))
        gradients = sum(p.numel() * p.element_size() for p in own[i])
        costs.append(BlockCost(storage_bytes(alone.streams), gradients, modes, _same_as(modes)))
    progress("blocks", len(blocks), len(blocks))
    with preserve(alone.block):
        outputs, _ = around.run(alone.block, alone.streams, STORE)
    return costs, last, tuple(map(detached_leaf, outputs))


def _blocks_alone(stack: ReversibleSequence, streams: Streams, around: Surroundings) -> Iterator[BlockAlone]:
    """Each block with its real input. Only the streams between two blocks are alive at a time."""
    blocks = list(stack)
    placements = grid_placements(blocks, range(len(blocks)), stack.names)
    ends: dict[Hashable, Streams] = {}
    for i, block in enumerate(blocks):
        if i in placements:
            with torch.enable_grad():
                streams = tuple(map(detached_leaf, placed_on_grid(i, placements[i], streams, [])))
        parameters = parameters_of(block)
        alone = BlockAlone(block, streams, around, parameters, parameters)
        yield alone
        if i + 1 == len(blocks):
            return
        end = exact_kind(alone)
        if end not in ends or has_values(streams[0]):  # without values, blocks of one kind have one output
            with preserve(block):
                outputs, _ = around.run(block, streams, STORE)
            ends = {end: tuple(map(detached_leaf, outputs))}
            del outputs
        streams = ends[end]


def _own_parameters(stack: ReversibleSequence, streams: Streams, around: Surroundings) -> list[list[Tensor]]:
    """For each block the parameters whose gradients it is the first to make in a backward pass.

    Only those that it uses: a branch may reach the parameters of all blocks, in a list.
    """
    trained = []
    for alone in _blocks_alone(stack, streams, around):
        with preserve(alone.block):
            trained.append(alone.trained())
    seen: set[Tensor] = set()
    own: list[list[Tensor]] = []
    for parameters in reversed(trained):
        own.append([p for p in parameters if p not in seen])
        seen.update(parameters)
    return own[::-1]


def _allowed_modes(block: Block, streams: Streams) -> dict[Mode, MemoryMode]:
    """The registered modes that the block can have here, and whose costs add up block by block."""
    on_accelerator = any(s.device.type != "cpu" for s in streams)

    def is_allowed(mode: MemoryMode) -> bool:
        adds_up = mode.make_tape is None or mode.blocks_per_tape == (None if mode.needs_inverse else 1)
        if mode is SELECTIVE_CHECKPOINT and block.invertible:  # "selective" saves less there, and takes as long
            return False
        return adds_up and mode.for_block(block) is mode and (on_accelerator or not mode.needs_accelerator)

    return {name: mode for name, mode in MODES.items() if is_allowed(mode)}


@dataclass(frozen=True)
class _Measurer:
    """Measures blocks in every mode that they allow; equal ones once.

    Blocks of one exact kind are equal in everything. Those of one kind may differ in a number, such as their own index:
    they count as equal if they also need the same bytes and do the same work in every mode, and are timed once.
    """

    clock: Clock
    by_exact_kind: dict[Hashable, dict[Mode, ModeCost]] = field(default_factory=dict)
    times: dict[Hashable, dict[Mode, float]] = field(default_factory=dict)

    def all_modes(self, alone: BlockAlone) -> dict[Mode, ModeCost]:
        block_kind = exact_kind(alone)
        if block_kind not in self.by_exact_kind:
            with preserve(alone.block):
                self.by_exact_kind[block_kind] = self._measured(alone)
        return self.by_exact_kind[block_kind]

    def _measured(self, alone: BlockAlone) -> dict[Mode, ModeCost]:
        modes = _allowed_modes(alone.block, alone.streams)
        for mode in modes.values():
            alone.seconds(mode)  # a first replay takes more than later ones: it inspects everything
        sizes = {name: alone.bytes(mode) for name, mode in modes.items()}
        work = {name: alone.work(mode) for name, mode in modes.items()}
        for selective, plain in ((SELECTIVE, REVERSE), (SELECTIVE_CHECKPOINT, CHECKPOINT)):
            if selective.name in modes and sizes[selective.name] == sizes[plain.name]:  # nothing expensive to save
                del modes[selective.name]
        equals = (kind(alone), tuple(sizes.items()), tuple(work.items()))
        if equals not in self.times:
            self.times[equals] = self.clock(alone, modes)
        seconds = self.times[equals]
        return no_faster_than_storing({name: ModeCost(seconds[name], *sizes[name], work=work[name]) for name in modes})


def _same_as(modes: dict[Mode, ModeCost]) -> dict[Mode, Mode]:
    return {SELECTIVE.name: REVERSE.name} if REVERSE.name in modes and SELECTIVE.name not in modes else {}
