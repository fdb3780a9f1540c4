"""What cannot work is refused before anything runs, in words that name what was given and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.couplings import Affine, Replace, Scaled
from stacks import MEMORIES, RECOMPUTING, Mlp, memory_of, sample, twins

every_memory = pytest.mark.parametrize("memory", MEMORIES)


def block() -> rg.Block:
    return rg.two_stream(Mlp(), Mlp())


@pytest.mark.parametrize(
    ("shape", "dim", "words"),
    [
        ((4, 5), -1, r"\(4, 5\).*2 equal streams.*dim=-1.*5 entries"),
        ((3, 6), 0, r"\(3, 6\).*2 equal streams.*dim=0.*3 entries"),
        ((4, 6), 2, r"split.*\(4, 6\).*dim=2"),
        ((4, 6), -3, r"split.*\(4, 6\).*dim=-3"),
        ((), -1, r"split.*\(\).*dim=-1"),
    ],
)
def test_an_input_that_does_not_split_is_refused(shape: tuple[int, ...], dim: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rg.ReversibleSequence([block()], split="chunk", dim=dim)(torch.zeros(shape))


def test_streams_that_do_not_merge_are_refused() -> None:
    streams = (torch.zeros(4, 6), torch.zeros(4, 3))
    step = rg.Block(rg.Step(nn.Linear(3, 6), 0, [1]))
    for merge in ("mean", "sum"):
        with pytest.raises(ValueError, match=rf"\(4, 6\), \(4, 3\).*{merge}"):
            rg.ReversibleSequence([step], merge=merge)(streams)
    with pytest.raises(ValueError, match="dim=5"):
        rg.ReversibleSequence([step], merge="concat", dim=5)(streams)
    assert rg.ReversibleSequence([step], merge="concat")(streams).shape == (4, 9)


@pytest.mark.parametrize(
    "streams",
    [
        (torch.zeros(4, 6),),
        (torch.zeros(4, 6),) * 3,
        (torch.zeros(4, 6), None),
        [torch.zeros(4, 6), 3.0],
    ],
)
def test_a_wrong_number_or_kind_of_streams_is_refused(streams: Any) -> None:
    with pytest.raises(ValueError, match="2 streams"):
        rg.ReversibleSequence([block()])(streams)


@pytest.mark.parametrize("given", [{"a": 0}, {"a": 0, "c": 0}, {"a": 0, "b": 0, "c": 0}])
def test_streams_under_wrong_names_are_refused(given: dict[str, int]) -> None:
    stack = rg.ReversibleSequence([rg.Block(rg.Step(Mlp(), "a", ["b"]), rg.Step(Mlp(), "b", ["a"]))])
    with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
        stack({name: torch.zeros(4, 6) for name in given})


def test_a_step_that_reads_its_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot read the stream it updates: target=0, sources=\(1, 0\)"):
        rg.Step(Mlp(), 0, (1, 0))
    with pytest.raises(ValueError, match="at least one source"):
        rg.Step(Mlp(), 0, ())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rg.Step("mlp", 0, [1]), TypeError, "'mlp'"),
        (lambda: rg.Step(Mlp(), 0, [1], coupling=torch.add), TypeError, "combine and separate"),
        (lambda: rg.Step(Mlp(), 0, [1], reads="all"), ValueError, "reads='all'.*'each', 'sum'"),
        (lambda: rg.Step(Mlp(), 0, [1], aux="maybe"), ValueError, "aux='maybe'.*'none', 'loss'"),
        (lambda: rg.Step(Mlp(), 0, [1], takes="shift"), ValueError, r"takes='shift'.*\['shift'\]"),
        (lambda: rg.Step(Mlp(), 0, [1], takes=["shfit"]), ValueError, "'shfit'.*Mlp does not accept.*shift, mask"),
        (lambda: rg.Block(), ValueError, "one or more steps"),
        (lambda: rg.Block(Mlp()), ValueError, "not of .*Mlp"),
        (lambda: rg.Block(rg.Step(Mlp(), -1, [0])), ValueError, "counted from 0"),
        (lambda: rg.Block(rg.Step(Mlp(), 0, ["a"])), ValueError, "numbers or by strings, not by both"),
        (lambda: rg.Block(rg.Step(Mlp(), 0, [1]), order=(0, 0)), ValueError, "not a permutation"),
        (lambda: rg.Block(rg.Step(Mlp(), "a", ["b"]), streams=["a", "c"]), ValueError, r"\['b'\]"),
        (lambda: rg.grouped(Mlp()), ValueError, "two branches or more"),
        (lambda: rg.two_stream(Mlp(), Mlp(), aux="h"), ValueError, "'f' and 'g'.*'h'"),
        (lambda: Scaled(keep=0), ValueError, "keep=0"),
        (lambda: rg.ReversibleSequence([]), ValueError, "at least one block"),
        (lambda: rg.ReversibleSequence([Mlp()]), TypeError, "Block 0 is a Mlp.*two_stream"),
        (lambda: rg.ReversibleSequence([block()], split="half"), ValueError, "split='half'.*'duplicate', 'chunk'"),
        (lambda: rg.ReversibleSequence([block()], merge="max"), ValueError, "merge='max'.*'mean', 'sum'"),
        (
            lambda: rg.ReversibleSequence([block()], memory="revers"),
            ValueError,
            "memory='revers'.*'reverse', 'selective'",
        ),
        (lambda: rg.ReversibleSequence([block()], memory=["keep"]), ValueError, "memory='keep'"),
        (lambda: rg.ReversibleSequence([block()], memory=["store"] * 2), ValueError, "2 entries for 1 blocks"),
        (lambda: rg.Plan(("reverse",), anchors={1}), ValueError, r"Anchors \[1\].*1 blocks"),
        (
            lambda: rg.ReversibleSequence([block(), rg.Block(rg.Step(Mlp(), "a", ["b"]))]),
            ValueError,
            "name their streams and others number them",
        ),
    ],
)
def test_a_part_that_cannot_work_is_refused_when_it_is_made(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("how", ["constructor", "attribute", "call"])
@pytest.mark.parametrize("bad", ["revers", ["store"], ["store", "keep"]])
def test_a_bad_memory_plan_is_refused_wherever_it_is_given(how: str, bad: Any) -> None:
    stack = rg.ReversibleSequence([block(), block()])
    give = {
        "constructor": lambda: rg.ReversibleSequence([block(), block()], memory=bad),
        "attribute": lambda: setattr(stack, "memory", bad),
        "call": lambda: stack(sample(4, 6), memory=bad),
    }[how]
    with pytest.raises(ValueError, match=r"memory='revers'|1 entries for 2 blocks|memory='keep'"):
        give()
    assert stack.memory == rg.Plan(("reverse", "reverse"))


@pytest.mark.parametrize("memory", ["reverse", "selective"])
def test_a_block_without_an_inverse_is_checkpointed_by_itself(memory: str) -> None:
    down = rg.transition(nn.Linear(6, 3).double(), nn.Linear(6, 3).double())
    stack = rg.ReversibleSequence([block(), down], memory=memory, merge=None)
    fallback = "selective checkpoint" if memory == "selective" else "checkpoint"
    assert stack.memory == rg.Plan([memory, fallback])
    stack.memory = "store"
    stack.memory = memory
    assert stack.memory == rg.Plan([memory, fallback])


def test_a_block_without_an_inverse_is_refused_where_it_is_to_be_reversed_and_by_inverse() -> None:
    down = rg.transition(nn.Linear(6, 3).double(), nn.Linear(6, 3).double())
    with pytest.raises(ValueError, match="Block 1 has memory='reverse', but Linear, Linear cannot be inverted"):
        rg.ReversibleSequence([block(), down], memory=["reverse", "reverse"])
    stack = rg.ReversibleSequence([block(), down], merge=None)
    with pytest.raises(ValueError, match="Block 1: Linear cannot be undone: Replace"):
        stack.inverse(stack(sample(4, 6)))
    with pytest.raises(TypeError, match="merged tensor"):
        stack.inverse(sample(4, 6))


class Shift(rg.couplings.Coupling, nn.Module):
    """A coupling whose `separate` is wrong by a factor."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target + update

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - update * (1 + self.error)


