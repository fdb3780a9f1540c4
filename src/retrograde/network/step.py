"""One invertible update of one stream: target ← combine(target, branch(*sources, **context))."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.couplings import Additive, Coupling, ExactCoupling, SideBitCoupling

from .branch import TakesArgument, find_takes, name_of
from .choices import check_choice
from .save_ops import SaveOps, check_save_ops
from .streams import versions

StreamName = int | str


class StepError(ValueError):
    """A step met something it cannot work with; the message names the block and the branch.

    `bits` is the grid that would have held a stream that left its range (see `couplings.Exact`).
    """

    bits: int | None = None
    _has_block = False

    def at(self, block: int) -> StepError:
        """The same error, with the number of the block. A stack inside a branch has a grid of its own: no bits then."""
        error = StepError(f"Block {block}: {self}")
        error.bits = None if self._has_block else self.bits
        error._has_block = True
        return error


class Step(nn.Module):
    """Update one stream from others, which stay unchanged.

        target ← coupling.combine(target, branch(*sources, **context))

    Args:
        branch: any callable or module; it gets the sources by position and its context by name.
        target: the stream that is updated, by position or name.
        sources: the streams that the branch reads.
        coupling: how the update enters the stream; `couplings.Additive()` by default.
        takes: which context the branch receives: a sequence of names, a mapping from the
            branch's parameter to the context's name, or "all". By default what its signature names.
        reads: "each" passes the sources one by one, "sum" their sum.
        masks: which of the branch's parameters are masks over the leading dimensions (batch, length …)
            of a stream; their shape is checked before anything runs.
        aux: "loss" for a branch that returns `(update, auxiliary loss)`.
        compute: the dtype that the branch computes in, if it differs from the streams': its sources are cast to it.
        save_ops: which results inside the branch memory="selective" saves: "attention", "projections" (fused attention
            and products with a weight), "products" (all matrix products), or a list of operators or a policy, as
            torch's selective checkpoint takes.
        name: what to call this step in messages; the branch's class by default.
    """

    def __init__(
        self,
        branch: Callable[..., Any],
        /,
        target: StreamName,
        sources: Sequence[StreamName],
        *,
        coupling: Coupling | None = None,
        takes: TakesArgument = None,
        reads: Literal["each", "sum"] = "each",
        masks: Mapping[str, StreamName] | None = None,
        aux: Literal["none", "loss"] = "none",
        compute: torch.dtype | None = None,
        save_ops: SaveOps = "attention",
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not callable(branch):
            raise TypeError(f"A step's branch must be a module or a callable, not {branch!r}.")
        self.couple(Additive() if coupling is None else coupling)
        self.target = target
        self.sources = (sources,) if isinstance(sources, (int, str)) else tuple(sources)
        self._check_streams()
        check_choice("reads", reads, ("each", "sum"))
        check_choice("aux", aux, ("none", "loss"))
        self.branch = branch
        self.reads = reads
        self.aux = aux
        self.compute = compute
        self.save_ops = check_save_ops(save_ops)
        self.takes = find_takes(branch, takes, 1 if reads == "sum" else len(self.sources))
        self.name = name or name_of(branch)
        self.masks = dict(masks or {})
        if untaken := set(self.masks) - {parameter for parameter, _ in self.takes.pairs}:
            raise ValueError(f"masks names {sorted(untaken)}, which {self.name} does not take; it takes {self.takes}.")

    def couple(self, coupling: Coupling) -> None:
        """Give the step another coupling."""
        if not isinstance(coupling, Coupling):
            raise TypeError(
                f"coupling={coupling!r} is no retrograde.couplings.Coupling. Derive your class from it and define "
                "combine and separate."
            )
        self.coupling: Any = coupling
        self.invertible = coupling.invertible
        self.exact = isinstance(coupling, ExactCoupling)
        self.has_side_bits = isinstance(coupling, SideBitCoupling)
        self.takes_same_shape = type(coupling).why_not is Coupling.why_not
        self.has_own_range = isinstance(coupling, ExactCoupling) and type(coupling).bounds is not ExactCoupling.bounds
        self.cache: Any = None  # what the engine learns of the step from call to call

    def _check_streams(self) -> None:
        if not self.sources:
            raise ValueError(f"A step needs at least one source: target={self.target!r}, sources=().")
        if self.invertible and self.target in self.sources:
            raise ValueError(
                f"A step cannot read the stream it updates: target={self.target!r}, sources={self.sources!r}. "
                "Reading it would make the step impossible to invert; drop it from sources."
            )

    def update(self, sources: list[Tensor], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        """Run the branch: its update, and its auxiliary loss if it has one."""
        compared = [] if torch.compiler.is_dynamo_compiling() else sources  # a traced tensor has no version to compare
        before = versions(compared)
        inputs = sources if self.reads == "each" and self.compute is None else self.branch_inputs(sources)
        branch = self._modules.get("branch")  # a module is found by `self.branch` only after a long search
        result = self.branch(*inputs, **kwargs) if branch is None else branch(*inputs, **kwargs)
        if versions(compared) != before:
            raise self.edited_source()
        return (result, None) if self.aux == "none" else self.split_aux(result)

    def branch_inputs(self, sources: list[Tensor]) -> list[Tensor]:
        """The sources as the branch gets them."""
        if self.reads == "sum":
            sources = [total(sources)]
        return sources if self.compute is None else [s.to(self.compute) for s in sources]

    def split_aux(self, result: Any) -> tuple[Any, Tensor | None]:
        """What a branch returned, as its update and its auxiliary loss."""
        if self.aux == "none":
            return result, None
        if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], Tensor):
            return result[0], result[1]
        raise StepError(
            f"{self.name} was declared with aux='loss' and must return (update, auxiliary loss), "
            f"not {type(result).__name__}."
        )

    def combine(self, target: Tensor, update: Any) -> Tensor:
        """The stream after the step, checked against the stream before it."""
        if not (self.takes_same_shape and isinstance(update, Tensor) and update.shape == target.shape):
            self.check_update(target, update)
        combined: Tensor = self.coupling.combine(target, update)
        if self.invertible and (combined.shape != target.shape or combined.dtype != target.dtype):
            self.check_combined(target, combined)
        return combined

    def check_update(self, target: Tensor, update: Any) -> None:
        if (reason := self.coupling.why_not(target, update)) is not None:
            raise StepError(f"{self.name} {reason} (stream {self.target!r}).")

    def check_combined(self, target: Tensor, combined: Tensor) -> None:
        """Raise for a stream that an invertible step would turn into another dtype or shape."""
        if combined.dtype != target.dtype:
            raise StepError(
                f"{self.name} would turn stream {self.target!r} from {target.dtype} into {combined.dtype}, which no "
                f"inverse can undo. Cast the branch's output to {target.dtype}, or the stack's input to "
                f"{combined.dtype}; under FSDP2 set cast_forward_inputs=False on the block."
            )
        raise StepError(
            f"{self.name} would turn stream {self.target!r} from shape {tuple(target.shape)} into "
            f"{tuple(combined.shape)}, which no inverse can undo. Use couplings.Replace() with memory='checkpoint'."
        )

    def check_inverse(self, target: Tensor, update: Any) -> None:
        """Raise if the coupling does not give the target back; done once, when a step is first used."""
        with torch.no_grad():
            combined = self.coupling.combine(target, update)
            side_bits = (self.coupling.side_bits(target),) if self.has_side_bits else ()
            back = self.coupling.separate(combined, update, *side_bits)
            scale = torch.maximum(target.abs().amax(), combined.abs().amax()) if target.numel() else target.sum()
            error = (back - target).abs().amax() if target.numel() else scale
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(target.dtype, 5e-2)
        if not error <= tolerance * scale and bool(torch.isfinite(scale)):
            raise StepError(
                f"{type(self.coupling).__name__}.separate does not undo combine for {self.name}: the stream comes "
                f"back off by {float(error):.3g}, where its largest entry is {float(scale):.3g}. "
                "Gradients would be wrong in every block before this one; correct separate."
            )

    def edited_source(self) -> StepError:
        """The error for a branch that edits what it reads."""
        return StepError(
            f"{self.name} edited one of its sources in place. A step leaves its sources unchanged, and its inverse "
            "depends on it: use an out-of-place operation (for example relu(x) in the place of relu_(x))."
        )

    def extra_repr(self) -> str:
        return f"target={self.target!r}, sources={self.sources!r}, coupling={self.coupling!r}"


def total(sources: list[Tensor]) -> Tensor:
    """The sum of the sources, for a step that reads it."""
    result = sources[0]
    for source in sources[1:]:
        result = result + source
    return result
