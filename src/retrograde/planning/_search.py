"""The fastest plan under a budget, by dynamic programming over the blocks.

NOTE [Why the plan is optimal]
 What a choice for the blocks so far means for the rest is their total of held bytes, what autocast caches of theirs,
 the mode of the last of them, and the time they take. Of two choices with the same last mode, one that holds no less,
 caches no less and takes no less time can never be part of a better plan (exchange it for the other: no later moment
 holds more, the time is not longer), and is dropped.
 What is left after the last block holds a fastest plan. The number of choices stays small for chains of like blocks;
 where it does not, held bytes are rounded up to 1/4096 of the budget, and the plan is the fastest of those that fit
 under this rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from retrograde._plan import Memory

from ._costs import ChainCost, predict

_MANY = 20_000


class _Choice(NamedTuple):
    """Modes for the first blocks: what they hold and what is cached of them (all but the last one's part), the time,
    and the mode of the last of them, after the choice for those before it."""

    held: int
    cached: int
    seconds: float
    before: _Choice | None = None
    mode: Memory | None = None

    @property
    def memory(self) -> tuple[Memory, ...]:
        """The modes of all blocks so far."""
        modes: list[Memory] = []
        choice: _Choice | None = self
        while choice is not None and choice.mode is not None:
            modes.append(choice.mode)
            choice = choice.before
        return tuple(reversed(modes))


def cheapest(chain: ChainCost, budget: int) -> tuple[Memory, ...] | None:
    """The modes with the least time whose predicted peak is within the budget, or None if there are none."""
    found = _sweep(chain, budget, grain=1)
    if found is None:
        found = _sweep(chain, budget, grain=max(1, budget // 4096))
    assert found is not None
    by_time = sorted(found, key=lambda c: c.seconds)
    return next((c.memory for c in by_time if predict(chain, c.memory).peak <= budget), None)


def smallest(chain: ChainCost) -> int:
    """The least peak that any plan reaches: a bisection over budgets, on which plans depend monotonically."""
    uniform = [predict(chain, [m] * len(chain.blocks)).peak for m in _common(chain)]
    low, high = 0, min(uniform) if uniform else predict(chain, [next(iter(b.modes)) for b in chain.blocks]).peak
    while low + 1 < high:
        middle = (low + high) // 2
        found = _lightest(chain, middle)
        if found is None:
            low = middle
        else:
            high = min(middle, predict(chain, found).peak)
    return high


def _common(chain: ChainCost) -> set[Memory]:
    return set.intersection(*(set(block.modes) for block in chain.blocks))


def _sweep(chain: ChainCost, budget: int, *, grain: int) -> list[_Choice] | None:
    """All choices that may be part of a fastest plan; None if they become too many."""
    choices = [_Choice(0, 0, chain.seconds_outside)]
    for i in range(len(chain.blocks)):
        grown = _extended(chain, i, choices, budget, grain)
        by_mode = {mode: _undominated(c for c in grown if c.mode == mode) for mode in chain.blocks[i].modes}
        choices = [choice for kept in by_mode.values() for choice in kept]
        if len(choices) > _MANY and grain == 1:
            return None
    return choices


def _extended(chain: ChainCost, i: int, choices: Sequence[_Choice], budget: int, grain: int) -> list[_Choice]:
    """The choices with one more block, without those that are over the budget."""
    modes = {mode: (chain.mode(i, mode).seconds, *chain.moments(i, mode, 0, 0)) for mode in chain.blocks[i].modes}
    last = chain.blocks[i - 1].modes if i else ()
    added = {(a, b): (chain.carried(i - 1, a, b), chain.mode(i - 1, a).cached) for a in last for b in modes}
    grown = []
    for choice in choices:
        for mode, (seconds, forward, backward) in modes.items():
            held, cached = (0, 0) if choice.mode is None else added[choice.mode, mode]
            held = -(-(choice.held + held) // grain) * grain
            cached += choice.cached
            if held + cached + forward <= budget and held + backward <= budget:
                grown.append(_Choice(held, cached, choice.seconds + seconds, choice, mode))
    return grown


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Those for which no other holds as little, caches as little and takes as little time."""
    kept: list[_Choice] = []
    stairs: list[tuple[int, float]] = []  # of those that are kept: the least time for what is cached, going down
    for choice in sorted(choices, key=itemgetter(0, 1, 2)):
        at = bisect_right(stairs, (choice.cached, math.inf))
        if at and stairs[at - 1][1] <= choice.seconds:
            continue
        kept.append(choice)
        while at < len(stairs) and stairs[at][1] >= choice.seconds:
            del stairs[at]
        stairs.insert(at, (choice.cached, choice.seconds))
    return kept


def _lightest(chain: ChainCost, budget: int) -> tuple[Memory, ...] | None:
    """Any plan within the budget, whatever its time."""
    choices = [_Choice(0, 0, 0.0)]
    for i in range(len(chain.blocks)):
        grown = [choice._replace(seconds=0.0) for choice in _extended(chain, i, choices, budget, 1)]
        choices = [c for mode in chain.blocks[i].modes for c in _undominated(c for c in grown if c.mode == mode)]
    return next((c.memory for c in choices if predict(chain, c.memory).peak <= budget), None)
