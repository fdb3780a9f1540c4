"""How an update enters a stream. One coupling a file; write your own from `combine` and `separate`."""

from ._base import Coupling as Coupling
from ._base import SupportsCoupling as SupportsCoupling
from ._grid import OutOfRangeError as OutOfRangeError
from ._grid import bits_for as bits_for
from .additive import Additive as Additive
from .affine import Affine as Affine
from .exact import Exact as Exact
from .exact_scaled import ExactScaled as ExactScaled
from .replace import Replace as Replace
from .scaled import Scaled as Scaled
