"""Sizes and times, as people write and read them."""

from __future__ import annotations

import pytest

from retrograde.measure import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 2**33), ("500MB", 500_000_000), ("1.5k", 1500), ("64 mib", 2**26), ("2Ti", 2**41), ("77", 77), (7, 7)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 parsecs", "-3MB", "0", "1..5GB", "8iB", "1e3", "8 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size|above 0"):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30, 1000 * 2**40)] == [
        "12 B",
        "2 KiB",
        "3 MiB",
        "5 GiB",
        "1000 TiB",
    ]


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", 10**400, float("inf"), float("nan"), "1e3", "-1"])
def test_an_absurd_size_is_explained(size: int | float | str) -> None:
    with pytest.raises(ValueError, match=r"more than any machine has|is not a size|must be above 0"):
        parse_size(size)
