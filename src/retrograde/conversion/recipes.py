"""The recipes of `convert`, with their parameters."""

from ._recipes import BDIA as BDIA
from ._recipes import Annealed as Annealed
from ._recipes import Momentum as Momentum
from ._recipes import ScaledResidual as ScaledResidual
from ._recipes import TwoStream as TwoStream
from ._recipes import Unchanged as Unchanged
