"""Runs the tests marked `gpu` on the accelerator of this machine, and writes a report that can be sent back."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REPORT = Path("accelerator-report.md")


class Results:
    """A plugin of pytest that notes the outcome of every test."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float]] = []
        self.errors: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.rows.append((report.nodeid, report.outcome, report.duration))
            if report.failed:
                self.errors.append((report.nodeid, report.longreprtext))


def machine() -> dict[str, str]:
    """What was run on what."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module = torch.get_device_module(device)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip() or "unknown",
        "device": f"{device} ({module.get_device_name() if hasattr(module, 'get_device_name') else 'no name'})",
        "number of devices": str(torch.accelerator.device_count()),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, ROCm {torch.version.hip}, XPU {torch.version.xpu})",
        "Python": platform.python_version(),
        "system": platform.platform(),
    }


def written(results: Results, facts: dict[str, str]) -> str:
    """The report as markdown."""
    counts = Counter(outcome for _, outcome, _ in results.rows)
    lines = ["# Tests on an accelerator", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]
    lines += [f"| results | {', '.join(f'{n} {outcome}' for outcome, n in counts.items())} |", ""]
    lines += ["| test | outcome | seconds |", "|---|---|---|"]
    lines += [f"| `{name}` | {outcome} | {seconds:.2f} |" for name, outcome, seconds in results.rows]
    for name, text in results.errors:
        lines += ["", f"## {name}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    if not torch.accelerator.is_available():
        sys.exit("torch sees no accelerator on this machine, so there is nothing to test.")
    results = Results()
    status = pytest.main(["-q", "-m", "gpu", str(ROOT / "tests"), *sys.argv[1:]], plugins=[results])
    REPORT.write_text(written(results, machine()), encoding="utf-8")
    sys.stdout.write(f"Wrote {REPORT}.\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
