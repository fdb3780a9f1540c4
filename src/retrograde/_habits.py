"""What is learned of a step's branch from call to call. It saves work, and never decides a result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from torch import nn

from ._torch_private import Survey

Value = TypeVar("Value")


class Habits:
    """What was learned of a branch in one training mode; it saves work and never decides a result."""

    __slots__ = ("draws", "draws_rare", "edits", "kept_nothing", "repeats", "steady", "verified")

    def __init__(self) -> None:
        self.draws = True
        self.draws_rare = True
        self.edits = True
        self.steady: set[tuple[int, str]] = set()
        self.repeats = False  # a replay that ran to its end saved what the first run did
        self.verified = False  # the coupling's inverse was checked
        self.kept_nothing: set[Hashable] = set()  # of what a partial replay was to keep, and did not find


class Known:
    """What is known of a step from earlier calls: the modules in its branch, and its habits in each training mode.

    It is kept with the step, and forgotten when the step is copied or saved.
    """

    __slots__ = ("_habits", "_last", "_survey", "form")

    def __init__(self) -> None:
        self.form: Any = None  # of the step's last record, if it is steady
        self._last: dict[str, Any] = {}
        self._habits: dict[bool, Habits] = {}
        self._survey: Survey | None = None

    def __deepcopy__(self, memo: object) -> Known:
        return Known()

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return Known, ()

    def habits(self, training: Sequence[bool]) -> Habits:
        """The habits in a training mode, which is given by the flags of the branch's modules."""
        mode = training[0] if training else True
        habits = self._habits.get(mode)
        if habits is None:
            habits = self._habits[mode] = Habits()
        return habits

    def survey(self, roots: list[nn.Module]) -> Survey:
        """The modules below `roots` as they are now; roots[0] is the step's branch."""
        survey = self._survey
        if survey is None or survey.modules[0] is not roots[0] or not survey.holds():
            survey = Survey(roots)
            for habits in self._habits.values():
                habits.kept_nothing.clear()
            lasting = all(
                isinstance(t, nn.Parameter) for t in survey.tensors
            )  # others are a caller's, and not ours to hold
            self._survey = survey if lasting else None
        return survey

    def remembers(self, survey: Survey) -> bool:
        """Whether a survey is kept for later calls."""
        return self._survey is survey

    def same(self, what: str, value: Value) -> Value:
        """The value that was given last as `what`, if it equals this one.

        So calls share one list, where thousands of equal ones would keep the garbage collector busy.
        """
        last: Value | None = self._last.get(what)
        if last == value:
            return last
        self._last[what] = value
        return value

    def expect_draws(self) -> None:
        """Expect draws from any generator, whatever was learned."""
        self.form = None
        for habits in self._habits.values():
            habits.draws_rare = True
