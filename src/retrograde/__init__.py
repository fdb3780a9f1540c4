"""retrograde: train deep networks in activation memory that does not grow with depth."""

import sys as _sys

if _sys.argv[:1] == ["-m"] or "retrograde" in "".join(_sys.argv[:1]):  # it may be the command; torch takes a second
    from .cli import _starting

    _starting.stop_in_one_line()

from . import couplings as couplings
from . import nn as nn
from .conversion import convert as convert
from .engine.decisions import decide as decide
from .engine.guard import DriftError as DriftError
from .engine.guard import Guard as Guard
from .engine.observer import Observer as Observer
from .engine.outputs import Outputs as Outputs
from .engine.replaying import is_replaying as is_replaying
from .fused_optimizer import FusedOptimizer as FusedOptimizer
from .memory import MemoryMode as MemoryMode
from .memory import Plan as Plan
from .network.block import Block as Block
from .network.multimodal import multimodal as multimodal
from .network.ready_made import grouped as grouped
from .network.ready_made import midpoint as midpoint
from .network.ready_made import momentum as momentum
from .network.ready_made import transition as transition
from .network.ready_made import two_stream as two_stream
from .network.step import Step as Step
from .sequence import ReversibleSequence as ReversibleSequence

__version__ = "0.2.0"
