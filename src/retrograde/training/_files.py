"""Files in a folder that others may write to: a link there must not lead a run to files elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # Windows has neither


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a regular file, opened without following a link; raises OSError for anything else."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which could lead a run to any file, and is not followed", str(path))
    descriptor = os.open(path, flags | _NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def create_own(path: Path) -> int:
    """The descriptor of a new, empty file, in the place of what had its name."""
    path.unlink(missing_ok=True)
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def read_own(path: Path, most: int) -> bytes:
    """The bytes of a regular file that is no link, at most so many."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes")
    return content


def discard(path: Path) -> None:
    """Remove a folder, or whatever has its name: a link itself, and a pipe without opening it, which would wait."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
