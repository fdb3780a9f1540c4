"""The module that users hold: blocks in a row, a memory plan, and tensors in and out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .compiled.traced_run import ON_TAPE, run_traced, why_not_call, why_not_traced
from .engine.anchors import find_anchors
from .engine.exactness import check_all_exact, grid_bits_of, make_exact, make_ordinary, rescaling
from .engine.graph_marks import is_traced
from .engine.guard import Guard, GuardWatch
from .engine.observer import Observer, StackCall
from .engine.outputs import Outputs
from .engine.run import outside_compiled_graphs, run_blocks
from .engine.torch_internals import constant_when_traced
from .memory import Memory, Plan, as_plan
from .network.block import Block
from .network.choices import check_choice
from .network.step import StepError
from .network.streams import Input, Merge, Split, Streams, cast_input, dense, merge_streams, split_tensor
from .network.validation import (
    block_numbers,
    check_blocks,
    check_context_names,
    check_exact,
    check_masks,
    check_max_drift,
    drop_probabilities,
    groups_of,
    merged_context,
    names_of,
)


class ReversibleSequence(nn.Module):
    """Blocks in a row, trained in activation memory that does not grow with their number.

    Args:
        blocks: the blocks; all of them share the same streams.
        split: "duplicate" gives the input to every stream, "chunk" its equal parts along
            `dim`, "first" gives it to the first stream and zeros to the others.
        merge: "mean", "sum", "concat" (along `dim`) or "first" make one tensor of the streams;
            None returns the tuple of streams. By default "concat" after split="chunk", otherwise "mean".
        dim: the dimension that is split and merged.
        memory: "reverse", "selective", "checkpoint", "offload" or "store", a list with one of them per block, or a
            `Plan`. It decides how the backward pass gets its activations, never what is computed. Given one mode for
            all, blocks that have no inverse are checkpointed.
        exact: True puts the streams on a grid on which the inverse is exact to the bit (see `couplings.Exact`).
        grid_bits: the grid's spacing is 2^-grid_bits; by default 16 for float32 streams and 40 for float64 ones.
        overflow: what to do when a stream leaves the range of its grid: "raise", or "rescale": take a coarser grid
            and run the call again, with a warning.
        stream_dtype: the dtype of the streams, if it differs from the input's: float32 around branches of lower
            precision. The merged output has the input's dtype.
        max_drift: place anchors, on the first training call, so that no recomputed stream is relatively further from
            the true one than this.
        guard: compare what was recomputed with the true values now and then, in training.
        layer_drop: the probability with which a block is left out of a call in training, for all
            blocks or one per block. If all would drop, the first one runs. Nothing is rescaled.

    Examples:
        >>> import torch, retrograde as rg
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> stack(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    keeps_last_graph = True  # in the last step of a call: rule 5 of NOTE [Rules of the tape]

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        split: Split = "duplicate",
        merge: Merge | Literal["default"] | None = "default",
        dim: int = -1,
        memory: Memory = "reverse",
        exact: bool = False,
        grid_bits: int | None = None,
        overflow: Literal["raise", "rescale"] = "raise",
        stream_dtype: torch.dtype | None = None,
        max_drift: float | None = None,
        guard: Guard | None = None,
        layer_drop: float | Sequence[float] = 0.0,
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        check_choice("split", split, get_args(Split))
        if merge == "default":
            merge = "concat" if split == "chunk" else "mean"
        check_choice("merge", merge, (*get_args(Merge), None), otherwise="which returns the tuple of streams")
        check_choice("overflow", overflow, ("raise", "rescale"))
        check_blocks(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.split: Split = split
        self.merge: Merge | None = merge
        self.dim = dim
        self.names = names_of(blocks)
        for block in blocks:
            block.bound_steps(self.names)
        self.groups = groups_of(blocks, self.names)
        self.layer_drop = drop_probabilities(layer_drop, len(blocks))
        self.stream_dtype = stream_dtype
        self.overflow = overflow
        self._observer: Observer | None = None
        self._reasons_on_tape: set[str] = set()
        self._checked: set[frozenset[str]] = set()
        check_exact(exact)
        if exact:
            make_exact(blocks, grid_bits)
        elif grid_bits is not None:
            raise ValueError(f"grid_bits={grid_bits} is for exact stacks: give exact=True too.")
        check_all_exact(blocks)
        self.memory = memory
        self.guard = guard
        self.max_drift = max_drift

    @property
    def memory(self) -> Plan:
        """How the backward pass gets each block's activations. Assign any form that the constructor takes."""
        return self._plan

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._plan = as_plan(memory, self._blocks())

    @property
    def exact(self) -> bool:
        """Whether the streams are on a grid. Assign True or False; True leaves the grid of an exact stack unchanged."""
        return any(block.exact for block in self._blocks())

    @exact.setter
    def exact(self, exact: bool) -> None:
        check_exact(exact)
        if exact and not self.exact:
            make_exact(self._blocks(), None)
        elif not exact:
            make_ordinary(self._blocks())

    @property
    def grid_bits(self) -> int | None:
        """The bits of the grid of an exact stack; None for the default of the streams' dtype. Assign another number."""
        return grid_bits_of(self._blocks())

    @grid_bits.setter
    def grid_bits(self, bits: int | None) -> None:
        if not self.exact:
            raise ValueError(f"grid_bits={bits}: the stack is not exact. Set stack.exact = True first.")
        make_exact(self._blocks(), bits)

    @property
    def guard(self) -> Guard | None:
        """What compares recomputed values with the true ones now and then. Assign a `Guard`, or None."""
        return None if self._watch is None else self._watch.guard

    @guard.setter
    def guard(self, guard: Guard | None) -> None:
        if guard is not None and not isinstance(guard, Guard):
            raise TypeError(f"guard={guard!r}: give a retrograde.Guard, or None.")
        self._watch = None if guard is None else GuardWatch(guard)

    @property
    def max_drift(self) -> float | None:
        """The drift at which anchors are placed. Assigned, they are placed in the next training call."""
        return self._max_drift

    @max_drift.setter
    def max_drift(self, max_drift: float | None) -> None:
        check_max_drift(max_drift)
        self._max_drift = max_drift
        self._places_anchors = max_drift is not None

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks())

    def __getitem__(self, index: int) -> Block:
        return self._blocks()[index]

    def __bool__(self) -> bool:
        return True  # as every module is, whatever its length

    def forward(
        self, x: Input, /, *, memory: Memory | None = None, context: Any = None, **named: Any
    ) -> Tensor | tuple[Any, ...] | dict[str, Tensor]:
        """The merged streams; with `(output, aux)` if any step declares an auxiliary loss.

        Where blocks group their streams (several modalities), input and output are dictionaries.

        Args:
            x: a tensor to be split, or the streams as a tuple or by name.
            memory: another memory plan for this call.
            context: what branches take by name, as a dictionary: for names that are options here, such as `memory`.
                Anything but a dictionary is what branches take by the name `context`.
            named: what branches take by name, as keywords; tensors in it are differentiable inputs.
        """
        if "hidden" in named:
            raise TypeError(
                "hidden= is an option of run: stack.run(x, hidden=[...]) returns the streams after those blocks. Give "
                'what a branch takes by that name as context={"hidden": ...}.'
            )
        outputs = self.run(x, memory=memory, context=context, **named)
        merged = self._merged(outputs if self.stream_dtype is None else _in_dtype_of(x, outputs))
        return (merged, outputs.aux) if outputs.aux is not None else merged

    def run(
        self,
        x: Input,
        /,
        *,
        memory: Memory | None = None,
        hidden: Sequence[int] = (),
        context: Any = None,
        **named: Any,
    ) -> Outputs:
        """The streams before they are merged, with auxiliary losses and the hidden states asked for.

        Args:
            hidden: the blocks after which the streams are wanted too, for deep supervision.
        """
        plan = self._plan if memory is None else as_plan(memory, self._blocks())
        self._check_depth(plan)
        context = self._check_context(merged_context(context, named))
        wanted = block_numbers(hidden, len(self.blocks))
        streams = self._streams_of(x)
        if context:
            check_masks(self._blocks(), self.names, context, streams)
        if self._places_anchors and memory is None and torch.is_grad_enabled():
            plan = self._place_anchors(streams, context)
        outputs = self._run(plan, streams, context, wanted)
        if outputs.aux_by_block or (self._drops() and any(b.has_aux for b in self._blocks())):
            losses = [loss for each in outputs.aux_by_block.values() for loss in each]
            outputs.aux = torch.stack([loss.sum() for loss in losses]).sum() if losses else streams[0].new_zeros(())
        return outputs

    def inverse(
        self,
        outputs: Sequence[Tensor] | Mapping[str, Tensor],
        /,
        *,
        context: Any = None,
        **named: Any,
    ) -> Outputs:
        """The streams that `run` was given, from those it returned.

        Branches must compute what they did before: no dropout, and the same context.
        """
        context = self._check_context(merged_context(context, named))
        if isinstance(outputs, Tensor):
            raise TypeError("inverse takes the streams that run returned, not one merged tensor.")
        streams = self._streams_of(outputs)
        for i, block in reversed(list(enumerate(self._blocks()))):
            try:
                streams = block.inverse(streams, context, self.names)
            except StepError as error:
                raise error.at(i) from None
        return Outputs(streams, self.names)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """A context in which an observer looks into every call, in the place of the guard."""
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    def _run(self, plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Outputs:
        observer = self._observer
        if observer is not None:
            call = StackCall(plan, streams, context)
            observer.on_call(call)
            plan, streams, context = call.plan, call.streams, call.context
        blocks = self._blocks()
        if self._goes_into_graph(plan):
            parts = [(plan.modes[s.blocks[0]].name, s.blocks) for s in plan.segments(range(len(blocks)))]
            drop = self.layer_drop if self._drops() else ()
            return run_traced(blocks, self.names, parts, streams, context, hidden=hidden, layer_drop=drop)
        running = self._running()
        if observer is None and self._watch is not None and torch.is_grad_enabled():
            recomputed = [i for i in running if plan.modes[i].make_tape is not None]
            observer = self._watch.observer(recomputed, [i for i in recomputed if plan.modes[i].needs_inverse])
        segments = plan.whole if len(running) == len(plan.modes) else list(plan.segments(running))

        def run() -> Outputs:
            return run_blocks(
                blocks, self.names, segments, streams, context,
                hidden=hidden, observer=observer, keep_last_graph=self.keeps_last_graph,
            )  # fmt: skip

        if self.overflow == "raise" or not self.exact:
            outputs = run()
        else:
            outputs = rescaling(blocks, list(dict.fromkeys(s.device for s in streams)), run)
        return outputs if self._observer is None else self._observer.on_return(outputs)

    def _goes_into_graph(self, plan: Plan) -> bool:
        """Whether this call is traced, for backend="retrograde". If not, it runs on its tape, outside of any graph."""
        if not is_traced():
            return False
        is_observed, rescales = bool(self._observer or self._watch), self.overflow == "rescale" and self.exact
        reason = why_not_call(self, is_observed=is_observed, rescales=rescales)
        for i, block in enumerate(self._blocks()):
            drop = self.layer_drop[i] if self.training else 0.0
            reason = reason or why_not_traced(i, block, plan.modes[i].name, drop)
        if reason is not None:
            self._warn_on_tape(reason)
        return reason is None

    @constant_when_traced
    def _warn_on_tape(self, reason: str) -> None:
        if reason not in self._reasons_on_tape:
            self._reasons_on_tape.add(reason)
            warnings.warn(ON_TAPE.format(reason=reason), RuntimeWarning, stacklevel=2)

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

    @outside_compiled_graphs
    def _place_anchors(self, streams: Streams, context: Mapping[str, Any]) -> Plan:
        """Measure drift on this call, once, and put anchors into the plan."""
        assert self._max_drift is not None
        blocks, plan = self._blocks(), self._plan
        segments = list(plan.segments(range(len(blocks))))

        def run(leaves: Streams, context: Mapping[str, Any], observer: Observer) -> Outputs:
            return run_blocks(blocks, self.names, segments, leaves, context, observer=observer)

        anchors = find_anchors(run, blocks, streams, context, tolerance=self._max_drift)
        self._plan = replace(plan, anchors=plan.anchors | anchors)
        self._places_anchors = False
        return self._plan

    def _streams_of(self, x: Input) -> Streams:
        return self._split(x if self.stream_dtype is None else cast_input(x, self.stream_dtype))

    def _split(self, x: Input) -> Streams:
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
            expected = (
                f"{list(self.groups)}, or the streams {list(self.names)}" if self.groups else f"{list(self.names)}"
            )
            raise ValueError(f"The stack takes {expected}, but {list(x)} were given.")
        return [x[name] for name in self.names]

    def _check_depth(self, plan: Plan) -> None:
        """Blocks that were added have no place in a plan that was made before."""
        if min(len(plan.memory), len(self.layer_drop)) < len(self.blocks):
            raise ValueError(
                f"The stack has {len(self.blocks)} blocks, a memory plan for {len(plan.memory)} and layer_drop for "
                f"{len(self.layer_drop)}: blocks were added. Make a new ReversibleSequence of them all."
            )

    def _check_context(self, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """The context, whose names are checked once for each set of them."""
        given = frozenset(context)
        if given not in self._checked:
            check_context_names(self._blocks(), given)
            if not torch.compiler.is_compiling():  # an exported program may have no side effects
                self._checked.add(given)
        return context

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        memory = next(iter(self._plan.memory)) if len(set(self._plan.memory)) == 1 else str(self._plan)
        grid = f", exact=True, grid_bits={self.grid_bits}" if self.exact else ""
        return f"split={self.split!r}, merge={self.merge!r}, dim={self.dim}, memory={str(memory)!r}{grid}"


def _in_dtype_of(x: Input, outputs: Outputs) -> Outputs:
    """The outputs in the dtype of the input they came from."""
    given = x if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, Mapping) else x))
    return outputs.after(tuple(s.to(given.dtype) for s in outputs))
