"""A character model trained by one process, by several, or on several machines; training survives crashes of any.

    python examples/distributed_training.py
    torchrun --nproc-per-node 2 examples/distributed_training.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise restarted processes may read addresses of dead ones
    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed_training.py --fsdp

and on each of two machines, with a folder that both can reach:

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint first-machine:29400 \\
        examples/distributed_training.py --checkpoints /shared/run

Every process takes its part of each batch, and gradients are averaged by DDP, or by FSDP2 with `--fsdp`. The text of a
step, its order and the random numbers of dropout depend only on the seed and the step's number. A checkpoint therefore
contains the model, the optimiser and the step. It is written under another name and then renamed, so it is never
incomplete. A run resumes from the last checkpoint, if there is one: after a crash, `torchrun` restarts all processes,
and the result is bit-identical to that of a run without the crash. The text is the reference that comes with every
Python.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from retrograde.training import backend_for

HEADS = 4
TIMEOUT = timedelta(minutes=1)  # for which a process waits for the others


@dataclass(frozen=True)
class Options:
    steps: int
    batch: int
    length: int
    width: int
    depth: int
    dropout: float
    seed: int
    fsdp: bool
    checkpoints: Path
    save_every: int
    show_every: int


@dataclass(frozen=True)
class Process:
    """This process: its rank, the number of all processes, and the device of its tensors."""

    rank: int
    count: int
    device: torch.device

    def says(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self.rank == 0:
            say(text)


def say(text: str) -> None:
    """Print a line in one piece; with print, lines of several processes may come mixed."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def joined() -> Iterator[Process]:
    """Join the processes that torchrun started, if it did."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    index = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(accelerator.type, index) if accelerator else torch.device("cpu")
    if not dist.is_torchelastic_launched():
        yield Process(0, 1, device)
        return
    if accelerator:
        torch.accelerator.set_device_index(index)
    dist.init_process_group(backend_for(device), timeout=TIMEOUT)
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return result


def feed_forward(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
    )


class Model(nn.Module):
    """The loss of predicting each character of a text from those before it."""

    def __init__(self, characters: int, options: Options) -> None:
        super().__init__()
        width, dropout = options.width, options.dropout
        self.embed = nn.Embedding(characters, width)
        self.process = nn.Parameter(0.02 * torch.randn(options.length, width))
        self.stack = rg.ReversibleSequence(
            [rg.two_stream(Attention(width, dropout), feed_forward(width, dropout)) for _ in range(options.depth)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        y = self.stack(self.embed(text[:, :-1]) + self.process)
        return F.cross_entropy(self.head(self.norm(y)).flatten(0, 1), text[:, 1:].flatten())


class Corpus:
    """Windows of text, in an order that is drawn for each epoch from the seed and the epoch's number."""

    def __init__(self, options: Options) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        numbers = torch.tensor([number[character] for character in text])
        self.windows = numbers.unfold(0, options.length + 1, options.length)
        self.batch, self.seed = options.batch, options.seed
        self.epoch = len(self.windows) // self.batch  # steps

    def part(self, step: int, process: Process) -> Tensor:
        """This process's part of the batch of a step. All parts together are the same for any number of processes."""
        epoch, at = divmod(step, self.epoch)
        order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))
        chosen = order[at * self.batch : (at + 1) * self.batch]
        return self.windows[chosen.chunk(process.count)[process.rank]].to(process.device)


def mixed(*numbers: int) -> int:
    """One seed made of several numbers."""
    return hash(numbers) % 2**63  # of whole numbers, it is the same in every process


def parallel(model: Model, options: Options) -> nn.Module:
    """The model under FSDP2 or DDP; unchanged if there is only one process."""
    if not dist.is_initialized():
        return model
    if not options.fsdp:
        return DistributedDataParallel(model)
    for block in model.stack:
        fully_shard(block)
    fully_shard(model)
    return model


