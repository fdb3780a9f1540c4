"""`examine`: run a model a few times under different plans, and compare."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from retrograde.engine.observer import BranchRun
from retrograde.measure.loss import Loss
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence

from ._amplification import note_amplification
from ._bench import Bench, Gradients, Setup
from ._branches import BehaviourNotes
from ._compare import compared, worst
from ._remedies import of_steps, tried
from ._report import Behaviour, BlockReport, Diagnosis, ExaminationError, Peak, StackReport, StepReport
from ._verdict import verdict
from ._watch import DriftObserver, SeenStep, StackLog, StackObserver, place


def examine(model: nn.Module, batch: Any, *, loss: Loss | None = None, tolerance: float = 1e-3) -> Diagnosis:
    """Examine every reversible stack of a model, block by block, on a sample batch.

    The model runs a dozen times, forward and backward. It is left unchanged: parameters, gradients, buffers,
    attributes and generators. If something is past the tolerance, remedies are tried and their effects measured.

    Args:
        model: a module that calls one or more `ReversibleSequence`s, drop-ins included.
        batch: what to call it with: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        loss: makes a scalar of the model's output; by default the output's own `loss`, or the mean squared distance
            of its tensors from fixed random numbers.
        tolerance: the relative error of recomputed streams and of gradients up to which a block counts as healthy.

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
    bench = _prepared(model, batch, loss, tolerance)
    examined = _examined(bench, tolerance)
    reports = {
        stack: _stack_report(name, stack, examined, tolerance)
        for name, stack in bench.stacks.items()
        if examined.logs[stack].calls
    }
    peaks = tuple(peak for peak, _ in examined.peaks.values())
    with in_words("A remedy"):
        suggestions, untried = tried(bench, examined.setup, reports, peaks[-1])
    stacks = tuple(reports.values())
    words = verdict(stacks, peaks[-1], peaks[0], reverses=bench.reverses)
    return Diagnosis(type(model).__name__, tolerance, words, stacks, peaks, suggestions, untried)


def _prepared(model: Any, batch: Any, loss: Loss | None, tolerance: float) -> Bench:
    if not tolerance > 0:
        raise ExaminationError(f"tolerance={tolerance}: give a relative error greater than 0, as in tolerance=1e-3.")
    bench = Bench(model, batch, loss)
    if not any(block.invertible for stack in bench.stacks.values() for block in stack):
        raise ExaminationError(
            f"No block of {type(model).__name__} can be inverted (all use couplings.Replace), so that nothing can "
            "drift. Its memory is 'checkpoint' or 'store', which are exact."
        )
    return bench


def _behaviours(bench: Bench, tolerance: float) -> dict[Step, Behaviour]:
    """What the branches do; raises if the model does not run, or if what it does cannot be compared."""
    notes = BehaviourNotes(bench.steps, tolerance)

    class Twice(StackObserver):
        def first_run(self, run: BranchRun) -> Any:
            return notes.run_twice(run)

    with in_words("The forward pass"), bench.run(Setup(bench.plans("store")), Twice) as run:
        check_called(run.logs)
    return notes.by_step


def check_called(logs: dict[ReversibleSequence, StackLog]) -> None:
    """Raise if no stack was called in training."""
    if not any(log.calls for log in logs.values()):
        how = "only under no_grad" if any(log.calls_without_grad for log in logs.values()) else "not at all"
        raise ExaminationError(
            f"The model has a ReversibleSequence, but calls it {how} for this batch, so that it has no backward "
            "pass. Examine it as it is trained."
        )


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn an error of the model or of the engine into a sentence. Warnings of repeated runs are not the user's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExaminationError as error:
        raise ExaminationError(" ".join(str(error).split())) from None  # Python 3.10 has notes in the message
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises
        message = " ".join(" ".join([str(error) or "no message", *getattr(error, "__notes__", ())]).split())
        raise ExaminationError(f"{what} raised {type(error).__name__}: {message}") from error


