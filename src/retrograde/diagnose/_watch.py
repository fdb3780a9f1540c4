"""The engine, watched: what its tapes rebuild against what there was, and where a run is.

The engine lets a probe see the streams before a block when they have been rebuilt. Steps are watched by putting a
function in the place of their `update` and `update_again`, which calls the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from retrograde._block import Block, advance
from retrograde._decide import counting_flips
from retrograde._drive import FindProbe
from retrograde._guard import norm, relative_error
from retrograde._outputs import Outputs
from retrograde._plan import Plan, segments
from retrograde._replay import is_replaying
from retrograde._sequence import ReversibleSequence
from retrograde._step import Step, StreamName
from retrograde._streams import Streams

from ._compare import noise_like, rms
from ._decisions import FirstChoices, SecondChoices

Look = Literal["drift", "amplification", "forced decisions"]
Walks = Literal["all", "needed"]
Where = Callable[[str], None]


@dataclass
class SeenBlock:
    """What was seen of one block in one call; also the probe that sees it. `truth` are the streams that entered it."""

    index: int
    truth: Streams
    drift: float | None = None
    amplification: float | None = None

    @property
    def magnitude(self) -> float:
        return rms(self.truth)

    def rebuilt(self, streams: Streams) -> Streams:
        self.drift = relative_error(streams, self.truth)
        return streams


@dataclass
class Pushed(SeenBlock):
    """A probe that sends a small error through the inverse, and sees by how much each block magnifies it.

    The error's direction is kept from block to block, so that it turns to where the inverse magnifies most; its
    size starts anew, so that it stays small.
    """

    context: Mapping[str, Any] = field(default_factory=dict)
    after: Pushed | None = None
    pushed: float = 0.0  # the relative error that it goes on with

    def rebuilt(self, streams: Streams) -> Streams:
        errors = tuple(now.double() - then.double() for now, then in zip(streams, self.truth, strict=True))
        if self.after is None or not self.after.pushed:
            errors = noise_like(self.truth)
        else:
            self.amplification = relative_error(streams, self.truth) / self.after.pushed
        moved = _moved(self.truth, errors)
        self.pushed = relative_error(moved, self.truth)
        return moved

    def push_through(self, block: Block, names: tuple[StreamName, ...]) -> None:
        """Run the block by itself, and its inverse from results that are a little off."""
        with torch.no_grad():
            after, _ = block(self.truth, self.context, advance, names)
            moved = _moved(after, noise_like(after))
            back = block.inverse(moved, self.context, names)
        self.amplification = relative_error(back, self.truth) / relative_error(moved, after)


def _moved(streams: Streams, errors: Streams) -> Streams:
    """The streams with an error of a direction; it is as large as the square root of their spacing."""
    size = math.sqrt(torch.finfo(streams[0].dtype).eps) * norm(streams) / max(norm(errors), 1e-300)
    return tuple((t.double() + size * e).to(t.dtype) for t, e in zip(streams, errors, strict=True))


@dataclass
class SeenStep:
    """What was seen of one run of a step's branch: what it read, and what it chose.

    `flips` are choices that the replay made otherwise, `held` those that `retrograde.decide` kept it from.
    """

    block: int
    step: Step
    sources: list[Tensor]
    choices: list[Tensor]
    drift: float | None = None
    flips: int = 0
    held: int = 0

    @property
    def decisions(self) -> int:
        return sum(indices.numel() for indices in self.choices)


@dataclass
class StackLog:
    """What was seen of one stack in one run of the model."""

    calls: int = 0
    calls_without_grad: int = 0
    blocks: list[SeenBlock] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None


class _WatchedStep:
    """A step whose runs are written into a log, and which tells where the run is."""

    def __init__(self, step: Step, log: StackLog, look: Look | None, where: Callable[[str, int], None]) -> None:
        self.blocks: list[int] = []  # those that the step will run in, in this call, the next one last
        self._step = step
        self._log = log
        self._look = look
        self._where = where
        self._update, self._update_again = step.update, step.update_again
        object.__setattr__(step, "update", self._first)
        object.__setattr__(step, "update_again", self._again)

    def undo(self) -> None:
        object.__delattr__(self._step, "update")
        object.__delattr__(self._step, "update_again")

    def _first(self, sources: list[Tensor], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        if is_replaying():  # a stack inside a branch
            return self._update(sources, kwargs)
        block, where = self.blocks.pop(), self._where
        where("forward", block)
        if self._look is None:
            update, aux = self._update(sources, kwargs)
        else:
            with FirstChoices() as first:
                update, aux = self._update(sources, kwargs)
            self._log.steps.append(SeenStep(block, self._step, [s.detach() for s in sources], first.chosen))
        if isinstance(update, Tensor) and update.requires_grad:
            update.register_hook(lambda _: where("backward", block))
        return update, aux

    def _again(self, branch: Callable[..., Any], sources: list[Tensor], kwargs: Mapping[str, Any]) -> Any:
        runs = [seen for seen in self._log.steps if seen.step is self._step]
        if not runs:
            return self._update_again(branch, sources, kwargs)
        seen = min(runs, key=lambda run: relative_error(sources, run.sources)) if len(runs) > 1 else runs[0]
        second = SecondChoices(seen.choices, "free" if self._look == "drift" else "forced")
        with second, counting_flips() as held:
            update = self._update_again(branch, sources, kwargs)
        seen.drift = relative_error(sources, seen.sources)
        seen.held = min(held.flipped, second.flips)
        seen.flips = second.flips - seen.held
        return update


class Redirected:
    """A stack whose calls run under another plan, and are watched, inside of this.

    Args:
        plan: the plan of every call, whatever the caller asks for.
        look: what to watch for, or None.
        widen: the dtype of the streams, if another than they come in; branches read and return what they did.
        walks: "all" lets the backward pass walk through the whole stack, though no parameter before it may need it.
    """

    def __init__(
        self,
        stack: ReversibleSequence,
        plan: Plan,
        *,
        look: Look | None = None,
        widen: torch.dtype | None = None,
        walks: Walks = "all",
    ) -> None:
        self.log = StackLog()
        self._stack = stack
        self._plan = plan
        self._look = look
        self._widen = widen
        self._walks = walks
        self._tell: Where | None = None
        self._label = ""
        self._context: Mapping[str, Any] = {}
        self._steps: dict[Step, _WatchedStep] = {}
        self._computes: list[tuple[Step, torch.dtype | None]] = []

    def tell(self, where: Where | None, label: str) -> None:
        """Whom to tell where the run is, and what to call this stack there."""
        self._tell, self._label = where, label

    def _where(self, direction: str, block: int) -> None:
        if self._tell is not None:
            self._tell(place(direction, self._label, block))

    def __enter__(self) -> StackLog:
        stack = self._stack
        self._originals = (stack._drive, stack._guarded)
        object.__setattr__(stack, "_drive", self._drive)
        object.__setattr__(stack, "_guarded", self._guarded)
        if self._look is not None or self._tell is not None:
            steps = dict.fromkeys(step for block in stack._blocks() for step in block.each_step())
            self._steps = {step: _WatchedStep(step, self.log, self._look, self._where) for step in steps}
        return self.log

    def __exit__(self, *error: object) -> None:
        object.__delattr__(self._stack, "_drive")
        object.__delattr__(self._stack, "_guarded")
        for watched in self._steps.values():
            watched.undo()
        for step, compute in self._computes:
            step.compute = compute

    def _drive(self, plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Outputs:
        if not is_replaying():
            self.log.calls += torch.is_grad_enabled()
            self.log.calls_without_grad += not torch.is_grad_enabled()
            self.log.dtype = streams[0].dtype
        self._context = context
        streams = self._entering(streams)
        if self._widen is not None:
            self._narrow_branches(streams[0].dtype)
            streams = tuple(s.to(self._widen) for s in streams)
        outputs: Outputs = self._originals[0](self._plan, streams, context, hidden)
        if self._tell is not None:
            self._tell("forward, after the stack")
        return outputs if self._widen is None else _cast(outputs, self.log.dtype)

    def _entering(self, streams: Streams) -> Streams:
        for stream in streams:
            if stream.requires_grad and (tell := self._tell) is not None:
                stream.register_hook(lambda _, tell=tell: tell("backward, before the stack"))
        if self._walks == "needed" or not torch.is_grad_enabled():
            return streams
        entered = streams
        if not any(s.requires_grad for s in streams):
            entered = tuple(s.detach().requires_grad_() for s in streams)
            streams = tuple(s.clone() for s in entered)  # no leaves, on whose edits autograd has words of its own
        if not is_replaying():
            self.log.inputs += list({id(s): s for s in entered if s.requires_grad}.values())
        return streams

    def _narrow_branches(self, dtype: torch.dtype) -> None:
        for step in dict.fromkeys(step for block in self._stack._blocks() for step in block.each_step()):
            if step.compute is None:
                self._computes.append((step, None))
                step.compute = dtype

    def _guarded(self, plan: Plan, running: list[int]) -> FindProbe | None:
        """Asked by the engine at the start of each call who is to see rebuilt streams."""
        if is_replaying():
            return None
        for step, watched in self._steps.items():
            watched.blocks = [i for i in reversed(running) for s in self._stack._blocks()[i].each_step() if s is step]
        if self._look == "amplification":
            ends = {part.blocks[-1] for part in segments(plan, running)}
            return _Pushing(self.log, ends, self._context)
        return self._seeing if self._look is not None else None

    def _seeing(self, block: int, streams: Streams) -> SeenBlock:
        seen = SeenBlock(block, tuple(s.detach() for s in streams))
        self.log.blocks.append(seen)
        return seen


class _Pushing:
    """Makes probes that push, each of which knows the one after it, unless its block ends a part of the plan."""

    def __init__(self, log: StackLog, ends: set[int], context: Mapping[str, Any]) -> None:
        self._log = log
        self._ends = ends
        self._context = context
        self._before: Pushed | None = None

    def __call__(self, block: int, streams: Streams) -> Pushed:
        probe = Pushed(block, tuple(s.detach() for s in streams), context=self._context)
        if self._before is not None:
            self._before.after = probe
        self._before = None if block in self._ends else probe
        self._log.blocks.append(probe)
        return probe


def place(direction: str, label: str, block: int) -> str:
    """The words for where a run is: "backward, block 3"."""
    return f"{direction}, {label}block {block}"


def _cast(outputs: Outputs, dtype: torch.dtype | None) -> Outputs:
    cast = outputs.after(tuple(s.to(dtype) for s in outputs))
    cast.hidden = {i: tuple(s.to(dtype) for s in streams) for i, streams in outputs.hidden.items()}
    return cast
