"""What is predicted for a job, as a table, as JSON and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from retrograde.measure.batches import arguments, tensors_in
from retrograde.measure.formatting import align, format_bytes
from retrograde.measure.pictures import new_figure, unit_of
from retrograde.memory import Plan

from .jobs import Job
from .rank import StepCost

_PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "temporaries")
_LABELS = ("parameters", "gradients", "optimiser", "activations", "exchanged", "temporaries")
_COLOURS = ("#4c566a", "#d9899c", "#9f7aa5", "#5ab4ac", "#a0aec0", "#d8c24a")  # none is that of a memory mode


@dataclass(frozen=True)
class Way:
    """One way to train: a memory mode, or a plan, with what it is predicted to cost a rank."""

    name: str
    plan: Plan | None
    cost: StepCost
    fits: bool


def speed(way: Way) -> tuple[float, float]:
    """By what ways are compared: the likely time, then the worst, where all wait for the exchange."""
    return way.cost.seconds.likely, way.cost.seconds.worst


@dataclass(frozen=True)
class Unit:
    """What a step's batch is counted in, and how much of it all ranks process in a step together."""

    name: str
    count: int


def throughput_unit(batch: Any, job: Job) -> Unit:
    """Tokens, if the batch begins with rows of integers (labels come later); otherwise samples."""
    first = next((t for t in tensors_in(arguments(batch)) if t.dim()), None)
    many = job.data_ranks * (job.batches if job.shard == "pipeline" else 1)
    if first is not None and first.dim() > 1 and first.dtype in (torch.int64, torch.int32):
        return Unit("tokens", first.numel() * many)
    return Unit("samples", many if first is None else first.shape[0] * many)


