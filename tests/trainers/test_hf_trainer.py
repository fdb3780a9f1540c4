"""Reversible and converted models under the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.conversion import map_gradient_checkpointing
from retrograde.engine.torch_internals import VERSION
from trainer_models import Counting, Reversible, assert_same, converted_gpt2, state

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.interop


def trainer(model: nn.Module, folder: Path, *, steps: int = 8, **changes: Any) -> Any:
    options = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "logging_steps": 2, "save_steps": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**options | changes)
    return transformers.Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting(16))


@pytest.fixture(params=["converted", "reversible"], name="make")
def _make(request: pytest.FixtureRequest) -> Any:
    def make(memory: str = "reverse") -> nn.Module:
        torch.manual_seed(0)
        return converted_gpt2(memory=memory).model if request.param == "converted" else Reversible(memory, exact=True)

    return make


def test_a_model_trains_logs_and_evaluates(make: Any, tmp_path: Path) -> None:
    running = trainer(make(), tmp_path, steps=30, save_strategy="no")
    before = running.evaluate()["eval_loss"]
    running.train()
    losses = [entry["loss"] for entry in running.state.log_history if "loss" in entry]
    assert len(losses) == 15
    assert running.evaluate()["eval_loss"] < before - 0.5
    assert losses[-1] < losses[0] - 0.5


def test_recomputed_and_stored_activations_train_the_same_parameters_under_trainer(make: Any, tmp_path: Path) -> None:
    ends = []
    for memory in ("store", "reverse"):
        model = make(memory)
        trainer(model, tmp_path / memory, save_strategy="no").train()
        ends.append(state(model))
    assert_same(ends[1], ends[0])


def test_a_resumed_run_ends_with_the_same_parameters(make: Any, tmp_path: Path) -> None:
    whole = make()
    trainer(whole, tmp_path).train()
    resumed = make()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(state(resumed), state(whole))


def test_checkpoints_of_a_converted_model_load_into_the_original_model(tmp_path: Path) -> None:
    model = converted_gpt2().model
    trainer(model, tmp_path).train()
    original = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-8").eval()
    tokens = Counting(4).tokens
    assert torch.equal(original(tokens).logits, model.eval()(tokens).logits)
    assert type(original.transformer.h[0]).forward.__module__.startswith("transformers")
    assert "forward" not in vars(original.transformer.h[0])


def test_gradient_checkpointing_true_sets_the_memory(tmp_path: Path) -> None:
    conversion = converted_gpt2(memory="store")
    running = trainer(
        conversion.model, tmp_path, steps=2, save_strategy="no", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"memory": "checkpoint"},
    )  # fmt: skip
    running.train()
    assert str(conversion.stack.memory) == "blocks 0-2 checkpoint"
    trainer(conversion.model, tmp_path, steps=2, save_strategy="no", gradient_checkpointing=True).train()
    assert str(conversion.stack.memory) == "blocks 0-2 reverse"


def test_gradient_checkpointing_true_sets_the_memory_of_a_mapped_model(tmp_path: Path) -> None:
    model = map_gradient_checkpointing(Reversible("store"))
    trainer(model, tmp_path, steps=2, save_strategy="no", gradient_checkpointing=True).train()
    assert str(model.model.stack.memory) == "blocks 0-2 reverse"


def test_mixed_precision_and_accumulated_gradients_train_bit_identical_parameters(make: Any, tmp_path: Path) -> None:
    ends = []
    for memory in ("store", "reverse"):
        model = make(memory)
        trainer(model, tmp_path / memory, save_strategy="no", bf16=True, gradient_accumulation_steps=2).train()
        ends.append(state(model))
    assert_same(ends[1], ends[0])


class Compact(nn.Module):
    """A model that compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.stack(self.embed(input_ids)).tanh())
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.skipif(VERSION < (2, 13), reason='backend="retrograde" needs torch 2.13')
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning",  # torch's own, when it loads its compiler
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the tracer looks at every attribute
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",  # the tracer does
)
def test_a_model_that_was_compiled_in_place_trains_as_the_eager_one_does(tmp_path: Path) -> None:
    from compiling import ByRule

    ends, backend = [], ByRule()
    for way in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Compact()
        if way == "compiled":
            model.compile(backend=backend)  # as model.compile(backend="retrograde"), without a code generator
        trainer(model, tmp_path / way, steps=3, save_strategy="no").train()
        ends.append(state(model))
    assert backend.graphs > 0
    for ours, theirs in zip(ends[1].values(), ends[0].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_accelerate_takes_no_backend_that_is_not_on_its_list() -> None:
    """Which is why docs/compile.md says model.compile(); when this fails, torch_compile_backend works."""
    from accelerate.utils import TorchDynamoPlugin

    assert TorchDynamoPlugin(backend="inductor").backend == "INDUCTOR"
    with pytest.raises(ValueError, match="RETROGRADE"):
        TorchDynamoPlugin(backend="retrograde")
