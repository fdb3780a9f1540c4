"""Bytes, errors and tables as people write and read them: the one formatter of each."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_LARGEST = 2.0**80  # a million petabytes


def parse_size(size: int | float | str) -> int:
    """The bytes that a number or a text such as "8GiB", "500 MB" or "1.5g" means; with an i a step is 1024.

    Examples:
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
    if count > _LARGEST:
        raise ValueError(f"A size of {len(str(size))} digits is more than any machine has; write 8GiB, for example.")
    return int(count)


def format_bytes(size: int) -> str:
    """A number of bytes for people to read.

    Examples:
        >>> format_bytes(365), format_bytes(2_300_000), format_bytes(500_000_000), format_bytes(8 * 2**30)
        ('365 B', '2.19 MiB', '477 MiB', '8 GiB')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.0f} TiB" if value >= 100 else f"{value:.3g} TiB"


def format_error(error: float) -> str:
    """A relative error in two digits, or 0.

    Examples:
        >>> format_error(0.00123), format_error(0.0)
        ('1.2e-03', '0')
    """
    return f"{error:.1e}" if error else "0"


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table. Its columns are aligned to the right, those in `left` to the left.

    Examples:
        >>> align([("mode", "peak"), ("store", "3 MiB")])
        ['mode    peak', 'store  3 MiB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in left else text.rjust(widths[column])

    return ["  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows]
