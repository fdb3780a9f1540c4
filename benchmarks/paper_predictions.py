"""Plans on paper, held against real training steps on this machine: bytes of models, bytes of ranks, order of modes.

    python benchmarks/paper_predictions.py [--only PARTS] [--quick] [--output DIR]

The parts are bytes, held-out, compiled, ranks, large, tools and times, with commas between them.

Bytes are held against what the allocator hands out from the first tensor on (torch's profiler), not against a tracker
of retrograde. Times are held against real steps, on the roofline that `--on this` measures: run that part on a
machine that does nothing else. The limits are 2% for the peak of a model, 5% for that of a rank, and the right order
of 90% of all pairs of memory modes. The report names what exceeds them, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products are illegal instructions on some CPUs

import torch
from torch import nn

from harness.allocated import allocated_peak
from harness.machine import describe, load
from harness.paper_models import HELD_OUT, MODELS, Made
from harness.paper_ranks import of_ranks, work
from harness.paper_steps import CPU, MODES, Section, prepare, tell
from retrograde.measure.stacks import stacks_of
from retrograde.measure.timing import least_seconds
from retrograde.measure.training_step import loss_of, step_seconds
from retrograde.planning._measure import following
from retrograde.planning.on_paper.devices import Device, device_named
from retrograde.planning.on_paper.jobs import Job
from retrograde.planning.on_paper.planner import opened, plan_job

OF_A_MODEL, PAIRS = 0.02, 0.90
SURE = 0.03  # times that differ by less than this have no order that a machine could keep
PARTS = "bytes,held-out,compiled,ranks,large,tools,times"
TWO_MINUTES, FOUR_GIB = 120, 2**32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=PARTS, help="parts of the report")
    parser.add_argument("--quick", action="store_true", help="two models, two processes")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        task = json.loads(chosen.worker)
        plan_large(task["large"]) if "large" in task else work(task)
        return
    lines = ["# What is predicted on paper, and what real steps need", "", *describe(load(), ["torch", "accelerate"])]
    past: list[str] = []
    parts: dict[str, Callable[[bool], Section]] = {
        "bytes": of_models,
        "held-out": of_held_out,
        "compiled": of_compiled,
        "ranks": of_ranks,
        "large": of_a_large_model,
        "tools": of_tools,
        "times": of_times,
    }
    for name in chosen.only.split(","):
        section, wrong = parts[name](chosen.quick)
        lines += ["", *section]
        past += wrong
    lines += ["", f"Past the limits: {'; '.join(past)}." if past else "All within the limits."]
    text = "\n".join(lines) + "\n"
    chosen.output.mkdir(parents=True, exist_ok=True)
    parts_left_out = "" if len(chosen.only.split(",")) == len(parts) else "-" + chosen.only.replace(",", "-")
    target = chosen.output / f"{datetime.date.today()}-paper{parts_left_out}{'-quick' if chosen.quick else ''}.md"
    target.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {target}", file=sys.stderr)
    sys.exit(1 if past else 0)


# Bytes of a model


def of_models(quick: bool) -> Section:
    return peaks_of(MODELS, "## The peak of a training step", quick)


def of_held_out(quick: bool) -> Section:
    return peaks_of(HELD_OUT, "## The same for models that the prediction was not tuned with", quick)


def peaks_of(models: dict[str, Callable[[], Made]], title: str, quick: bool) -> Section:
    lines = [
        title,
        "",
        "Everything that a process allocates: parameters, gradients, optimiser state, batch, activations, kernels' own "
        f"buffers. Limit: {OF_A_MODEL:.0%}.",
        "",
        "| model | memory | predicted, bytes | allocated, bytes | off by | at the peak |",
        "|---|---|---|---|---|---|",
    ]
    past: list[str] = []
    for name, make in list(models.items())[: 2 if quick else None]:
        tell(name)
        try:
            with opened(make, Job(CPU)) as subject:
                rank = subject.rank()
                costs = {mode: rank.step([mode] * len(rank.stacks)).memory for mode in MODES}
        except (ValueError, RuntimeError) as error:
            first_line = str(error).partition("\n")[0]
            lines.append(f"| {name} | | refused: {first_line} | | | |")
            continue
        for mode, memory in costs.items():
            gc.collect()
            real = allocated_peak(partial(prepare, make, mode))
            off = memory.peak / real - 1
            lines.append(f"| {name} | {mode} | {memory.peak} | {real} | {off:+.2%} | {memory.moment} |")
            past += [f"the peak of {name}, {mode}, by {off:+.1%}"] * (abs(off) > OF_A_MODEL)
    return lines, past


def of_compiled(quick: bool) -> Section:
    """A plan on paper is made uncompiled. How far from that is the same model under backend="retrograde"?"""
    lines = [
        "## Models that are compiled",
        "",
        'Predicted for the uncompiled model; allocated by the same model compiled with `backend="retrograde"`, in a '
        "step after two others. Every row compiled one graph, without breaks. Differences above "
        f"{OF_A_MODEL:.0%} are named, and are no fault of the prediction: it does not know what a compiler fuses.",
        "",
        "| model | memory | predicted (uncompiled), bytes | allocated (compiled), bytes | off by |",
        "|---|---|---|---|---|",
    ]
    within, past = 0, []
    for name in ("MLPs", "MLPs, exact", "language model", "RevViT")[: 1 if quick else None]:
        with opened(MODELS[name], Job(CPU)) as subject:
            rank = subject.rank()
            predicted = {mode: rank.step([mode] * len(rank.stacks)).memory.peak for mode in MODES}
        for mode in MODES:
            tell(f"{name}, {mode}, compiled")
            real = compiled_peak(MODELS[name], mode)
            off = predicted[mode] / real - 1
            within += abs(off) <= OF_A_MODEL
            past += [f"{name}, {mode}, by {off:+.1%}"] * (abs(off) > OF_A_MODEL)
            lines.append(f"| {name} | {mode} | {predicted[mode]} | {real} | {off:+.2%} |")
    lines += ["", f"Within {OF_A_MODEL:.0%}: {within} of {within + len(past)}. Others: {'; '.join(past) or 'none'}."]
    return lines, []


def compiled_peak(make: Callable[[], Made], mode: str) -> int:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()

    def compiled(model: nn.Module) -> nn.Module:
        model.compile(backend="retrograde")
        return model

    peak = allocated_peak(partial(prepare, make, mode, compiled))
    if counters["stats"]["unique_graphs"] != 1 or counters["graph_break"]:
        raise RuntimeError(f"The model was not compiled as one graph: {counters['stats']}, {counters['graph_break']}.")
    return peak


# A large model


def of_a_large_model(quick: bool) -> Section:
    """How long a plan for 70 billion parameters takes, and in how much memory, in a new process."""
    from paper_tables import SHAPES

    name = "8b" if quick else "70b"
    command = [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps({"large": name})]
    seconds, taken, most = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    lines = [
        "## A plan for a large model",
        "",
        f"{SHAPES[name].title}; {SHAPES[name].ranks} ranks, {SHAPES[name].shard}, 70 GiB each: {taken:.0f} s of "
        f"processor time ({seconds:.0f} s by the clock) in {most / 2**30:.2f} GiB, torch itself included. Limits: "
        f"{TWO_MINUTES} s, {FOUR_GIB // 2**30} GiB.",
    ]
    return lines, [f"a plan for {name}: {taken:.0f} s, {most} bytes"] * (taken > TWO_MINUTES or most > FOUR_GIB)


def plan_large(name: str) -> None:
    """Print the seconds by the clock, those of the processor, and the most bytes of this process."""
    from paper_tables import SHAPES

    start = time.perf_counter()
    plan_job(SHAPES[name].make, SHAPES[name].job(), 70 * 2**30)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, time.process_time(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))


# Other tools


def of_tools(quick: bool) -> Section:
    """What torch's own tracker and Accelerate's estimate say of the same models."""
    lines = [
        "## Beside other tools",
        "",
        "`MemTracker` of torch.distributed._tools, on the same step without values (forward and backward, with "
        "parameters, gradients and optimiser state), and the figure of `accelerate estimate-memory` for training with "
        "Adam (four times the parameters: it has no batch and no activations), in bytes; and the FLOPs of forward and "
        "backward, ours and those of torch.utils.flop_counter, whose formulas ours are except for attention on the "
        "CPU, for which it has none. `RuntimeEstimator` has no time for a machine without CUDA: its roofline raises "
        '"Roofline estimation needs to access CUDA capabilities", and its benchmark mode needs CUDA events.',
        "",
        "| model | memory | on paper | MemTracker | 4 x parameters (accelerate) | allocated | GFLOP on paper | "
        "flop_counter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ("MLPs", "language model", "RevViT", "mixture of experts")[: 1 if quick else None]:
        for mode in ("store", "reverse"):
            with opened(MODELS[name], Job(CPU)) as subject:
                cost = subject.rank().step([mode] * len(stacks_of(subject.target.model)))
            gc.collect()
            real = allocated_peak(partial(prepare, MODELS[name], mode))
            tracked = of_mem_tracker(MODELS[name], mode)
            lines.append(
                f"| {name} | {mode} | {cost.memory.peak} ({cost.memory.peak / real - 1:+.1%}) | {tracked} "
                f"({tracked / real - 1:+.1%}) | {estimated_by_accelerate(MODELS[name], real)} | {real} | "
                f"{cost.flops / 1e9:.3f} | {counted_flops(MODELS[name], mode) / 1e9:.3f} |"
            )
    return lines, []


def of_mem_tracker(make: Callable[[], Made], mode: str) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    with opened(make, Job(CPU)) as subject:
        model, batch, loss = subject.target.model, subject.target.batch, subject.target.loss
        for stack in stacks_of(model).values():
            stack.memory = mode
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            loss_of(model, batch, loss).backward()
        peak = sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
        state = 2 * sum(p.numel() * p.element_size() for p in model.parameters())  # of AdamW
    return int(peak + state)


def counted_flops(make: Callable[[], Made], mode: str) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with opened(make, Job(CPU)) as subject:
        for stack in stacks_of(subject.target.model).values():
            stack.memory = mode
        counter = FlopCounterMode(display=False)
        for _ in range(2):  # a first replay goes to the end of a branch
            with counter:
                loss_of(subject.target.model, subject.target.batch, subject.target.loss).backward()
    return int(counter.get_total_flops())


def estimated_by_accelerate(make: Callable[[], Made], real: int) -> str:
    try:
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return "not installed"
    with opened(make, Job(CPU)) as subject:
        total, _ = calculate_maximum_sizes(subject.target.model)
    return f"{int(total) * 4} ({int(total) * 4 / real - 1:+.1%})"


# The order of memory modes by time


def of_times(quick: bool) -> Section:
    """On each model, is the faster of two modes predicted to be the faster one?"""
    this = device_named("this")
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in this.flops.items())
    lines = [
        "## The order of memory modes by time",
        "",
        f"{this.title}: {rates}, {this.bandwidth / 1e9:.1f} GB/s, {1e6 * this.overhead:.1f} us per operator, "
        f"measured. Pairs that differ by less than {SURE:.0%} in real steps are not judged. Limit: {PAIRS:.0%} right.",
        "",
        "| model | memory | predicted, ms (range) | real, ms | off by | ratio to store, predicted | real |",
        "|---|---|---|---|---|---|---|",
    ]
    right = wrong = close = 0
    for name, make in list(MODELS.items())[: 2 if quick else None]:
        tell(name)
        predicted, real = times_of(make, this)
        for mode in MODES:
            seconds, taken = predicted[mode], real[mode]
            lines.append(
                f"| {name} | {mode} | {1000 * seconds.likely:.1f} ({1000 * seconds.best:.1f} to "
                f"{1000 * seconds.worst:.1f}) | {1000 * taken:.1f} | {seconds.likely / taken - 1:+.0%} | "
                f"{seconds.likely / predicted['store'].likely:.2f} | {taken / real['store']:.2f} |"
            )
        for a, b in itertools.combinations(MODES, 2):
            if abs(real[a] / real[b] - 1) < SURE:
                close += 1
            elif (predicted[a].likely < predicted[b].likely) == (real[a] < real[b]):
                right += 1
            else:
                wrong += 1
    share = right / max(1, right + wrong)
    lines += ["", f"Right: {right} of {right + wrong} pairs ({share:.0%}); {close} more were too close to judge."]
    return lines, [f"only {share:.0%} of the pairs of modes are in the right order"] * (share < PAIRS)


def times_of(make: Callable[[], Made], device: Device) -> tuple[dict[str, Any], dict[str, float]]:
    """Forward and backward, without the optimiser's step, which is the same in all modes."""
    with opened(make, Job(device)) as subject:
        rank = subject.rank()
        predicted = {mode: rank.step([mode] * len(rank.stacks)).operators for mode in MODES}
    model, batch, loss, _ = (*make(), None, None)[:4]

    def all_following(mode: str) -> Any:
        from contextlib import ExitStack

        around = ExitStack()
        for stack in stacks_of(model).values():
            around.enter_context(following(stack, mode))
        return around

    ways = {mode: partial(all_following, mode) for mode in MODES}
    return predicted, least_seconds(ways, partial(step_seconds, model, batch, loss))


if __name__ == "__main__":
    main()
