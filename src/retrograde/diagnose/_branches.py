"""What each branch does that a replay must handle, seen by running it twice from the same state."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrograde import _randomness as randomness
from retrograde._before import reached
from retrograde._guard import relative_error
from retrograde._step import Step
from retrograde._torch_private import versions

from ._report import Behaviour, ExaminationError
from ._snapshot import Snapshot, named_modules_of


class CopyingReader:
    """In the place of a step's way to read its sources: the branch gets copies, and may edit them."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._read = step._read
        self._reads = step.reads
        self._copies: list[Tensor] = []
        self._before: list[int] = []

    def __enter__(self) -> CopyingReader:
        object.__setattr__(self._step, "_read", self)
        if self._reads == "each":
            self._step.reads = "copies of each"  # type: ignore[assignment]  # a step that reads "each" does not ask
        return self

    def __exit__(self, *error: object) -> None:
        object.__delattr__(self._step, "_read")
        self._step.reads = self._reads

    def __call__(self, sources: list[Tensor]) -> list[Tensor]:
        read = self._read(sources)  # what was cast or summed is a copy already, and nobody else's
        copies = {i: t.clone() for i, t in enumerate(read) if any(t is s for s in sources)}
        self._copies = list(copies.values())
        self._before = versions(self._copies)
        return [copies.get(i, t) for i, t in enumerate(read)]

    @property
    def edited(self) -> bool:
        """Whether the branch edited what it was last given."""
        return versions(self._copies) != self._before


class ProbedSteps:
    """While it is on, every run of these steps' branches is followed by a second one from the same state.

    Afterwards each step has its behaviour in `found`. The second run leaves no trace.

    Args:
        steps: the steps, with the words by which a message names each.
        tolerance: a second run that is further from the first than this cannot be replayed.
    """

    def __init__(self, steps: Mapping[Step, str], tolerance: float) -> None:
        self.found: dict[Step, Behaviour] = {}
        self._steps = steps
        self._tolerance = tolerance

    def __enter__(self) -> ProbedSteps:
        for step in self._steps:
            self._wrap(step)
        return self

    def __exit__(self, *error: object) -> None:
        for step in self._steps:
            object.__delattr__(step, "update")

    def _wrap(self, step: Step) -> None:
        update = step.update

        def twice(sources: list[Tensor], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
            named = named_modules_of(step)
            _, everywhere = reached([step], [s.device for s in sources])
            owned = [g for g in everywhere if randomness.is_generator(g) and g is not torch.default_generator]
            before = Snapshot(named, everywhere)
            copies = [s.detach().clone() for s in sources]
            with CopyingReader(step) as reader:
                result: tuple[Any, Tensor | None] = update(sources, kwargs)
            behaviour = _changes(before, owned, edits_source=reader.edited)
            after = Snapshot(named, everywhere)
            before.restore()
            with torch.enable_grad(), CopyingReader(step):
                again = update(
                    [c.requires_grad_(s.requires_grad) for c, s in zip(copies, sources, strict=True)], kwargs
                )
            after.restore()
            self._judge(step, behaviour, result[0], again[0])
            return result

        object.__setattr__(step, "update", twice)

    def _judge(self, step: Step, behaviour: Behaviour, first: Any, again: Any) -> None:
        before, now = _tensors(first), _tensors(again)
        where = self._steps[step]
        if not all(bool(torch.isfinite(t).all()) for t in before):
            raise ExaminationError(
                f"{where} returns NaN or infinity in the forward pass, so that nothing after it can be compared. "
                "Look for an overflow (float16, large weights), a division by zero or bad values in the batch."
            )
        same = [t.shape for t in before] == [t.shape for t in now]
        error = relative_error(now, before) if same else float("inf")
        if not error <= self._tolerance:
            how = f"{error:.1e} off, relatively" if same else "in another shape"
            raise ExaminationError(
                f"{where} is not deterministic: run a second time on the same input, with the same random numbers, "
                f"buffers and attributes, its result is {how}. A branch that does so cannot be replayed: look for "
                "state kept outside of the module, time, or threads; or give its block memory='store'."
            )
        earlier = self.found.get(step, Behaviour())
        self.found[step] = _joined(earlier, behaviour, error)


def _changes(before: Snapshot, owned: list[Any], *, edits_source: bool) -> Behaviour:
    return Behaviour(
        draws=tuple(_name(g, owned) for g in before.moved_generators()),
        generators=tuple(_name(g, owned) for g in owned),
        buffers=tuple(before.changed_buffers()),
        attributes=tuple(before.changed_attributes()),
        edits_source=edits_source,
    )


def _joined(a: Behaviour, b: Behaviour, repeat_error: float) -> Behaviour:
    """Both, of a branch that ran more than once."""
    names = ("draws", "generators", "buffers", "attributes")
    lists = {name: tuple(dict.fromkeys((*getattr(a, name), *getattr(b, name)))) for name in names}
    return Behaviour(
        **lists,
        edits_source=a.edits_source or b.edits_source,
        repeat_error=max(a.repeat_error, repeat_error),
    )


def _tensors(update: Any) -> list[Tensor]:
    if isinstance(update, Tensor):
        return [update.detach()]
    return [t for part in update for t in _tensors(part)] if isinstance(update, (tuple, list)) else []


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