@pytest.mark.parametrize("memory", ["reverse", "anchored", "mixed"])
@pytest.mark.parametrize("error", [1e-3, -2.0, float("nan")])
def test_a_coupling_that_does_not_undo_itself_is_refused_when_first_used(memory: str, error: float) -> None:
    stack = rg.ReversibleSequence(
        [rg.two_stream(Mlp(), Mlp(), coupling=Shift(error)) for _ in range(3)], memory=memory_of(memory, 3)
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Block 0: Shift.separate does not undo combine for Mlp"):
            stack(sample(4, 6))
    stack.memory = "checkpoint"
    stack(sample(4, 6)).sum().backward()


@pytest.mark.parametrize("before", ["no_grad", "checkpoint"])
def test_a_coupling_that_does_not_undo_itself_is_refused_though_it_was_used_without_an_inverse(before: str) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp(), coupling=Shift(1.0)) for _ in range(3)])
    if before == "no_grad":
        with torch.no_grad():
            stack(sample(4, 6))
    else:
        stack(sample(4, 6), memory="checkpoint")
    with pytest.raises(ValueError, match="does not undo combine"):
        stack(sample(4, 6))


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@every_memory
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x[:1], r"shape \(1, 6\) for a target of shape \(4, 6\)"),
        (lambda x: x[:, :1], r"shape \(4, 1\) for a target of shape \(4, 6\)"),
        (lambda x: x.sum(), r"shape \(\) for a target of shape \(4, 6\)"),
        (lambda x: x[None], r"shape \(1, 4, 6\) for a target of shape \(4, 6\)"),
        (lambda x: x.double(), r"from torch.float32 into torch.float64.*Cast"),
        (lambda x: (x, x), "a tuple of 2"),
        (lambda x: None, "type NoneType"),
    ],
)
def test_a_branch_whose_output_does_not_fit_is_named_with_its_block(memory: str, make: Any, words: str) -> None:
    good = rg.two_stream(torch.sin, torch.cos)
    stack = rg.ReversibleSequence([good, rg.two_stream(torch.sin, Returns(make)), good], memory=memory_of(memory, 3))
    with pytest.raises(ValueError, match=f"Block 1: Returns .*{words}"):
        stack(torch.ones(4, 6, requires_grad=True))
    with torch.no_grad(), pytest.raises(ValueError, match=f"Block 1: Returns .*{words}"):
        stack(torch.ones(4, 6))


