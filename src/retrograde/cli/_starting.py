"""Ctrl-C before a command runs: one line, as later.

Torch takes a second or more to be imported, before any code of a command runs. So the package installs this handler
first, in processes that were started as a command. This file imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import FrameType


def stop_in_one_line() -> None:
    """From now on Ctrl-C ends the process with one line, if the process was started as a command."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _stop)


def raise_as_usual() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: a command runs, and ends in its own words."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Whether the process was started as `retrograde …` or `python -m retrograde …`."""
    if sys.argv[0] != "-m":
        return os.path.basename(sys.argv[0]).removesuffix(".exe") == "retrograde"
    words = sys.orig_argv  # sys.argv names the module only after Python has found it
    return "-mretrograde" in words or ("-m", "retrograde") in pairwise(words)


def _stop(number: int, frame: FrameType | None) -> None:
    """An exception would not do: it can be caught inside of the import, and leaves a traceback."""
    os.write(2, b"Stopped.\n")
    os._exit(130)  # as a shell reports an interrupt
