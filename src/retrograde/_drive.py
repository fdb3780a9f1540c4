"""Run blocks forward, each part of them under the tape that the memory plan names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from ._block import Block
from ._exactness import OnGrid
from ._offload import Offloaded
from ._outputs import Outputs
from ._plan import INVERTING, Memory, Plan, segments
from ._record import Call, Kept
from ._reverse import Probe, ReverseTape
from ._step import StepError, StreamName
from ._streams import Streams
from ._tape import CheckpointTape, Plain, known
from ._torch_private import constant_when_traced, inside_function_transform, is_exporting

Runner = Plain | CheckpointTape | ReverseTape
MakeRunner = Callable[..., Runner]
Method = TypeVar("Method", bound=Callable[..., Any])

WHY_OUTSIDE = (
    "a reversible stack rebuilds activations when autograd asks for them, which cannot be traced; compile its branches"
)


class FindProbe(Protocol):
    """Says who is to see a block's input again when it is rebuilt, if anybody."""

    def __call__(self, block: int, streams: Streams) -> Probe | None: ...


def outside_compiled_graphs(method: Method) -> Method:
    """Keep a compiler that traces the caller out of `method`; branches that were compiled themselves stay so.

    Compiled whole, the first run would be fused and the replay not, and saved tensors would differ.
    The compiler is only imported if it is at work.
    """
    disabled: list[Any] = []

    @constant_when_traced
    def make_ready() -> None:
        if not disabled:
            disabled.append(torch.compiler.disable(method, reason=WHY_OUTSIDE))

    @functools.wraps(method)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or is_exporting() or not torch.is_grad_enabled():
            return method(*args, **kwargs)
        make_ready()
        return disabled[0](*args, **kwargs)

    return cast("Method", inner)


@outside_compiled_graphs
def drive(
    blocks: Sequence[Block],
    names: tuple[StreamName, ...],
    plan: Plan,
    running: Sequence[int],
    streams: Streams,
    context: Mapping[str, Any],
    *,
    hidden: set[int] | None = None,
    find_probe: FindProbe | None = None,
    make_runner: MakeRunner | None = None,
) -> Outputs:
    """Run the blocks of a call.

    Args:
        running: the blocks that run; the others were dropped.
        hidden: the blocks after which the streams are wanted.
        find_probe: who looks at a reversed block's input.
        make_runner: what runs consecutive blocks of one memory mode; a tape that fits it, unless given.
    """
    call = None
    taped = torch.is_grad_enabled() and not inside_function_transform() and not is_exporting()
    if taped and set(plan.memory) != {"store"}:
        call = Call(names, streams, context)
    outputs = Outputs(streams, names)
    aux, states = outputs.aux_by_block, outputs.hidden
    grid, before = OnGrid([blocks[i] for i in running], names), -1
    is_marked = bool(plan.anchors) or find_probe is not None or not grid.is_idle
    parts = list(segments(plan, running))
    for part in parts:
        here = [blocks[i] for i in part.blocks]
        make = runner_for if make_runner is None else make_runner  # no compiler before 2.13 tests a method for truth
        runner = make(part.memory, call, names, here, keeps_last=part is parts[-1])
        try:
            for i, block in zip(part.blocks, here, strict=True):
                at = i
                if is_marked:
                    streams = grid.before(block, streams)
                    _mark(runner, plan, before, i, streams, find_probe)
                streams, losses = runner.run(block, streams, context)
                if is_marked:
                    grid.after(block)
                before = i
                if losses:
                    aux[i] = losses
                if hidden and i in hidden:
                    states[i] = streams
            runner.close(streams)
        except StepError as error:
            raise error.at(at) from None
        finally:
            runner.leave()
    if call is not None and call.ambient.drew_unseen:
        _relearn(blocks)
    return outputs.after(streams)


def _mark(runner: Runner, plan: Plan, before: int, block: int, streams: Streams, find_probe: FindProbe | None) -> None:
    """Tell a tape what is asked of the streams before a block: whether they are kept, and who sees them rebuilt."""
    if isinstance(runner, ReverseTape):
        runner.watch(None if find_probe is None else find_probe(block, streams))
        if any(before < a <= block for a in plan.anchors):
            runner.anchor(streams)


def runner_for(
    memory: Memory, call: Call | None, names: tuple[StreamName, ...], blocks: list[Block], *, keeps_last: bool
) -> Runner:
    """The tape for consecutive blocks of one memory mode, or none at all.

    Args:
        keeps_last: whether their last step keeps its graph.
    """
    if call is None or memory == "store":
        return Plain(call, names)
    steps = sum(len(block.steps) for block in blocks) - keeps_last
    if memory in INVERTING:
        return ReverseTape(call, steps, partial=memory == "partial")
    return CheckpointTape(call, steps, keep=Offloaded if memory == "offload" else Kept)


def _relearn(blocks: Sequence[Block]) -> None:
    """Python's or NumPy's generator moved, and no branch was known to use it: watch all in the next call."""
    for block in blocks:
        for step in block.each_step():
            known(step).expect_draws()
    warnings.warn(
        "Python's or NumPy's global random generator was drawn from during a call of a ReversibleSequence, where "
        "its branches had not done so before. If a branch drew from it now, the draw was not recorded and this "
        "call's gradients are wrong; later calls record it. A draw of another thread does no harm.",
        RuntimeWarning,
        stacklevel=5,
    )