@every_memory
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x, r"shape \(4, 3\) for a target of shape \(4, 6\)"),
        (lambda x: x[:, :5], "does not halve along dim -1"),
        (lambda x: (x, x[:1]), r"shape \(1, 6\) for a target of shape \(4, 6\)"),
        (lambda x: (x, x, x), r"tuple of 3.*\(log_scale, shift\)"),
        (lambda x: x.sum(), "does not halve"),
    ],
)
def test_an_update_that_does_not_fit_an_affine_coupling_is_refused(memory: str, make: Any, words: str) -> None:
    bad = rg.two_stream(Returns(make), Returns(make), coupling=Affine())
    with pytest.raises(ValueError, match=f"Block 0: Returns .*{words}"):
        rg.ReversibleSequence([bad] * 3, memory=memory_of(memory, 3))(sample(4, 6))


@every_memory
def test_a_branch_that_promised_a_loss_and_returns_none_is_named(memory: str) -> None:
    blocks = [rg.two_stream(torch.sin, Mlp(), aux="g") for _ in range(3)]
    with pytest.raises(ValueError, match=r"Block 0: Mlp was declared with aux='loss'.*\(update, auxiliary loss\)"):
        rg.ReversibleSequence(blocks, memory=memory_of(memory, 3))(sample(4, 6))


def test_an_unknown_context_name_is_refused_with_a_list_of_who_takes_what() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), torch.sin), rg.two_stream(Mlp(), Wants())])
    words = r"\['shfit'\].*block 0 Mlp: mask, shift; block 0 .*sin: nothing; .*block 1 Wants: needed, wanted"
    with pytest.raises(TypeError, match=words):
        stack(sample(4, 6), shfit=sample(6), needed=sample(6))


class Wants(Mlp):
    def forward(self, x: Tensor, needed: Tensor, wanted: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, needed, wanted)


def test_a_missing_context_is_refused_by_the_name_of_the_branch_that_needs_it() -> None:
    stack = rg.ReversibleSequence([block(), rg.two_stream(Mlp(), Wants())])
    with pytest.raises(TypeError, match=r"Block 1: Wants needs the context \['needed'\].*gave \['shift'\]"):
        stack(sample(4, 6), shift=sample(6))
    with pytest.raises(TypeError, match=r"Block 1: Wants needs the context \['needed'\].*gave none"):
        stack(sample(4, 6))
    outputs = stack.run(sample(4, 6), needed=sample(6))
    with pytest.raises(TypeError, match="needs the context"):
        stack.inverse(outputs)


def test_a_branch_with_open_keywords_takes_what_it_is_told_to() -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor, **context: Tensor) -> Tensor:
            return sum(context.values(), x).sin()

    with pytest.raises(TypeError, match=r"leave that open \(say takes=...\)"):
        rg.ReversibleSequence([rg.two_stream(Open(), Open())])(sample(4, 6), shift=sample(6))
    x, shift, other = sample(4, 6), sample(6, seed=2), sample(6, seed=3)
    a = x + (x + shift).sin()
    expected = {"all": (a, x + (a + shift + other).sin()), "renamed": (a, x + (a + other).sin())}
    for name, takes in (("all", {"f": ["shift"], "g": "all"}), ("renamed", {"f": ["shift"], "g": {"shift": "other"}})):
        stack = rg.ReversibleSequence([rg.two_stream(Open(), Open(), takes=takes)], merge=None)
        for got, wanted in zip(stack(x, shift=shift, other=other), expected[name], strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("hidden", [[3], [0, -4]])
def test_a_hidden_state_of_no_block_is_refused(hidden: list[int]) -> None:
    with pytest.raises(ValueError, match="the stack has 3 blocks"):
        twins()[0].run(sample(4, 6), hidden=hidden)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_forward_hook_that_exchanges_a_stream_between_blocks_is_refused(memory: str) -> None:
    """The inverse could not know of it."""
    stack, _ = twins(memory=memory)
    stack.blocks[1].register_forward_pre_hook(lambda m, args: ((args[0][0] * 2, args[0][1]), *args[1:]))
    with pytest.raises(ValueError, match=r"Block 1: Stream 0 was exchanged before block 1 \[Mlp · Mlp\]"):
        stack(sample(4, 6))


def test_a_step_that_replaces_its_stream_may_read_it_and_is_checkpointed() -> None:
    step = rg.Step(Mlp(), 0, [0, 1], coupling=Replace(), takes=())
    assert rg.ReversibleSequence([rg.Block(step)]).memory == rg.Plan(["checkpoint"])
