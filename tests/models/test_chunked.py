"""The chunked functions compute what the plain ones do, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from retrograde.measure import MemoryTracker
from retrograde.models import ChunkedFeedForward, chunked_cross_entropy
from retrograde.models._feed_forward import FeedForward

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "reduction": "none", "ignore_index": 3},
]


def head(tokens: int = 11, width: int = 5, classes: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, a weight and a bias."""
    return [
        torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((tokens, width), (classes, width), classes)
    ]


def targets(tokens: int = 11, classes: int = 7, ignored: int = -100) -> Tensor:
    classes_of_tokens = torch.randint(classes, (tokens,))
    classes_of_tokens[::4] = ignored
    return classes_of_tokens


def plain(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), target, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
def test_the_loss_and_its_gradients_are_those_of_the_plain_one(options: dict[str, Any], chunk_size: int) -> None:
    hidden, weight, bias = inputs = head()
    target = targets(ignored=options.get("ignore_index", -100))
    expected = plain(hidden, weight, target, bias, **options)
    chunked = chunked_cross_entropy(hidden, weight, target, bias, chunk_size=chunk_size, **options)
    torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(chunked, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_first_and_second_derivatives_pass_gradcheck(options: dict[str, Any]) -> None:
    target = targets(ignored=options.get("ignore_index", -100))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, target, bias, chunk_size=4, **options)

    inputs = tuple(head())
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_batches_keep_their_shape_and_a_head_needs_no_bias() -> None:
    hidden, weight, _ = head(tokens=12)
    target = targets(12).view(3, 4)
    losses = chunked_cross_entropy(hidden.view(3, 4, 5), weight, target, chunk_size=5, reduction="none")
    assert losses.shape == (3, 4)
    torch.testing.assert_close(losses.flatten(), plain(hidden, weight, target.flatten(), reduction="none"))


def test_frozen_parts_get_no_gradient_and_the_others_theirs() -> None:
    for frozen in range(3):
        inputs = head()
        inputs[frozen].requires_grad_(False)
        hidden, weight, bias = inputs
        target = targets()
        chunked_cross_entropy(hidden, weight, target, bias, chunk_size=3).backward()
        wanted = torch.autograd.grad(
            plain(hidden, weight, target, bias), [tensor for tensor in inputs if tensor.requires_grad]
        )
        assert inputs[frozen].grad is None
        for tensor, gradient in zip([t for t in inputs if t.requires_grad], wanted, strict=True):
            torch.testing.assert_close(tensor.grad, gradient)


def test_a_loss_of_ignored_tokens_only_is_nan_as_the_plain_one_is() -> None:
    hidden, weight, _ = head()
    target = torch.full((11,), -100)
    assert plain(hidden, weight, target).isnan()
    assert chunked_cross_entropy(hidden, weight, target).isnan()
    assert chunked_cross_entropy(hidden, weight, target, reduction="sum") == 0


def test_an_edit_of_the_weight_before_the_backward_pass_is_detected() -> None:
    hidden, weight, _ = head()
    loss = chunked_cross_entropy(hidden, weight, targets())
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_gives_the_gradients_of_the_plain_loss_under_autocast() -> None:
    """Both compute the logits in bfloat16 and the loss in float32; the sum over chunks is the more accurate one."""
    hidden, weight, bias = inputs = head(tokens=64, width=16, classes=50, dtype=torch.float32)
    target = targets(64, 50)
    exact = torch.autograd.grad(plain(hidden, weight, target, bias), inputs)
    results = []
    for loss in (plain, chunked_cross_entropy):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(hidden, weight, target, bias)
        results.append((value, torch.autograd.grad(value, inputs)))
    (expected, wanted), (chunked, got) = results
    assert chunked.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(chunked, expected, rtol=1e-6, atol=0)
    for ours, theirs, true in zip(got, wanted, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - true).norm() < 1.1 * (theirs - true).norm()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's jvp uses it
def test_function_transforms_and_forward_mode_see_the_plain_derivatives() -> None:
    hidden, weight, bias = (tensor.detach() for tensor in head())
    target = targets()
    got = torch.func.grad(chunked_cross_entropy, argnums=1)(hidden, weight, target, bias)
    wanted = torch.func.grad(plain, argnums=1)(hidden, weight, target, bias)
    torch.testing.assert_close(got, wanted)
    tangent = torch.randn_like(hidden)
    _, slope = torch.func.jvp(lambda h: chunked_cross_entropy(h, weight, target, bias), (hidden,), (tangent,))
    _, expected = torch.func.jvp(lambda h: plain(h, weight, target, bias), (hidden,), (tangent,))
    torch.testing.assert_close(slope, expected)


