"""The training loop.

NOTE [Why a run that was killed ends with the same bits]
The batch of a step, what dropout draws in it and its learning rate are functions of the seed and the step's number.
So the model and the optimiser's state are all that a step needs from the one before, and a checkpoint has both, to the
bit. On a CPU with the same number of threads the rest of the run is then the same.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from retrograde.measure import device_memory
from retrograde.models import ReversibleLM
from retrograde.network.step import StepError

from ._checkpoints import Checkpoint, CheckpointError, CheckpointFolder, check_tensors, locked
from ._config import Config, ConfigError, changes, config_of
from ._data import Corpus, Vocabulary, mixed, read_corpus
from ._log import Event, Log
from ._processes import Loss, Process, full_state, gradient_sync, join_processes, load_full_state, parallelised
from ._size import check_size
from ._trackers import trackers_of

_UNCHANGED = "Finished checkpoints are unchanged."


class TrainingError(Exception):
    """A run that cannot continue; the message says why, and what to do."""


@dataclass(frozen=True)
class Options:
    """How a run starts and stops, besides its configuration.

    Args:
        tell: called with each event that is logged, in the first process.
        start: the checkpoint to resume from; the last one by default.
        accept_changes: resume even though the configuration changed.
        stop: called after each step; the run saves and ends when it returns True (only if there is one process).
    """

    tell: Callable[[Event], None] = lambda event: None
    start: Path | None = None
    accept_changes: bool = False
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Result:
    """How a run ended: the step that it reached, the step that it began from, and its last checkpoint."""

    step: int
    began: int
    checkpoint: Path


def train(config: Config, options: Options | None = None) -> Result:
    """Train as the configuration says, from the last checkpoint in its folder if there is one."""
    options = options or Options()
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    with join_processes(config.training.device) as process:
        parts = config.training.accumulate * process.count
        if config.training.batch % parts:
            raise ConfigError(
                f"training.batch = {config.training.batch} cannot be shared by {process.count} processes that "
                f"accumulate {config.training.accumulate} parts each; give a multiple of {parts}."
            )
        corpus = read_corpus(config.data)
        folder = Path(config.output.folder)
        try:
            with locked(folder) if process.is_main else nullcontext():
                return _Run(config, options, process, corpus).train()
        except OSError as error:
            raise TrainingError(f"{error.filename or folder}: {error.strerror or error}. {_UNCHANGED}") from error


def build_model(config: Config, vocabulary: Vocabulary) -> ReversibleLM:
    """The model of a configuration, with fresh weights from its seed."""
    check_size(config, vocabulary.size)
    torch.manual_seed(config.training.seed)
    with _explained("Building the model"):
        model = ReversibleLM(vocabulary.size, **asdict(config.model))
    # Large enough compared with the updates of a deep stack.
    nn.init.normal_(model.embed.weight, std=config.model.width**-0.5)
    return model


def load_model(path: Path | str) -> tuple[ReversibleLM, Vocabulary]:
    """The model of a checkpoint, or of the last one in a run's folder, in evaluation mode; and its vocabulary.

    Nothing in a checkpoint is run as code.
    """
    finished = CheckpointFolder(Path(path) / "checkpoints", keep=1).finished()
    folder = finished[-1] if finished else Path(path)
    checkpoint = CheckpointFolder(folder.parent, keep=1).load(folder)
    try:
        vocabulary = Vocabulary.from_dict(checkpoint.details["vocabulary"])
        model = build_model(config_of(checkpoint.details["config"], where=str(folder)), vocabulary)
    except (ConfigError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {error}") from None
    check_tensors(checkpoint, folder, model.state_dict())
    model.load_state_dict(checkpoint.model)
    return model.eval(), vocabulary


class _Run:
    def __init__(self, config: Config, options: Options, process: Process, corpus: Corpus) -> None:
        self.config, self.options, self.process, self.corpus = config, options, process, corpus
        self.folder = Path(config.output.folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.output.keep)
        model = build_model(config, corpus.vocabulary)
        self.tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        loss = Loss(model).to(process.device)
        if config.training.compile:
            loss.compile()
        self.module = parallelised(loss, process, config.training.parallel)
        self.optimizer = _optimizer(self.module, config)

    def train(self) -> Result:
        began = self._resume()
        with closing(self._log(began)) if self.process.is_main else nullcontext() as log:
            done = self._steps(began, log)
        return Result(done, began, self.checkpoints.path(done))

    def _log(self, began: int) -> Log:
        return Log(
            self.folder, began, trackers_of(self.config.output.tracker, self.folder, began, self.config.to_dict())
        )

    def _steps(self, began: int, log: Log | None) -> int:
        output, evaluation, last = self.config.output, self.config.evaluation, self.config.training.steps
        if began < last:
            self._report(log, self._start_event(began))
        meter = _Meter(self.config, self.process)
        for step in range(began + 1, last + 1):
            with _explained(f"Step {step}"):
                loss, norm = self._step(step)
            stopping = self.process.count == 1 and self.options.stop()
            ends = step == last or stopping
            saves = ends or step % output.save_every == 0
            if saves or step % output.log_every == 0 or step == began + 1:
                mean = self._checked(loss, norm, step)
                self._report(log, meter.event(step, mean, norm, _rate(self.config, step)))
            if len(self.corpus.unseen) and evaluation.every and (step % evaluation.every == 0 or step == last):
                with _explained(f"The evaluation after step {step}"):
                    unseen = self._evaluate()
                self._report(log, {"event": "evaluation", "step": step, "loss": unseen})
            if saves:
                path = self._save(step)
                self._report(log, {"event": "checkpoint", "step": step, "path": str(path)})
            if ends:
                return step
        return began

    def _start_event(self, began: int) -> Event:
        return {
            "event": "start", "step": began, "steps": self.config.training.steps, "processes": self.process.count,
            "device": str(self.process.device), "torch": torch.__version__, "threads": torch.get_num_threads(),
        }  # fmt: skip

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        """One update; its loss and the norm of its gradients before they were clipped."""
        training = self.config.training
        for group in self.optimizer.param_groups:
            group["lr"] = _rate(self.config, step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.process.device)
        batch = self.corpus.batch(training.seed, step, training.batch)
        for i, part in enumerate(batch.chunk(training.accumulate)):
            torch.manual_seed(mixed(training.seed, "dropout", step, i, self.process.rank))
            with gradient_sync(self.module, enabled=i == training.accumulate - 1):
                loss = self._loss(self.process.own_rows(part)) / training.accumulate
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), training.clip or math.inf)
        self.optimizer.step()
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _loss(self, tokens: Tensor) -> Tensor:
        low = self.config.training.precision == "bf16"
        with torch.autocast(self.process.device.type, torch.bfloat16, enabled=low):
            loss: Tensor = self.module(tokens)
        return loss

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The mean loss on unseen text."""
        self.module.eval()
        training = self.config.training
        batches = (self.corpus.unseen_batch(i, training.batch) for i in range(self.config.evaluation.batches))
        parts = (part for batch in batches for part in batch.chunk(training.accumulate))
        losses = [self._loss(self.process.own_rows(part)) for part in parts]
        self.module.train()
        return self.process.mean(torch.stack(losses).mean())

    def _checked(self, loss: Tensor, norm: Tensor, step: int) -> float:
        mean = self.process.mean(loss)
        if not math.isfinite(mean) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"At step {step} the loss is {mean:g} and the norm of the gradients {float(norm):g}. {_UNCHANGED} "
                "A smaller training.learning_rate, a longer training.warmup or a smaller training.clip may help; start "
                "again in another output.folder, or from an earlier checkpoint (--from)."
            )
        return mean

    def _report(self, log: Log | None, event: Event) -> None:
        if log is not None:
            log.write(event)
            self.options.tell(event)

    def _save(self, step: int) -> Path:
        model, optimizer = full_state(self.module, self.optimizer)
        details = {
            "config": self.config.to_dict(),
            "data": self.corpus.fingerprint,
            "vocabulary": self.corpus.vocabulary.to_dict(),
            "torch": torch.__version__,
        }
        with self._failing_together("write"):
            if self.process.is_main:
                _check_finite(model, step)
                self.checkpoints.save(Checkpoint(step, model, optimizer, details))
        return self.checkpoints.path(step)

    def _resume(self) -> int:
        """Load the checkpoint to resume from, and return the number of steps done. Only the main process reads it."""
        with self._failing_together("read"):
            checkpoint = self._read_checkpoint() if self.process.is_main else None
        step = self.process.broadcast(checkpoint.step if checkpoint else 0)
        if step:
            model, optimizer = (checkpoint.model, checkpoint.optimizer) if checkpoint else ({}, {})
            load_full_state(self.module, self.optimizer, model, optimizer, self.process)
        return step

    @contextmanager
    def _failing_together(self, verb: str) -> Iterator[None]:
        """What only the main process does with a checkpoint: if it fails there, all processes end."""
        failure: Exception | None = None
        try:
            yield
        except (CheckpointError, ConfigError, TrainingError) as error:
            failure = error
        if self.process.broadcast(int(failure is not None)):
            raise failure or CheckpointError(f"The main process could not {verb} the checkpoint.")

    def _read_checkpoint(self) -> Checkpoint | None:
        paths = self.checkpoints.finished()
        start = self.options.start or (paths[-1] if paths else None)
        checkpoint = None
        if start is not None:
            checkpoint = self.checkpoints.load(start)
            _check_same(checkpoint, start, self.config, self.corpus, accept=self.options.accept_changes)
            check_tensors(checkpoint, start, self.tensors)
        self.checkpoints.tidy()
        return checkpoint


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Explain errors that a configuration causes: too little memory, a stream that leaves its grid."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        on_cpu = "DefaultCPUAllocator" in reason or isinstance(error, MemoryError)  # which raises a plain RuntimeError
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise TrainingError(
            f"{what} ran out of memory: {reason} A larger training.accumulate, a smaller training.batch, a smaller "
            'model or model.memory = "reverse" takes less. ' + _UNCHANGED
        ) from error
    except StepError as error:
        bits = "" if error.bits is None else f" In the configuration, write model.grid_bits = {error.bits}."
        raise TrainingError(f"{what}: {error}{bits} {_UNCHANGED}") from error


