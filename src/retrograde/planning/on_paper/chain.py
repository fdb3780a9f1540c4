"""What the blocks of a stack cost on a device on paper: bytes without values, times from a roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from retrograde.measure.loss import Loss
from retrograde.measure.memory_tracker import storage_bytes
from retrograde.measure.timing import Progress
from retrograde.memory import MemoryMode, Mode
from retrograde.planning._block_run import BlockAlone
from retrograde.planning._blocks import measure_blocks
from retrograde.planning._costs import ChainCost
from retrograde.planning._measure import _chain, _watched_step
from retrograde.sequence import ReversibleSequence

from .devices import Device
from .jobs import Job
from .operators import OperatorClock


def chain_on_paper(
    model: nn.Module, batch: Any, loss: Loss | None, stack: ReversibleSequence, job: Job, progress: Progress
) -> ChainCost:
    """The costs of a stack's blocks, for a rank of a job. The model is not sharded yet.

    Sharding leaves activations as they are. Of the gradients, a rank keeps its share once a block's backward is done.
    """
    watch = _watched_step(model, batch, stack, loss)
    clock = partial(_counted, job.device)
    blocks, last, outputs = measure_blocks(stack, watch.streams, watch.surroundings, progress, clock=clock)
    model.zero_grad()
    chain = _chain(stack, watch, blocks, last, storage_bytes(outputs))
    share = job.ranks // job.replicas if job.shard in ("fsdp2", "hsdp") else 1
    blocks_of_rank = [replace(block, gradients=0 if job.fused else block.gradients // share) for block in chain.blocks]
    return replace(chain, blocks=tuple(blocks_of_rank))


def _counted(device: Device, alone: BlockAlone, modes: Mapping[Mode, MemoryMode]) -> dict[Mode, float]:
    """The likely time of a block in each mode."""
    seconds = {}
    for name, mode in modes.items():
        with OperatorClock(device) as clock:
            alone.seconds(mode)
        seconds[name] = clock.costs.seconds.likely
    return seconds
