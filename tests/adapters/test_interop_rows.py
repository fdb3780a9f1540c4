"""What users do with every published model: the rows of docs/replaced-systems.md where the published module is wrong.

Ours is right in each. The behaviour of theirs is asserted too, so that the tests are known to see the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models import MODELS, Model, in_double, routing_encoder_decoder, translation_loss
from published import Trio, Twins, compare, distance, run, sequences

pytestmark = pytest.mark.interop

DROP = 0.1
Load = Callable[[str], Twins]
every_model = pytest.mark.parametrize("name", MODELS)


def wrong(trio: Trio, loss: Callable[[Any], Tensor]) -> float:
    """Checks ours; the relative error of the published gradients, infinite where they are missing or it raises."""
    outcome = compare(trio, loss)
    return math.inf if outcome.error else float(outcome.grads["error"])


def trio_of(twins: Load, model: Model, **options: Any) -> Trio:
    """A model that was trained for a step: k-means is set up by the first."""
    trio = twins(model.package).trio(lambda p: model.make(p, dropout=DROP, **options))
    run(trio.ours, model.loss)
    return trio


@every_model
def test_two_calls_before_one_backward_are_right(twins: Load, name: str) -> None:
    model = MODELS[name]
    with in_double(twins(model.package)):
        error = wrong(trio_of(twins, model), lambda m: model.loss(m) + 2 * model.loss(m))
    assert error > 0.1 or name == "axial", "the axial model draws nothing at random"


@every_model
def test_a_call_without_grad_before_the_backward_changes_nothing(twins: Load, name: str) -> None:
    model = MODELS[name]

    def interrupted(m: Any) -> Tensor:
        loss = model.loss(m)
        with torch.no_grad():
            model.loss(m)
        return loss

    with in_double(twins(model.package)):
        error = wrong(trio_of(twins, model), interrupted)
    assert error > 0.1 or name == "axial"


@every_model
def test_forward_and_backward_in_eval_mode_are_right(twins: Load, name: str) -> None:
    """Published: a crash, unless the module was trained before."""
    model = MODELS[name]
    with in_double(twins(model.package)):
        assert wrong(trio_of(twins, model).train(False), model.loss) == math.inf


@every_model
def test_eval_mode_between_forward_and_backward_changes_nothing(twins: Load, name: str) -> None:
    model = MODELS[name]

    def then_eval(m: Any) -> Tensor:
        loss = model.loss(m)
        m.eval()
        return loss

    with in_double(twins(model.package)):
        error = wrong(trio_of(twins, model), then_eval)
    assert error > 0.1 or name == "axial"


@every_model
def test_frozen_embeddings_leave_the_other_gradients_right(twins: Load, name: str) -> None:
    model = MODELS[name]
    with in_double(twins(model.package)):
        trio = trio_of(twins, model)
        for each in (trio.theirs, trio.ours, trio.plain):
            model.freeze_embeddings(each)
        assert wrong(trio, model.loss) == math.inf, "published: no parameter of the blocks gets a gradient"


@every_model
def test_autograd_grad_returns_the_gradients_of_parameters(twins: Load, name: str) -> None:
    model = MODELS[name]
    with in_double(twins(model.package)):
        trio = trio_of(twins, model)
        trio.sync()
        results = []
        for each in (trio.ours, trio.plain):
            each.zero_grad()
            torch.manual_seed(1)
            loss = model.loss(each)
            parameters = dict(each.named_parameters())
            grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            assert all(p.grad is None for p in each.parameters())
            results.append({n: g for n, g in zip(parameters, grads, strict=True) if g is not None})
        assert distance(*results) <= 1e-12
        torch.manual_seed(1)
        loss = model.loss(trio.theirs)
        stack = next(m for m in trio.theirs.modules() if type(m).__name__.endswith("ReversibleSequence"))
        with pytest.raises(RuntimeError):
            torch.autograd.grad(loss, list(stack.blocks.parameters()))


WALKED = {
    "nuwa": ("text_transformer.norm.norm.weight", 3),
    "video-audio": ("text_transformer.norm.norm.weight", 6),
    "routing encoder-decoder": ("enc.norm.weight", 2),
    "lie": ("edge_emb.weight", math.nan),
}


@pytest.mark.parametrize("name", WALKED)
def test_the_backward_pass_of_the_encoder_runs_once(twins: Load, name: str) -> None:
    """Published: once for each branch that attends to it. The lie model raises at the second."""
    encoder_decoder = Model("routing_transformer", routing_encoder_decoder, translation_loss, ())
    model = MODELS.get(name, encoder_decoder)
    parameter, published = WALKED[name]
    with in_double(twins(model.package)):
        trio = twins(model.package).trio(model.make)
        walks: dict[str, list[int]] = {"theirs": [], "ours": []}
        for key, each in (("theirs", trio.theirs), ("ours", trio.ours)):
            each.get_parameter(parameter).register_post_accumulate_grad_hook(lambda _, k=key: walks[k].append(1))
        theirs = compare(trio, model.loss)
    assert len(walks["ours"]) == 1
    assert theirs.error if math.isnan(published) else len(walks["theirs"]) == published


@pytest.mark.parametrize("name", ["routing", "axial", "reformer", "lie"])
def test_forward_under_autocast_and_backward_outside_of_it_are_right(twins: Load, name: str) -> None:
    """Ours: as exact as float32 streams are; with checkpoints, bit-identical to stored activations."""
    model = MODELS[name]
    trio = twins(model.package).trio(model.make, dtype=torch.float32)

    def loss(m: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.loss(m).float()

    run(trio.ours, loss)
    trio.sync()
    plain, ours, theirs = (run(each, loss) for each in (trio.plain, trio.ours, trio.theirs))
    assert plain.loss is not None
    assert ours.loss is not None
    assert torch.equal(ours.loss, plain.loss)
    assert distance(ours.grads, plain.grads) < 0.01
    trio.ours.load_state_dict(trio.theirs.state_dict())
    trio.plain.load_state_dict(trio.theirs.state_dict())
    for sequence in sequences(trio.ours):
        sequence.memory = "checkpoint"
    assert distance(run(trio.ours, loss).grads, run(trio.plain, loss).grads) == 0
    if name == "lie":
        assert "dtype" in theirs.error
    else:
        assert theirs.loss is not None
        assert torch.equal(ours.loss, theirs.loss)
        assert distance(theirs.grads, plain.grads) > 0.02


def test_nuwa_under_autocast_is_stopped_by_its_own_attention(twins: Load) -> None:
    """It fills bfloat16 with the largest float32. Not ours: nothing reversible has run by then."""
    package = twins("nuwa_pytorch")
    for module in (package.published, package.ours):
        model = MODELS["nuwa"].make(module)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="without overflow"):
            MODELS["nuwa"].loss(model)
