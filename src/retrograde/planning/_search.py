"""The fastest plan under a budget, by dynamic programming over the blocks.

NOTE [Why the plan is optimal]
 A choice for the blocks so far affects the rest by the total of the bytes they save, by what autocast caches of
 theirs, by the mode of the last of them, and by the effort they take (see NOTE [What a plan is chosen by]). Of two
 choices with the same last mode, one that saves no less, caches no less and takes no less effort can never be part of a
 better plan (exchange it for the other: no later moment needs more, and the effort is not greater), so it is dropped.
 A plan of the least effort is among those that remain after the last block. Their number stays small for chains of
 similar blocks; where it does not, saved bytes are rounded up to 1/4096 of the budget, and the plan is the fastest of
 those that fit under this rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from retrograde.memory import Mode

from ._costs import ChainCost, predict

_MANY = 20_000


class _Choice(NamedTuple):
    """Modes for the first blocks: what they save and what is cached of them (without the last one's part), the effort,
    and the mode of the last of them, after the choice for those before it."""

    saved: int
    cached: int
    effort: float
    before: _Choice | None = None
    mode: Mode | None = None

    @property
    def memory(self) -> tuple[Mode, ...]:
        """The modes of all blocks so far."""
        modes: list[Mode] = []
        choice: _Choice | None = self
        while choice is not None and choice.mode is not None:
            modes.append(choice.mode)
            choice = choice.before
        return tuple(reversed(modes))


def cheapest(chain: ChainCost, budget: int) -> tuple[Mode, ...] | None:
    """The modes with the least effort whose predicted peak is within the budget, or None if there are none."""
    by_time = sorted(_sweep(chain, budget), key=lambda c: c.effort)
    return next((c.memory for c in by_time if predict(chain, c.memory).peak <= budget), None)


def smallest(chain: ChainCost) -> int:
    """The least peak that any plan reaches: a bisection over budgets, on which plans depend monotonically."""
    chain = chain.smallest_first()
    low, high = 0, predict(chain, [next(iter(block.modes)) for block in chain.blocks]).peak
    while low + 1 < high:
        middle = (low + high) // 2
        memory = cheapest(chain, middle)
        if memory is None:
            low = middle
        else:
            high = min(middle, predict(chain, memory).peak)
    return high


def _sweep(chain: ChainCost, budget: int, grain: int = 1) -> list[_Choice]:
    """All choices that may be part of a fastest plan; where they become too many, with saved bytes rounded up."""
    choices = [_Choice(0, 0, 0.0)]
    for i in range(len(chain.blocks)):
        grown = _extended(chain, i, choices, budget, grain)
        choices = [c for mode in chain.blocks[i].modes for c in _undominated(c for c in grown if c.mode == mode)]
        if len(choices) > _MANY and grain == 1:
            return _sweep(chain, budget, max(2, budget // 4096))
    return choices


def _extended(chain: ChainCost, i: int, choices: Sequence[_Choice], budget: int, grain: int) -> list[_Choice]:
    """The choices with one more block, without those that are over the budget."""
    modes = {mode: tuple(chain.moments(i, mode, 0, 0)) for mode in chain.blocks[i].modes}
    last: Iterable[Mode | None] = chain.blocks[i - 1].modes if i else (None,)
    effort = {(a, b): chain.effort(i, b, before=a) for a in last for b in modes}
    added = {(a, b): _added(chain, i, a, b) for a, b in effort}
    grown = []
    for choice in choices:
        for mode, (forward, backward) in modes.items():
            saved, cached = added[choice.mode, mode]
            saved = -(-(choice.saved + saved) // grain) * grain
            cached += choice.cached
            if saved + cached + forward <= budget and saved + backward <= budget:
                grown.append(_Choice(saved, cached, choice.effort + effort[choice.mode, mode], choice, mode))
    return grown


def _added(chain: ChainCost, i: int, before: Mode | None, mode: Mode) -> tuple[int, int]:
    """What the block before the i-th leaves alive, and what autocast caches of it."""
    return (0, 0) if before is None else (chain.carried(i - 1, before, mode), chain.mode(i - 1, before).cached)


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Those for which no other saves as little, caches as little and takes as little effort."""
    undominated: list[_Choice] = []
    stairs: list[tuple[int, float]] = []  # of those so far: the least effort for what is cached, going down
    for choice in sorted(choices, key=itemgetter(0, 1, 2)):
        at = bisect_right(stairs, (choice.cached, math.inf))
        if at and stairs[at - 1][1] <= choice.effort:
            continue
        undominated.append(choice)
        while at < len(stairs) and stairs[at][1] >= choice.effort:
            del stairs[at]
        stairs.insert(at, (choice.cached, choice.effort))
    return undominated
