"""`examine`: run a model a few times under different plans, and compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrograde._block import Block
from retrograde._plan import Memory
from retrograde._sequence import ReversibleSequence
from retrograde._step import Step

from ._bench import Bench, Gradients, Loss, Setup
from ._branches import ProbedSteps
from ._compare import compared, worst
from ._remedies import of_steps, tried
from ._report import (
    Behaviour,
    BlockReport,
    Diagnosis,
    ExaminationError,
    Peak,
    StackReport,
    StepReport,
    in_bytes,
    in_digits,
)
from ._watch import Pushed, SeenBlock, SeenStep, StackLog, place

MODES: tuple[Memory, ...] = ("store", "checkpoint", "reverse")


def examine(
    model: nn.Module, *args: Any, loss: Loss | None = None, tolerance: float = 1e-3, **kwargs: Any
) -> Diagnosis:
    """Examine every reversible stack of a model, block by block, on a sample batch.

    The model runs a dozen times, forward and backward. It is left as it was found: parameters, gradients, buffers,
    attributes and generators. If something is past the tolerance, remedies are tried and their effects measured.

    Args:
        model: a module that calls one or more `ReversibleSequence`s, drop-ins included.
        args: what to call it with; and `kwargs`.
        loss: makes a scalar of the model's output; by default the mean squared distance from fixed random numbers.
        tolerance: the relative error of rebuilt streams and of gradients up to which a block counts as healthy.

    Raises:
        ExaminationError: if there is nothing to examine or a comparison makes no sense; the message says why.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde.diagnose import examine
        >>> layers = [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
        >>> stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers])
        >>> diagnosis = examine(stack, torch.randn(2, 8))
        >>> diagnosis.healthy, diagnosis.stacks[0].first_bad
        (True, None)
    """
    bench = _prepared(model, args, kwargs, loss, tolerance)
    behaviours = _behaviours(bench, tolerance)
    bench.copying = [step for step, behaviour in behaviours.items() if behaviour.edits_source]
    setup = Setup(bench.plans())
    with _in_words("The backward pass"):
        true, logs = bench.gradients(Setup(bench.plans("store")))
        found, _ = bench.gradients(setup)
        _, seen = bench.gradients(setup, "drift")
        _note_amplification(bench, setup, seen, behaviours)
        bench.gradients(Setup(bench.plans("checkpoint")))  # which keeps more the first time than later
        peaks = {mode: bench.peak(setup if mode == "reverse" else Setup(bench.plans(mode)), mode) for mode in MODES}
    places: dict[str, dict[str, int]] = {mode: by_place for mode, (_, by_place) in peaks.items()}
    reports = {
        stack: _stack_report(
            name,
            _Examined(stack, setup, seen[stack], found, true, behaviours),
            tolerance,
            _by_block(bench.label(name), places),
        )
        for name, stack in bench.stacks.items()
        if logs[stack].calls
    }
    totals = tuple(peak for peak, _ in peaks.values())
    with _in_words("A remedy"):
        suggestions, untried = tried(bench, setup, reports, totals)
    stacks = tuple(reports.values())
    verdict = _supposed(bench) + _refused(stacks) + _verdict(stacks, totals)
    return Diagnosis(type(model).__name__, tolerance, verdict, stacks, totals, suggestions, untried)


def _prepared(model: Any, args: Any, kwargs: Any, loss: Loss | None, tolerance: float) -> Bench:
    if not isinstance(model, nn.Module):
        raise ExaminationError(f"The doctor examines a torch.nn.Module, not a value of type {type(model).__name__}.")
    if not tolerance > 0:
        raise ExaminationError(f"tolerance={tolerance}: give a relative error greater than 0, as in tolerance=1e-3.")
    bench = Bench(model, args, kwargs, loss)
    if not bench.stacks:
        raise ExaminationError(
            f"{type(model).__name__} contains no retrograde.ReversibleSequence, so that there is nothing to examine. "
            "If it comes from a published package, call retrograde.adapters.install(name) before that is imported."
        )
    if not any(block.invertible for stack in bench.stacks.values() for block in stack._blocks()):
        raise ExaminationError(
            f"No block of {type(model).__name__} can be inverted (all use couplings.Replace), so that nothing can "
            "drift. Its memory is 'checkpoint' or 'store', which are exact."
        )
    return bench


def _behaviours(bench: Bench, tolerance: float) -> dict[Step, Behaviour]:
    """What the branches do; raises if the model does not run, or if what it does cannot be compared."""
    stored = Setup(bench.plans("store"))
    probed = ProbedSteps(bench.steps, tolerance)
    with _in_words("The forward pass"), probed, bench.run(stored) as (_, logs):
        _check_called(logs)
    return probed.found


def _check_called(logs: dict[ReversibleSequence, StackLog]) -> None:
    if not any(log.calls for log in logs.values()):
        how = "only under no_grad" if any(log.calls_without_grad for log in logs.values()) else "not at all"
        raise ExaminationError(
            f"The model has a ReversibleSequence, but calls it {how} for this batch, so that it has no backward "
            "pass. Examine it as it is trained."
        )


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn an error of the model or of the engine into a sentence. Warnings of repeated runs are not the user's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExaminationError:
        raise
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        raise ExaminationError(f"{what} raised {type(error).__name__}: {message}") from error


def _note_amplification(
    bench: Bench, setup: Setup, seen: dict[ReversibleSequence, StackLog], behaviours: dict[Step, Behaviour]
) -> None:
    """Send a small error through the inverse, and write into `seen` by how much each block magnifies it."""
    logs: dict[ReversibleSequence, StackLog] = {}
    try:
        with bench.run(setup, "amplification") as (loss, logs):
            inputs = [t for log in logs.values() for t in log.inputs]
            torch.autograd.grad(loss, [*bench.parameters, *inputs], allow_unused=True)
    except Exception:
        pass  # the error tipped a decision; what was measured up to there stands
    _note_ends(bench, logs, behaviours)
    for stack, log in logs.items():
        for now, then in zip(seen[stack].blocks, log.blocks, strict=False):
            now.amplification = then.amplification


def _note_ends(bench: Bench, logs: dict[ReversibleSequence, StackLog], behaviours: dict[Step, Behaviour]) -> None:
    """Where a part of the plan ends nothing is rebuilt that an error could be put into: run these blocks alone.

    One that draws random numbers, or keeps bits aside, cannot be.
    """
    alone = {step for step in bench.steps if not step.forgets and not behaviours.get(step, Behaviour()).draws}
    for stack, log in logs.items():
        for seen in log.blocks:
            block = stack._blocks()[seen.index]
            if seen.amplification is None and isinstance(seen, Pushed) and alone.issuperset(block.each_step()):
                with suppress(Exception), bench.untouched():  # as above
                    seen.push_through(block, stack.names)


class _Examined:
    """What is known of one stack after all runs, and the figures that follow from it."""

    def __init__(
        self,
        stack: ReversibleSequence,
        setup: Setup,
        log: StackLog,
        found: Gradients,
        true: Gradients,
        behaviours: dict[Step, Behaviour],
    ) -> None:
        self.stack = stack
        self.plan = setup.plans[stack]
        self.log = log
        self.behaviours = behaviours
        self.input_gradient = compared(found.inputs[stack], true.inputs[stack])
        self._found, self._true = found, true

    def gradients(self, steps: Sequence[Step]) -> tuple[float | None, float | None]:
        return of_steps(steps, self._found, self._true)

    def blocks(self, index: int) -> list[SeenBlock]:
        return [b for b in self.log.blocks if b.index == index]

    def steps(self, block: int, step: Step) -> list[SeenStep]:
        return [s for s in self.log.steps if s.block == block and s.step is step]


def _stack_report(
    name: str, examined: _Examined, tolerance: float, peaks: Callable[[int], dict[str, int]]
) -> StackReport:
    blocks = [_block_report(i, b, examined, peaks(i)) for i, b in enumerate(examined.stack._blocks())]
    dtype = examined.log.dtype or torch.float32
    report = StackReport(
        name=name or type(examined.stack).__name__,
        dtype=str(dtype).removeprefix("torch."),
        floor=torch.finfo(dtype).eps,
        tolerance=max(tolerance, torch.finfo(dtype).eps),
        calls=examined.log.calls,
        input_gradient_error=examined.input_gradient[0],
        first_bad=None,
        blocks=tuple(blocks),
    )
    return replace(report, first_bad=max((block.index for block in report.past), default=None))


def _block_report(index: int, block: Block, examined: _Examined, peaks: dict[str, int]) -> BlockReport:
    steps = block.each_step()
    error, cosine = examined.gradients(steps)
    seen = examined.blocks(index)
    return BlockReport(
        index=index,
        name=block.describe(),
        memory=examined.plan.memory[index],
        drift=worst(s.drift for s in seen),
        amplification=worst(s.amplification for s in seen),
        magnitude=worst(s.magnitude for s in seen),
        gradient_error=error,
        gradient_cosine=cosine,
        peak_bytes=peaks,
        steps=tuple(_step_report(step, examined.steps(index, step), examined) for step in dict.fromkeys(steps)),
    )


def _step_report(step: Step, seen: list[SeenStep], examined: _Examined) -> StepReport:
    error, cosine = examined.gradients([step])
    return StepReport(
        name=step.name,
        target=str(step.target),
        coupling=repr(step.coupling),
        drift=worst(s.drift for s in seen),
        gradient_error=error,
        gradient_cosine=cosine,
        decisions=sum(s.decisions for s in seen),
        flips=sum(s.flips for s in seen),
        held=sum(s.held for s in seen),
        behaviour=examined.behaviours.get(step, Behaviour()),
    )


def _by_block(label: str, places: dict[str, dict[str, int]]) -> Callable[[int], dict[str, int]]:
    def peaks(block: int) -> dict[str, int]:
        at = [place(direction, label, block) for direction in ("forward", "backward")]
        return {mode: max(found.get(p, 0) for p in at) for mode, found in places.items()}

    return peaks


def _supposed(bench: Bench) -> str:
    return "" if bench.reverses else "No block is set to be reversed; what follows is of a run in which all are. "


def _refused(stacks: Sequence[StackReport]) -> str:
    """The verdict on branches that a stack does not run; the rest of it is for copies of their sources."""
    found = [f"block {block} of {stack.name} ({branch})" for stack in stacks for block, branch in stack.edits]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"Fault: a branch edits its source in place, which a stack refuses: {found[0]}{more}. Use an out-of-place "
        "operation, or let the branch clone its source. With copies of the sources: "
    )


def _verdict(stacks: Sequence[StackReport], peaks: Sequence[Peak]) -> str:
    by_mode = {peak.memory: peak.bytes for peak in peaks}
    memory = f"Reversing peaks at {in_bytes(by_mode['reverse'])}, storing at {in_bytes(by_mode['store'])}."
    bad = [stack for stack in stacks if stack.first_bad is not None]
    count = sum(len(stack.blocks) for stack in stacks)
    if not bad:
        off = max(stack.gradient_error for stack in stacks)
        return (
            f"Healthy: all {count} blocks are within the tolerance {stacks[0].tolerance:.2g}; "
            f"gradients are at most {in_digits(off)} off. {memory}"
        )
    stack = max(bad, key=lambda s: s.drift)  # the gradients of the others may be wrong by what this one hands on
    assert stack.first_bad is not None
    block = stack.blocks[stack.first_bad]
    return (
        f"Fault: on the way back, block {block.index} of {stack.name} ({block.name}) is the first past the tolerance "
        f"{stack.tolerance:.2g}, and {len(stack.past)} of {len(stack.blocks)} blocks are. "
        f"Gradients are up to {stack.gradient_error:.1e} off, rebuilt streams up to {stack.drift:.1e}"
        f"{_cause(stack)}. {memory}"
    )


def _cause(stack: StackReport) -> str:
    """What stands out among the causes of drift, in half a sentence."""
    found = []
    sizes = [b.magnitude for b in stack.blocks if b.magnitude]
    if sizes and max(sizes) > 100 * min(sizes):
        found.append(f"the streams grow from {min(sizes):.1e} to {max(sizes):.1e} on the way")
    gains = [b.amplification for b in stack.blocks if b.amplification]
    if gains and max(gains) > 2:
        found.append(f"the inverse magnifies errors up to {max(gains):.3g} times a block")
    if stack.flips:
        found.append(f"{stack.flips} decisions flip")
    if not found and stack.floor > 1e-3:
        found.append(f"{stack.dtype} streams round to {stack.floor:.0e} at every step")
    return f": {', '.join(found)}" if found else ""
