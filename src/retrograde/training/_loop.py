"""The training loop.

NOTE [Why a run that was killed ends with the same bits]
The batch of a step, what dropout draws in it and its learning rate are functions of the seed and the step's number.
So the model and the optimiser's state are all that a step takes over from the one before, and both are in a checkpoint
as they were, to the bit. On a CPU with the same number of threads the rest of the run is then the same.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._step import StepError
from retrograde.models import ReversibleLM

from ._checkpoints import Checkpoint, CheckpointError, CheckpointFolder, locked
from ._config import Config, ConfigError, changes, config_of
from ._data import Corpus, Vocabulary, mixed, read_corpus
from ._log import Event, Log
from ._place import Loss, Place, joined, put_state, shared, unsynchronised, whole_state


class TrainingError(Exception):
    """A run that cannot go on; the message says why, and what to do."""


@dataclass(frozen=True)
class Options:
    """How a run starts and stops, besides its configuration.

    Args:
        tell: called with each event that is logged, in the first process.
        start: the checkpoint to go on from; the last one unless it is given.
        accept_changes: go on although the configuration computes something else than the checkpoint's did.
        stop: asked after each step; the run saves and ends when it says True (with one process alone).
    """

    tell: Callable[[Event], None] = lambda event: None
    start: Path | None = None
    accept_changes: bool = False
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Result:
    """How a run ended: the step it reached, that it had begun from, and its last checkpoint."""

    step: int
    began: int
    checkpoint: Path


def train(config: Config, options: Options | None = None) -> Result:
    """Train as the configuration says, from the last checkpoint in its folder if there is one."""
    options = options or Options()
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    with joined(config.training.device) as place:
        parts = config.training.accumulate * place.count
        if config.training.batch % parts:
            raise ConfigError(
                f"training.batch = {config.training.batch} cannot be shared by {place.count} processes that accumulate "
                f"{config.training.accumulate} parts each; give a multiple of {parts}."
            )
        corpus = read_corpus(config.data)
        folder = Path(config.output.folder)
        if not place.leads:
            return _Run(config, options, place, corpus).train()
        try:
            with locked(folder):
                return _Run(config, options, place, corpus).train()
        except OSError as error:
            raise TrainingError(
                f"{error.filename or folder}: {error.strerror or error}. Finished checkpoints are as they were."
            ) from error


def build_model(config: Config, vocabulary: Vocabulary) -> ReversibleLM:
    """The model of a configuration, with fresh weights from its seed."""
    torch.manual_seed(config.training.seed)
    m = config.model
    options: dict[str, Any] = {"hidden": m.hidden, "dropout": m.dropout, "memory": m.memory, "exact": m.exact}
    with _in_words("Making the model"):
        model = ReversibleLM(vocabulary.size, m.width, m.depth, m.heads, m.kv_heads, **options)
    nn.init.normal_(model.embed.weight, std=m.width**-0.5)  # not to be drowned by the updates of a deep stack
    return model


def load_model(path: Path | str) -> tuple[ReversibleLM, Vocabulary]:
    """The model of a checkpoint, or of the last one in a run's folder, in evaluation mode; and its vocabulary.

    Nothing in a checkpoint is run as code.
    """
    folder = Path(path)
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=1)
    if found := checkpoints.found():
        folder = found[-1]
    else:
        checkpoints = CheckpointFolder(folder.parent, keep=1)
    checkpoint = checkpoints.load(folder)
    vocabulary = Vocabulary.from_dict(checkpoint.details["vocabulary"])
    model = build_model(config_of(checkpoint.details["config"], where=str(folder)), vocabulary)
    model.load_state_dict(checkpoint.model)
    return model.eval(), vocabulary


class _Run:
    def __init__(self, config: Config, options: Options, place: Place, corpus: Corpus) -> None:
        self.config, self.options, self.place, self.corpus = config, options, place, corpus
        self.folder = Path(config.output.folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.output.keep)
        loss = Loss(build_model(config, corpus.vocabulary)).to(place.device)
        if config.training.compile:
            loss.compile()
        self.module = shared(loss, place, config.training.parallel)
        self.optimizer = _optimizer(self.module, config)

    def train(self) -> Result:
        began = self._resume()
        log = Log(self.folder, began) if self.place.leads else None
        try:
            done = self._steps(began, log)
        finally:
            if log is not None:
                log.close()
        return Result(done, began, self.checkpoints.path(done))

    def _steps(self, began: int, log: Log | None) -> int:
        output, evaluation, last = self.config.output, self.config.evaluation, self.config.training.steps
        if began < last:
            self._report(log, self._started(began))
        meter = _Meter(self.config, self.place)
        for step in range(began + 1, last + 1):
            with _in_words(f"Step {step}"):
                loss, norm = self._step(step)
            stopping = self.place.count == 1 and self.options.stop()
            ends = step == last or stopping
            saves = ends or step % output.save_every == 0
            if saves or step % output.log_every == 0 or step == began + 1:
                mean = self._checked(loss, norm, step)
                self._report(log, meter.event(step, mean, norm, _rate(self.config, step)))
            if len(self.corpus.unseen) and evaluation.every and (step % evaluation.every == 0 or step == last):
                with _in_words(f"The evaluation after step {step}"):
                    unseen = self._evaluated()
                self._report(log, {"event": "evaluation", "step": step, "loss": unseen})
            if saves:
                path = self._save(step)
                self._report(log, {"event": "checkpoint", "step": step, "path": str(path)})
            if ends:
                return step
        return began

    def _started(self, began: int) -> Event:
        return {
            "event": "start", "step": began, "steps": self.config.training.steps, "processes": self.place.count,
            "device": str(self.place.device), "torch": torch.__version__, "threads": torch.get_num_threads(),
        }  # fmt: skip

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        """One update; its loss and the norm of its gradients before they were clipped."""
        training = self.config.training
        for group in self.optimizer.param_groups:
            group["lr"] = _rate(self.config, step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.place.device)
        batch = self.corpus.batch(training.seed, step, training.batch)
        for i, part in enumerate(batch.chunk(training.accumulate)):
            torch.manual_seed(mixed(training.seed, "dropout", step, i, self.place.rank))
            with unsynchronised(self.module, when=i < training.accumulate - 1):
                loss = self._loss(self.place.share(part)) / training.accumulate
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), training.clip or math.inf)
        self.optimizer.step()
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _loss(self, tokens: Tensor) -> Tensor:
        low = self.config.training.precision == "bf16"
        with torch.autocast(self.place.device.type, torch.bfloat16, enabled=low):
            loss: Tensor = self.module(tokens)
        return loss

    @torch.no_grad()
    def _evaluated(self) -> float:
        """The mean loss on unseen text."""
        self.module.eval()
        training = self.config.training
        batches = [self.corpus.unseen_batch(i, training.batch) for i in range(self.config.evaluation.batches)]
        parts = [part for batch in batches for part in batch.chunk(training.accumulate)]
        losses = [self._loss(self.place.share(part)) for part in parts]
        self.module.train()
        return self.place.mean(torch.stack(losses).mean())

    def _checked(self, loss: Tensor, norm: Tensor, step: int) -> float:
        mean = self.place.mean(loss)
        if not math.isfinite(mean) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"At step {step} the loss is {mean:g} and the norm of the gradients {float(norm):g}. Finished "
                "checkpoints are as they were. A smaller training.learning_rate, a longer training.warmup or a smaller "
                "training.clip may help; start again in another output.folder, or from an earlier checkpoint (--from)."
            )
        return mean

    def _report(self, log: Log | None, event: Event) -> None:
        if log is not None:
            log.write(event)
            self.options.tell(event)

    def _save(self, step: int) -> Path:
        model, optimizer = whole_state(self.module, self.optimizer)
        failure: CheckpointError | TrainingError | None = None
        if self.place.leads:
            details = {
                "config": self.config.to_dict(),
                "data": self.corpus.fingerprint,
                "vocabulary": self.corpus.vocabulary.to_dict(),
                "torch": torch.__version__,
            }
            try:
                _check_finite(model, step)
                self.checkpoints.save(Checkpoint(step, model, optimizer, details))
            except (CheckpointError, TrainingError) as error:
                failure = error
        if self.place.told(int(failure is not None)):
            raise failure or CheckpointError("The first process could not write the checkpoint.")
        return self.checkpoints.path(step)

    def _resume(self) -> int:
        """Load the checkpoint to go on from, and return the number of steps done. The first process alone reads it."""
        found: Checkpoint | None = None
        failure: Exception | None = None
        if self.place.leads:
            try:
                found = self._found()
            except (CheckpointError, ConfigError) as error:
                failure = error
        if self.place.told(int(failure is not None)):
            raise failure or CheckpointError("The first process could not read the checkpoint.")
        step = self.place.told(found.step if found else 0)
        if step:
            put_state(
                self.module, self.optimizer, found.model if found else {}, found.optimizer if found else {}, self.place
            )
        return step

    def _found(self) -> Checkpoint | None:
        paths = self.checkpoints.found()
        start = self.options.start or (paths[-1] if paths else None)
        if start is None:
            self.checkpoints.tidy()
            return None
        found = self.checkpoints.load(start)
        _check_same(found, start, self.config, self.corpus, accept=self.options.accept_changes)
        self.checkpoints.tidy()
        return found


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn what a step may run into, through no fault of ours, into a sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        on_cpu = "DefaultCPUAllocator" in reason or isinstance(error, MemoryError)  # a plain RuntimeError, there
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise TrainingError(
            f"{what} ran out of memory: {reason} A larger training.accumulate, a smaller training.batch, a smaller "
            'model or model.memory = "reverse" takes less. Finished checkpoints are as they were.'
        ) from error
    except StepError as error:
        bits = "" if error.bits is None else f" In the configuration, model.exact = {error.bits} sets the grid's bits."
        raise TrainingError(f"{what}: {error}{bits} Finished checkpoints are as they were.") from error


def _check_finite(model: dict[str, Tensor], step: int) -> None:
    """A loss is of the weights before a step's update; a checkpoint has those after it."""
    odd = [name for name, tensor in model.items() if not bool(tensor.isfinite().all())]
    if odd:
        raise TrainingError(
            f"The update of step {step} made NaN or infinity of {odd[0]} and {len(odd) - 1} more weights. They are "
            "not saved. Finished checkpoints are as they were. A smaller training.learning_rate may help."
        )


