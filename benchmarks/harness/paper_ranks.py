"""The peak of a rank, as predicted and in real processes."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from harness.allocated import counting_allocations, peaks_of_steps
from harness.paper_models import RANKED
from harness.paper_steps import CPU, MODES, Section, prepare, tell
from retrograde.measure.stacks import stacks_of
from retrograde.planning.on_paper.jobs import Job
from retrograde.planning.on_paper.planner import opened

OF_A_RANK = 0.05
STEPS_OF_A_RANK = 7
SCRIPT = Path(__file__).resolve().parents[1] / "paper_predictions.py"


def of_ranks(quick: bool) -> Section:
    lines = [
        "## The peak of a rank",
        "",
        "Real processes (gloo). Each counts its own allocations, whichever thread frees them, in "
        f"{STEPS_OF_A_RANK} training steps after two. gloo copies what it exchanges, and frees the copy on a thread of "
        "its own, sooner or later after the collective: so peaks differ from step to step. The median of all steps of "
        f"all ranks is held against the prediction; the least and the most are shown. Limit: {OF_A_RANK:.0%}.",
        "",
        "| model | ranks | shard | memory | predicted, bytes | allocated, bytes: median | least | most | off by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    past: list[str] = []
    settings = itertools.product(list(RANKED)[: 1 if quick else None], (2,) if quick else (2, 4), ("ddp", "fsdp2"))
    for name, ranks, shard in settings:
        tell(f"{name}, {ranks} ranks, {shard}")
        for mode, (predicted, peaks) in peaks_of_ranks(name, ranks, shard).items():
            median = statistics.median_low(peaks)
            off = predicted / median - 1
            lines.append(
                f"| {name} | {ranks} | {shard} | {mode} | {predicted} | {median} | {min(peaks)} | {max(peaks)} | "
                f"{off:+.2%} |"
            )
            past += [f"a rank of {name}, {ranks} x {shard}, {mode}, by {off:+.1%}"] * (abs(off) > OF_A_RANK)
    return lines, past


def peaks_of_ranks(name: str, ranks: int, shard: str) -> dict[str, tuple[int, list[int]]]:
    """For each mode, the peak that is predicted for a rank, and those of the steps of all real processes."""
    with opened(RANKED[name], Job(CPU, ranks, shard)) as subject:
        rank = subject.rank()
        predicted = {mode: rank.step([mode] * len(rank.stacks)).memory.peak for mode in MODES}
    real = in_processes({"model": name, "ranks": ranks, "shard": shard})
    return {mode: (predicted[mode], [peak for each in real for peak in each[mode]]) for mode in MODES}


def in_processes(task: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The peaks of each mode's steps, in each of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [{**task, "rank": rank, "folder": folder} for rank in range(task["ranks"])]
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--worker"]
        environment = {**counting_allocations(Path(folder)), "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, json.dumps(each)], env=environment) for each in tasks]
        try:
            codes = [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"A process of {task} failed.")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(task["ranks"])]


def work(task: dict[str, Any]) -> None:
    """One rank of a real job."""
    store = dist.FileStore(str(Path(task["folder"], "store")), task["ranks"])
    dist.init_process_group("gloo", store=store, rank=task["rank"], world_size=task["ranks"])
    peaks = {}
    for mode in MODES:
        prepared = partial(prepare, RANKED[task["model"]], mode, wrappers()[task["shard"]])
        peaks[mode] = peaks_of_steps(prepared, STEPS_OF_A_RANK)
        gc.collect()
        dist.barrier()
    Path(task["folder"], f"{task['rank']}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def wrappers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def fsdp2(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for stack in stacks_of(model).values():
            for block in stack.blocks:
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": fsdp2}
