"""Tools that look at a run from outside. Nothing in the engine imports them.

`examine` is the doctor: how far recomputed streams and gradients are off, what branches do, and what to change.
`profile` shows where the memory of a training step goes.
"""

from retrograde.engine.decisions import Flips as Flips
from retrograde.engine.decisions import counting_flips as counting_flips

from ._examine import examine as examine
from ._profile import BlockMemory as BlockMemory
from ._profile import ModeProfile as ModeProfile
from ._profile import Part as Part
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._report import Behaviour as Behaviour
from ._report import BlockReport as BlockReport
from ._report import Diagnosis as Diagnosis
from ._report import ExaminationError as ExaminationError
from ._report import Figures as Figures
from ._report import Peak as Peak
from ._report import StackReport as StackReport
from ._report import StepReport as StepReport
from ._report import Suggestion as Suggestion
from ._report import Untried as Untried
