"""The grid itself: which bits come back, what is refused, and what happens when a stream leaves its range."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import retrograde as rg
from bits import assert_same_bits, digest, loss_of, mlp, observed, stack_of
from retrograde.couplings import Affine, Exact, ExactScaled, OutOfRangeError, bits_for
from retrograde.engine.preserve import StateSnapshot
from retrograde.measure import MemoryTracker

MANTISSA = {torch.float32: 24, torch.float64: 53}
few = settings(max_examples=60, deadline=None)


@st.composite
def on_the_grid(draw: Any, dtype: torch.dtype = torch.float32, size: int = 24) -> tuple[int, Tensor, Tensor]:
    """The bits of a grid, a stream on it, and an update after which the stream is still in range."""
    mantissa = MANTISSA[dtype]
    bits = draw(st.integers(-4, mantissa - 2))
    largest = 2**mantissa - 1
    whole = st.integers(-largest, largest)
    before = [*draw(st.lists(whole, min_size=size, max_size=size)), 0, largest, -largest, 1, -1]
    after = [*draw(st.lists(whole, min_size=size, max_size=size)), 0, -largest, largest, -1, 1]
    x = torch.tensor(before, dtype=torch.float64) * 2.0**-bits
    y = torch.tensor(after, dtype=torch.float64) * 2.0**-bits
    return bits, x.to(dtype), (y - x).to(dtype)


def reached(coupling: Exact, target: Tensor, combined: Tensor) -> float:
    low, high = coupling.bounds(target, combined)
    return float(torch.maximum(-low, high))


@pytest.mark.parametrize("dtype", MANTISSA)
@few
@given(data=st.data())
def test_what_was_added_is_taken_out_to_the_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    bits, x, update = data.draw(on_the_grid(dtype))
    coupling = Exact(bits)
    combined = coupling.combine(x, update)
    if reached(coupling, x, combined) < 2.0 ** (MANTISSA[dtype] - bits):  # an update of twice the range may be rounded
        assert digest(coupling.separate(combined, update)) == digest(x)


def test_a_sum_that_is_rounded_to_the_limit_is_out_of_range() -> None:
    """-3 + (2^24 + 4) is 2^24 + 1, which float32 does not hold: it gives 2^24, and -4 comes back."""
    coupling, x = Exact(0), torch.tensor([-3.0])
    combined = coupling.combine(x, torch.tensor([2.0**24 + 4]))
    with pytest.raises(OutOfRangeError, match="bits=-1 would hold it"):
        coupling.grid(torch.float32).check(reached(coupling, x, combined))


@pytest.mark.parametrize("dtype", MANTISSA)
@few
@given(data=st.data())
def test_rounding_by_two_additions_is_rounding_to_the_nearest_even_multiple(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    """Over the whole range: ties, signs, subnormals, and updates of low precision, all against exact arithmetic."""
    mantissa = MANTISSA[dtype]
    bits = data.draw(st.integers(-4, mantissa - 2))
    spacing, limit = 2.0 ** (1 - bits), 2.0 ** (mantissa - bits)
    numbers = data.draw(st.lists(st.floats(-limit / 2, limit / 2, width=32, exclude_min=True, exclude_max=True)))
    ties = [(k + 0.5) * spacing for k in (-3, -2, -1, 0, 1, 2)]
    edges = [0.0, -0.0, 5e-324, -5e-324, 1e-45, -1e-45, limit / 4, -limit / 4]
    update = torch.tensor([*numbers, *ties, *edges], dtype=torch.float64).to(dtype)
    for given_dtype in (dtype, torch.bfloat16, torch.float16):
        narrow = update.to(given_dtype)
        narrow = narrow[narrow.isfinite() & (narrow.double().abs() < limit / 2)]
        rounded = Exact(bits).grid(dtype).round(narrow)
        expected = torch.tensor([spacing * round(float(u) / spacing) for u in narrow], dtype=torch.float64)
        assert torch.equal(rounded.double(), expected)
        assert not (rounded.signbit() & (rounded == 0)).any()


@pytest.mark.parametrize("dtype", MANTISSA)
def test_every_update_is_rounded_to_the_grid_however_large_it_is(dtype: torch.dtype) -> None:
    limit = 2.0 ** (MANTISSA[dtype] - 16)
    for factor in (0.2, 0.3, 0.6, 1.1, 1.9, 3.7):
        update = factor * limit * (2 * torch.rand(4000, dtype=torch.float64) - 1)
        counts = Exact(16).grid(dtype).round(update.to(dtype)).double() * 2.0**16
        assert torch.equal(counts, counts.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_graph_changes_no_bit_and_has_second_derivatives(dtype: torch.dtype) -> None:
    coupling = rg.couplings.Exact(bits=12, scale=0.5)
    target, update = coupling.prepare(torch.randn(50, dtype=dtype)), torch.randn(50, dtype=dtype)
    leaf = update.clone().requires_grad_()
    combined = coupling.combine(target, leaf**3)
    assert torch.equal(combined, coupling.combine(target, update**3))
    assert combined._version == 0  # a version above 0 would send every replay through the slow comparison
    [slope] = torch.autograd.grad(combined.sum(), leaf, create_graph=True)
    torch.testing.assert_close(slope, 1.5 * leaf**2)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), leaf)[0], 3 * update)
    rows = torch.func.vmap(torch.func.grad(lambda u: coupling.combine(target[0], u**3)))(update)
    torch.testing.assert_close(rows, 1.5 * update**2)


def test_the_gradient_of_the_rounding_is_that_of_the_identity() -> None:
    update = torch.randn(50, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Exact(4).grid(torch.float64).round(update).sum(), update)
    assert torch.equal(gradient, torch.ones_like(update))


@few
@given(seed=st.integers(0, 2**32), bits=st.integers(4, 20), scale=st.sampled_from([1.0, 0.5, 0.3, -2.0]))
def test_an_update_that_is_not_on_the_grid_is_taken_out_to_the_bit(seed: int, bits: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    coupling, limit = Exact(bits, scale), 2.0 ** (24 - bits)
    x = coupling.prepare(limit / 4 * (2 * torch.rand(500, generator=generator) - 1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        update = (min(limit, 6e4) / 4 * (2 * torch.rand(500, generator=generator) - 1)).to(dtype)
        assert digest(coupling.separate(coupling.combine(x, update), update)) == digest(x)


@few
@given(keep=st.floats(1 / 256, 4.0), bits=st.integers(8, 18), seed=st.integers(0, 2**32))
def test_a_scaled_stream_comes_back_to_the_bit(keep: float, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    coupling, limit = ExactScaled(bits, 1.0, keep), 2.0 ** (24 - bits)
    edges = torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0, 255.0, -256.0]) * 2.0**-bits
    largest = limit * min(1.0, 1 / keep) / 2
    x = coupling.prepare(torch.cat([largest * (2 * torch.rand(500, generator=generator) - 1), edges]))
    update = limit / 4 * (2 * torch.rand(x.shape, generator=generator) - 1)
    combined = coupling.combine(x, update)
    assert digest(coupling.separate(combined, update, coupling.side_bits(x))) == digest(x)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.25, 1 / 3, 0.1, 1 / 16, 1 / 49, 1 / 255, 1 / 256, 2.0, 3.7, 4.0])
def test_every_stream_that_leads_to_the_same_result_is_told_apart(keep: float) -> None:
    coupling = ExactScaled(16, keep=keep)
    x = torch.arange(-3000, 3000) * 2.0**-16
    update = torch.zeros_like(x)
    assert digest(coupling.separate(coupling.combine(x, update), update, coupling.side_bits(x))) == digest(x)


@pytest.mark.parametrize(
    ("keep", "each"), [(0.9, 8), (0.5, 8), (0.3, 4), (0.1, 2), (1 / 16, 2), (1 / 256, 1), (1.0, 0)]
)
def test_side_bits_are_packed(keep: float, each: int) -> None:
    """`each` elements share a byte."""
    side = ExactScaled(keep=keep).side_bits(torch.randn(8 * 100).mul(2**16).round() * 2.0**-16)
    assert side.numel() == (800 // each if each else 0)
    assert side.dtype == torch.uint8


def test_a_keep_above_1_is_refused_where_the_product_leaves_the_range() -> None:
    """The update may bring the sum back into the range; the product was rounded by then."""
    coupling = ExactScaled(16, keep=3.7)
    x = coupling.prepare(200 + torch.rand(100))
    combined = coupling.combine(x, torch.full((100,), -700.0))
    assert combined.abs().max() < 256
    with pytest.raises(OutOfRangeError):
        coupling.grid(torch.float32).check(reached(coupling, x, combined))


@pytest.mark.parametrize("keep", [0.0, -0.5, 1 / 300, 5.0, float("nan")])
def test_a_keep_that_forgets_too_much_is_refused_with_the_alternative(keep: float) -> None:
    with pytest.raises(ValueError, match=r"keep must be from 1/256 to 4.*Scaled with memory='checkpoint'"):
        ExactScaled(keep=keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streams_of_low_precision_are_refused_with_the_alternative(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"stream_dtype=torch\.float32"):
        stack_of(lambda: mlp().to(dtype))(torch.randn(4, 16).to(dtype))


def test_float64_streams_are_exact_and_refused_where_products_would_not_be() -> None:
    stack = stack_of(lambda: mlp().double())
    x = torch.randn(4, 16, dtype=torch.float64)
    assert_same_bits(observed(stack, x, memory="reverse"), observed(stack, x, memory="store"))
    momentum = rg.ReversibleSequence([rg.momentum(mlp().double())], exact=True)
    with pytest.raises(TypeError, match=r"float64.*Use Scaled"):
        momentum(x)


@pytest.mark.parametrize("bits", [200, -300, 2.5, "16"])
def test_bits_that_make_no_grid_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match="bits="):
        stack_of(grid_bits=bits)


def test_the_inverse_gives_the_bits_that_came_in() -> None:
    stack = stack_of(depth=64)
    x = torch.randn(4, 16)
    streams = tuple(Exact().prepare(s) for s in (x, x.flip(0)))
    outputs = stack.run(streams)
    assert not torch.equal(outputs[0], streams[0])
    assert [digest(s) for s in stack.inverse(outputs)] == [digest(s) for s in streams]
    stack.exact = False
    assert not all(torch.equal(a, b) for a, b in zip(stack.inverse(stack.run(streams)), streams, strict=True))


def test_the_inverse_of_a_scaled_stack_is_refused_with_the_alternative() -> None:
    stack = rg.ReversibleSequence([rg.momentum(mlp()) for _ in range(2)], exact=True)
    outputs = stack.run(torch.randn(4, 16))
    with pytest.raises(ValueError, match=r"Block 1: Sequential .* use couplings\.Scaled"):
        stack.inverse(outputs)
    with pytest.raises(ValueError, match="only be undone with its side bits"):
        ExactScaled().separate(torch.zeros(2), torch.zeros(2))


def test_exactness_is_switched_on_and_off() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(mlp(), mlp()), rg.momentum(mlp(), gamma=0.5), rg.midpoint(mlp())])
    before = [copy.copy(step.coupling) for step in steps_of(stack)]
    assert not stack.exact
    with pytest.raises(ValueError, match=r"grid_bits=12: the stack is not exact"):
        stack.grid_bits = 12
    stack.exact = True
    stack.grid_bits = 12
    assert stack.exact
    assert [type(step.coupling) for step in steps_of(stack)] == [Exact, Exact, ExactScaled, Exact, Exact]
    assert {step.coupling.bits for step in steps_of(stack)} == {12}
    assert steps_of(stack)[2].coupling == ExactScaled(12, 0.5, 0.5)
    stack.exact = stack.exact
    assert stack.grid_bits == 12
    stack.grid_bits = None
    assert {step.coupling.bits for step in steps_of(stack)} == {None}
    stack.exact = False
    assert [vars(step.coupling) for step in steps_of(stack)] == [vars(coupling) for coupling in before]


def steps_of(stack: rg.ReversibleSequence) -> list[rg.Step]:
    return [step for block in stack.blocks for step in block.each_step()]  # type: ignore[operator, union-attr]


def test_a_mixture_of_exact_and_rounding_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Some steps are exact and others round: block 1 Sequential \(Additive\)"):
        rg.ReversibleSequence([rg.two_stream(mlp(), mlp(), coupling=Exact()), rg.two_stream(mlp(), mlp())])


def test_steps_on_different_grids_are_refused() -> None:
    blocks = [rg.two_stream(mlp(), mlp(), coupling=Exact(bits)) for bits in (16, 4)]
    with pytest.raises(ValueError, match="bits"):
        rg.ReversibleSequence(blocks)


def test_a_coupling_without_an_exact_form_is_refused_and_nothing_is_changed() -> None:
    affine = rg.Block(rg.Step(nn.Linear(16, 32), 0, 1, coupling=Affine()))
    blocks = [rg.two_stream(mlp(), mlp()), affine]
    with pytest.raises(ValueError, match=r"Block 1: Linear is coupled by Affine.*max_drift=1e-3"):
        rg.ReversibleSequence(blocks, exact=True)
    assert not blocks[0].exact


def growing(bits: int, **options: Any) -> rg.ReversibleSequence:
    """Streams that grow past any small range; draws and batch statistics in every branch."""
    torch.manual_seed(0)

    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16))

    stack = stack_of(branch, 4, grid_bits=bits, **options)
    with torch.no_grad():
        for step in steps_of(stack)[5:]:
            step.branch[3].weight.mul_(1000)  # so that draws and statistics come before it
    return stack


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_leaving_the_range_is_an_error_that_names_the_block_and_the_bits_that_would_hold(memory: str) -> None:
    x = torch.zeros(2, 16)
    shift = [rg.two_stream(lambda s: 0 * s, lambda s, by=300 * (i == 2): 0 * s + by, takes=()) for i in range(4)]
    stack = rg.ReversibleSequence(shift, exact=True, memory=memory)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Block 2: .*stream 1 reached 300, past 256.*bits=15 would hold it") as caught:
        stack(x)
    assert caught.value.bits == 15  # type: ignore[attr-defined]
    stack.grid_bits = 15
    assert stack(x).max() == 150


def test_an_input_past_the_range_is_an_error_that_names_the_stream() -> None:
    with pytest.raises(ValueError, match=r"Block 0: Sequential: stream 0 reached 1000.*bits=12"):
        stack_of()(torch.full((2, 16), 1000.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("overflow", ["raise", "rescale"])
def test_nan_and_infinity_are_errors_that_no_grid_would_hold(value: float, overflow: str) -> None:
    blocks = [rg.two_stream(lambda s: 0 * s, lambda s: s + value) for _ in range(2)]
    stack = rg.ReversibleSequence(blocks, exact=True, overflow=overflow)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Block 0: .*reached infinity or NaN") as caught:
        stack(torch.zeros(2, 16))
    assert caught.value.bits is None  # type: ignore[attr-defined]


def test_the_bits_named_are_the_most_that_hold() -> None:
    for largest in (1e-3, 0.5, 1.0, 1.001, 255.9, 256.0, 256.1, 3e8):
        bits = bits_for(largest, torch.float32)
        assert 2.0 ** (23 - bits) <= largest < 2.0 ** (24 - bits)


@pytest.mark.parametrize("memory", ["store", "reverse", "checkpoint"])
def test_a_rescaled_call_is_that_of_a_stack_that_began_with_those_bits(memory: str) -> None:
    """Draws and batch statistics of the abandoned run leave nothing behind."""
    x = torch.randn(4, 16)
    stack = growing(16, overflow="rescale")
    with pytest.warns(RuntimeWarning, match=r"Block [23]: .* continues with a grid of 2\^-1?.; the call was"):
        found = observed(stack, x, memory=memory)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        torch.manual_seed(11)
        stack(x)
    bits = steps_of(stack)[0].coupling.bits
    assert bits < 16
    found = {name: value for name, value in found.items() if "rescaled_bits" not in name}  # see test_exact_states.py
    assert_same_bits(found, observed(growing(bits), x, memory=memory))


def test_rescaling_takes_no_snapshot_of_modules_in_calls_of_branches_that_edit_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Draws from torch's generators need their states alone. Branches that edit buffers are copied in every call."""
    snapshots: list[Any] = []
    of = StateSnapshot.of.__func__  # type: ignore[attr-defined]
    noting = classmethod(lambda cls, parts, devices: [snapshots.extend(parts), of(cls, parts, devices)][1])
    monkeypatch.setattr(StateSnapshot, "of", noting)

    def calls(*branch: nn.Module) -> list[int]:
        stack = stack_of(lambda: copy.deepcopy(nn.Sequential(*branch)), 3, overflow="rescale")
        sizes = []
        for _ in range(3):
            snapshots.clear()
            stack(torch.randn(8, 16)).sum().backward()
            sizes.append(len(snapshots))
        return sizes

    assert calls(nn.Linear(16, 16), nn.Dropout(0.1)) == [3, 0, 0]
    assert calls(nn.Linear(16, 16), nn.BatchNorm1d(16)) == [3, 3, 3]


