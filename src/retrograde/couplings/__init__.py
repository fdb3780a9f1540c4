"""How an update enters a stream. One coupling per file; write your own from `combine` and `separate`."""

from .additive import Additive as Additive
from .affine import Affine as Affine
from .base import Coupling as Coupling
from .base import ExactCoupling as ExactCoupling
from .base import SideBitCoupling as SideBitCoupling
from .exact import Exact as Exact
from .exact_scaled import ExactScaled as ExactScaled
from .grid import OutOfRangeError as OutOfRangeError
from .grid import bits_for as bits_for
from .replace import Replace as Replace
from .scaled import Scaled as Scaled
