"""What can be done about drift: each remedy is tried on the model, and its effect is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograde.measure.stacks import parameters_of
from retrograde.memory import Plan
from retrograde.network.step import Step, StepError
from retrograde.sequence import ReversibleSequence

from ._bench import Bench, Gradients, Look, Setup
from ._compare import compared, worst
from ._report import Figures, Peak, StackReport, Suggestion, Untried
from ._watch import DriftObserver, SameDecisions, StackLog

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Case:
    """A model with a fault: how it ran, the stacks that have the fault with their dtypes, and what was measured."""

    bench: Bench
    setup: Setup
    stacks: dict[ReversibleSequence, torch.dtype]
    before: Figures
    tolerance: float
    least: float  # the smallest size, as root mean square, of any block's input


@dataclass(frozen=True)
class Remedy:
    """One thing to change: how the stacks run with it, and how a user makes the change.

    `prepared` is a context in which the model has the change, where a `Setup` cannot express it.
    """

    name: str
    how: str
    setup: Setup
    look: Look = DriftObserver
    prepared: Callable[[], AbstractContextManager[Any]] = nullcontext


def tried(
    bench: Bench, setup: Setup, reports: dict[ReversibleSequence, StackReport], peak: Peak
) -> tuple[tuple[Suggestion, ...], tuple[Untried, ...]]:
    """Every remedy that applies, with its effect; first those that are enough, the smallest peak first.

    After them those that the model does not run with. Nothing is tried where nothing is past the tolerance and no
    decision flips.

    Args:
        peak: the peak of the run that was examined.
    """
    bad = [stack for stack, report in reports.items() if report.first_bad is not None or report.flips]
    if not bad:
        return (), ()
    before = Figures(
        drift=max(report.drift for report in reports.values()),
        gradient_error=max(report.gradient_error for report in reports.values()),
        flips=sum(report.flips for report in reports.values()),
        peak_bytes=peak.bytes,
    )
    dtypes = {stack: getattr(torch, reports[stack].dtype) for stack in bad}
    tolerance = max(reports[stack].tolerance for stack in bad)
    sizes = [block.magnitude for stack in bad for block in reports[stack].blocks if block.magnitude]
    case = Case(bench, setup, dtypes, before, tolerance, min(sizes, default=1.0))
    outcomes = [_try(make, case) for make in _REMEDIES]
    suggestions = [s for s in outcomes if isinstance(s, Suggestion)]
    suggestions.sort(key=lambda s: (not s.enough, s.after.peak_bytes if s.enough else s.after.gradient_error))
    return tuple(suggestions), tuple(s for s in outcomes if isinstance(s, Untried))


def exact_coupling(case: Case) -> Remedy | None:
    """Streams on a grid, on which adding is undone to the bit: the finest grid that holds them."""
    stacks = [stack for stack in case.stacks if not stack.exact]
    if not stacks:
        return None
    widen = _widened(case, (torch.float16, torch.bfloat16))
    setup = replace(case.setup, widen=widen)
    bits: int | None = None
    while True:
        try:
            with _exact(stacks, bits), case.bench.run(setup):
                break
        except StepError as error:
            if error.bits is None or 2.0**-error.bits > case.tolerance * case.least:
                return None  # a grid so coarse would change the model itself
            bits = error.bits
    grid = "" if bits is None else f" and stack.grid_bits = {bits}"
    name = "Exact coupling" if bits is None else f"Exact coupling, on a grid of 2^-{bits} that the streams' size needs"
    how = f"Set stack.exact = True{grid}{_in_wide_streams(widen)}."
    return Remedy(name, how, setup, prepared=lambda: _exact(stacks, bits))


@contextmanager
def _exact(stacks: Sequence[ReversibleSequence], bits: int | None) -> Iterator[None]:
    """A context in which the stacks are exact."""
    steps = dict.fromkeys(step for stack in stacks for block in stack for step in block.each_step())
    couplings = [(step, step.coupling) for step in steps]
    try:
        for stack in stacks:
            stack.exact = True
            if bits is not None:
                stack.grid_bits = bits
        yield
    finally:
        for step, coupling in couplings:
            step.couple(coupling)


def wider_streams(case: Case) -> Remedy | None:
    """Streams in the next wider dtype; branches compute in their own."""
    widen = _widened(case, tuple(_WIDER))
    if not widen:
        return None
    dtype = str(next(iter(widen.values()))).removeprefix("torch.")
    return Remedy(f"Streams in {dtype}", f"Run{_in_wide_streams(widen)}.", replace(case.setup, widen=widen))


def _widened(case: Case, narrow: tuple[torch.dtype, ...]) -> dict[ReversibleSequence, torch.dtype]:
    return {stack: _WIDER[dtype] for stack, dtype in case.stacks.items() if dtype in narrow}


def _in_wide_streams(widen: dict[ReversibleSequence, torch.dtype]) -> str:
    if not widen:
        return ""
    dtype = next(iter(widen.values()))
    narrow = next(n for n, wide in _WIDER.items() if wide == dtype) if dtype == torch.float64 else "their own dtype"
    own = any(type(stack).forward is not ReversibleSequence.forward for stack in widen)
    back = "; a drop-in returns these streams as they are: cast its output back" if own else ""
    return f" with stack.stream_dtype = {dtype}, and branches in {narrow} (autocast, or compute= of their steps){back}"


def anchors(case: Case) -> Remedy | None:
    """Streams saved every few blocks: as few as bring the errors within the tolerance."""
    true, _ = case.bench.gradients(Setup(case.bench.plans("store")))
    depth = max(len(stack) for stack in case.stacks)
    spacing = depth
    while spacing > 1:
        spacing = (spacing + 1) // 2
        plans = case.setup.plans | {stack: _anchored(case.setup.plans[stack], spacing) for stack in case.stacks}
        gradients, logs = case.bench.gradients(Setup(plans), DriftObserver)
        if max(_drift(logs), gradient_error(case.bench, gradients, true)) <= case.tolerance:
            name = f"Anchors every {spacing} blocks" if spacing > 1 else "Anchors at all blocks"
            return Remedy(name, f"Set stack.memory = {_in_code(case, depth, spacing)}.", Setup(plans))
    return None


def _in_code(case: Case, depth: int, spacing: int) -> str:
    """The plan with anchors as users write it, the same for all stacks."""
    if not case.bench.reverses:
        return f'Plan.uniform("reverse", list(stack), anchor_every={spacing})'
    end = depth if all(len(stack) == depth for stack in case.stacks) else "len(stack)"
    return f"Plan(stack.memory.memory, anchors=range({spacing}, {end}, {spacing}))"


def _anchored(plan: Plan, spacing: int) -> Plan:
    return replace(plan, anchors=frozenset(range(spacing, len(plan.memory), spacing)))


def decision_replay(case: Case) -> Remedy | None:
    """The replay reuses the indices that the first run chose."""
    if not case.before.flips:
        return None
    how = "Pass the indices that the branch chooses (top-k, argmax …) through rg.decide."
    return Remedy("Decision replay", how, case.setup, look=SameDecisions)


def checkpointing(case: Case) -> Remedy:
    """Streams saved at every block, and no inverse."""
    checkpointed = case.bench.plans("checkpoint")
    plans = case.setup.plans | {stack: checkpointed[stack] for stack in case.stacks}
    how = 'Set stack.memory = "checkpoint"; nothing is recomputed by an inverse.'
    return Remedy("Checkpointing", how, Setup(plans))


_REMEDIES = (exact_coupling, wider_streams, anchors, decision_replay, checkpointing)


def _try(make: Callable[[Case], Remedy | None], case: Case) -> Suggestion | Untried | None:
    """The remedy with its effect; None if it does not apply, the reason if the model does not run with it."""
    try:
        remedy = make(case)
        if remedy is None:
            return None
        with remedy.prepared():
            after = _measured(case.bench, remedy)
    except Exception as error:  # a branch may refuse another dtype or a grid; then this is no remedy for it
        name = make.__name__.replace("_", " ").capitalize()
        return Untried(name, " ".join(f"{type(error).__name__}: {error}".split()))
    enough = max(after.drift, after.gradient_error) <= case.tolerance
    return Suggestion(remedy.name, remedy.how, case.before, after, enough)


def _measured(bench: Bench, remedy: Remedy) -> Figures:
    """Against stored activations of the same arithmetic: a remedy may change the forward pass by rounding."""
    true, _ = bench.gradients(replace(remedy.setup, plans=bench.plans("store")))
    gradients, logs = bench.gradients(remedy.setup, remedy.look)
    peak, _ = bench.peak(remedy.setup, "remedy")
    flips = sum(seen.flips for log in logs.values() for seen in log.steps)
    return Figures(_drift(logs), gradient_error(bench, gradients, true), flips, peak.bytes)


def _drift(logs: dict[ReversibleSequence, StackLog]) -> float:
    return worst(seen.drift for log in logs.values() for seen in log.blocks) or 0.0


def gradient_error(bench: Bench, gradients: Gradients, true: Gradients) -> float:
    """The worst relative error of the gradients of any block, and of what leaves a stack."""
    errors: list[float | None] = []
    for stack in bench.stacks.values():
        errors.append(compared(gradients.inputs[stack], true.inputs[stack])[0])
        errors.extend(of_steps(block.each_step(), gradients, true)[0] for block in stack)
    return worst(errors) or 0.0


def of_steps(steps: Sequence[Step], gradients: Gradients, true: Gradients) -> tuple[float | None, float | None]:
    """The error and cosine of the gradients of some steps' parameters; a gradient that is missing counts as zero."""
    wanted = dict.fromkeys(p for step in steps for p in parameters_of(step) if p in true.parameters)
    given = [gradients.parameters.get(p, torch.zeros_like(true.parameters[p])) for p in wanted]
    return compared(given, [true.parameters[p] for p in wanted])
