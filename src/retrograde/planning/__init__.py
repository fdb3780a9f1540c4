"""Plans from a byte budget: the fastest backward pass that fits."""

from ._compare import Comparison as Comparison
from ._compare import compare as compare
from ._costs import BlockCost as BlockCost
from ._costs import ChainCost as ChainCost
from ._costs import ModeCost as ModeCost
from ._costs import Prediction as Prediction
from ._costs import predict as predict
from ._fit import Fit as Fit
from ._fit import fit as fit
from ._measure import measure as measure
from ._measure import measured as measured
from ._planner import BudgetError as BudgetError
from ._planner import Planned as Planned
from ._planner import choose as choose
from ._planner import pareto as pareto
from ._planner import plan as plan
from ._search import cheapest as cheapest
from ._search import smallest as smallest
