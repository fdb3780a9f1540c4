"""glibc's heap, which fragments where small streams are freed between gradients that stay."""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_freed_memory(threshold: int = 64 * 1024) -> bool:
    """Have the process return buffers of `threshold` bytes and more to the system as soon as they are freed.

    By default glibc puts buffers of up to 32 MiB into one heap. Gradients, which stay, come to lie between activations,
    which are freed, and the heap grows with depth though live memory does not. Call it before the first
    step of training on the CPU. It costs time, for page faults: little where branches are large, but the demo, whose
    buffers are small, trains at half its speed. Accelerators are not concerned.

    Returns:
        Whether it had an effect: not with another allocator than glibc's, nor where the user has set
        `MALLOC_MMAP_THRESHOLD_`, which has precedence.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, threshold))
