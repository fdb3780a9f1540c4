"""The module that users hold: blocks in a row, a memory plan, and tensors in and out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._block import Block
from ._context import check_masks, check_names
from ._drift import place_anchors
from ._drive import FindProbe, Runner, drive, runner_for
from ._exactness import check_all_exact, make_exact, make_ordinary, rescaling
from ._guard import Guard, Sampled, Watch
from ._outputs import Outputs
from ._plan import INVERTING, Memory, Plan, as_plan
from ._record import Call
from ._single_graph import refusal, run_in_graph, unfit
from ._step import StepError, StreamName, check_choice
from ._streams import Merge, Split, Streams, check_merge, check_split, dense, merge_streams, split_tensor
from ._structure import check_blocks, groups_of, names_of, positions, probabilities
from ._torch_private import constant_when_traced

Input = Tensor | Sequence[Tensor] | Mapping[Any, Tensor]


class ReversibleSequence(nn.Module):
    """Blocks in a row, trained in activation memory that does not grow with their number.

    Args:
        blocks: the blocks; all of them share the same streams.
        split: "duplicate" gives the input to every stream, "chunk" its equal parts along
            `dim`, "first" gives it to the first stream and zeros to the others.
        merge: "mean", "sum", "concat" (along `dim`) or "first" make one tensor of the streams;
            None returns the tuple of streams.
        dim: the dimension that is split and merged.
        memory: "reverse", "partial", "checkpoint", "offload" or "store" (see `Plan`), a list with one of them for
            each block, or a `Plan`. It decides how the backward pass gets its activations, never what is computed.
        exact: True puts the streams on a grid on which the inverse is exact to the bit (see `couplings.Exact`); a
            number gives the grid's bits.
        overflow: what to do when a stream leaves the range of its grid: "raise", or "rescale": take a coarser grid
            and start the call again, with a warning.
        stream_dtype: the dtype of the streams, if it is another than the input's: float32 around branches of lower
            precision. The merged output has the input's dtype again.
        drift: place anchors, on the first training call, so that no rebuilt stream is relatively further from the
            true one than this.
        guard: compare a rebuilt stream with the true one now and then, in training.
        compiled: how the stack trains inside of a model that is compiled as a whole. "branches" keeps it out of the
            graph; compile its branches one by one. "single graph" writes the reversible backward pass into
            the graph, where nothing is against it (see `single_graph_refusal`).
        layer_drop: the probability with which a block is left out of a call in training, for all
            blocks or one for each. If all would drop, the first is kept. Nothing is rescaled.

    Examples:
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
        exact: bool | int = False,
        overflow: Literal["raise", "rescale"] = "raise",
        stream_dtype: torch.dtype | None = None,
        drift: float | None = None,
        guard: Guard | None = None,
        layer_drop: float | Sequence[float] = 0.0,
        compiled: Literal["branches", "single graph"] = "branches",
    ) -> None:
        super().__init__()
        blocks = list(blocks)
        check_split(split)
        check_merge(merge)
        check_blocks(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.split: Split = split
        self.merge: Merge | None = merge
        self.dim = dim
        self.names = names_of(blocks)
        for block in blocks:
            block.wires(self.names)
        self.groups = groups_of(blocks, self.names)
        self.layer_drop = probabilities(layer_drop, len(blocks))
        self.stream_dtype = stream_dtype
        self.overflow = check_choice("overflow", overflow, ("raise", "rescale"))
        if exact is not False:
            self.exact = exact
        check_all_exact(blocks)
        self._plan = as_plan(memory, blocks)
        self._watch = None if guard is None else Watch(guard)
        if drift is not None and not drift > 0:
            raise ValueError(f"drift={drift!r} is no tolerance: give a relative error above 0, such as 1e-3.")
        self._drift = drift
        self.compiled = check_choice("compiled", compiled, ("branches", "single graph"))
        self._checked: set[frozenset[str]] = set()

    @property
    def memory(self) -> Plan:
        """How the backward pass gets each block's activations. Assign any form that the constructor takes."""
        return self._plan

    @memory.setter
    def memory(self, memory: Memory | Sequence[Memory] | Plan) -> None:
        self._plan = as_plan(memory, self._blocks())

    @property
    def exact(self) -> bool:
        """Whether the streams are on a grid. Assign True, False, or the grid's bits."""
        return any(block.exact for block in self._blocks())

    @exact.setter
    def exact(self, exact: bool | int) -> None:
        if exact is False:
            make_ordinary(self._blocks())
        else:
            make_exact(self._blocks(), None if exact is True else exact)

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
        merged = self._merged(outputs if self.stream_dtype is None else _in_dtype_of(x, outputs))
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
        self._check_depth(plan)
        self._check_context(context)
        wanted = positions(hidden, len(self.blocks))
        streams = self._streams_of(x)
        if context:
            check_masks(self._blocks(), self.names, context, streams)
        if self._drift is not None and memory is None and torch.is_grad_enabled():
            plan = self._place_anchors(streams, context, self._drift)
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
                raise error.at(i) from None
        return Outputs(streams, self.names)

    def _drive(self, plan: Plan, streams: Streams, context: Mapping[str, Any], hidden: set[int]) -> Outputs:
        blocks, running = self._blocks(), self._running()

        def run() -> Outputs:
            return drive(
                blocks, self.names, plan, running, streams, context,
                hidden=hidden, find_probe=find_probe, make_runner=self._runner,
            )  # fmt: skip

        if self.compiled == "single graph" and torch.compiler.is_compiling() and torch.is_grad_enabled():
            reverses = set(plan.memory) == {"reverse"} and not plan.anchors
            if reverses and not hidden and self.single_graph_refusal() is None and unfit(streams, context) is None:
                return Outputs(run_in_graph(blocks, self.names, streams, context), self.names)
        find_probe = self._guarded(plan, running)
        if self.overflow == "raise" or not self.exact:
            return run()
        return rescaling(blocks, list(dict.fromkeys(s.device for s in streams)), run)

    @constant_when_traced
    def single_graph_refusal(self) -> str | None:
        """Why the stack, as it is now, would not train in one compiled graph; None if it would.

        A call goes into the graph if, besides, its inputs allow it: float32 or float64 streams, no autocast, and no
        hidden states asked for.
        """
        if self._watch is not None or self._drops():
            return "a guard or layer drop decides anew in each call"
        return refusal(self._blocks())

    def _runner(
        self, memory: Memory, call: Call | None, names: tuple[StreamName, ...], blocks: list[Block], *, keeps_last: bool
    ) -> Runner:
        return runner_for(memory, call, names, blocks, keeps_last=keeps_last)

    def _guarded(self, plan: Plan, running: list[int]) -> FindProbe | None:
        """In a call that the guard is due in, who looks at which block."""
        if self._watch is None or not torch.is_grad_enabled():
            return None
        watch = self._watch
        due = watch.due([i for i in running if plan.memory[i] in INVERTING])
        return lambda block, streams: Sampled(watch, block, streams) if block == due else None

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

    def _place_anchors(self, streams: Streams, context: Mapping[str, Any], tolerance: float) -> Plan:
        self._plan = place_anchors(self._blocks(), self.names, self._plan, streams, context, tolerance=tolerance)
        self._drift = None  # measured once
        return self._plan

    def _streams_of(self, x: Input) -> Streams:
        return self._split(x if self.stream_dtype is None else _cast(x, self.stream_dtype))

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
            known = f"{list(self.groups)}, or the streams {list(self.names)}" if self.groups else f"{list(self.names)}"
            raise ValueError(f"The stack takes {known}, but {list(x)} were given.")
        return [x[name] for name in self.names]

    def _check_depth(self, plan: Plan) -> None:
        """Blocks that were added have no place in a plan that was made before."""
        if min(len(plan.memory), len(self.layer_drop)) < len(self.blocks):
            raise ValueError(
                f"The stack has {len(self.blocks)} blocks, a memory plan for {len(plan.memory)} and layer_drop for "
                f"{len(self.layer_drop)}: blocks were added. Make a new ReversibleSequence of them all."
            )

    def _check_context(self, context: Mapping[str, Any]) -> None:
        """Checked once for each set of names."""
        given = frozenset(context)
        if given not in self._checked:
            check_names(self._blocks(), given)
            if not torch.compiler.is_compiling():  # an exported program may have no side effects
                self._checked.add(given)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        modes = dict.fromkeys(self._plan.memory)
        memory = next(iter(modes)) if len(modes) == 1 else list(self._plan.memory)
        return f"split={self.split!r}, merge={self.merge!r}, dim={self.dim}, memory={memory!r}"


def _cast(x: Input, dtype: torch.dtype) -> Input:
    """The input in another dtype, before it is split: gradients of the streams are summed in the wide one."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, Mapping):
        return {name: stream.to(dtype) for name, stream in x.items()}
    return [stream.to(dtype) for stream in x]


def _in_dtype_of(x: Input, outputs: Outputs) -> Outputs:
    """The outputs in the dtype of the input they came from."""
    given = x if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, Mapping) else x))
    return outputs.after(tuple(s.to(given.dtype) for s in outputs))
