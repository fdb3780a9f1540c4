"""Every model trains, and its gradients do not depend on how it gets its activations."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import PROBLEMS, Problem, nodes_of_a_ring, normal, whole
from retrograde import models
from retrograde.models.axial import AxialAttention

every_model = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def train(problem: Problem, model: nn.Module) -> list[float]:
    optimiser = torch.optim.Adam(model.parameters(), lr=problem.rate)
    losses = []
    for _ in range(problem.steps):
        loss = problem.loss(model)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [*losses, problem.loss(model).item()]


@every_model
def test_a_model_trains(problem: Problem) -> None:
    losses = train(problem, problem.build("reverse"))
    assert losses[-1] < problem.falls * losses[0], losses


@every_model
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_a_model_has_the_loss_and_the_gradients_of_stored_activations(problem: Problem, memory: str) -> None:
    """In float64, relative to the largest entry of each gradient."""
    model, stored = problem.build(memory).double(), problem.build("store").double()
    stored.load_state_dict(model.state_dict())
    losses = [problem.loss(m) for m in (model, stored)]
    assert torch.equal(*losses)
    got, wanted = (
        torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (model, stored), strict=True)
    )
    for (name, _), ours, theirs in zip(model.named_parameters(), got, wanted, strict=True):
        assert theirs.any(), name
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max(), name


def gradients(problem: Problem, memory: str, exact: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    model = problem.build(memory)
    for module in model.modules():
        if isinstance(module, rg.ReversibleSequence):
            module.exact = exact
    return torch.autograd.grad(problem.loss(model), list(model.parameters()))


@every_model
def test_an_exact_model_has_the_gradients_of_stored_activations_to_the_bit(problem: Problem) -> None:
    """In float32, where reversing a model that is not exact drifts."""
    if not problem.has_exact:
        with pytest.raises(ValueError, match="which has no exact form here"):
            gradients(problem, "reverse", exact=True)
        return
    for exact in (True, False):
        pairs = zip(gradients(problem, "reverse", exact), gradients(problem, "store", exact), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs) == exact


@every_model
def test_a_state_dict_can_be_saved_and_loaded(problem: Problem) -> None:
    model, other = problem.build("reverse").eval(), problem.build("store").eval()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        assert not torch.equal(problem.loss(other), problem.loss(model))
    other.load_state_dict(torch.load(file))
    with torch.no_grad():
        assert torch.equal(problem.loss(other), problem.loss(model))


@every_model
def test_a_deep_copy_is_equal_and_independent(problem: Problem) -> None:
    model = problem.build("reverse").eval()
    twin = copy.deepcopy(model)
    before = problem.loss(model)
    assert torch.equal(problem.loss(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(problem.loss(model), before)
    assert not torch.equal(problem.loss(twin), before)


@every_model
def test_under_autocast_streams_stay_in_float32_and_reversing_hardly_drifts(problem: Problem) -> None:
    gradients_by_memory = []
    for memory in ("reverse", "store"):
        torch.manual_seed(0)
        model = problem.build(memory)
        dtypes: set[torch.dtype] = set()
        for module in model.modules():
            if isinstance(module, rg.Block):
                module.register_forward_hook(lambda _, __, out, seen=dtypes: seen.update(s.dtype for s in out[0]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problem.loss(model)
        assert dtypes == {torch.float32}
        assert loss.dtype == torch.float32
        gradients_by_memory.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        )
    assert (gradients_by_memory[0] - gradients_by_memory[1]).norm() < 0.02 * gradients_by_memory[1].norm()


# Depth


@pytest.mark.parametrize("name", ["ReversibleLM", "DeepGraphNetwork", "MomentumResNet"])
def test_a_fresh_model_has_streams_and_gradients_of_the_same_size_at_any_depth(name: str) -> None:
    builds: dict[str, Any] = {
        "ReversibleLM": lambda depth: models.ReversibleLM(12, 32, depth, 4),
        "DeepGraphNetwork": lambda depth: models.DeepGraphNetwork(4, 2, width=24, depth=depth),
        "MomentumResNet": lambda depth: models.MomentumResNet(4, widths=(8,), depths=(depth,), memory="checkpoint"),
    }

    def first(depth: int) -> tuple[float, float]:
        model = builds[name](depth)
        outputs: list[Tensor] = []
        model.stack.register_forward_hook(lambda _, __, out: outputs.append(out))
        PROBLEMS[name].loss(model).backward()
        return outputs[0].std().item(), next(model.parameters()).grad.norm().item()

    shallow, deep = first(4), first(64)
    assert 0.6 < deep[0] / shallow[0] < 1.7
    assert 0.4 < deep[1] / shallow[1] < 2.5


def test_a_graph_network_of_a_thousand_layers_trains() -> None:
    problem = Problem(
        lambda memory: models.DeepGraphNetwork(4, 2, width=16, depth=1000, memory=memory),
        nodes_of_a_ring,
        steps=4,
        rate=1e-4,  # a thousand layers change together
        falls=0.6,
    )
    losses = train(problem, problem.build("reverse"))
    assert losses[-1] < problem.falls * losses[0], losses


# Stages


@pytest.mark.parametrize("model", [models.RevNet, models.MomentumResNet])
def test_transitions_are_checkpointed_where_the_rest_is_reversed(model: Any) -> None:
    def modes(memory: Any) -> tuple[str, ...]:
        return model(4, widths=(4, 8, 8), depths=(2, 1, 1), memory=memory).stack.memory.memory

    assert modes("reverse") == ("reverse", "reverse", "checkpoint", "reverse", "checkpoint", "reverse")
    selective, fallback = "selective", "selective checkpoint"
    assert modes("selective") == (selective, selective, fallback, selective, fallback, selective)
    assert modes("store") == ("store",) * 6
    mixed = ("reverse", "store", "store", "reverse", "checkpoint", "checkpoint")
    assert modes(mixed) == mixed


def test_a_momentum_resnet_starts_from_rest_and_keeps_gamma_of_its_velocity() -> None:
    model = models.MomentumResNet(4, widths=(4,), depths=(3,), gamma=0.7).double().eval()
    x = start = model.stem(normal(model, 2, 3, 6, 6))
    velocity = torch.zeros_like(x)
    for block in model.stack.blocks:
        velocity = 0.7 * velocity + 0.3 * block.steps[0].branch(x)
        x = x + velocity
    torch.testing.assert_close(model.stack(start), x, rtol=1e-12, atol=1e-12)


def test_batch_statistics_are_updated_once_per_step() -> None:
    model = PROBLEMS["RevNet"].build("reverse")
    PROBLEMS["RevNet"].loss(model).backward()
    counts = {module.num_batches_tracked.item() for module in model.modules() if isinstance(module, nn.BatchNorm2d)}
    assert counts == {1}


# What each model guarantees


def test_axial_attention_attends_along_its_axis_only() -> None:
    x = torch.randn(1, 5, 6, 8)
    other = x.clone()
    other[0, 2, 3] += torch.randn(8)
    for axis, line in ((1, (slice(None), 3)), (2, (2, slice(None)))):
        attention = AxialAttention(8, 2, axis)
        changed = (attention(x) != attention(other)).any(-1)[0]
        expected = torch.zeros(5, 6, dtype=torch.bool)
        expected[line] = True
        assert torch.equal(changed, expected)


def test_smaller_images_use_the_first_positions_and_larger_ones_are_refused() -> None:
    model = models.AxialImageTransformer(1, 2, (6, 6), width=8, depth=1, heads=2)
    assert model(torch.randn(1, 1, 4, 6)).shape == (1, 2, 4, 6)
    with pytest.raises(ValueError, match="Images of 8×6 were given to a model of size 6×6"):
        model(torch.randn(1, 1, 8, 6))


def moved(coords: Tensor) -> Tensor:
    """Rotated, mirrored and shifted."""
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=coords.dtype))[0]
    return -coords @ turn + torch.randn(3, dtype=coords.dtype)


def test_a_point_cloud_model_is_invariant_to_motions_and_equivariant_to_permutations() -> None:
    model = models.PointCloudTransformer(2, 3, 1, width=16, depth=3, heads=2).double()
    values, coords, edges = normal(model, 2, 6, 2), normal(model, 2, 6, 3), normal(model, 2, 6, 6, 1)
    output = model(values, coords, edges=edges)
    torch.testing.assert_close(model(values, moved(coords), edges=edges), output, rtol=1e-9, atol=1e-9)
    assert (model(values, 1.1 * coords, edges=edges) - output).abs().max() > 1e-4
    order = torch.randperm(6)
    permuted = model(values[:, order], coords[:, order], edges=edges[:, order][:, :, order])
    torch.testing.assert_close(permuted, output[:, order], rtol=1e-9, atol=1e-9)


def test_forces_can_be_trained_on() -> None:
    """A loss on the gradient to the coordinates: second derivatives, the same whether reversed or stored."""
    results = []
    for memory in ("reverse", "store"):
        torch.manual_seed(0)
        model = models.PointCloudTransformer(2, 1, 1, width=8, depth=2, heads=2, memory=memory).double()
        values, edges = normal(model, 2, 5, 2), normal(model, 2, 5, 5, 1)
        coords = normal(model, 2, 5, 3).requires_grad_()
        energy = model(values, coords, edges=edges).sum()
        [forces] = torch.autograd.grad(energy, coords, create_graph=True)
        results.append(torch.autograd.grad(forces.square().sum(), list(model.stack.parameters())))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.any()
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def changes(model: nn.Module, first: Any, second: Any) -> bool:
    with torch.no_grad():
        return not torch.equal(model(*first), model(*second))


def test_masked_entries_change_nothing() -> None:
    model = models.EncoderDecoder(10, 10, 16, 2, 2)
    source, target = whole(10, 2, 6), whole(10, 2, 5)
    other = source.clone()
    other[:, 4:] = (source[:, 4:] + 1) % 10
    mask = (torch.arange(6) < 4).expand(2, 6)
    assert changes(model, (source, target), (other, target))
    assert not changes(model, (source, target, mask), (other, target, mask))

    cloud = models.PointCloudTransformer(2, 1, width=16, depth=2, heads=2)
    values, coords = normal(cloud, 2, 6, 2), normal(cloud, 2, 6, 3)
    shifts = (0.0, torch.where(mask[..., None], 0.0, 1.0))  # of masked entries only
    with torch.no_grad():
        first, second = (cloud(values + shift, coords + shift, mask)[:, :4] for shift in shifts)
    assert torch.equal(first, second)

    pair = models.TwoModalityTransformer({"video": 2, "audio": 2}, width=16, depth=2, heads=2)
    masks = {"audio": mask}
    with torch.no_grad():
        masked = [pair({"video": values, "audio": values + shift}, masks) for shift in shifts]
        unmasked = [pair({"video": values, "audio": values + shift}) for shift in shifts]
    assert torch.equal(masked[0]["video"], masked[1]["video"])
    assert not torch.equal(unmasked[0]["video"], unmasked[1]["video"])


def test_messages_of_a_graph_network_follow_the_direction_of_edges() -> None:
    model = models.DeepGraphNetwork(2, 1, width=8, depth=1)
    chain = torch.tensor([[0, 1], [1, 2]])
    nodes = torch.randn(4, 2)
    other = nodes.clone()
    other[1] += 1
    with torch.no_grad():
        changed = (model(nodes, chain) != model(other, chain)).flatten()
    assert changed.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.ReversibleLM(10, 30, 1, 4), "A width of 30 must be a multiple of heads=4"),
        (lambda: models.ReversibleLM(10, 32, 1, 4, 3), "heads of kv_heads=3"),
        (lambda: models.RevNet(2, widths=(4, 7), depths=(1, 1)), r"widths=\(4, 7\): each is cut into two streams"),
        (lambda: models.RevNet(2, widths=(4, 8), depths=(1,)), "give a width and a depth for each stage"),
        (lambda: models.RevCol(2, widths=(4,)), r"widths=\(4,\): give two levels or more"),
        (lambda: models.RevCol(2, (4, 4, 4), 1)(torch.zeros(1, 3, 6, 8)), "Images of 6×8 cannot be halved 2 times"),
        (lambda: models.RevBiFPN(2, widths=(4, 5)), "two resolutions or more, of an even number"),
        (lambda: models.RevViT(2, 10, 4), "Images of 10×10 cannot be cut into patches of 4×4"),
        (lambda: models.TwoModalityTransformer({"video": 3}), "name the same two modalities"),
        (lambda: models.DeepGraphNetwork(2, 2, width=9, groups=2), "width of 9 cannot be cut into 2 equal groups"),
        (
            lambda: models.PointCloudTransformer(2, 1, 3, width=8, depth=1, heads=2)(
                torch.zeros(1, 2, 2), torch.zeros(1, 2, 3)
            ),
            "made for 3 edge features, but 0 were given",
        ),
    ],
)
def test_impossible_options_are_refused_with_a_message(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_column_scales_each_level_and_adds_what_finer_and_coarser_ones_say() -> None:
    model = models.RevCol(4, widths=(4, 6, 8), columns=3).double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    stem, *rest = start = model.pyramid(normal(model, 2, 3, 8, 8))
    levels: list[Tensor] = [stem, *rest]
    for block in model.stack:
        for i, step in enumerate(block.each_step()):
            others = [levels[j] for j in (i - 1, i + 1) if 0 <= j < 3]
            scale, update = step.branch(*others, stem) if i == 0 else step.branch(*others)
            levels[i] = levels[i] * torch.tanh(scale).exp() + update
    for found, wanted in zip(model.stack(start, stem=stem), levels, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_every_resolution_of_a_feature_pyramid_reads_every_other() -> None:
    model = models.RevBiFPN(4, widths=(4, 4, 4), depth=1).eval()
    streams = tuple(torch.randn(1, 2, 8 >> i, 8 >> i) for i in range(3) for _ in range(2))
    with torch.no_grad():
        before = model.stack(streams)
        for changed in range(6):
            other = tuple(s + (i == changed) * torch.randn_like(s) for i, s in enumerate(streams))
            assert all(not torch.equal(a, b) for a, b in zip(model.stack(other), before, strict=True))
