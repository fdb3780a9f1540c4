"""How tools look into a run: guards, anchors, the doctor, the planner and conversion reports all use this interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from retrograde.network.step import Step
from retrograde.network.streams import Streams

from .outputs import Outputs


@dataclass
class StackCall:
    """One call of a stack, before its blocks run: its memory plan, the streams that enter, the context."""

    plan: Any
    streams: Streams
    context: Mapping[str, Any]


@dataclass
class BranchRun:
    """One run of a step's branch: `inputs` are the step's sources as the branch reads them."""

    block: int
    step: Step
    branch: Callable[..., Any]
    sources: list[Tensor]
    inputs: list[Tensor]
    kwargs: Mapping[str, Any]
    is_replay: bool

    def result(self) -> Any:
        """Run the branch."""
        return self.branch(*self.inputs, **self.kwargs)


class Probe(Protocol):
    """Sees the streams before a block when they have been recomputed, and says with which to continue."""

    def recomputed(self, streams: Streams) -> Streams: ...


class Observer:
    """Looks into the calls of a stack (see `ReversibleSequence.observed_by`). By default nothing is changed.

    The tapes of a call keep its observer until the backward pass. So an observer must not keep tensors with their
    graph: that would be a cycle which no garbage collector sees. Detach them, or drop them after the backward pass.
    """

    def on_call(self, call: StackCall) -> None:
        """Before the blocks run. The call may be edited: another plan, other streams."""

    def on_return(self, outputs: Outputs) -> Outputs:
        """After the blocks ran: the outputs to return."""
        return outputs

    def on_block(self, block: int, streams: Streams) -> Probe | None:
        """Before a block that will be reversed: who is to see its input when it is recomputed, if anybody."""
        return None

    def on_step(self, run: BranchRun) -> Any:
        """In the place of the branch: what it returns."""
        return run.result()
