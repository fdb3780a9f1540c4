"""What the processes of test_trainers_in_two_processes.py run: training in two memory modes, and a comparison.

Started by torchrun, as users start their scripts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from test_hf_trainer import trainer
from trainer_models import Reversible, assert_same, converted_gpt2, state


def train(kind: str, memory: str, folder: Path, resume: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = converted_gpt2(memory=memory).model if kind == "converted" else Reversible(memory, exact=True)
    running = trainer(model, folder, ddp_backend="gloo", per_device_train_batch_size=4)
    assert running.args.world_size == 2
    running.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    return state(model)


def main(folder: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    for kind in ("converted", "reversible"):
        stored = train(kind, "store", folder / f"{kind}-store")
        recomputed = train(kind, "reverse", folder / f"{kind}-reverse")
        assert_same(recomputed, stored)
        assert_same(train(kind, "reverse", folder / f"{kind}-reverse", resume=True), stored)
        gathered = [None, None]
        dist.all_gather_object(gathered, float(sum(value.double().sum() for value in recomputed.values())))
        assert gathered[0] == gathered[1], "the processes have trained different models"
        (folder / f"{kind}-{dist.get_rank()}.agrees").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
