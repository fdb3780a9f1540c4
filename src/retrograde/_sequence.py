"""The module that users hold: blocks in a row, a memory plan, and tensors in and out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ._block import Block
from ._plan import Memory, Plan, as_plan, segments
from ._record import Call
from ._step import StepError, StreamName
from ._streams import Merge, Split, Streams, check_merge, check_split, dense, merge_streams, split_tensor
from ._tape import CheckpointTape, Losses, Plain, ReverseTape, known
from ._torch_private import inside_function_transform

Input = Tensor | Sequence[Tensor] | Mapping[Any, Tensor]
Runner = Plain | CheckpointTape | ReverseTape
Method = TypeVar("Method", bound=Callable[..., Any])


def outside_compiled_graphs(method: Method) -> Method:
    """Keep a compiler that traces the caller out of `method`; branches that were compiled themselves stay so.

    Compiled whole, the first run would be fused and the replay not, and saved tensors would differ.
    The compiler is only imported if it is at work.
    """
    disabled: list[Any] = []

    @functools.wraps(method)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    return cast("Method", inner)


class Outputs(tuple[Tensor, ...]):
    """The streams after a stack: a tuple, with names where the streams have names.

    Attributes:
        names: the streams' names, or their positions.
        aux: the sum of all auxiliary losses, or None if no block has one.
        aux_by_block: for each block that ran and has them, its auxiliary losses.
        hidden: the streams after each block that was asked for.
    """

    names: tuple[StreamName, ...]
    aux: Tensor | None
    aux_by_block: dict[int, Losses]
    hidden: dict[int, Streams]

    def __new__(cls, streams: Iterable[Tensor], names: tuple[StreamName, ...]) -> Outputs:
        outputs = super().__new__(cls, streams)
        outputs.names = names
        outputs.aux = None
        outputs.aux_by_block = {}
        outputs.hidden = {}
        return outputs

    def __getnewargs__(self) -> tuple[tuple[Tensor, ...], tuple[StreamName, ...]]:
        return tuple(self), self.names

    def named(self) -> dict[StreamName, Tensor]:
        """The streams by name."""
        return dict(zip(self.names, self, strict=True))


class ReversibleSequence(nn.Module):
    """Blocks in a row, trained in activation memory that does not grow with their number.

    Args:
        blocks: the blocks; all of them share the same streams.
        split: "duplicate" gives the input to every stream, "chunk" its equal parts along
            `dim`, "first" gives it to the first stream and zeros to the others.
        merge: "mean", "sum", "concat" (along `dim`) or "first" make one tensor of the streams;
            None returns the tuple of streams.
        dim: the dimension that is split and merged.
        memory: "reverse", "checkpoint" or "store", a list with one of them for each block, or
            a `Plan`. It decides how the backward pass gets its activations, never what is computed.
        layer_drop: the probability with which a block is left out of a call in training, for all
            blocks or one for each. If all would drop, the first is kept. Nothing is rescaled.

    Example:
        >>> import torch, retrograde as rg
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> stack(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        split: Split = "duplicate",
        merge: Merge | None = "mean",
        dim: int = -1,
        memory: Memory | Sequence[Memory] | Plan = "reverse",
        layer_drop: float | Sequence[float] = 0.0,
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        check_split(split)
        check_merge(merge)
        _check_blocks(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.split: Split = split
        self.merge: Merge | None = merge
        self.dim = dim
        self.names = _names_of(blocks)
        for block in blocks:
            block.wires(self.names)
        self.groups = _groups_of(blocks, self.names)
        self.layer_drop = _probabilities(layer_drop, len(blocks))
        self._plan = as_plan(memory, blocks)
        self._checked: set[frozenset[str]] = set()

    @property
    def memory(self) -> Plan:
        """How the backward pass gets each block's activations. Assign any form that the constructor takes."""
        return self._plan

    @memory.setter
    def memory(self, memory: Memory | Sequence[Memory] | Plan) -> None:
        self._plan = as_plan(memory, self._blocks())

    def forward(
        self, x: Input, /, *, memory: Memory | Sequence[Memory] | Plan | None = None, **context: Any
    ) -> Tensor | tuple[Any, ...] | dict[str, Tensor]:
        """The merged streams; with `(output, aux)` if any step declares an auxiliary loss.

        Where blocks group their streams (several modalities), input and output are dictionaries.

        Args:
            x: a tensor to be split, or the streams as a tuple or by name.
            memory: another memory plan for this call.
            context: what branches take by name; tensors in it are differentiable inputs.
        """
        outputs = self.run(x, memory=memory, **context)
        merged = self._merged(outputs)
        return (merged, outputs.aux) if outputs.aux is not None else merged

    def run(
        self,
        x: Input,
        /,
        *,
        memory: Memory | Sequence[Memory] | Plan | None = None,
        hidden: Sequence[int] = (),
        **context: Any,
    ) -> Outputs:
        """The streams before they are merged, with auxiliary losses and the hidden states asked for.

        Args:
            hidden: the blocks after which the streams are wanted too, for deep supervision.
        """
        plan = self._plan if memory is None else as_plan(memory, self._blocks())
        self._check_context(context)
        wanted = _positions(hidden, len(self.blocks))
        streams = self._streams_of(x)
        self._check_masks(context, streams)
        outputs = self._drive(plan, streams, context, wanted)
        if outputs.aux_by_block or (self._drops() and any(b.has_aux for b in self._blocks())):
            losses = [loss for found in outputs.aux_by_block.values() for loss in found]
            outputs.aux = torch.stack([loss.sum() for loss in losses]).sum() if losses else streams[0].new_zeros(())
        return outputs

    def inverse(self, outputs: Sequence[Tensor] | Mapping[str, Tensor], /, **context: Any) -> Outputs:
        """The streams that `run` was given, from those it returned.

        Branches must compute what they did before: no dropout, and the same context.
        """
        self._check_context(context)
        if isinstance(outputs, Tensor):
            raise TypeError("inverse takes the streams that run returned, not one merged tensor.")
        streams = self._streams_of(outputs)
        for i, block in reversed(list(enumerate(self._blocks()))):
            try:
                streams = block.inverse(streams, context, self.names)
            except StepError as error:
                raise StepError(f"Block {i}: {error}") from None
        return Outputs(streams, self.names)

    @outside_compiled_graphs
    def _drive(self, plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Outputs:
        call = None
        taped = torch.is_grad_enabled() and not inside_function_transform() and not torch.compiler.is_exporting()
        if taped and set(plan.memory) != {"store"}:
            call = Call(self.names, streams, context)
        outputs, aux, states = streams, {}, {}
        parts = list(segments(plan, self._running()))
        every = self._blocks()
        for part in parts:
            blocks = [every[i] for i in part.blocks]
            runner = self._runner(part.memory, call, blocks, keeps_last=part is parts[-1])
            try:
                for i, block in zip(part.blocks, blocks, strict=True):
                    running = i
                    outputs, losses = runner.run(block, outputs, context)
                    if losses:
                        aux[i] = losses
                    if i in hidden:
                        states[i] = outputs
                runner.close(outputs)
            except StepError as error:
                raise StepError(f"Block {running}: {error}") from None
            finally:
                runner.leave()
        if call is not None and call.ambient.drew_unseen:
            self._relearn()
        result = Outputs(outputs, self.names)
        result.aux_by_block, result.hidden = aux, states
        return result

    def _runner(self, memory: Memory, call: Call | None, blocks: list[Block], *, keeps_last: bool) -> Runner:
        if call is None or memory == "store":
            return Plain(call, self.names)
        steps = sum(len(block.steps) for block in blocks) - keeps_last
        return ReverseTape(call, steps) if memory == "reverse" else CheckpointTape(call, steps)

    def _relearn(self) -> None:
        """Python's or NumPy's generator moved, and no branch was known to use it: watch all in the next call."""
        for block in self._blocks():
            for step in block.each_step():
                known(step).expect_draws()
        warnings.warn(
            "Python's or NumPy's global random generator was drawn from during a call of a ReversibleSequence, where "
            "its branches had not done so before. If a branch drew from it now, the draw was not recorded and this "
            "call's gradients are wrong; later calls record it. A draw of another thread does no harm.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _drops(self) -> bool:
        return self.training and any(self.layer_drop)

    def _running(self) -> list[int]:
        """The blocks of this call: all of them, but for those that are dropped in training."""
        every = list(range(len(self.blocks)))
        if not self._drops():
            return every
        dropped = torch.empty(len(every)).uniform_(0, 1) < torch.tensor(self.layer_drop)
        return [i for i in every if not dropped[i]] or every[:1]

    def _merged(self, outputs: Outputs) -> Tensor | Streams | dict[str, Tensor]:
        if self.merge is None:
            return tuple(outputs)
        if not self.groups:
            return merge_streams(outputs, self.merge, self.dim)
        named = outputs.named()
        return {
            name: merge_streams([named[m] for m in members], self.merge, self.dim)
            for name, members in self.groups.items()
        }

    def _streams_of(self, x: Input) -> Streams:
        if isinstance(x, Tensor):
            if self.groups:
                raise ValueError(
                    f"The stack takes one tensor for each of {list(self.groups)}, by name, not one in all."
                )
            return split_tensor(x, len(self.names), self.split, self.dim)
        if isinstance(x, Mapping):
            x = self._by_name(x)
        if len(x) != len(self.names) or not all(isinstance(s, Tensor) for s in x):
            raise ValueError(
                f"The stack has {len(self.names)} streams ({', '.join(map(str, self.names))}), but got {len(x)} values "
                f"of types {[type(s).__name__ for s in x]}. Give a tensor to be split, or one tensor for each stream."
            )
        return tuple(dense(s) for s in x)

    def _by_name(self, x: Mapping[Any, Tensor]) -> list[Tensor]:
        if self.groups and set(x) == set(self.groups):
            parts = {
                member: stream
                for name, members in self.groups.items()
                for member, stream in zip(
                    members, split_tensor(x[name], len(members), self.split, self.dim), strict=True
                )
            }
            return [parts[name] for name in self.names]  # type: ignore[index]
        if set(x) != set(self.names):
            known = f"{list(self.groups)}, or the streams {list(self.names)}" if self.groups else f"{list(self.names)}"
            raise ValueError(f"The stack takes {known}, but {list(x)} were given.")
        return [x[name] for name in self.names]

    def _check_context(self, context: Mapping[str, Any]) -> None:
        """Every name is taken by somebody, and nobody lacks one; checked once for each set of names."""
        given = frozenset(context)
        if given in self._checked:
            return
        steps = [(i, step) for i, block in enumerate(self._blocks()) for step in block.each_step()]
        taken = frozenset().union(*(step.takes.names() for _, step in steps))
        if given - taken and not any(step.takes.everything for _, step in steps):
            listing = "; ".join(f"block {i} {step.name}: {step.takes}" for i, step in steps)
            raise TypeError(f"No branch takes the context {sorted(given - taken)}. What each takes: {listing}.")
        for i, step in steps:
            if missing := step.takes.required - given:
                raise TypeError(
                    f"Block {i}: {step.name} needs the context {sorted(missing)}, but the call gave "
                    f"{sorted(given) or 'none'}. Pass it by name, or give the branch's parameter a default."
                )
        self._checked.add(given)

    def _check_masks(self, context: Mapping[str, Any], streams: Streams) -> None:
        """Masks cover the leading dimensions of their streams; a wrong one would broadcast, or fail far inside."""
        for i, block in enumerate(self._blocks() if context else ()):
            for step in (step for step in block.each_step() if step.masks):
                names = dict(step.takes.pairs)
                for parameter, stream in step.masks.items():
                    mask = context.get(names[parameter])
                    shape = streams[self.names.index(stream)].shape
                    if isinstance(mask, Tensor) and mask.shape != shape[: mask.ndim]:
                        raise ValueError(
                            f"Block {i}, {step.name}: {names[parameter]} has shape {tuple(mask.shape)}, but the stream "
                            f"{stream!r} of shape {tuple(shape)} needs {tuple(shape[: max(mask.ndim, 1)])}."
                        )

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        modes = dict.fromkeys(self._plan.memory)
        memory = next(iter(modes)) if len(modes) == 1 else list(self._plan.memory)
        return f"split={self.split!r}, merge={self.merge!r}, dim={self.dim}, memory={memory!r}"


def _check_blocks(blocks: list[Any]) -> None:
    if not blocks:
        raise ValueError("A reversible sequence needs at least one block.")
    for i, block in enumerate(blocks):
        if not isinstance(block, Block):
            raise TypeError(
                f"Block {i} is a {type(block).__name__}, not a retrograde.Block. "
                "Make one of two branches with retrograde.two_stream(f, g)."
            )


def _names_of(blocks: list[Block]) -> tuple[StreamName, ...]:
    kinds = {isinstance(name, str) for block in blocks for name in block.names}
    if len(kinds) > 1:
        raise ValueError("Some blocks name their streams and others number them; choose one for the whole sequence.")
    if kinds == {False}:
        return tuple(range(max(len(block.names) for block in blocks)))
    return tuple(dict.fromkeys(name for block in blocks for name in block.names))


def _groups_of(blocks: list[Block], names: tuple[StreamName, ...]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        for name, members in block.groups.items():
            if groups.setdefault(name, members) != members:
                raise ValueError(f"Blocks disagree on the streams of {name!r}: {groups[name]} and {members}.")
    left = [n for n in names if not any(n in members for members in groups.values())]
    if groups and left:
        raise ValueError(f"The streams {left} belong to none of the groups {groups}; put each stream into one.")
    return groups


def _probabilities(layer_drop: float | Sequence[float], count: int) -> list[float]:
    each = [float(layer_drop)] * count if isinstance(layer_drop, (int, float)) else [float(p) for p in layer_drop]
    if len(each) != count or not all(0 <= p <= 1 for p in each):
        raise ValueError(
            f"layer_drop={layer_drop!r}: give a probability from 0 to 1, or one for each of {count} blocks."
        )
    return each


def _positions(blocks: Sequence[int], count: int) -> set[int]:
    outside = [i for i in blocks if not -count <= i < count]
    if outside:
        raise ValueError(f"hidden={list(blocks)}: the stack has {count} blocks, so {outside} name none.")
    return {i % count for i in blocks}