def _check_finite(model: dict[str, Tensor], step: int) -> None:
    """Check the weights after a step's update; its loss was that of the weights before."""
    odd = [name for name, tensor in model.items() if not bool(tensor.isfinite().all())]
    if odd:
        raise TrainingError(
            f"The update of step {step} made {odd[0]} and {len(odd) - 1} more weights NaN or infinite. They are not "
            f"saved. {_UNCHANGED} A smaller training.learning_rate may help."
        )


def _check_same(checkpoint: Checkpoint, path: Path, config: Config, corpus: Corpus, *, accept: bool) -> None:
    different = changes(checkpoint.details["config"], config)
    if checkpoint.details["data"] != corpus.fingerprint:
        different.append("data.path: the text or the tokens differ from those that were trained on")
    fixed = [change for change in different if change.startswith("model.") and "dropout" not in change]
    if corpus.vocabulary.to_dict() != checkpoint.details["vocabulary"]:
        fixed.append("data.path: the text has other characters")
    if fixed or (different and not accept):
        listed = "".join(f"\n  {change}" for change in dict.fromkeys([*different, *fixed]))
        way = "" if fixed else ", or add --accept-changes to resume with the new one"
        raise ConfigError(
            f"{path} was trained with another configuration:{listed}\nGive the old one again, set another "
            f"output.folder to start afresh{way}. Nothing was changed."
        )


def _optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, not biases and norms."""
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

    def __init__(self, config: Config, process: Process) -> None:
        self.tokens = config.training.batch * config.data.length
        self.process, self.began, self.last = process, time.perf_counter(), 0

    def event(self, step: int, loss: float, norm: Tensor, rate: float) -> Event:
        now = time.perf_counter()
        steps = step - self.last if self.last else 1
        speed = steps * self.tokens / (now - self.began)
        self.began, self.last = now, step
        return {
            "event": "step", "step": step, "loss": loss, "learning_rate": rate, "gradient_norm": float(norm),
            "tokens_per_second": speed, "peak_memory": _peak(self.process.device),
        }  # fmt: skip


def _peak(device: torch.device) -> int:
    """The peak so far in bytes: of tensors on an accelerator, of the whole process on a CPU (0 if unknown)."""
    if device.type != "cpu":
        return device_memory.peak(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