class Checkpoints:
    """One file per step with the full state, whatever the number of processes; the last two are kept."""

    def __init__(self, folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, process: Process) -> None:
        self.folder, self.model, self.optimiser, self.process = folder, model, optimiser, process
        if process.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in folder.glob("*.unfinished"):
                unfinished.unlink()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}.pt"

    def finished(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int) -> None:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimiser = get_state_dict(self.model, self.optimiser, options=whole)
        if self.process.rank == 0:
            write(self.path(step), {"step": step, "model": model, "optimiser": optimiser})
            for old in self.finished()[:-2]:
                old.unlink()

    def resume(self) -> int:
        """Load the last checkpoint, if there is one, and return the number of steps done so far.

        Only the first process reads it; it sends it to the others, so that all start from the same one.
        """
        state: dict[str, Any] = {"step": 0, "model": {}, "optimiser": {}}
        if self.process.rank == 0 and (paths := self.finished()):
            state = torch.load(paths[-1], map_location="cpu", weights_only=True)
        step = torch.tensor(state["step"], device=self.process.device)
        if dist.is_initialized():
            dist.broadcast(step, src=0)
        if step > 0:
            whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
            set_model_state_dict(self.model, state["model"], options=whole)
            set_optimizer_state_dict(self.model, self.optimiser, state["optimiser"], options=whole)
        return int(step)


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a file completely or not at all, even if the machine stops at any moment."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def train(options: Options, process: Process) -> None:
    corpus = Corpus(options)
    torch.manual_seed(options.seed)  # the same weights in every process
    model = parallel(Model(len(corpus.characters), options).to(process.device), options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = Checkpoints(options.checkpoints, model, optimiser, process)
    start = checkpoints.resume()
    how = "one process" if process.count == 1 else "with FSDP2" if options.fsdp else "with DDP"
    say(f"rank {process.rank} of {process.count}, {how}: process {os.getpid()}, from step {start}")
    began = time.perf_counter()
    for step in range(start, options.steps):
        torch.manual_seed(mixed(options.seed, step, process.rank))  # for dropout
        loss = model(corpus.part(step, process))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        done = step + 1
        if done % options.show_every == 0 or done == options.steps:
            rate = (done - start) / (time.perf_counter() - began)
            process.says(
                f"  step {done:>5}/{options.steps}  epoch {done / corpus.epoch:.2f}  "
                f"loss {average(loss, process):.6f}  {rate:.1f} steps/s"
            )
        if done % options.save_every == 0 or done == options.steps:
            checkpoints.save(done)
    process.says(f"Done: {checkpoints.path(max(start, options.steps))}")


def average(loss: Tensor, process: Process) -> float:
    """The mean over all processes."""
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
    return mean.item() / process.count


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=_positive, default=300, help="training steps (default: %(default)s)")
    add("--batch", type=_positive, default=16, help="texts per step, over all processes (default: %(default)s)")
    add("--length", type=_positive, default=64, help="characters per text (default: %(default)s)")
    add("--width", type=_positive, default=64, help="features of a stream (default: %(default)s)")
    add("--depth", type=_positive, default=6, help="blocks (default: %(default)s)")
    add("--dropout", type=float, default=0.1, help="fraction of a branch's update (default: %(default)s)")
    add("--seed", type=int, default=0, help="the seed of all random numbers (default: %(default)s)")
    add("--fsdp", action="store_true", help="shard the model with FSDP2 instead of DDP")
    add("--checkpoints", type=Path, default=Path("example-output/distributed_training"),
        help="folder to write checkpoints to, and to resume from (default: %(default)s)")  # fmt: skip
    add("--save-every", type=_positive, default=50, help="steps (default: %(default)s)")
    add("--show-every", type=_positive, default=10, help="steps (default: %(default)s)")
    options = Options(**vars(parser.parse_args()))
    count = int(os.environ.get("WORLD_SIZE", 1))
    if options.batch % count:
        parser.error(f"--batch {options.batch} cannot be shared by {count} processes; give a multiple of {count}")
    if options.width % HEADS:
        parser.error(f"--width {options.width} cannot be shared by {HEADS} heads; give a multiple of {HEADS}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout} is not a fraction from 0 up to, but not including, 1")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@record
def main() -> None:
    options = read_options()
    torch.set_num_threads(1)  # the matrices are too small for several threads
    try:
        with joined() as process:
            train(options, process)
    except KeyboardInterrupt:
        say("Stopped.")
        sys.exit(130)  # as a shell reports an interrupt


if __name__ == "__main__":
    main()
