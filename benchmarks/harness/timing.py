"""Time of forward + backward: rounds in which every contender runs once, so that what slows one slows all."""

from __future__ import annotations

import gc
import random
import time

import torch

from .contenders import Run
from .field import Field
from .machine import Progress
from .settings import Network, Setting

WARM_UP = 1  # after the run in which its results were compared


def seconds(setting: Setting, field: Field, progress: Progress) -> dict[str, list[float]]:
    """For each contender the seconds of each round. The order is shuffled in each round."""
    torch.set_num_threads(setting.threads)
    order, shuffle = list(field.runs), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in order}
    gc.disable()  # a collection would count as time of the contender that runs
    try:
        for round_ in range(setting.rounds + WARM_UP):
            shuffle(order)
            for name in order:
                took = one_step(field.runs[name], field.network)
                if round_ >= WARM_UP:
                    times[name].append(took)
            progress.step(f"{setting.name}: round {round_ + 1} of {setting.rounds + WARM_UP}")
    finally:
        gc.enable()
        torch.set_num_threads(1)
    return times


def one_step(run: Run, network: Network) -> float:
    """The seconds of one forward and backward pass, without gradients at the start."""
    for leaf in network.leaves:
        leaf.grad = None
    gc.collect()
    start = time.perf_counter()
    run(network.x).sum().backward()
    return time.perf_counter() - start
