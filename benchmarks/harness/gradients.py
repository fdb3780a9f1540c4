"""How far each contender's gradients are from float64 autograd, by precision and depth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from retrograde.engine.drift import relative_error

from .contenders import BASELINES, Contender, Run
from .field import clear, one_line, outcome
from .machine import Progress
from .settings import Network, Setting, Sweep

Precision = Literal["float32", "autocast", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "autocast", "bfloat16")
Errors = dict[str, dict[int, dict[str, float]]]  # by precision, depth, contender

MEANING = {
    "float32": "all in float32",
    "autocast": "streams and weights in float32, the forward pass under bfloat16 autocast",
    "bfloat16": "weights and streams in bfloat16",
}


def network_in(precision: Precision | Literal["float64"], setting: Setting) -> Network:
    """The same numbers in each precision: weights and input are rounded to bfloat16 first."""
    kind = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(precision, torch.float32)
    return setting.build().to(torch.bfloat16).to(kind)


@contextlib.contextmanager
def forward_in(precision: Precision) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        yield


def gradients(run: Run, network: Network, precision: Precision | Literal["float64"]) -> list[Tensor]:
    """The gradients of every leaf. Autocast is on for the forward pass only, as torch recommends."""

    def in_precision(x: Tensor) -> Tensor:
        with forward_in(precision) if precision != "float64" else contextlib.nullcontext():
            return run(x)

    return outcome(in_precision, network)[1:]


def errors(
    sweeps: Sequence[Sweep], contenders: Sequence[Contender], progress: Progress
) -> tuple[Errors, dict[str, str]]:
    """The relative error of all gradients as one vector; and who is absent, with the reason."""
    by_precision: Errors = {precision: {} for precision in PRECISIONS}
    absent: dict[str, str] = {}
    torch.set_num_threads(1)
    for setting in (sweep.at(depth) for sweep in sweeps for depth in sweep.depths):
        references = _references(setting, contenders)
        for precision in PRECISIONS:
            row = by_precision[precision].setdefault(setting.depth, {})
            network = network_in(precision, setting)
            for contender in contenders:
                try:
                    result = gradients(contender.build(network), network, precision)
                except Exception as error:
                    absent[f"{contender.name}, {precision}"] = one_line(error)
                    continue
                row[contender.name] = relative_error(result, references[contender.arithmetic])
                progress.step(f"gradients: {contender.name}, {precision}, depth {setting.depth}")
            clear(network)
    return by_precision, absent


def _references(setting: Setting, contenders: Sequence[Contender]) -> dict[str, list[Tensor]]:
    """Plain autograd in float64, for each arithmetic."""
    network = network_in("float64", setting)
    baselines = [c for c in contenders if c.name == BASELINES[c.arithmetic]]
    return {c.arithmetic: gradients(c.build(network), network, "float64") for c in baselines}
