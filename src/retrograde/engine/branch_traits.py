"""What was seen of a branch in earlier calls: whether it draws, edits buffers, repeats itself."""

from __future__ import annotations

from typing import Any

_MOST_SHAPES = 64  # for which it is noted that there is nothing to save


class BranchTraits:
    """What was seen of a branch in one training mode."""

    __slots__ = (
        "_saves_nothing",
        "draws",
        "draws_globally",
        "draws_own",
        "edits",
        "is_new",
        "may_stop",
        "unchanging",
        "verified",
    )

    def __init__(self) -> None:
        self.is_new = True  # nothing was seen yet: what follows is to be on the safe side
        self.draws = True  # random numbers, from torch's generators or its own
        self.draws_globally = True  # from Python's or NumPy's global generator
        self.draws_own = True  # from generators that the branch has itself
        self.edits = True  # its buffers
        self.unchanging: set[tuple[int, str]] = set()  # buffers that it was seen to leave unchanged
        self.may_stop = False  # a replay ran to its end and saved what the first run did
        self.verified = False  # the coupling's inverse was checked
        self._saves_nothing: dict[tuple[Any, ...], None] = {}

    def saves_nothing(self, what: tuple[Any, ...]) -> bool:
        """Whether selective recomputation was seen to have nothing to save here."""
        return what in self._saves_nothing

    def note_saves_nothing(self, what: tuple[Any, ...]) -> None:
        self._saves_nothing[what] = None
        if len(self._saves_nothing) > _MOST_SHAPES:  # sequence lengths vary: the oldest is forgotten
            del self._saves_nothing[next(iter(self._saves_nothing))]

    def forget_saves(self) -> None:
        self._saves_nothing.clear()
