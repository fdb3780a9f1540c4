"""By how much the inverse of each block magnifies a small error: measured with an error that is put in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograde.engine.drift import norm, relative_error
from retrograde.engine.observer import BranchRun, StackCall
from retrograde.network.block import Block
from retrograde.network.step import Step, StreamName
from retrograde.network.streams import Streams
from retrograde.sequence import ReversibleSequence

from ._bench import Bench, Setup
from ._report import Behaviour
from ._watch import SameDecisions, SeenBlock, StackLog


@dataclass
class PushedBlock(SeenBlock):
    """A probe that sends a small error through the inverse, and sees by how much its block magnifies it.

    The error's direction is passed on from block to block, so that it turns to where the inverse magnifies most; its
    size is reset at each block, so that it stays small.
    """

    context: Mapping[str, Any] = field(default_factory=dict)
    after: PushedBlock | None = None
    pushed: float = 0.0  # the relative error of the streams that it returns

    def recomputed(self, streams: Streams) -> Streams:
        errors = tuple(now.double() - then.double() for now, then in zip(streams, self.truth, strict=True))
        if self.after is None or not self.after.pushed:
            errors = _noise_like(self.truth)
        else:
            self.amplification = relative_error(streams, self.truth) / self.after.pushed
        moved = _moved(self.truth, errors)
        self.pushed = relative_error(moved, self.truth)
        return moved

    def push_through(self, block: Block, names: tuple[StreamName, ...]) -> None:
        """Run the block by itself, and its inverse from results that are a little off."""
        with torch.no_grad():
            after, _ = block(self.truth, self.context, names=names)
            moved = _moved(after, _noise_like(after))
            back = block.inverse(moved, self.context, names)
        self.amplification = relative_error(back, self.truth) / relative_error(moved, after)


class PushingObserver(SameDecisions):
    """Makes probes that push, each of which knows the one after it, unless its block is the last on its tape."""

    _context: Mapping[str, Any]
    _last: PushedBlock | None
    _running: int = 0

    def on_call(self, call: StackCall) -> None:
        super().on_call(call)
        self._context, self._last = call.context, None

    def first_run(self, run: BranchRun) -> Any:
        self._running = run.block
        return super().first_run(run)

    def make_probe(self, block: int, streams: Streams) -> PushedBlock:
        probe = PushedBlock(block, streams, context=self._context)
        before = self._last
        # Blocks share a tape if the plan does not cut between them, and no block of another mode ran in between.
        if before is not None and before.index == self._running and self._shares_tape(before.index, block):
            before.after = probe
        self._last = probe
        return probe

    def _shares_tape(self, *blocks: int) -> bool:
        return len(list(self.run.plan.segments(blocks))) == 1


def note_amplification(
    bench: Bench, setup: Setup, seen: dict[ReversibleSequence, StackLog], behaviours: dict[Step, Behaviour]
) -> None:
    """Send a small error through the inverse, and write into `seen` by how much each block magnifies it."""
    logs: dict[ReversibleSequence, StackLog] = {}
    # The error may change a decision, and the replay fail; what was measured up to there stands.
    with suppress(Exception), bench.run(setup, PushingObserver) as run:
        logs = run.logs
        run.gradients()
    _note_ends(bench, logs, behaviours)
    for stack, log in logs.items():
        for now, then in zip(seen[stack].blocks, log.blocks, strict=False):
            now.amplification = then.amplification


def _note_ends(bench: Bench, logs: dict[ReversibleSequence, StackLog], behaviours: dict[Step, Behaviour]) -> None:
    """Where a tape ends nothing is recomputed that an error could be put into: run these blocks by themselves.

    Not those that draw random numbers, edit their sources or have side bits.
    """
    unfit = {step for step, behaviour in behaviours.items() if behaviour.draws or behaviour.edits_source}
    alone = {step for step in bench.steps if not step.has_side_bits} - unfit
    for stack, log in logs.items():
        for seen in log.blocks:
            block = stack[seen.index]
            if seen.amplification is None and isinstance(seen, PushedBlock) and alone.issuperset(block.each_step()):
                with suppress(Exception), bench.preserved():  # as above
                    seen.push_through(block, stack.names)


def _moved(streams: Streams, errors: Streams) -> Streams:
    """The streams with an error of a direction; it is as large as the square root of their spacing."""
    size = math.sqrt(torch.finfo(streams[0].dtype).eps) * norm(streams) / max(norm(errors), 1e-300)
    return tuple((t.double() + size * e).to(t.dtype) for t, e in zip(streams, errors, strict=True))


def _noise_like(tensors: Sequence[Tensor]) -> Streams:
    """The same random numbers each time, drawn from no generator of anybody else."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in tensors)
