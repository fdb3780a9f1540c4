"""Several modalities: streams by name, attention to itself, to a context and to each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

WIDTH = 6
Batch = dict[str, Tensor]


class Attention(nn.Module):
    """Attention of one sequence to another, with masks; small and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        *others: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        read = torch.cat(others, 1) if others else (x if context is None else context)
        read_mask = context_mask if others or context is not None else mask
        scores = self.q(x) @ self.k(read).transpose(1, 2) / WIDTH**0.5
        if read_mask is not None:
            scores = scores.masked_fill(~read_mask[:, None, :], -1e9)
        out = scores.softmax(-1) @ self.v(read)
        return out if mask is None else out * mask[..., None]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def make(memory: str = "reverse", names: tuple[str, ...] = ("video", "audio")) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    kinds = ["itself", "context", "each other"] * 2
    blocks = [rg.multimodal(kind, **{n: (Attention(), feed_forward()) for n in names}) for kind in kinds]  # type: ignore[arg-type]
    return rg.ReversibleSequence(blocks, memory=memory).double()  # type: ignore[arg-type]


def batch(names: tuple[str, ...] = ("video", "audio")) -> tuple[Batch, Batch]:
    torch.manual_seed(1)
    lengths = dict(zip(names, (5, 3, 4), strict=False))
    x = {n: torch.randn(2, lengths[n], WIDTH, dtype=torch.float64, requires_grad=True) for n in names}
    context: Batch = {f"{n}_mask": torch.rand(2, lengths[n]) > 0.3 for n in names}
    for mask in context.values():
        mask[:, 0] = True
    context["context"] = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, context


def by_hand(stack: rg.ReversibleSequence, x: Batch, c: Batch) -> Batch:
    """The same arithmetic in plain autograd; every modality keeps its own feed-forward."""
    names = list(x)
    top, memory = dict(x), dict(x)
    for i, block in enumerate(stack.blocks):
        branches = [step.branch for step in block.steps]
        for n, attend, feed in zip(names, branches[::2], branches[1::2], strict=True):
            others = [m for m in names if m != n]
            kwargs = {"mask": c[f"{n}_mask"]}
            read = []
            if i % 3 == 1:
                kwargs["context"] = c["context"]
            if i % 3 == 2:
                read = [memory[m] for m in others]
                kwargs["context_mask"] = c[f"{others[0]}_mask"]
            top[n] = top[n] + attend(memory[n], *read, **kwargs)
            memory[n] = memory[n] + feed(top[n])
    return {n: (top[n] + memory[n]) / 2 for n in names}


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
def test_two_modalities_give_the_gradients_that_autograd_gives(memory: str) -> None:
    stack, (x, context) = make(memory), batch()
    expected = by_hand(stack, x, context)
    inputs = [*x.values(), context["context"], *stack.parameters()]
    wanted = torch.autograd.grad(sum(v.square().sum() for v in expected.values()), inputs)
    output = stack(x, **context)
    found = torch.autograd.grad(sum(v.square().sum() for v in output.values()), inputs)
    assert all(torch.equal(output[n], expected[n]) for n in x)
    scale = max(float(g.abs().max()) for g in wanted)  # a bias of the keys has a gradient of zero
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13 * scale)


def test_the_memory_mode_can_be_switched_in_a_call() -> None:
    stack, (x, context) = make("reverse"), batch()
    stored, reversed_ = stack(x, memory="store", **context), stack(x, **context)
    assert all(torch.equal(stored[n], reversed_[n]) for n in x)


def test_three_modalities_attend_to_each_other() -> None:
    class Cross(nn.Linear):
        def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return super().forward(x) + first.mean(1, keepdim=True) - second.mean(1, keepdim=True)

    names = ("video", "audio", "text")
    blocks = [
        rg.multimodal("each other", **{n: (Cross(WIDTH, WIDTH), feed_forward()) for n in names}) for _ in range(3)
    ]
    stack = rg.ReversibleSequence(blocks).double()
    x, _ = batch(names)
    found = torch.autograd.grad(stack(x)["text"].square().sum(), [*x.values(), *stack.parameters()], allow_unused=True)
    wanted = torch.autograd.grad(
        stack(x, memory="store")["text"].square().sum(), [*x.values(), *stack.parameters()], allow_unused=True
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert float(found[0].abs().max()) > 0, "text does not see video"


def test_a_modality_runs_its_own_feed_forward() -> None:
    block = make().blocks[2]
    for attention, feed in zip(block.steps[::2], block.steps[1::2], strict=True):
        assert feed.sources == (attention.target,)


def test_the_inverse_gives_the_streams_back() -> None:
    stack, (x, context) = make().eval(), batch()
    outputs = stack.run(x, **context)
    back = stack.inverse(outputs, **context).named()
    for n in x:
        torch.testing.assert_close(back[n], x[n], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(back[f"{n}_memory"], x[n], rtol=1e-12, atol=1e-12)


def test_a_mask_of_the_wrong_shape_is_rejected_before_anything_runs() -> None:
    stack, (x, context) = make(), batch()
    ran: list[int] = []
    stack.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    context["audio_mask"] = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"audio_mask has shape \(2, 5\).*'audio' of shape \(2, 3, 6\) needs \(2, 3\)"):
        stack(x, **context)
    assert not ran


def test_bad_blocks_are_rejected() -> None:
    pair = (Attention(), feed_forward())
    with pytest.raises(ValueError, match="choose one of 'itself'"):
        rg.multimodal("others", video=pair)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each other"):
        rg.multimodal("each other", video=pair)
    with pytest.raises(TypeError, match="pair"):
        rg.multimodal("itself", video=(Attention(),))  # type: ignore[arg-type]
    stack, (x, context) = make(), batch()
    with pytest.raises(ValueError, match="video"):
        stack({"vide": x["video"], "audio": x["audio"]}, **context)
    with pytest.raises(ValueError, match="by name"):
        stack(x["video"], **context)
    with pytest.raises(TypeError, match="video_msk"):
        stack(x, video_msk=context["video_mask"])


def test_a_multimodal_stack_can_be_copied() -> None:
    stack, (x, context) = make(), batch()
    other = copy.deepcopy(stack)
    assert torch.equal(other(x, **context)["video"], stack(x, **context)["video"])
