"""Plans for a machine that is not here: nothing is allocated, and times come from a roofline."""

from .devices import Device as Device
from .devices import known_devices as known_devices
from .jobs import Job as Job
from .planner import plan_on as plan_on
from .report import JobPlan as JobPlan