@dataclass(frozen=True)
class JobPlan:
    """What each memory mode is predicted to cost one rank of a job, and the fastest plan that fits.

    Attributes:
        job: the device, the ranks and how they share the model.
        budget: bytes of a rank.
        ways: the memory modes, then this budget's plan.
        blocks: how many blocks the model's stacks have.
        unit: what the throughput is counted in.
        compiled: whether the model is compiled. The figures are those of the same model uncompiled.
        unplanned: the names of the model's stacks, if there are several and none was chosen: there is no plan then.
    """

    job: Job
    budget: int
    ways: tuple[Way, ...]
    blocks: int
    unit: Unit
    compiled: bool = False
    unplanned: tuple[str, ...] = ()

    @property
    def best(self) -> Way | None:
        """The fastest way that fits, or None."""
        fitting = [way for way in self.ways if way.fits]
        return min(fitting, key=speed, default=None)

    @property
    def plan(self) -> Plan | None:
        """The plan of the fastest way that fits, to be given to the stack as its `memory`."""
        return next((way.plan for way in reversed(self.ways) if way.fits and way.plan is not None), None)

    @property
    def minimum(self) -> int:
        """The least peak of all ways."""
        return min(way.cost.memory.peak for way in self.ways)

    @property
    def unlisted(self) -> list[str]:
        """The dtypes of matrix products for which the device lists no FLOP/s."""
        return sorted({dtype for way in self.ways for dtype in way.cost.unlisted})

    def __getitem__(self, name: str) -> Way:
        return next(way for way in self.ways if way.name == name)

    def __str__(self) -> str:
        return "\n".join([self._title(), "", *self._bytes(), "", *self._times(), "", *self._notes()])

    def _title(self) -> str:
        job = self.job
        ranks = f"{job.ranks} x {job.device.title or job.device.name}"
        shared = "" if job.shard == "none" else f", {job.shard}"
        if job.shard == "pipeline":
            shared += f", stage {job.stage} with {job.in_flight} micro-batches at once"
        return f"Predicted for {ranks}{shared}, {format_bytes(self.budget)} each. Bytes of one rank at its peak:"

    def _bytes(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("", *_LABELS, "peak", "")]
        for way in self.ways:
            memory = way.cost.memory
            sizes = [format_bytes(getattr(memory, part)) for part in _PARTS]
            rows.append((way.name, *sizes, format_bytes(memory.peak), "fits" if way.fits else "too large"))
        return align(rows, left=(0, 8))

    def _times(self) -> list[str]:
        rows = [("", "time of a step (range)", f"{self.unit.name}/s (range)", "all-gathers", "per block", "exchanged")]
        for way in self.ways:
            seconds, traffic = way.cost.seconds, way.cost.traffic
            rates = [_rate(self.unit.count / value) for value in (seconds.likely, seconds.worst, seconds.best)]
            per_block = f"{traffic.all_gathers / self.blocks:.1f}" if traffic.all_gathers else ""
            rows.append(
                (
                    way.name,
                    str(seconds),
                    f"{rates[0]} ({rates[1]} to {rates[2]})",
                    str(traffic.all_gathers or ""),
                    per_block,
                    format_bytes(traffic.bytes) if traffic.bytes else "",
                )
            )
        return align(rows)

    def _notes(self) -> list[str]:
        notes = [
            "Times are from a roofline, not measured: the range is what devices attain of their peaks, and whether "
            "exchange hides behind arithmetic."
        ]
        if self.compiled:
            notes.append(
                "The model is compiled, and these figures are those of the same model uncompiled: what a compiler "
                "fuses and saves depends on the device. `retrograde plan` without --on, where the device is, measures "
                "compiled steps."
            )
        if self.unlisted:
            notes.append(
                f"{self.job.device.name} lists no FLOP/s for {', '.join(self.unlisted)}: those of float32, or the "
                "least it has, are taken, which may be far too many. Describe the device in a JSON file to give them."
            )
        if self.unplanned:
            names = ", ".join(map(repr, self.unplanned))
            notes.append(
                f"The model has {len(self.unplanned)} stacks ({names}), each in the same mode here. Mixtures are "
                "planned for one stack at a time, which you choose with stack=name (--stack name)."
            )
        best = self.best
        if best is None:
            return [*notes, f"Nothing fits {format_bytes(self.budget)}: the least is {format_bytes(self.minimum)}."]
        plan = f": {self.plan}" if self.plan is not None else ""
        return [*notes, f"The fastest that fits is {best.name}{plan}"]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        best = self.best
        ways = [
            {
                "name": way.name,
                "fits": way.fits,
                "plan": None if way.plan is None else way.plan.to_dict(),
                **asdict(way.cost.memory),
                "peak": way.cost.memory.peak,
                "seconds": way.cost.seconds._asdict(),
                f"{self.unit.name}_per_second": self.unit.count / way.cost.seconds.likely,
                "flops": way.cost.flops,
                "traffic": {**asdict(way.cost.traffic), "seconds": way.cost.traffic.seconds._asdict()},
            }
            for way in self.ways
        ]
        job = {key: value for key, value in asdict(self.job).items() if key != "device"}
        return {
            "predicted": True,
            "device": self.job.device.name,
            **job,
            "budget": self.budget,
            "blocks": self.blocks,
            "compiled": self.compiled,
            "unlisted": self.unlisted,
            "best": None if best is None else best.name,
            **({} if self.plan is None else self.plan.to_dict()),
            "ways": ways,
        }

    def plot(self, path: str | Path) -> Path:
        """Each way's bytes as a bar of parts, with its time beside it and the budget as a line. Needs matplotlib."""
        path = Path(path)
        figure = new_figure(9, 1.6 + 0.55 * len(self.ways))
        axes = figure.subplots()
        unit, size = unit_of(max(way.cost.memory.peak for way in self.ways))
        for row, way in enumerate(self.ways):
            start = 0.0
            for part, label, colour in zip(_PARTS, _LABELS, _COLOURS, strict=True):
                width = getattr(way.cost.memory, part) / size
                axes.barh(row, width, left=start, color=colour, label=label if row == 0 else None)
                start += width
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            place: dict[str, Any] = {"xy": (start, row), "xytext": (8, 0), "textcoords": "offset points"}
            axes.annotate(str(way.cost.seconds), **place, va="center", fontsize=8, bbox=behind)
        axes.axvline(self.budget / size, color="#c53030", linestyle="--", label="budget")
        axes.set_yticks(range(len(self.ways)), [way.name for way in self.ways])
        axes.invert_yaxis()
        axes.margins(x=0.4)
        axes.set(xlabel=f"bytes of one rank at its peak, {unit} (predicted)", title=self._title().partition(".")[0])
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, format=path.suffix[1:] or "png")
        return path


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