class Drawing(nn.Module):
    """Draws from Python's generator and counts its calls, in a buffer that is put anew or shared."""

    def __init__(self, count: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()) if count is None else count)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.last = torch.tensor(random.random())
        return 0 * x + 1000 * self.last


def test_a_rescaled_call_leaves_other_generators_and_shared_buffers_as_one_call_would() -> None:
    seen = []
    for bits in (16, 12):
        random.seed(0)
        first = Drawing()
        second = Drawing(first.count)
        count = first.count
        stack = rg.ReversibleSequence([rg.two_stream(first, second)], exact=True, grid_bits=bits, overflow="rescale")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack(torch.zeros(2))
        assert first.count is second.count is count
        seen.append((float(count), float(first.last), float(second.last), random.random()))
    assert seen[0] == seen[1]


def test_an_unknown_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of 'raise', 'rescale'"):
        stack_of(overflow="wrap")


def peak(stack: rg.ReversibleSequence, x: Tensor) -> int:
    loss_of(stack(x)).backward()
    with MemoryTracker(ignore=[stack, x]) as tracker:
        loss_of(stack(x)).backward()
    return tracker.peak


def test_the_grid_costs_no_memory_that_grows_with_depth() -> None:
    x = torch.randn(64, 16)
    shallow, deep = (peak(stack_of(depth=depth), x) for depth in (4, 24))
    assert deep == shallow
    assert shallow <= peak(stack_of(depth=4, exact=False), x) + x.nbytes  # the rounded update, for a moment


@pytest.mark.parametrize(("gamma", "bits"), [(0.9, 1), (0.25, 2), (0.1, 4)])
def test_side_bits_are_all_that_grows(gamma: float, bits: int) -> None:
    x = torch.randn(128, 64)

    def peak_at(depth: int) -> int:
        blocks = [rg.momentum(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), gamma=gamma) for _ in range(depth)]
        return peak(rg.ReversibleSequence(blocks, split="first", merge="first", exact=True), x)

    numbers = 16 * 2 * 2 * 4  # the bounds of each step, until the call ends
    assert peak_at(24) - peak_at(8) == 16 * x.numel() * bits // 8 + numbers


def test_a_meta_tensor_gives_shapes() -> None:
    assert stack_of().to("meta")(torch.randn(4, 16, device="meta")).shape == (4, 16)
