"""Bytes, times, batches and models to be measured: what all tools share."""

from .allocator import return_freed_memory as return_freed_memory
from .batches import arguments as arguments
from .formatting import format_bytes as format_bytes
from .formatting import parse_size as parse_size
from .loss import default_loss as default_loss
from .memory_tracker import Event as Event
from .memory_tracker import Holding as Holding
from .memory_tracker import MemoryTracker as MemoryTracker
from .memory_tracker import Phase as Phase
from .memory_tracker import holdings as holdings
from .stacks import stacks_in as stacks_in
from .targets import Target as Target
from .targets import TargetError as TargetError
from .targets import load as load
