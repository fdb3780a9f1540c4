"""One training run of a small model, from a description that can be sent to another process."""

from __future__ import annotations

import functools
import hashlib
import importlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report import Progress
from small_models import CharacterModel, ImageClassifier, MakeStack, ModernGPT, ModernViT, Residual, reversible

TaskName: TypeAlias = Literal["characters", "digits"]
TrainingMemory: TypeAlias = Literal["store", "checkpoint", "reverse"]
Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """What to train. `bits` are those of the streams' grid; `precision` is that of the branches.

    `parts` "modern" are transformers with RMSNorm, rotary positions and SwiGLU, "classic" a transformer with LayerNorm
    and GELU for characters and a convolutional network for digits.
    """

    task: TaskName
    seed: int
    steps: int
    width: int
    depth: int
    batch: int
    network: Literal["reversible", "residual"] = "reversible"
    memory: TrainingMemory = "store"
    bits: int | None = None
    precision: Literal["float32", "bf16 autocast"] = "float32"
    parts: Literal["classic", "modern"] = "classic"

    def __str__(self) -> str:
        grid = "" if self.bits is None else f", grid 2^-{self.bits}"
        return f"{self.network}, {self.memory}, {self.precision}{grid}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    """The loss of every step, that on unseen data, and a digest of all parameters and buffers at the end."""

    losses: list[float]
    unseen: float
    accuracy: float
    parameters: int
    digest: str


class Task(Protocol):
    """Data, and a model for it."""

    def model(self, run: Run, make_stack: MakeStack) -> nn.Module: ...
    def batch(self, size: int, generator: torch.Generator) -> Batch: ...
    def unseen(self) -> Iterator[Batch]: ...


class Characters:
    """The text that comes with every Python, as numbers. The last tenth of it is not trained on."""

    length = 64

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        self.characters = len(number)
        numbers = torch.tensor([number[character] for character in text])
        seen = len(numbers) * 9 // 10
        self._seen, self._unseen = numbers[:seen], numbers[seen:]

    def model(self, run: Run, make_stack: MakeStack) -> nn.Module:
        if run.parts == "modern":
            return ModernGPT(self.characters, run.width, run.depth, make_stack)
        return CharacterModel(self.characters, self.length, run.width, run.depth, make_stack)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        return self._pieces(self._seen, size, generator)

    def unseen(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        return (self._pieces(self._unseen, 64, generator) for _ in range(8))

    def _pieces(self, part: Tensor, count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(part) - self.length, (count, 1), generator=generator)
        pieces = part[starts + torch.arange(self.length + 1)]
        return pieces[:, :-1], pieces[:, 1:]


class Digits:
    """scikit-learn's 1,797 digits of 8×8 pixels, which come with the package. A third is not trained on."""

    def __init__(self) -> None:
        try:
            datasets = importlib.import_module("sklearn.datasets")  # it has no types
        except ModuleNotFoundError:
            raise SystemExit("The digits come with scikit-learn: pip install 'retrograde[examples]'") from None
        data = datasets.load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        seen = 2 * len(labels) // 3
        self._seen, self._unseen = ((images[part], labels[part]) for part in (order[:seen], order[seen:]))

    def model(self, run: Run, make_stack: MakeStack) -> nn.Module:
        if run.parts == "modern":
            return ModernViT(10, run.width, run.depth, make_stack)
        return ImageClassifier(10, run.width, run.depth, make_stack)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self._seen[1]), (size,), generator=generator)
        return self._seen[0][chosen], self._seen[1][chosen]

    def unseen(self) -> Iterator[Batch]:
        yield self._unseen


@functools.cache
def task_of(name: TaskName) -> Task:
    return Characters() if name == "characters" else Digits()


def build(run: Run) -> nn.Module:
    """The model before training; its weights depend only on the seed and the sizes."""
    torch.manual_seed(run.seed)
    if run.network == "residual":
        return task_of(run.task).model(run, functools.partial(Residual, memory=run.memory))
    dim = 1 if run.task == "digits" and run.parts == "classic" else -1
    make_stack = reversible(dim=dim, memory=run.memory, exact=run.bits is not None, grid_bits=run.bits)
    return task_of(run.task).model(run, make_stack)


def train(run: Run) -> Trained:
    """Train with AdamW and a one-cycle rate, and evaluate on unseen data at the end."""
    task, model = task_of(run.task), build(run)
    generator = torch.Generator().manual_seed(1000 + run.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=run.steps + 1)
    losses = []
    for _ in range(run.steps):
        inputs, answers = task.batch(run.batch, generator)
        with _precision(run):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    unseen, accuracy = _evaluate(run, model)
    return Trained(losses, unseen, accuracy, sum(p.numel() for p in model.parameters()), _digest(model))


def _precision(run: Run) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.precision == "bf16 autocast")


@torch.no_grad()
def _evaluate(run: Run, model: nn.Module) -> tuple[float, float]:
    """The mean loss and the share of right answers on unseen data."""
    model.eval()
    losses, right = [], []
    for inputs, answers in task_of(run.task).unseen():
        with _precision(run):
            logits = model(inputs)
        logits = logits.float().flatten(0, -2)
        losses.append(F.cross_entropy(logits, answers.flatten(), reduction="none"))
        right.append(logits.argmax(-1) == answers.flatten())
    # In float64: the mean of float32 losses near 2 does not show differences below 2e-7.
    return torch.cat(losses).double().mean().item(), torch.cat(right).double().mean().item()


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def over_seeds(run: Run, seeds: Sequence[int]) -> list[Run]:
    return [replace(run, seed=seed) for seed in seeds]


Job = TypeVar("Job")
Result = TypeVar("Result")


def run_all(function: Callable[[Job], Result], jobs: Sequence[Job], *, label: str, processes: int) -> list[Result]:
    """The results of all jobs in order, from so many processes of one thread each; with 1, from this process."""
    progress, results = Progress(label, len(jobs)), []
    if processes == 1:
        for job in jobs:
            results.append(function(job))
            progress.step(str(job))
        return results
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_prepare_process) as pool:
        for job, result in zip(jobs, pool.imap(function, jobs), strict=True):
            results.append(result)
            progress.step(str(job))
    return results


def _prepare_process() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
