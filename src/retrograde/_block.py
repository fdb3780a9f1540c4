"""An ordered group of steps, and the ready-made blocks of the literature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ._branch import TakesArgument
from ._partial import Policy
from ._step import Step, StepError, StreamName
from ._streams import Streams
from .couplings import Replace, Scaled, SupportsCoupling


class Wire(NamedTuple):
    """A step of a block, and the positions of the streams that it updates and reads."""

    step: Step
    target: int
    sources: tuple[int, ...]
    ends_block: bool


class Advance(Protocol):
    """Runs one step: the streams after it, and its auxiliary loss."""

    def __call__(self, wire: Wire, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Tensor | None]: ...


def advance(wire: Wire, streams: Streams, context: Mapping[str, Any]) -> tuple[Streams, Tensor | None]:
    """Run one step in plain autograd."""
    step = wire.step
    update, aux = step.update([streams[i] for i in wire.sources], step.takes.select(context))
    return replaced(streams, wire.target, step.combine(streams[wire.target], update)), aux


def retreat(wire: Wire, streams: Streams, context: Mapping[str, Any]) -> Streams:
    """Undo one step in plain autograd."""
    step = wire.step
    if not step.invertible:
        raise StepError(f"{step.name} cannot be undone: {type(step.coupling).__name__} forgets its target.")
    if step.forgets:
        raise StepError(
            f"{step.name} can only be undone in a backward pass, with the bits that {type(step.coupling).__name__} "
            "kept aside in the forward pass. For inverse() use couplings.Scaled, whose inverse rounds."
        )
    update, _ = step.update([streams[i] for i in wire.sources], step.takes.select(context))
    return replaced(streams, wire.target, step.coupling.separate(streams[wire.target], update))


def replaced(streams: Streams, position: int, stream: Tensor) -> Streams:
    return (*streams[:position], stream, *streams[position + 1 :])


class Block(nn.Module):
    """Steps that belong together; the unit to which a memory mode is given.

    Streams are named by position (0, 1, …) or by any strings, in all steps alike. Named
    streams are ordered as `streams` says, or else as they first appear.

    Args:
        steps: the steps, in the order in which they run.
        streams: the names of the streams in order; needed only to fix another order.
        order: how the streams leave the block; `(1, 0)` swaps two streams' roles.
        groups: streams that are made of one input and merged into one output, by the name of that
            input; `{"video": ("video", "video_memory")}`.
    """

    def __init__(
        self,
        *steps: Step,
        streams: Sequence[str] | None = None,
        order: Sequence[int] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        if not steps or not all(isinstance(s, Step) for s in steps):
            raise ValueError(f"A block is made of one or more steps, not of {[type(s).__name__ for s in steps]}.")
        self.steps = nn.ModuleList(steps)
        self.names: tuple[StreamName, ...] = tuple(streams) if streams else _names_in(steps)
        self.order = tuple(order) if order is not None else None
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        self._wirings: dict[tuple[StreamName, ...], tuple[list[Any], tuple[Wire, ...]]] = {}
        if self.order is not None and sorted(self.order) != list(range(len(self.names))):
            raise ValueError(f"order={self.order} is not a permutation of the block's {len(self.names)} streams.")
        self.wires(self.names)

    @property
    def invertible(self) -> bool:
        return all(step.invertible for step in self.each_step())

    @property
    def exact(self) -> bool:
        """Whether a step of the block works on a grid."""
        return any(wire.step.exact for wire in self.wires(self.names))

    @property
    def has_aux(self) -> bool:
        return any(step.aux == "loss" for step in self.each_step())

    def each_step(self) -> list[Step]:
        return [step for step in self.steps if isinstance(step, Step)]

    def wires(self, names: tuple[StreamName, ...]) -> tuple[Wire, ...]:
        """The steps with their streams' positions among `names`, which may hold more than the block's own."""
        steps = [*self._modules["steps"]._modules.values()]  # type: ignore[union-attr]  # `self.steps` is a long search
        found = self._wirings.get(names)
        if found is None or found[0] != steps:  # one may have been exchanged
            found = self._wirings[names] = steps, self._wire(names)
        return found[1]

    def _wire(self, names: tuple[StreamName, ...]) -> tuple[Wire, ...]:
        steps = self.each_step()
        missing = [n for n in _names_in(steps) if n not in names]
        if missing:
            raise ValueError(f"The block's steps use the streams {missing}, which are not among {list(names)}.")
        if self.order is not None and len(names) != len(self.order):
            raise ValueError(f"A block that reorders {len(self.order)} streams cannot be used among {len(names)}.")
        return tuple(
            Wire(step, names.index(step.target), tuple(names.index(s) for s in step.sources), i == len(steps) - 1)
            for i, step in enumerate(steps)
        )

    def forward(
        self,
        streams: Streams,
        context: Mapping[str, Any] | None = None,
        advance: Advance = advance,
        names: tuple[StreamName, ...] | None = None,
    ) -> tuple[Streams, tuple[Tensor, ...]]:
        """Run the steps: the streams after the block, and its auxiliary losses.

        Args:
            streams: the streams, in the order of `names`.
            context: what branches take by name.
            advance: how to run a step; a tape has its own way.
            names: the streams' names, if they are not just the block's own.
        """
        losses: tuple[Tensor, ...] = ()
        context = {} if context is None else context
        for wire in self.wires(self.names if names is None else names):
            streams, aux = advance(wire, streams, context)
            if aux is not None:
                losses = (*losses, aux)
        return self.reorder(streams), losses

    def inverse(
        self, streams: Streams, context: Mapping[str, Any] | None = None, names: tuple[StreamName, ...] | None = None
    ) -> Streams:
        """The streams before the block, from those after it."""
        streams = self.restore_order(streams)
        for wire in reversed(self.wires(self.names if names is None else names)):
            streams = retreat(wire, streams, {} if context is None else context)
        return streams

    def reorder(self, streams: Streams) -> Streams:
        return streams if self.order is None else tuple(streams[i] for i in self.order)

    def restore_order(self, streams: Streams) -> Streams:
        if self.order is None:
            return streams
        return tuple(streams[self.order.index(i)] for i in range(len(self.order)))

    def describe(self) -> str:
        return " · ".join(step.name for step in self.each_step())


def _names_in(steps: Sequence[Any]) -> tuple[StreamName, ...]:
    used = [name for step in steps for name in (step.target, *step.sources)]
    if all(isinstance(name, int) for name in used):
        if min(used) < 0:
            raise ValueError(f"Streams are counted from 0, but a step uses {min(used)}.")
        return tuple(range(max(used) + 1))
    if all(isinstance(name, str) for name in used):
        return tuple(dict.fromkeys(used))
    raise ValueError(f"Streams are named by numbers or by strings, not by both: {list(dict.fromkeys(used))}.")


def two_stream(
    f: Callable[..., Any],
    g: Callable[..., Any],
    /,
    *,
    coupling: SupportsCoupling | None = None,
    takes: TakesArgument | Mapping[str, TakesArgument] = None,
    aux: Literal["f", "g"] | Sequence[Literal["f", "g"]] = (),
    compute: torch.dtype | None = None,
    keeps: Policy = "attention",
) -> Block:
    """The block of RevNet and Reformer: `0 += f(1)`, then `1 += g(0)`.

    Args:
        coupling: how the updates enter both streams; additive unless given.
        takes: the context that both branches receive, as in `Step`; or `{"f": ..., "g": ...}`
            to say it for each of them. By default what their signatures name.
        aux: which of the two return `(update, auxiliary loss)`, as in `aux="f"` or `aux=("f", "g")`.
        compute: the dtype that the branches compute in, if it is another than the streams'.
        keeps: what a partial replay keeps of both branches, as in `Step`.
    """
    each = isinstance(takes, Mapping) and set(takes) <= {"f", "g"}
    by_branch: Mapping[str, Any] = cast("Mapping[str, Any]", takes) if each else {"f": takes, "g": takes}
    if unknown := set(aux) - {"f", "g"}:
        raise ValueError(f"two_stream has the branches 'f' and 'g', but aux names {sorted(unknown)}.")
    return Block(
        *(
            Step(
                branch,
                target,
                (source,),
                coupling=coupling,
                takes=by_branch.get(name),
                aux=_aux(name in aux),
                compute=compute,
                keeps=keeps,
            )
            for branch, name, target, source in ((f, "f", 0, 1), (g, "g", 1, 0))
        )
    )


def _aux(has_loss: bool) -> Literal["none", "loss"]:
    return "loss" if has_loss else "none"


def momentum(f: Callable[..., Any], /, *, gamma: float = 0.9, takes: TakesArgument = None) -> Block:
    """A momentum residual block: `v = gamma v + (1 - gamma) f(x)`, then `x += v`.

    Stream 0 is x and stream 1 the velocity v. `split="first"` starts it at zero, and
    `merge="first"` returns x.
    """
    return Block(
        Step(f, target=1, sources=(0,), coupling=Scaled(keep=gamma, scale=1 - gamma), takes=takes),
        Step(_same, target=0, sources=(1,), name="velocity"),
    )


def midpoint(f: Callable[..., Any], /, *, step: float = 1.0, takes: TakesArgument = None) -> Block:
    """An explicit midpoint (leapfrog) block: `next = previous + 2 step f(current)`; the streams swap roles."""
    return Block(Step(f, target=0, sources=(1,), coupling=Scaled(scale=2 * step), takes=takes), order=(1, 0))


def grouped(*branches: Callable[..., Any], takes: TakesArgument = None) -> Block:
    """The grouped block of RevGNN: one stream a branch.

    The first branch reads the sum of the other streams; each further one reads the stream
    before it, already updated.
    """
    if len(branches) < 2:
        raise ValueError(f"A grouped block needs two branches or more, one a stream, not {len(branches)}.")
    others = range(1, len(branches))
    return Block(
        Step(branches[0], target=0, sources=tuple(others), reads="sum", takes=takes),
        *(Step(branches[i], target=i, sources=(i - 1,), takes=takes) for i in others),
    )


def transition(*branches: Callable[..., Any], takes: TakesArgument = None) -> Block:
    """A stage transition: each stream is replaced by its branch of it, in a new shape or width.

    It has no inverse, so its memory is "checkpoint" or "store".
    """
    return Block(*(Step(b, target=i, sources=(i,), coupling=Replace(), takes=takes) for i, b in enumerate(branches)))


def _same(stream: Tensor) -> Tensor:
    return stream
