"""Routes: which block's f and g receive which keyword argument of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._dropin import Branch

Arguments = Mapping[str, Any]
Routes = Mapping[str, Sequence[tuple[bool, bool]]]


class RoutedBranch(Branch):
    """A branch that receives some of a call's arguments, by their names."""

    def __init__(
        self, letter: str, target: int, sources: tuple[int, ...], names: Sequence[str], dim: int | None = None
    ) -> None:
        super().__init__(letter, target, sources, dim)
        self.names = tuple(names)


def checked_routes(args_route: Routes | None, depth: int) -> Routes:
    """The routes; raises unless each says for every block whether f and whether g receive its argument."""
    routes = dict(args_route or {})
    for name, route in routes.items():
        if len(route) != depth:
            raise ValueError(
                f"args_route[{name!r}] has {len(route)} entries for {depth} blocks. Give one pair "
                "(f receives it, g receives it) for each block."
            )
        for i, pair in enumerate(route):
            if len(pair) != 2:
                raise ValueError(
                    f"args_route[{name!r}], block {i}: {pair!r} is not a pair (f receives it, g receives it)."
                )
    return routes


def names_for(routes: Routes, block: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that a block's f and g receive."""
    f, g = (tuple(name for name, route in routes.items() if route[block][i]) for i in range(2))
    return f, g


def routed(routes: Routes, kwargs: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments that have a route. Others raise, except for those that are to be ignored."""
    unknown = [name for name in kwargs if name not in routes and name not in ignored]
    if unknown:
        raise TypeError(
            f"No block receives the arguments {unknown}: args_route has routes for {sorted(routes) or 'none'}."
        )
    return {name: value for name, value in kwargs.items() if name in routes}


def chosen(names: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's arguments that a branch receives."""
    return {name: kwargs[name] for name in names if name in kwargs}


def by_letter(arg_route: Sequence[bool], kwargs: Arguments) -> dict[str, Arguments]:
    """What f and g receive if a call routes all of its arguments together."""
    if len(arg_route) != 2:
        raise ValueError(f"arg_route={arg_route!r} is not a pair (f receives the arguments, g receives them).")
    return {letter: kwargs if receives else {} for letter, receives in zip("fg", arg_route, strict=True)}
