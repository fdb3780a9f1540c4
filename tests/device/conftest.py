"""Runs this folder's tests in processes of their own, one per file, with the toy device registered there.

The device that a process registers is its accelerator for good, and would be that of every later test. So a process
that collects these tests starts a child for each file, and passes on the child's reports. Tests marked `gpu` run where
they were collected: they use the accelerator of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REPORTS = "RETROGRADE_DEVICE_REPORTS"  # the file that a child writes its reports to

if REPORTS in os.environ:
    import toy_device

    toy_device.register()


@pytest.fixture
def toy() -> Iterator[Any]:
    """The toy device, with its counters at zero."""
    import toy_device

    toy_device.DEVICE.reset()
    yield toy_device.DEVICE
    toy_device.DEVICE.finish()


@pytest.fixture(params=["toy", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device() -> torch.device:
    """The toy device; and the machine's own, if it has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None  # otherwise the test was skipped
    return accelerator


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass on what the child reported of this test."""
    if REPORTS in os.environ or item.get_closest_marker("gpu") or not _uses_device(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item).get(item.nodeid, []):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a child: write the report down."""
    if REPORTS in os.environ:
        with Path(os.environ[REPORTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report._to_json()) + "\n")


def _uses_device(item: pytest.Item) -> bool:
    return bool({"toy", "device"} & set(getattr(item, "fixturenames", ())))


_BY_FILE = pytest.StashKey[dict[Path, dict[str, list[pytest.TestReport]]]]()


def _reports(item: pytest.Item) -> dict[str, list[pytest.TestReport]]:
    """The reports of all tests of a file, by their ids."""
    by_file = item.config.stash.setdefault(_BY_FILE, {})
    if item.path not in by_file:
        items = [i for i in item.session.items if i.path == item.path and _uses_device(i)]
        by_file[item.path] = _run_child(item.config, [i.nodeid for i in items if not i.get_closest_marker("gpu")])
    return by_file[item.path]


def _run_child(config: pytest.Config, tests: list[str]) -> dict[str, list[pytest.TestReport]]:
    tmp_path = config._tmp_path_factory.mktemp("device")  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, REPORTS: str(tmp_path / "reports.jsonl")}
    child = subprocess.run(command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=280)
    reports: dict[str, list[pytest.TestReport]] = {test: [] for test in tests}
    if (tmp_path / "reports.jsonl").exists():
        for line in (tmp_path / "reports.jsonl").read_text(encoding="utf-8").splitlines():
            report = pytest.TestReport._from_json(json.loads(line))
            reports[report.nodeid].append(report)
    for test, found in reports.items():
        if not any(report.when == "call" or not report.passed for report in found):
            said = f"The child process of {test} ended with {child.returncode}:\n{child.stdout}\n{child.stderr}"
            location = (test.split("::")[0], None, test)
            found.append(pytest.TestReport(test, location, {}, "failed", said, "call"))
    return reports
