"""retrograde: train deep networks in activation memory that does not grow with depth."""

from . import couplings as couplings
from ._block import Block as Block
from ._block import grouped as grouped
from ._block import midpoint as midpoint
from ._block import momentum as momentum
from ._block import transition as transition
from ._block import two_stream as two_stream
from ._decide import decide as decide
from ._fused import FusedOptimizer as FusedOptimizer
from ._guard import DriftError as DriftError
from ._guard import Guard as Guard
from ._modalities import multimodal as multimodal
from ._outputs import Outputs as Outputs
from ._plan import Plan as Plan
from ._replay import is_replaying as is_replaying
from ._sequence import ReversibleSequence as ReversibleSequence
from ._step import Step as Step
from .conversion import convert as convert

__version__ = "0.1.0"
