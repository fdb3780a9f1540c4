"""Tools that look at a run from outside. Nothing in the engine imports them.

`examine` is the doctor: what a model's reversible blocks lose, what their branches do, and what to change.
`MemoryTracker` counts the bytes of live tensors.
"""

from retrograde._decide import Flips as Flips
from retrograde._decide import counting_flips as counting_flips

from ._examine import examine as examine
from ._memory import Event as Event
from ._memory import Holding as Holding
from ._memory import MemoryTracker as MemoryTracker
from ._memory import Phase as Phase
from ._memory import holdings as holdings
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
