"""The report of `make test-accelerator`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerator_report import Results, machine, written


def test_the_report_names_device_versions_and_each_result(toy: Any) -> None:
    results = Results()
    for name, outcome, text in (("test_a", "passed", None), ("test_b", "failed", "assert 1 == 2")):
        location = ("tests/device/test_x.py", 1, name)
        results.pytest_runtest_logreport(pytest.TestReport(name, location, {}, outcome, text, "call"))  # type: ignore[arg-type]
    report = written(results, machine())
    for words in (
        "| device | toy",
        f"| torch | {torch.__version__}",
        "1 passed, 1 failed",
        "`test_a` | passed",
        "1 == 2",
    ):
        assert words in report
