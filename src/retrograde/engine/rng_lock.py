"""The lock around branches that draw random numbers or change buffers, which run one at a time."""

from __future__ import annotations

import threading

from .torch_internals import inherited_list

LOCK_TIMEOUT_S = 600.0


class RngLock:
    """Held by a call, not by a thread.

    A branch may run a backward pass whose replays take the lock too. On an accelerator these replays are in a thread
    of autograd's, while the thread that holds the lock waits for them. So whoever holds it has a lock of their own
    for what runs inside, and autograd's thread inherits that one (see `inherited_list`).
    """

    def __init__(self) -> None:
        self._outermost = threading.Lock()

    def __enter__(self) -> None:
        inner = inherited_list("rng locks")
        lock = inner[-1] if inner else self._outermost
        if not lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise RuntimeError(
                f"A branch that draws random numbers or changes buffers waited {LOCK_TIMEOUT_S:.0f} s for another "
                "thread that is inside such a branch. Branches of this kind run one at a time; do not let one wait for "
                "another."
            )
        inner.append(threading.Lock())

    def __exit__(self, *error: object) -> None:
        inner = inherited_list("rng locks")
        inner.pop()
        (inner[-1] if inner else self._outermost).release()


RNG_LOCK = RngLock()
