"""Observers of the engine: under which plan a stack runs, where the run is, and how far replays are from first runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograde.engine.decisions import counting_flips
from retrograde.engine.drift import relative_error
from retrograde.engine.observer import BranchRun, Observer, Probe, StackCall
from retrograde.engine.outputs import Outputs
from retrograde.engine.replaying import is_replaying
from retrograde.memory import Plan
from retrograde.network.step import Step
from retrograde.network.streams import Streams

from ._branches import on_copies
from ._compare import rms
from ._decisions import FirstChoices, Repeat, SecondChoices

Tell = Callable[[str], None]


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

    def recomputed(self, streams: Streams) -> Streams:
        self.drift = relative_error(streams, self.truth)
        return streams


@dataclass
class SeenStep:
    """What was seen of one run of a step's branch: what it read, and what it chose.

    `flips` are choices that the replay made differently, `prevented_flips` those that `retrograde.decide` prevented.
    """

    block: int
    step: Step
    sources: list[Tensor]
    choices: list[Tensor]
    drift: float | None = None
    flips: int = 0
    prevented_flips: int = 0

    @property
    def decisions(self) -> int:
        return sum(indices.numel() for indices in self.choices)


@dataclass
class StackLog:
    """What was seen of one stack in one run of the model. `label` is what its places are called by."""

    label: str = ""
    calls: int = 0
    calls_without_grad: int = 0
    blocks: list[SeenBlock] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class StackRun:
    """How one stack runs.

    Attributes:
        plan: the plan of every call, whatever the caller asks for.
        widen: the dtype of the streams, if it differs from the one they come in; branches read what they did before.
        copying: steps that get copies of their sources, because their branches edit them.
        tell: is told where the run is. Without it, the backward pass goes through the whole stack, even if nothing
            before the stack needs a gradient.
        label: what to call the stack there.
    """

    plan: Plan
    widen: torch.dtype | None = None
    copying: frozenset[Step] = frozenset()
    tell: Tell | None = None
    label: str = ""


class StackObserver(Observer):
    """Makes the calls of a stack run as a `StackRun` says. Subclasses watch what happens in them."""

    def __init__(self, run: StackRun) -> None:
        self.run = run
        self.log = StackLog(run.label)

    def on_call(self, call: StackCall) -> None:
        self.log.dtype = call.streams[0].dtype
        if not is_replaying():
            self.log.calls += torch.is_grad_enabled()
            self.log.calls_without_grad += not torch.is_grad_enabled()
        call.plan = self.run.plan
        call.streams = self._entering(call.streams)
        if self.run.widen is not None:
            call.streams = _cast(call.streams, self.run.widen)

    def on_return(self, outputs: Outputs) -> Outputs:
        if self.run.tell is not None:
            self.run.tell("forward, after the stack")
        if self.run.widen is None or self.log.dtype is None:
            return outputs
        dtype, cast = self.log.dtype, outputs.after(_cast(outputs, self.log.dtype))
        cast.hidden = {i: _cast(streams, dtype) for i, streams in outputs.hidden.items()}
        return cast

    def on_step(self, run: BranchRun) -> Any:
        first = not run.is_replay and not is_replaying()  # a stack inside a branch runs again in that branch's replay
        if first:
            self._tell("forward", run.block)
        if self.run.widen is not None and run.step.compute is None:
            assert self.log.dtype is not None
            run.inputs = [t.to(self.log.dtype) for t in run.inputs]
        if run.step in self.run.copying:
            run = on_copies(run)
        if not first:
            return self.replay(run) if run.is_replay else run.result()
        result = self.first_run(run)
        update, _ = run.step.split_aux(result)
        if isinstance(update, Tensor) and update.requires_grad:
            tell, block = self._tell, run.block  # not the run: its tensors would live as long as the hook
            update.register_hook(lambda _: tell("backward", block))
        return result

    def first_run(self, run: BranchRun) -> Any:
        """The result of a branch that runs for the first time."""
        return run.result()

    def replay(self, run: BranchRun) -> Any:
        """The result of a branch that runs again."""
        return run.result()

    def _tell(self, direction: str, block: int) -> None:
        if self.run.tell is not None:
            self.run.tell(place(direction, self.run.label, block))

    def _entering(self, streams: Streams) -> Streams:
        tell = self.run.tell
        if tell is not None:
            for stream in streams:
                if stream.requires_grad:
                    stream.register_hook(lambda _: tell("backward, before the stack"))
        if tell is not None or not torch.is_grad_enabled():
            return streams
        entered = streams
        if not any(s.requires_grad for s in streams):
            entered = tuple(s.detach().requires_grad_() for s in streams)
            streams = tuple(s.clone() for s in entered)  # autograd refuses edits of leaves in words of its own
        if not is_replaying():
            self.log.inputs += list({id(s): s for s in entered if s.requires_grad}.values())
        return streams


class DriftObserver(StackObserver):
    """Compares what is recomputed with what there was: streams, what branches read, and what they choose."""

    repeat: Repeat = "free"

    def on_block(self, block: int, streams: Streams) -> Probe | None:
        if is_replaying():
            return None
        self.log.blocks.append(self.make_probe(block, tuple(s.detach() for s in streams)))
        return self.log.blocks[-1]

    def make_probe(self, block: int, streams: Streams) -> SeenBlock:
        return SeenBlock(block, streams)

    def first_run(self, run: BranchRun) -> Any:
        with FirstChoices() as first:
            result = run.result()
        self.log.steps.append(SeenStep(run.block, run.step, [s.detach() for s in run.sources], first.chosen))
        return result

    def replay(self, run: BranchRun) -> Any:
        runs = [seen for seen in self.log.steps if seen.step is run.step and seen.block == run.block]
        if not runs:
            return run.result()
        seen = min(runs, key=lambda one: relative_error(run.sources, one.sources)) if len(runs) > 1 else runs[0]
        second = SecondChoices(seen.choices, self.repeat)
        with second, counting_flips() as prevented:
            result = run.result()
        seen.drift = relative_error(run.sources, seen.sources)
        seen.prevented_flips = min(prevented.flipped, second.flips)
        seen.flips = second.flips - seen.prevented_flips
        return result


class SameDecisions(DriftObserver):
    """Makes the branches' replays choose what their first runs chose."""

    repeat = "forced"


def place(direction: str, label: str, block: int) -> str:
    """The words for where a run is: "backward, block 3"."""
    return f"{direction}, {label}block {block}"


def _cast(streams: Streams, dtype: torch.dtype) -> Streams:
    return tuple(s.to(dtype) for s in streams)
