"""Time of forward + backward of each contender, interleaved in one process, as a ratio to plain autograd.

    python benchmarks/run.py [setting ...]

Settings are those of models.py; all of them by default. The report goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch
from torch import Tensor

from contenders import CONTENDERS, Run
from models import SETTINGS, Setting

BASELINE = "plain"
Ratios = dict[str, tuple[float, float, float]]


def check_same(runs: dict[str, Run], parameters: list[Tensor], x: Tensor) -> None:
    """All contenders must compute the same thing, or their times mean nothing."""
    expected: list[Tensor] = []
    for name, run in runs.items():
        output = run(x)
        grads = torch.autograd.grad(output.square().mean(), [x]) if name != "RevTorch 0.2.4" else (None,)
        found = [output.detach(), *(g for g in grads if g is not None)]
        expected = expected or found
        for a, b in zip(found, expected, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for p in parameters:
        p.grad = None


def one_round(run: Run, parameters: list[Tensor], x: Tensor) -> float:
    for tensor in (*parameters, x):
        tensor.grad = None
    start = time.perf_counter()
    run(x).sum().backward()
    return time.perf_counter() - start


def measure(setting: Setting) -> tuple[Ratios, float]:
    """The median ratio to the baseline with its quartiles for each contender, and the baseline's milliseconds."""
    torch.set_num_threads(setting.threads)
    pairs, x = setting.build()
    parameters = [p for f, g in pairs for module in (f, g) for p in module.parameters()]
    runs = {name: make(pairs) for name, make in CONTENDERS.items()}
    check_same(runs, parameters, x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(setting.rounds + 2):
        for name, run in runs.items():
            seconds = one_round(run, parameters, x)
            if round_ >= 2:
                times[name].append(seconds)
        print(f"\r{setting.name}: round {round_ + 1} of {setting.rounds + 2}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {name: ratio(found, times[BASELINE]) for name, found in times.items()}, statistics.median(times[BASELINE])


def ratio(found: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Quartiles of the ratio round by round: what slows the machine slows both."""
    ratios = [a / b for a, b in zip(found, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def describe_machine() -> list[str]:
    model = next((line.split(":")[1].strip() for line in _read("/proc/cpuinfo") if "model name" in line), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return [
        f"- date: {datetime.date.today()}, commit: {commit.strip() or 'unknown'}",
        f"- CPU: {model}, {os.cpu_count()} cores; torch {torch.__version__}, Python {platform.python_version()}",
    ]


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def report(results: dict[str, tuple[Ratios, float]]) -> str:
    lines = ["# Time of forward + backward, ratio to plain autograd", "", *describe_machine()]
    for name, (ratios, seconds) in results.items():
        setting = SETTINGS[name]
        lines += ["", f"## {name}", "", f"{setting}; plain takes {1e3 * seconds:.2f} ms.", ""]
        lines += ["| contender | median ratio | quartiles |", "|---|---|---|"]
        lines += [f"| {who} | {mid:.3f} | {low:.3f} – {high:.3f} |" for who, (low, mid, high) in ratios.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    chosen = parser.parse_args().settings
    unknown = [name for name in chosen if name not in SETTINGS]
    if unknown:
        parser.error(f"unknown settings {unknown}; known: {', '.join(SETTINGS)}")
    text = report({name: measure(SETTINGS[name]) for name in chosen})
    target = Path(__file__).parent / "results" / f"{datetime.date.today()}-engine.md"
    target.write_text(text)
    print(text)
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