def _check_same(found: Checkpoint, path: Path, config: Config, corpus: Corpus, *, accept: bool) -> None:
    different = changes(found.details["config"], config)
    if found.details["data"] != corpus.fingerprint:
        different.append("data.path: the text or the tokens are others than those that were trained on")
    fixed = [change for change in different if change.startswith("model.") and "dropout" not in change]
    if corpus.vocabulary.to_dict() != found.details["vocabulary"]:
        fixed.append("data.path: the text has other characters")
    if fixed or (different and not accept):
        listed = "".join(f"\n  {change}" for change in dict.fromkeys([*different, *fixed]))
        way = "" if fixed else ", or add --accept-changes to go on with the new one"
        raise ConfigError(
            f"{path} was trained with another configuration:{listed}\nGive the old one again, set another "
            f"output.folder to start afresh{way}. Nothing was changed."
        )


def _optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that decays matrices alone, not biases and norms."""
    t = config.training
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": t.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=t.learning_rate, betas=t.betas)


def _rate(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    t = config.training
    if step <= t.warmup:
        return t.learning_rate * step / t.warmup
    if t.schedule == "constant":
        return t.learning_rate
    share = (step - t.warmup) / max(1, t.steps - t.warmup)
    fallen = share if t.schedule == "linear" else (1 - math.cos(math.pi * share)) / 2
    return t.learning_rate * (1 - (1 - t.final_rate) * fallen)


class _Meter:
    """The speed and the memory of a run, for its log."""

    def __init__(self, config: Config, place: Place) -> None:
        self.tokens = config.training.batch * config.data.length
        self.place, self.began, self.last = place, time.perf_counter(), 0

    def event(self, step: int, loss: float, norm: Tensor, rate: float) -> Event:
        now = time.perf_counter()
        steps = step - self.last if self.last else 1
        speed = steps * self.tokens / (now - self.began)
        self.began, self.last = now, step
        return {
            "event": "step", "step": step, "loss": loss, "learning_rate": rate, "gradient_norm": float(norm),
            "tokens_per_second": speed, "peak_memory": _peak(self.place.device),
        }  # fmt: skip


def _peak(device: torch.device) -> int:
    """The most bytes so far: of tensors on an accelerator, of the whole process on a CPU (0 where that is unknown)."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
