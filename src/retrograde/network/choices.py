"""The check that an option is one of its choices, with the same words everywhere."""

from __future__ import annotations

from collections.abc import Iterable


def check_choice(option: str, given: object, choices: Iterable[object], *, otherwise: str = "") -> None:
    """Raise if the value given for an option is none of its choices.

    Args:
        otherwise: what else could be given, in words.
    """
    allowed = list(choices)
    if given not in allowed:
        also = f", {otherwise}" if otherwise else ""
        raise ValueError(f"{option}={given!r} is not known; choose one of {', '.join(map(repr, allowed))}{also}.")
