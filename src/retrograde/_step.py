"""One invertible update of one stream: target ← combine(target, branch(*sources, **context))."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._branch import TakesArgument, find_takes, name_of
from ._partial import Policy, check_keeps
from ._torch_private import versions
from .couplings import Additive, OutOfRangeError, SupportsCoupling

StreamName = int | str


class StepError(ValueError):
    """A step met something it cannot work with; the message names the block and the branch.

    `bits` is the grid that would have held a stream that left its range (see `couplings.Exact`).
    """

    bits: int | None = None
    _placed = False

    def at(self, block: int) -> StepError:
        """The same error, with the number of the block. A stack inside a branch has a grid of its own: no bits then."""
        error = StepError(f"Block {block}: {self}")
        error.bits = None if self._placed else self.bits
        error._placed = True
        return error


class Step(nn.Module):
    """Update one stream from others, which stay as they are.

        target ← coupling.combine(target, branch(*sources, **context))

    Args:
        branch: any callable or module; it gets the sources by position and its context by name.
        target: the stream that is updated, by position or name.
        sources: the streams that the branch reads.
        coupling: how the update enters the stream; `couplings.Additive()` unless given.
        takes: which context the branch receives: a sequence of names, a mapping from the
            branch's parameter to the context's name, or "all". By default what its signature names.
        reads: "each" hands over the sources one by one, "sum" their sum.
        masks: which of the branch's parameters are masks over the leading dimensions (batch, length …)
            of a stream; their shape is checked before anything runs.
        aux: "loss" for a branch that returns `(update, auxiliary loss)`.
        compute: the dtype that the branch computes in, if it is another than the streams': its sources are cast to it.
        keeps: what a partial replay (memory="partial") keeps of the branch: the results of "attention", or those of
            "products", matrix products, too; or a list of operators or a policy, as torch's selective checkpoint takes.
        name: what to call this step in messages; the branch's class by default.
    """

    def __init__(
        self,
        branch: Callable[..., Any],
        /,
        target: StreamName,
        sources: Sequence[StreamName],
        *,
        coupling: SupportsCoupling | None = None,
        takes: TakesArgument = None,
        reads: Literal["each", "sum"] = "each",
        masks: Mapping[str, StreamName] | None = None,
        aux: Literal["none", "loss"] = "none",
        compute: torch.dtype | None = None,
        keeps: Policy = "attention",
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not callable(branch):
            raise TypeError(f"A step's branch must be a module or a callable, not {branch!r}.")
        self.couple(Additive() if coupling is None else coupling)
        self.target = target
        self.sources = (sources,) if isinstance(sources, (int, str)) else tuple(sources)
        self._check_wiring()
        check_choice("reads", reads, ("each", "sum"))
        check_choice("aux", aux, ("none", "loss"))
        self.branch = branch
        self.reads = reads
        self.aux = aux
        self.compute = compute
        self.keeps = check_keeps(keeps)
        self.takes = find_takes(branch, takes, 1 if reads == "sum" else len(self.sources))
        self.name = name or name_of(branch)
        self.masks = dict(masks or {})
        if untaken := set(self.masks) - {parameter for parameter, _ in self.takes.pairs}:
            raise ValueError(f"masks names {sorted(untaken)}, which {self.name} does not take; it takes {self.takes}.")

    def couple(self, coupling: SupportsCoupling) -> None:
        """Give the step another coupling."""
        if not isinstance(coupling, SupportsCoupling):
            raise TypeError(f"coupling={coupling!r} has no combine and separate; see retrograde.couplings.")
        self.coupling: Any = coupling
        self.invertible = bool(getattr(coupling, "invertible", True))
        self.exact = bool(getattr(coupling, "exact", False))
        self.forgets = hasattr(coupling, "side")
        self._fit = getattr(coupling, "fit", None)
        self.known: Any = None  # what tapes learn of the step, for their own use

    def _check_wiring(self) -> None:
        if not self.sources:
            raise ValueError(f"A step needs at least one source: target={self.target!r}, sources=().")
        if self.invertible and self.target in self.sources:
            raise ValueError(
                f"A step cannot read the stream it updates: target={self.target!r}, sources={self.sources!r}. "
                "Reading it would make the step impossible to invert; drop it from sources."
            )

    def update(self, sources: list[Tensor], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        """Run the branch: its update, and its auxiliary loss if it has one."""
        looked_at = [] if torch.compiler.is_dynamo_compiling() else sources  # a traced tensor has no version to compare
        before = versions(looked_at)
        branch = self._modules.get("branch")  # a module is not found by `self.branch` but after a long search
        read = sources if self.reads == "each" and self.compute is None else self._read(sources)
        result = self.branch(*read, **kwargs) if branch is None else branch(*read, **kwargs)
        if versions(looked_at) != before:
            raise StepError(
                f"{self.name} edited one of its sources in place. The step leaves its sources as they are, and its "
                "inverse depends on it: use an out-of-place operation (for example relu(x) in the place of relu_(x))."
            )
        return self._split_aux(result) if self.aux == "loss" else (result, None)

    def update_again(self, branch: Callable[..., Any], sources: list[Tensor], kwargs: Mapping[str, Any]) -> Any:
        """Run the branch of an earlier call once more, for its update alone; the first run has made the checks."""
        read = sources if self.reads == "each" and self.compute is None else self._read(sources)
        result = branch(*read, **kwargs)
        return result if self.aux == "none" else result[0]

    def _read(self, sources: list[Tensor]) -> list[Tensor]:
        """The sources as the branch gets them."""
        if self.reads == "sum":
            sources = [total(sources)]
        return sources if self.compute is None else [s.to(self.compute) for s in sources]

    def combine(self, target: Tensor, update: Any) -> Tensor:
        """The stream after the step, checked against the stream before it."""
        if self._fit is not None and (complaint := self._fit(target, update)) is not None:
            raise StepError(f"{self.name} {complaint} (stream {self.target!r}).")
        try:
            combined: Tensor = self.coupling.combine(target, update)
        except OutOfRangeError as error:
            raised = StepError(f"{self.name}: stream {self.target!r} {error}")
            raised.bits = error.bits
            raise raised from None
        if self.invertible and (combined.dtype != target.dtype or combined.shape != target.shape):
            raise StepError(self._misfit(target, combined))
        return combined

    def check_inverse(self, target: Tensor, update: Any) -> None:
        """Raise if the coupling does not give the target back; done once, when a block is first used."""
        with torch.no_grad():
            combined = self.coupling.combine(target, update)
            back = self.coupling.separate(combined, update)
            scale = torch.maximum(target.abs().amax(), combined.abs().amax()) if target.numel() else target.sum()
            error = (back - target).abs().amax() if target.numel() else scale
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(target.dtype, 5e-2)
        if not error <= tolerance * scale and bool(torch.isfinite(scale)):
            raise StepError(
                f"{type(self.coupling).__name__}.separate does not undo combine for {self.name}: the stream comes "
                f"back off by {float(error):.3g}, where its largest entry is {float(scale):.3g}. "
                "Gradients would be wrong in every block before this one; correct separate."
            )

    def _split_aux(self, result: Any) -> tuple[Any, Tensor]:
        if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], Tensor):
            return result[0], result[1]
        raise StepError(
            f"{self.name} was declared with aux='loss' and must return (update, auxiliary loss), "
            f"not {type(result).__name__}."
        )

    def _misfit(self, target: Tensor, combined: Tensor) -> str:
        if combined.dtype != target.dtype:
            return (
                f"{self.name} would turn stream {self.target!r} from {target.dtype} into {combined.dtype}, which no "
                f"inverse can undo. Cast the branch's output to {target.dtype}, or the stack's input to "
                f"{combined.dtype}; under FSDP2 set cast_forward_inputs=False on the block."
            )
        return (
            f"{self.name} would turn stream {self.target!r} from shape {tuple(target.shape)} into "
            f"{tuple(combined.shape)}, which no inverse can undo. Use couplings.Replace() with memory='checkpoint'."
        )

    def extra_repr(self) -> str:
        return f"target={self.target!r}, sources={self.sources!r}, coupling={self.coupling!r}"


def total(sources: list[Tensor]) -> Tensor:
    """The sum of the sources, for a step that reads it."""
    result = sources[0]
    for source in sources[1:]:
        result = result + source
    return result


def check_choice(option: str, given: str, known: tuple[str, ...]) -> str:
    """The value given for an option, if it is one of those that are known."""
    if given not in known:
        raise ValueError(f"{option}={given!r} is not known; choose one of {', '.join(map(repr, known))}.")
    return given
