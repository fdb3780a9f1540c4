"""All blocks of a stack, measured one by one on their real inputs, in every memory mode that they allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrograde.engine.exactness import grid_placements, placed_on_grid
from retrograde.engine.preserve import preserve
from retrograde.engine.torch_internals import has_values
from retrograde.measure.batches import detached_leaf
from retrograde.measure.memory_tracker import storage_bytes
from retrograde.measure.timing import Progress, rounds
from retrograde.memory import MODES, REVERSE, SELECTIVE, STORE, MemoryMode, Mode
from retrograde.network.block import Block
from retrograde.network.streams import Streams
from retrograde.sequence import ReversibleSequence

from ._block_run import BlockAlone, Surroundings
from ._costs import BlockCost, ModeCost

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

    Blocks of the same modules, shapes and context are measured once.
    """
    blocks = list(stack)
    own = _own_parameters(blocks)
    placements = grid_placements(blocks, range(len(blocks)), stack.names)
    by_kind: dict[Hashable, dict[Mode, ModeCost]] = {}
    ends: dict[Hashable, Streams] = {}
    costs: list[BlockCost] = []
    last: dict[Mode, ModeCost] = {}
    for i, block in enumerate(blocks):
        if i in placements:
            with torch.enable_grad():
                streams = tuple(map(detached_leaf, placed_on_grid(i, placements[i], streams, [])))
        alone = BlockAlone(block, streams, around, own[i])
        kind = _kind_of(alone)
        if kind not in by_kind:
            progress(f"block {i}", i, len(blocks))
            by_kind[kind] = _all_modes(alone, clock)
        if i == len(blocks) - 1:
            last = _all_modes(replace(alone, keep_last_graph=True), clock)
        gradients = sum(p.numel() * p.element_size() for p in own[i])
        costs.append(BlockCost(storage_bytes(streams), gradients, by_kind[kind], _same_as(by_kind[kind])))
        if kind not in ends or has_values(streams[0]):  # without values, blocks of one kind have one output
            with preserve(block):
                outputs, _ = around.run(block, streams, STORE)
            ends[kind] = tuple(map(detached_leaf, outputs))
            del outputs
        streams = ends.pop(kind) if has_values(streams[0]) else ends[kind]
    progress("blocks", len(blocks), len(blocks))
    return costs, last, streams


def _allowed_modes(block: Block, streams: Streams) -> dict[Mode, MemoryMode]:
    """The registered modes that the block can have here, and whose costs add up block by block."""
    on_accelerator = any(s.device.type != "cpu" for s in streams)

    def is_allowed(mode: MemoryMode) -> bool:
        adds_up = mode.make_tape is None or mode.blocks_per_tape == (None if mode.needs_inverse else 1)
        return adds_up and mode.for_block(block) is mode and (on_accelerator or not mode.needs_accelerator)

    return {name: mode for name, mode in MODES.items() if is_allowed(mode)}


def _all_modes(alone: BlockAlone, clock: Clock) -> dict[Mode, ModeCost]:
    """The costs of every mode that the block allows."""
    modes = _allowed_modes(alone.block, alone.streams)
    with preserve(alone.block):
        for mode in modes.values():
            alone.seconds(mode)  # a first replay takes more than later ones: it inspects everything
        sizes = {name: alone.bytes(mode) for name, mode in modes.items()}
        if SELECTIVE.name in modes and sizes[SELECTIVE.name] == sizes[REVERSE.name]:  # nothing expensive to save
            del modes[SELECTIVE.name]
        seconds = clock(alone, modes)
    return {name: ModeCost(seconds[name], *sizes[name]) for name in modes}


def _same_as(modes: dict[Mode, ModeCost]) -> dict[Mode, Mode]:
    return {SELECTIVE.name: REVERSE.name} if REVERSE.name in modes and SELECTIVE.name not in modes else {}


def _kind_of(alone: BlockAlone) -> Hashable:
    """What two blocks that cost the same have in common."""
    own, block = set(alone.own), alone.block
    modules = tuple((type(m).__qualname__, m.training, _settings(m)) for m in block.modules())
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad, p in own) for p in block.parameters())
    steps = tuple((_code(step.branch), repr(step.coupling)) for step in block.each_step())
    shapes = tuple((tuple(s.shape), s.dtype, s.requires_grad) for s in alone.streams)
    return modules, parameters, steps, shapes, tuple(alone.distinct[1])


def _settings(module: nn.Module) -> Hashable:
    """The plain attributes of a module: its number of heads, its window, its probability of dropping."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    attributes = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(module).items()}
    return tuple((name, value) for name, value in attributes.items() if all(isinstance(part, plain) for part in value))


def _code(branch: Any) -> Hashable:
    """Of a branch that is no module: what it runs, or itself if it closes over something."""
    if isinstance(branch, nn.Module):
        return None
    return id(branch if getattr(branch, "__closure__", None) else getattr(branch, "__code__", branch))


def _own_parameters(blocks: Sequence[Block]) -> list[list[nn.Parameter]]:
    """For each block the parameters whose gradients it is the first to make in a backward pass."""
    seen: set[nn.Parameter] = set()
    own: list[list[nn.Parameter]] = []
    for block in reversed(blocks):
        own.append([p for p in block.parameters() if p.requires_grad and p not in seen])
        seen.update(own[-1])
    return own[::-1]
