"""One of the processes of test_interop_ddp: trains a published model under DDP and reports on its gradients.

    python ddp_worker.py <models, comma-separated> <published|ours> <rank> <file of the store>

Writes a line for each model: "right", "wrong <error>" or "raised <message>".
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import MODELS, in_double
from published import TIGHT, Trio, Twins, distance, gradients

WORLD = 2


def averaged(model: nn.Module, loss: Any) -> dict[str, Tensor]:
    """What DDP should give: the mean of the gradients that each process has by itself, zero where it has none."""
    model.zero_grad()
    loss(model).backward()
    own = gradients(model)
    mean = {}
    for name, parameter in model.named_parameters():
        total = own.get(name, torch.zeros_like(parameter)).clone()
        dist.all_reduce(total)
        mean[name] = total / WORLD
    return mean


def check(which: str, trio: Trio, loss: Any, rank: int) -> str:
    model = trio.theirs if which == "published" else trio.ours
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        state = torch.get_rng_state()
        expected = averaged(trio.plain, loss)
        torch.set_rng_state(state)
        if step == 0:
            parallel = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        model.zero_grad()
        loss(parallel).backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        error = distance(grads, expected)
        if not error <= TIGHT:
            return f"wrong {error:.3g}"
    return "right"


def report(name: str, which: str, rank: int) -> str:
    model = MODELS[name]
    twins = Twins(model.package)
    with in_double(twins):
        trio = twins.trio(lambda p: model.make(p, dropout=0.1))
        for each in (trio.theirs, trio.ours, trio.plain):
            each.register_parameter("unused", nn.Parameter(torch.zeros((), dtype=torch.float64)))

        def loss(m: Any) -> Tensor:
            return model.loss(Through(m, m.module if isinstance(m, DistributedDataParallel) else m))

        try:
            return check(which, trio, loss, rank)
        except RuntimeError as error:
            return f"raised {' '.join(str(error).split())[:200]}"


def main(names: str, which: str, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for name in names.split(","):
        sys.stdout.write(f"{report(name, which, rank)}\n")
        sys.stdout.flush()
    os._exit(0)  # a process whose backward failed half-way would wait for the other one


class Through:
    """Calls go to the parallel model; attributes are those of the model inside."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
