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

WARM_UP = 1  # beside the run in which its results were compared


def seconds(setting: Setting, field: Field, progress: Progress) -> dict[str, list[float]]:
    """For each contender the seconds of each round. Their order is shuffled: neighbours differ from round to round."""
    torch.set_num_threads(setting.threads)
    order, shuffle = list(field.runs), random.Random(0).shuffle
    found: dict[str, list[float]] = {name: [] for name in order}
    gc.disable()  # a collection would be charged to whom it happens to fall to
    try:
        for round_ in range(setting.rounds + WARM_UP):
            shuffle(order)
            for name in order:
                took = one_step(field.runs[name], field.network)
                if round_ >= WARM_UP:
                    found[name].append(took)
            progress.step(f"{setting.name}: round {round_ + 1} of {setting.rounds + WARM_UP}")
    finally:
        gc.enable()
        torch.set_num_threads(1)
    return found


def one_step(run: Run, network: Network) -> float:
    """The seconds of one forward and backward, from no gradients."""
    for leaf in network.leaves:
        leaf.grad = None
    gc.collect()
    start = time.perf_counter()
    run(network.x).sum().backward()
    return time.perf_counter() - start
