"""Routes: which block's f and g receive which keyword argument of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Routes = Mapping[str, Sequence[tuple[bool, bool]]]


def check_routes(routes: Routes, depth: int) -> None:
    """Raise unless every route says for every block whether f and whether g receive its argument."""
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


def names_for(routes: Routes, block: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that a block's f and g receive."""
    f, g = (tuple(name for name, route in routes.items() if route[block][i]) for i in range(2))
    return f, g


def routed(routes: Routes, kwargs: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments that have a route. Others raise, but for those that are known to be passed for nothing."""
    unknown = [name for name in kwargs if name not in routes and name not in ignored]
    if unknown:
        raise TypeError(
            f"No block receives the arguments {unknown}: args_route has routes for {sorted(routes) or 'none'}."
        )
    return {name: value for name, value in kwargs.items() if name in routes}


def chosen(names: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call's arguments, those that a branch receives."""
    return {name: kwargs[name] for name in names if name in kwargs}


def by_route(arg_route: Sequence[bool], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What f and g receive where a call routes all of its arguments together."""
    if len(arg_route) != 2:
        raise ValueError(f"arg_route={arg_route!r} is not a pair (f receives the arguments, g receives them).")
    f, g = (kwargs if goes else {} for goes in arg_route)
    return f, g
