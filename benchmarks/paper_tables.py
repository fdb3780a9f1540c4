"""The tables of docs/plan-on-paper.md: what well-known shapes are predicted to need, and which devices they fit.

    python benchmarks/paper_tables.py [--only NAME | none] [--cache FILE]

Every figure is predicted: nothing is allocated and nothing is timed. A shape's figures are kept in the cache, a JSON
file beside this script, so that one shape can be computed anew; the tables are written between the marks of the page,
and drawn beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.measure.formatting import format_bytes
from retrograde.measure.pictures import new_figure, style_of
from retrograde.measure.stacks import the_stack
from retrograde.measure.timing import silent
from retrograde.models import ReversibleLM, RevViT
from retrograde.planning._costs import predict
from retrograde.planning._search import cheapest
from retrograde.planning.on_paper.chain import chain_on_paper
from retrograde.planning.on_paper.devices import device_named
from retrograde.planning.on_paper.jobs import Job
from retrograde.planning.on_paper.planner import opened

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "plan-on-paper.md"
PICTURE = PAGE.parent / "drawings" / "plan-on-paper.png"
DEVICES = ("rtx-4090-24gb", "l40s-48gb", "h100-80gb", "mi300x-192gb")
MODES = ("store", "checkpoint", "reverse")
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


class Loss(nn.Module):
    """A language model whose forward is its loss, so that the logits of all tokens are never there at once."""

    def __init__(self, model: ReversibleLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def language_model(depth: int, width: int, heads: int, hidden: int, tokens: tuple[int, int]) -> Callable[[], Any]:
    def make() -> Any:
        model = ReversibleLM(128256, width, depth, heads, 8, hidden=hidden)
        return Loss(model), torch.randint(128256, tokens), lambda loss: loss

    return make


def vision_transformer() -> Any:
    return RevViT(1000, 224, 14, width=1408, depth=40, heads=16), torch.randn(256, 3, 224, 224)


def video_model() -> Any:
    """32 frames of 224 x 224 as tubes of 2 x 14 x 14: 4,096 tokens, here as one long image of patches."""
    return RevViT(400, 896, 14, width=1024, depth=24, heads=16), torch.randn(16, 3, 896, 896)


@dataclass(frozen=True)
class Shape:
    """A shape that people know: how to make it, and how many ranks train it, sharded how."""

    name: str
    title: str
    make: Callable[[], Any]
    ranks: int
    shard: str

    def job(self) -> Job:
        return Job(device_named("h100-80gb"), self.ranks, self.shard, precision="bf16")


SHAPES = {
    "8b": Shape(
        "language model, 8B,\n8 devices",
        "Language model, 8 billion parameters: 32 blocks of width 4,096; 4 sequences of 8,192 tokens per rank",
        language_model(32, 4096, 32, 21504, (4, 8192)), 8, "fsdp2",
    ),
    "long": Shape(
        "8B, long context,\n8 devices",
        "The same with a long context: 1 sequence of 131,072 tokens per rank",
        language_model(32, 4096, 32, 21504, (1, 131072)), 8, "fsdp2",
    ),
    "70b": Shape(
        "language model, 70B,\n64 devices",
        "Language model, 70 billion parameters: 80 blocks of width 8,192; 1 sequence of 8,192 tokens per rank",
        language_model(80, 8192, 64, 43008, (1, 8192)), 64, "fsdp2",
    ),
    "vit": Shape(
        "ViT, 1B,\none device",
        "Vision transformer, 1 billion parameters: 40 blocks of width 1,408; 256 images of 224 x 224, one device",
        vision_transformer, 1, "none",
    ),
    "video": Shape(
        "video model,\none device",
        "Video model: 24 blocks of width 1,024; 16 clips of 4,096 tokens, one device", video_model, 1, "none",
    ),
}  # fmt: skip


def figures(shape: Shape) -> dict[str, Any]:
    """The peak of a rank and the ratio of times in each mode, and of the fastest plan on each device."""
    job = shape.job()
    with opened(shape.make, job) as subject:
        target = subject.target
        stack = the_stack(target.model)
        parameters = sum(p.numel() for p in target.model.parameters())
        dtype = job.autocast_dtype
        assert dtype is not None
        with torch.autocast("cpu", dtype):
            chain = chain_on_paper(target.model, target.batch, target.loss, stack, job, silent)
        rank = subject.rank()
        costs = {mode: rank.step([mode]) for mode in MODES}
    stored = costs["store"].compute.likely
    modes = {m: {"peak": c.memory.peak, "ratio": c.compute.likely / stored} for m, c in costs.items()}
    uniform = chain.uniform()
    chain = chain.with_steps({mode: cost.operators.likely for mode, cost in costs.items()})
    step = stored - costs["store"].operators.likely
    plans: dict[str, Any] = {}
    for name in DEVICES:
        budget = device_named(name).memory
        other = max(costs[mode].step_peak - predict(chain, uniform[mode]).peak for mode in MODES)
        memory = cheapest(chain, budget - other) if budget > other else None
        if memory is not None and costs["reverse"].memory.peak <= budget:
            peak, seconds = predict(chain, memory)
            plans[name] = {"peak": peak + other, "ratio": (seconds + step) / stored}
    gathers = {mode: cost.traffic.all_gathers for mode, cost in costs.items()}
    return {"parameters": parameters, "modes": modes, "plans": plans, "all_gathers": gathers, "blocks": len(stack)}


def table(shape: Shape, data: dict[str, Any]) -> list[str]:
    ranks = "one device" if shape.ranks == 1 else f"{shape.ranks} devices, {shape.shard}"
    gathers = data["all_gathers"]
    note = (
        f" All-gathers per step: {', '.join(f'{n} ({mode})' for mode, n in gathers.items())}."
        if gathers["store"]
        else ""
    )
    lines = [
        f"### {shape.title}",
        "",
        f"{data['parameters'] / 1e9:.1f} billion parameters, AdamW, autocast to bfloat16, {ranks}; peak per rank, and "
        f"time as a ratio to storing everything. Predicted.{note}",
        "",
        f"| | peak | time | {' | '.join(name.rpartition('-')[2].replace('gb', ' GB') for name in DEVICES)} |",
        f"|---|---|---|{'---|' * len(DEVICES)}",
    ]
    for mode, figure in data["modes"].items():
        fits = ["fits" if figure["peak"] <= device_named(name).memory else "–" for name in DEVICES]
        lines.append(f"| {mode} | {format_bytes(figure['peak'])} | x{figure['ratio']:.2f} | {' | '.join(fits)} |")
    cells = [_fastest(name, data) for name in DEVICES]
    return [*lines, f"| plan | up to the device's | | {' | '.join(cells)} |", ""]


def _fastest(device: str, data: dict[str, Any]) -> str:
    """The ratio of the fastest plan on a device; one mode for all blocks is a plan too."""
    memory = device_named(device).memory
    ratios = [figure["ratio"] for figure in data["modes"].values() if figure["peak"] <= memory]
    if device in data["plans"]:
        ratios.append(data["plans"][device]["ratio"])
    return f"x{min(ratios):.2f}" if ratios else "–"


def draw(data: dict[str, Any]) -> None:
    """The peak of each shape in each mode, and the memory of each device as a line."""
    shapes = [(name, shape) for name, shape in SHAPES.items() if name in data]
    figure = new_figure(9, 1.2 + 0.95 * len(shapes))
    axes = figure.subplots()
    for row, (name, _) in enumerate(shapes):
        for offset, mode in enumerate(MODES):
            peak, ratio = data[name]["modes"][mode]["peak"] / 1e9, data[name]["modes"][mode]["ratio"]
            y = row + 0.27 * (offset - 1)
            colour, marker = style_of(mode)
            axes.plot(peak, y, marker, color=colour, ms=8, label=mode if row == 0 else None)
            axes.text(1.1 * peak, y, f"{peak:.3g} GB, x{ratio:.2f}", va="center", fontsize=8, bbox=BEHIND)
    for device in DEVICES:
        memory = device_named(device).memory / 1e9
        axes.axvline(memory, color="#2d3748", linestyle=":", linewidth=1)
        axes.text(memory, -0.62, f"{memory:.0f} GB", ha="center", va="bottom", fontsize=8)
    peaks = [figure["peak"] / 1e9 for name, _ in shapes for figure in data[name]["modes"].values()]
    axes.set(xscale="log", xlim=(0.7 * min(peaks), 2.2 * max(peaks)))
    axes.set_xticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.set_yticks(range(len(shapes)), [shape.name for _, shape in shapes])
    axes.set_ylim(len(shapes) - 0.5, -0.6)
    axes.set_xlabel("predicted peak of one rank, GB (10^9 bytes), and time as a ratio to storing everything")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PICTURE, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SHAPES, "none"], help="compute this shape; the others are cached")
    parser.add_argument("--cache", type=Path, default=HERE / "results" / "paper-tables.json")
    chosen = parser.parse_args()
    known_figures = json.loads(chosen.cache.read_text()) if chosen.cache.exists() else {}
    for name in [] if chosen.only == "none" else [chosen.only] if chosen.only else SHAPES:
        print(f"computing {name}", file=sys.stderr, flush=True)
        known_figures[name] = figures(SHAPES[name])
        chosen.cache.write_text(json.dumps(known_figures, indent=2) + "\n", encoding="utf-8")
    lines = [
        line for name, shape in SHAPES.items() if name in known_figures for line in table(shape, known_figures[name])
    ]
    draw(known_figures)
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- tables -->\n).*(<!-- end of tables -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda m: f"{m[1]}\n" + "\n".join(lines) + f"\n{m[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
