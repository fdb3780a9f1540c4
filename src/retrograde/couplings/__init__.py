"""How an update enters a stream. One coupling a file; write your own from `combine` and `separate`."""

from ._base import Coupling as Coupling
from ._base import SupportsCoupling as SupportsCoupling
from .additive import Additive as Additive
from .affine import Affine as Affine
from .replace import Replace as Replace
from .scaled import Scaled as Scaled
