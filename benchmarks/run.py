"""retrograde compared with plain autograd, torch's checkpoint and the published libraries: time, memory, gradients.

    python benchmarks/run.py [part ...] [--quick] [--output FOLDER]

All parts by default, in about a quarter of an hour on two otherwise idle cores. The report is written to
benchmarks/results/, with its pictures and the raw figures as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see the Makefile

from harness import gradients, machine, memory, plots, report, resident, settings
from harness.compiled import COMPILED_CONTENDERS
from harness.contenders import OURS_AND_TORCH, REVERSE, Contender
from harness.field import assemble
from harness.flops import flops
from harness.machine import Progress
from harness.peers import PEERS
from harness.results import Comparison, GradientErrors, Growth, Results
from harness.settings import Setting, Sweep
from harness.timing import seconds

EVERYONE = (*OURS_AND_TORCH, *PEERS)
SWEEPS = ("depth", "resident", "gradients")
QUICK_RESIDENT = ("plain", REVERSE, "checkpoint, non-reentrant", "RevTorch")  # each a process of seconds
PARTS = (*settings.SETTINGS, "compiled", *SWEEPS)


def compare(setting: Setting, contenders: tuple[Contender, ...], progress: Progress) -> Comparison:
    """Measure time first; then memory and operations, which need modes that slow everything down."""
    field = assemble(setting, contenders)
    times = seconds(setting, field, progress)
    compiled = setting.name == "compiled"
    peaks, operations = {}, {}
    for name, run in field.runs.items():
        progress.step(f"{setting.name}: memory of {name}")
        if compiled:
            peaks[name] = memory.profiled_peak(run, field.network)
        else:
            peaks[name] = memory.peak(run, field.network)
            operations[name] = flops(run, field.network)
    by = "profiler" if compiled else "tracker"
    unit = field.network.pair_bytes
    return Comparison(setting, unit, times, peaks, operations, field.distances, field.absent, by)


def sweep_part(part: str, results: Results, progress: Progress) -> None:
    def size(sweep: Sweep) -> Sweep:
        return sweep.quick() if results.quick else sweep

    if part == "gradients":
        deep = [] if results.quick else [settings.GRADIENTS_DEEP]
        sweeps = [size(settings.GRADIENTS), *deep]
        errors, absent = gradients.errors(sweeps, EVERYONE, progress)
        sizes = {depth: f"width {sweep.setting.width}" for sweep in sweeps for depth in sweep.depths}
        results.gradients = GradientErrors(errors, absent, sizes)
        return
    sweep = size(settings.SLOPE if part == "depth" else settings.RESIDENT)
    unit = sweep.setting.build().pair_bytes
    if part == "depth":
        results.live = Growth(sweep.setting, unit, *memory.by_depth(sweep, EVERYONE, progress))
    else:
        names = [c.name for c in EVERYONE if not results.quick or c.name in QUICK_RESIDENT]
        for allocator in resident.ALLOCATORS:
            growth = resident.by_depth(sweep, names, progress, allocator)
            results.resident[allocator] = Growth(sweep.setting, unit, *growth)


def measure(parts: list[str], progress: Progress, *, quick: bool) -> Results:
    packages = dict.fromkeys(contender.package for contender in EVERYONE if contender.package)
    results = Results(machine.describe(machine.load(), packages), quick)
    for part in (part for part in PARTS if part in parts):
        if part in SWEEPS:
            sweep_part(part, results, progress)
        else:
            setting = settings.COMPILED if part == "compiled" else settings.SETTINGS[part]
            contenders = COMPILED_CONTENDERS if part == "compiled" else EVERYONE
            results.comparisons[part] = compare(setting.quick() if quick else setting, contenders, progress)
        progress.done(f"{part}: done")
    results.minutes = progress.minutes
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to check that everything works")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    warnings.simplefilter("ignore")  # of the peers; ours are errors in the tests
    results = measure(parts, Progress(), quick=arguments.quick)

    kind = "quick" if arguments.quick else "bench"
    stem = "-".join([str(datetime.date.today()), kind, *(arguments.parts or [])])
    arguments.output.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(results, arguments.output, stem)
    target = arguments.output / f"{stem}.md"
    target.write_text(report.render(results, pictures), encoding="utf-8")
    results.write(target.with_suffix(".json"))
    print(target.read_text(encoding="utf-8"))
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
