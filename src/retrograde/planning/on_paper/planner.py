"""Plans for a job on paper: each memory mode, and the fastest plan that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine.fake_internals import fake_copy
from retrograde.engine.torch_internals import VERSION, backends_of, tree_map
from retrograde.measure.loss import Loss
from retrograde.measure.stacks import stacks_of, the_stack
from retrograde.measure.targets import Target, as_target, load
from retrograde.measure.timing import Progress, silent
from retrograde.memory import Memory, Plan
from retrograde.planning._costs import ChainCost, predict
from retrograde.planning._search import cheapest
from retrograde.sequence import ReversibleSequence

from .chain import chain_on_paper
from .devices import Device, device_named
from .fake_session import fake_session, refusing_values
from .jobs import GivenOptimizer, Job
from .rank import Rank
from .report import JobPlan, Way, speed, throughput_unit

MODES = ("store", "checkpoint", "reverse", "selective")
_PLAN = "this budget's plan"
_ROUNDS = 3  # of the search: what the blocks alone do not tell is learned from the plan before
_NEAR = 0.02  # of the budget: a plan that leaves less than this unused is good enough

Source = str | Callable[..., Any] | tuple[nn.Module, Any, Loss | None]
"""What is planned: a target as on the command line, a factory, or a model and a batch."""


@dataclass(frozen=True)
class Subject:
    """What a session made of a source, for a job."""

    target: Target
    job: Job
    mesh: Any
    optimizer: GivenOptimizer | None

    def rank(self) -> Rank:
        return Rank(self.job, self.target, self.mesh, self.optimizer)


def plan_on(
    on: str | Device,
    model: nn.Module | Callable[..., Any] | str,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    loss: Loss | None = None,
    stack: str | None = None,
    progress: Progress = silent,
    ranks: int = 1,
    shard: str | None = None,
    **options: Any,
) -> JobPlan:
    """What `retrograde.planning.plan` does with `on`: its arguments, and those of a `Job`."""
    job = Job(device_named(on), ranks, shard or "none", **options)
    source: Source = (model, batch, loss) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) and (batch is not None or loss is not None):
        raise TypeError("plan: a factory returns its batch and its loss itself; give them with a model only.")
    return plan_job(source, job, job.device.limit(budget), stack=stack, progress=progress)


def plan_job(
    source: Source, job: Job, budget: int, *, stack: str | None = None, progress: Progress = silent
) -> JobPlan:
    """The costs of each memory mode for a rank of the job, and of the fastest plan that fits the budget."""
    with opened(source, job) as subject:
        model = subject.target.model
        stacks = stacks_of(model)
        chosen = the_stack(model, stack) if stack is not None or len(stacks) == 1 else None
        chain = None if chosen is None else _chain(subject, chosen, progress)
        rank = subject.rank()
        ways = _uniform(rank, chosen, chain, budget, progress)
        if chosen is not None and chain is not None:
            ways += _planned(rank, chosen, chain, budget, ways, progress)
        return JobPlan(
            job,
            budget,
            tuple(ways),
            blocks=sum(len(each.blocks) for each in rank.stacks),
            unit=throughput_unit(subject.target.batch, job),
            compiled=any(backends_of(part) for part in model.modules()),
            unplanned=() if chosen is not None else tuple(stacks),
        )


@contextmanager
def opened(source: Source, job: Job, **sizes: int) -> Iterator[Subject]:
    """A session in which the source has been made, without values."""
    if VERSION < (2, 13):
        raise ValueError(
            f"A plan for another machine (on=, --on) needs torch 2.13 or later, and this is {torch.__version__}: older "
            "versions cannot run attention and collectives on tensors without values. Update torch, or plan on this "
            "machine by measuring."
        )
    with fake_session(*job.mesh) as session:
        extra = {"mesh": session.mesh} if job.shard == "tensor" else job.factory_arguments
        with refusing_values("Making the model"):
            target = _target(source, session.mode, {**sizes, **extra})
        optimizer = None if target.optimizer is None else GivenOptimizer.of(target.optimizer, target.model)
        target = replace(target, batch=tree_map(_from_meta, target.batch))
        if job.shard != "tensor":
            target.model.to_empty(device="cpu")  # views of a copied parameter without values do not share its storage
        yield Subject(target, job, session.mesh, optimizer)


def _target(source: Source, mode: Any, arguments: dict[str, Any]) -> Target:
    if isinstance(source, str):
        return load(source, **arguments)
    if isinstance(source, tuple):
        return as_target("the model", (*(fake_copy(mode, part) for part in source[:2]), source[2]))
    return as_target(getattr(source, "__name__", "the factory"), source(**arguments))


def _from_meta(value: Any) -> Any:
    """A tensor of a batch that was made on "meta", where the model is."""
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) and value.is_meta else value


def _uniform(
    rank: Rank, chosen: ReversibleSequence | None, chain: ChainCost | None, budget: int, progress: Progress
) -> list[Way]:
    """The cost of each mode for all blocks, or for those of the chosen stack.

    A mode in which the blocks cost what they cost in another is not run.
    """
    ways: dict[str, Way] = {}
    for i, mode in enumerate(MODES):
        progress(mode, i, len(MODES) + _ROUNDS)
        same = next((other for other in ways if chain is not None and _same_costs(chain, mode, other)), None)
        way = _way(rank, mode, chosen, mode, budget) if same is None else ways[same]
        ways[mode] = replace(way, name=mode)
    return list(ways.values())


def _same_costs(chain: ChainCost, mode: str, other: str) -> bool:
    return all(block.measured_as(mode) == block.measured_as(other) for block in chain.blocks)


def _chain(subject: Subject, stack: ReversibleSequence, progress: Progress) -> ChainCost:
    target = subject.target
    with refusing_values("The training step"), subject.job.autocast():
        return chain_on_paper(target.model, target.batch, target.loss, stack, subject.job, progress)


def _way(rank: Rank, name: str, chosen: ReversibleSequence | None, memory: Memory, budget: int) -> Way:
    """The cost of a memory of the chosen stack, of which others keep their own; or of all stacks."""
    cost = rank.step([memory if chosen in (None, stack) else stack.memory for stack in rank.stacks])
    return Way(name, memory if isinstance(memory, Plan) else None, cost, cost.memory.peak <= budget)


def _planned(
    rank: Rank, chosen: ReversibleSequence, chain: ChainCost, budget: int, ways: list[Way], progress: Progress
) -> list[Way]:
    """The fastest plan that fits, if a mixture of modes is faster than each mode that fits.

    The chain knows the blocks. What it does not know, such as parameters, gathered ones and the optimiser's state, is
    the difference between a plan's simulated peak and the chain's: learned from reversing all blocks, then from plans.
    """
    reverse = next(way.cost for way in ways if way.name == "reverse")
    other = reverse.step_peak - predict(chain, chain.uniform().get("reverse", chain.uniform()["checkpoint"])).peak
    best: Way | None = None
    for i in range(_ROUNDS):
        progress(_PLAN, len(MODES) + i, len(MODES) + _ROUNDS)
        memory = cheapest(chain, budget - other) if budget > other else None
        if memory is None:
            break
        way = _way(rank, _PLAN, chosen, Plan(memory, chain.anchors), budget)
        if way.fits and (best is None or speed(way) < speed(best)):
            best = way
        difference = way.cost.step_peak - predict(chain, memory).peak
        if difference == other or (way.fits and way.cost.step_peak > (1 - _NEAR) * budget):
            break
        other = difference
    fitting = [way for way in (*ways, best) if way is not None and way.fits]
    if not fitting:
        return []
    fastest = min(fitting, key=speed)
    plan = fastest.plan or Plan.uniform(fastest.name, list(chosen))
    return [Way(_PLAN, plan, fastest.cost, fits=True)]
