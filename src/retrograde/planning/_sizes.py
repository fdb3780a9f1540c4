"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re


def parse_size(size: int | float | str) -> int:
    """The bytes that a number or a text such as "8GiB", "500 MB" or "1.5g" means; with an i a step is 1024.

    >>> parse_size("8GiB"), parse_size("500MB"), parse_size("1.5 k"), parse_size(512)
    (8589934592, 500000000, 1500, 512)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", size, re.IGNORECASE)
        if match is None or (match[3] and not match[2]):
            raise ValueError(f"{size!r} is not a size; write 8GiB, 500MB or a number of bytes.")
        step = 1024 if match[3] else 1000
        count = float(match[1]) * step ** " kmgt".index(match[2].lower() or " ")
    else:
        count = size
    if not count > 0:
        raise ValueError(f"A size must be above 0 bytes, not {size}.")
    return int(count)


def show_size(size: int) -> str:
    """A number of bytes for people to read.

    >>> show_size(365), show_size(2_300_000), show_size(500_000_000), show_size(8 * 2**30)
    ('365 B', '2.19 MiB', '477 MiB', '8 GiB')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.0f} TiB" if value >= 100 else f"{value:.3g} TiB"