def peak_of(step: Callable[[], Tensor], *ignored: Tensor | nn.Module) -> int:
    step().backward()  # so that there are gradients to ignore
    gradients = [tensor.grad for tensor in ignored if isinstance(tensor, Tensor) and tensor.grad is not None]
    with MemoryTracker(ignore=[*ignored, *gradients]) as memory:
        step().backward()
    return memory.peak


def test_the_peak_holds_one_chunk_of_the_logits() -> None:
    tokens, classes = 512, 1000
    hidden, weight, _ = head(tokens, 8, classes, torch.float32)
    target = targets(tokens, classes)
    logits = tokens * classes * 4
    assert peak_of(lambda: plain(hidden, weight, target), hidden, weight) > 2 * logits
    for chunk_size in (16, 64):
        peak = peak_of(lambda s=chunk_size: chunked_cross_entropy(hidden, weight, target, chunk_size=s), hidden, weight)
        parts = 3 * chunk_size * classes * 4  # the softmax, and its two successors
        assert peak < parts + 4 * weight.nbytes + 4 * hidden.nbytes < logits


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "average"}, ValueError, "reduction='average' is not known; choose one of 'mean', 'sum', 'none'"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0: give a whole number of 1 or more"),
        ({"target": torch.zeros(11, 7)}, TypeError, "dtype torch.float32, which would mean probabilities"),
        ({"target": torch.zeros(10, dtype=torch.int64)}, ValueError, r"hidden \(11, 5\), weight \(7, 5\) and target"),
        ({"weight": torch.zeros(7, 6)}, ValueError, r"weight \(7, 6\).* do not fit"),
    ],
)
def test_impossible_arguments_are_refused_with_a_message(change: dict[str, Any], error: type, message: str) -> None:
    hidden, weight, _ = head()
    arguments = {"hidden": hidden, "weight": weight, "target": targets(), **change}
    with pytest.raises(error, match=message):
        chunked_cross_entropy(**arguments)


# The feed-forward


def wide(width: int = 8, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(16 * width, width))


@pytest.mark.parametrize(("chunks", "dim"), [(1, 1), (3, 1), (4, 0), (7, -2), (100, 1)])
def test_a_chunked_feed_forward_gives_what_its_module_gives(chunks: int, dim: int) -> None:
    module = wide().double()
    chunked = ChunkedFeedForward(copy.deepcopy(module), chunks, dim)
    x = torch.randn(4, 7, 8, dtype=torch.float64, requires_grad=True)
    expected, output = module(x), chunked(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *module.parameters()], pull)
    got = torch.autograd.grad(output, [x, *chunked.parameters()], pull)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_chunks_lower_the_peak_of_a_stack_and_keep_it_flat(memory: str) -> None:
    x = torch.randn(4, 64, 8, requires_grad=True)

    def peak(chunks: int, depth: int) -> int:
        blocks = [rg.two_stream(nn.Linear(8, 8), ChunkedFeedForward(wide(), chunks)) for _ in range(depth)]
        stack = rg.ReversibleSequence(blocks, memory=memory)
        return peak_of(lambda: stack(x).sum(), stack, x)

    inner = 16 * x.nbytes
    assert peak(1, 3) > 2 * inner
    assert peak(8, 3) < inner
    if memory == "reverse":
        assert peak(8, 12) == peak(8, 3)


def test_dropout_in_a_chunked_feed_forward_is_the_same_in_the_replay() -> None:
    def gradients(memory: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        blocks = [rg.two_stream(nn.Linear(8, 8), ChunkedFeedForward(wide(dropout=0.5), 3)) for _ in range(3)]
        stack = rg.ReversibleSequence(blocks, memory=memory).double()
        x = torch.randn(2, 7, 8, dtype=torch.float64)
        return torch.autograd.grad(stack(x).square().sum(), list(stack.parameters()))

    for got, wanted in zip(gradients("reverse"), gradients("store"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_chunks_do_not_change_parameter_names_and_a_copy_is_independent() -> None:
    whole, parts = FeedForward(8), FeedForward(8, chunks=3)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(parts(x), whole(x))
    other = copy.deepcopy(parts)
    with torch.no_grad():
        other.update.weight.zero_()
    torch.testing.assert_close(parts(x), whole(x))
    assert (other(x) == other.update.bias).all()


def test_zero_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks=0: give a whole number of 1 or more"):
        ChunkedFeedForward(wide(), 0)
