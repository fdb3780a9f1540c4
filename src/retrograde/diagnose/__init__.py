"""Tools that look at a run from outside: how many bytes it holds. Nothing in the engine imports them."""

from ._memory import Event as Event
from ._memory import Holding as Holding
from ._memory import MemoryTracker as MemoryTracker
from ._memory import Phase as Phase
from ._memory import holdings as holdings
