"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_size(size: int | float | str) -> int:
    """A number of bytes from a number, or from a text such as "2GiB", "500 MB" or "1.5GiB".

    >>> parse_size("2GiB"), parse_size("1.5 kB"), parse_size(512)
    (2147483648, 1500, 512)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{size!r} is not a size; write a number and a unit, such as '2GiB' or '500MB'.")
        size = float(match[1]) * _UNITS[match[2].lower()]
    if not size > 0:
        raise ValueError(f"A size must be above 0 bytes, not {size}.")
    return int(size)


def show_size(size: int) -> str:
    """A number of bytes for people to read.

    >>> show_size(365), show_size(2_300_000)
    ('365 B', '2.19 MiB')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