@dataclass(frozen=True)
class _Examined:
    """All that the runs have shown.

    Attributes:
        setup: the plans that were examined.
        mode: the name of the mode in them that reverses blocks; of several if there are several.
        peaks: of each mode, of which `mode` is the last, and at each place that its run was at.
    """

    setup: Setup
    mode: str
    behaviours: dict[Step, Behaviour]
    logs: dict[ReversibleSequence, StackLog]
    gradients: Gradients
    true: Gradients
    peaks: dict[str, tuple[Peak, dict[str, int]]]

    def peaks_at(self, label: str, block: int) -> dict[str, int]:
        """The peak of each mode while its run was at a block."""
        places = [place(direction, label, block) for direction in ("forward", "backward")]
        return {mode: max(by_place.get(p, 0) for p in places) for mode, (_, by_place) in self.peaks.items()}


def _examined(bench: Bench, tolerance: float) -> _Examined:
    behaviours = _behaviours(bench, tolerance)
    bench.copying = frozenset(step for step, behaviour in behaviours.items() if behaviour.edits_source)
    setup, stored, checkpointed = (Setup(bench.plans(mode)) for mode in (None, "store", "checkpoint"))
    modes = (mode for plan in setup.plans.values() for mode in plan.modes if mode.needs_inverse)
    examined = " and ".join(dict.fromkeys(mode.name for mode in modes))
    with in_words("The backward pass"):
        true, _ = bench.gradients(stored)
        gradients, _ = bench.gradients(setup)
        _, logs = bench.gradients(setup, DriftObserver)
        note_amplification(bench, setup, logs, behaviours)
        bench.gradients(checkpointed)  # which saves more the first time than later
        setups = {"store": stored, "checkpoint": checkpointed, examined: setup}
        peaks = {mode: bench.peak(each, mode) for mode, each in setups.items()}
    return _Examined(setup, examined, behaviours, logs, gradients, true, peaks)


def _stack_report(name: str, stack: ReversibleSequence, examined: _Examined, tolerance: float) -> StackReport:
    log = examined.logs[stack]
    dtype = log.dtype or torch.float32
    report = StackReport(
        name=name or type(stack).__name__,
        dtype=str(dtype).removeprefix("torch."),
        floor=torch.finfo(dtype).eps,
        tolerance=max(tolerance, torch.finfo(dtype).eps),
        calls=log.calls,
        input_gradient_error=compared(examined.gradients.inputs[stack], examined.true.inputs[stack])[0],
        first_bad=None,
        blocks=tuple(_block_report(i, stack, examined) for i in range(len(stack))),
        memory=examined.mode,
    )
    return replace(report, first_bad=max((block.index for block in report.past), default=None))


def _block_report(index: int, stack: ReversibleSequence, examined: _Examined) -> BlockReport:
    block, log = stack[index], examined.logs[stack]
    steps = block.each_step()
    error, cosine = of_steps(steps, examined.gradients, examined.true)
    seen = [b for b in log.blocks if b.index == index]
    return BlockReport(
        index=index,
        name=block.describe(),
        memory=examined.setup.plans[stack].modes[index].name,
        drift=worst(s.drift for s in seen),
        amplification=worst(s.amplification for s in seen),
        magnitude=worst(s.magnitude for s in seen),
        gradient_error=error,
        gradient_cosine=cosine,
        peak_bytes=examined.peaks_at(log.label, index),
        steps=tuple(
            _step_report(step, [s for s in log.steps if s.block == index and s.step is step], examined)
            for step in dict.fromkeys(steps)
        ),
    )


def _step_report(step: Step, seen: list[SeenStep], examined: _Examined) -> StepReport:
    error, cosine = of_steps([step], examined.gradients, examined.true)
    return StepReport(
        name=step.name,
        target=str(step.target),
        coupling=repr(step.coupling),
        drift=worst(s.drift for s in seen),
        gradient_error=error,
        gradient_cosine=cosine,
        decisions=sum(s.decisions for s in seen),
        flips=sum(s.flips for s in seen),
        prevented_flips=sum(s.prevented_flips for s in seen),
        behaviour=examined.behaviours.get(step, Behaviour()),
    )
