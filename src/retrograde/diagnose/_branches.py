"""What each branch does that a replay must handle, seen by running it twice from the same state."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine import rng
from retrograde.engine.drift import relative_error
from retrograde.engine.observer import BranchRun
from retrograde.engine.preserve import StateSnapshot, reached
from retrograde.measure.batches import detached_leaf, tensors_in
from retrograde.network.reachable import reachable
from retrograde.network.step import Step
from retrograde.network.streams import versions

from ._report import Behaviour, ExaminationError


def modules_of(step: Step) -> list[nn.Module]:
    """The modules that a step's branch and coupling reach, each once."""
    return list(dict.fromkeys(v for v in (*reachable(step.branch), step.coupling) if isinstance(v, nn.Module)))


def named_modules_of(step: Step) -> list[tuple[str, nn.Module]]:
    """Every module in a step's branch and coupling, by its path from there."""
    seen: set[nn.Module] = set()
    return [pair for root in modules_of(step) for pair in root.named_modules(memo=seen)]


def on_copies(run: BranchRun) -> BranchRun:
    """The same run on copies of the sources, which the branch may edit. What was cast or summed is a copy already."""
    return _with_inputs(run, {id(t): t.clone() for t in run.inputs if any(t is s for s in run.sources)})


def _on_detached_copies(run: BranchRun) -> BranchRun:
    """The same run on copies of all inputs, without their graph. They are no leaves, which could not be edited."""
    with torch.enable_grad():
        return _with_inputs(run, {id(t): detached_leaf(t).clone() for t in run.inputs})


def _with_inputs(run: BranchRun, copies: Mapping[int, Tensor]) -> BranchRun:
    """Tensors exchanged for copies, by their ids; what is one tensor stays one, as branches may ask."""
    kwargs = {name: copies.get(id(value), value) for name, value in run.kwargs.items()}
    return replace(run, inputs=[copies.get(id(t), t) for t in run.inputs], kwargs=kwargs)


class BehaviourNotes:
    """What branches were seen to do: every run of one is followed by a second run from the same state.

    The second run leaves no trace.

    Args:
        labels: how a message names each step.
        tolerance: a branch whose second run is further from the first than this cannot be replayed.
    """

    def __init__(self, labels: Mapping[Step, str], tolerance: float) -> None:
        self.by_step: dict[Step, Behaviour] = {}
        self._labels = labels
        self._tolerance = tolerance

    def run_twice(self, run: BranchRun) -> Any:
        """The result of the first run."""
        _, generators = reached([run.step], [s.device for s in run.sources])
        modules = named_modules_of(run.step)
        first, second = on_copies(run), _on_detached_copies(run)
        copies = [copy for copy, given in zip(first.inputs, run.inputs, strict=True) if copy is not given]
        before, versions_before = StateSnapshot(modules, generators), versions(copies)
        result = first.result()
        behaviour = _changes(before, generators, edits_source=versions(copies) != versions_before)
        after = StateSnapshot(modules, generators)
        before.restore()
        with torch.enable_grad():
            repeated = second.result()
        after.restore()
        updates = [tensors_in(run.step.split_aux(value)[0]) for value in (result, repeated)]
        self._note(run.step, behaviour, self._repeat_error(run.step, *updates))
        return result

    def _repeat_error(self, step: Step, first: list[Tensor], second: list[Tensor]) -> float:
        """How far the second run is from the first; raises if they cannot be compared, or it is too far."""
        where = self._labels[step]
        if not all(bool(torch.isfinite(t).all()) for t in first):
            raise ExaminationError(
                f"{where} returns NaN or infinity in the forward pass, so that nothing after it can be compared. "
                "Look for an overflow (float16, large weights), a division by zero or bad values in the batch."
            )
        same = [t.shape for t in first] == [t.shape for t in second]
        error = relative_error(second, first) if same else float("inf")
        if not error <= self._tolerance:
            how = f"differs by {error:.1e}, relatively" if same else "has another shape"
            raise ExaminationError(
                f"{where} is not deterministic: run a second time on the same input, with the same random numbers, "
                f"buffers and attributes, its result {how}. Such a branch cannot be replayed: look for "
                "state outside of the module, time, or threads; or give its block memory='store'."
            )
        return error

    def _note(self, step: Step, behaviour: Behaviour, repeat_error: float) -> None:
        """Add a run to those of the same branch before it."""
        earlier = self.by_step.get(step, Behaviour())
        names = ("draws", "generators", "buffers", "attributes")
        lists = {n: tuple(dict.fromkeys((*getattr(earlier, n), *getattr(behaviour, n)))) for n in names}
        self.by_step[step] = Behaviour(
            **lists,
            edits_source=earlier.edits_source or behaviour.edits_source,
            repeat_error=max(earlier.repeat_error, repeat_error),
        )


def _changes(before: StateSnapshot, generators: list[Any], *, edits_source: bool) -> Behaviour:
    owned = [g for g in generators if rng.is_generator(g) and g is not torch.default_generator]
    return Behaviour(
        draws=tuple(_name(g, owned) for g in before.moved_generators()),
        generators=tuple(_name(g, owned) for g in owned),
        buffers=tuple(before.changed_buffers()),
        attributes=tuple(before.changed_attributes()),
        edits_source=edits_source,
    )


def _name(generator: Any, owned: list[Any]) -> str:
    if any(generator is g for g in owned):
        kind = type(generator)
        return f"its own {kind.__module__.partition('.')[0]} {kind.__name__}"
    if generator is random:
        return "Python's random"
    if generator is getattr(sys.modules.get("numpy"), "random", None):
        return "NumPy's random"
    device = getattr(generator, "device", torch.device("cpu"))
    return f"torch's generator ({device.type})"
