"""Operations, one by one: the replay computes the bits that the first run computed, at one and two threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from bits import digest, threads

N, LENGTH, WIDTH = 3, 13, 24
_generator = torch.Generator().manual_seed(0)
INDEX = torch.randint(0, LENGTH, (LENGTH,), generator=_generator)
MASK = torch.rand(LENGTH, LENGTH, generator=_generator).ge(0.3).index_fill(1, torch.tensor(0), True)
PLACES = torch.rand(N, 4, 6, 2, generator=_generator) * 2 - 1


def turned(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An operation over channels, on a stream whose channels come last."""
    return lambda x: operation(x.transpose(1, 2)).transpose(1, 2)


def attention(**options: Any) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2)

    return attend


def rows() -> Tensor:
    return INDEX[None, :, None].expand(N, LENGTH, WIDTH)


def image(x: Tensor) -> Tensor:
    return x.reshape(N, LENGTH, 4, 6)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": turned(lambda x: F.batch_norm(x, None, None, training=True)),
    "group_norm": turned(lambda x: F.group_norm(x, 6)),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "exp": lambda x: (-x.abs()).exp(),
    "erf": torch.erf,
    "power": lambda x: (x.abs() + 1) ** 1.7,
    "softmax": lambda x: x.softmax(-1),
    "softmax over rows": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "attention": attention(),
    "causal attention": attention(is_causal=True),
    "masked attention": attention(attn_mask=MASK),
    "attention with dropout": attention(dropout_p=0.3),
    "cumsum": lambda x: x.cumsum(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "einsum": lambda x: torch.einsum("nld,nmd,nme->nle", x, x, x) / 100,
    "bmm": lambda x: x @ (x.transpose(1, 2) @ x) / 100,
    "slices that are not aligned": lambda x: F.pad(x[..., 1:] @ x[..., 1:].transpose(1, 2) @ x[..., 1:], (1, 0)) / 100,
    "mean": lambda x: x - x.mean((0, 1)),
    "variance": lambda x: x / (1 + x.var(1, keepdim=True)),
    "norm": lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, INDEX, x),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, rows(), x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, rows(), x, "mean"),
    "gather": lambda x: x.gather(1, rows()),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=LENGTH, dim=1),
    "topk": lambda x: x * (x >= x.topk(5, -1).values[..., -1:]),
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "bilinear interpolation": lambda x: F.interpolate(
        F.interpolate(image(x), scale_factor=2, mode="bilinear"), size=(4, 6), mode="bicubic"
    ),
    "grid_sample": lambda x: F.grid_sample(image(x), PLACES, align_corners=False),
    "average pooling": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "max pooling": lambda x: F.max_pool1d(x, 3, 1, 1),
    "cdist": lambda x: torch.cdist(x, x) @ x / 100,
    "dropout": lambda x: F.dropout(x, 0.3),
    "multinomial": lambda x: x * x.flatten(0, 1).softmax(-1).multinomial(1).view(N, LENGTH, 1),
}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Turned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Pictured(nn.Module):
    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(N, LENGTH, *self.shape)).reshape(x.shape)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.words = nn.EmbeddingBag(LENGTH, WIDTH, mode="sum"), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.words(INDEX) + x.mean() * self.bag(INDEX.expand(N, -1))[:, None]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear of odd widths": lambda: nn.Sequential(nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH, bias=False)),
    "bilinear": lambda: Both(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "conv1d": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "depthwise conv1d": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
    "conv2d": lambda: Pictured(nn.Conv2d(LENGTH, LENGTH, 3, padding=1), 4, 6),
    "conv_transpose2d": lambda: Pictured(nn.ConvTranspose2d(LENGTH, LENGTH, 3, padding=1), 4, 6),
    "conv3d": lambda: Pictured(nn.Conv3d(LENGTH, LENGTH, 3, padding=1), 4, 2, 3),
    "embedding": Bags,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}


class Both(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class Operation(nn.Module):
    """Runs an operation, and notes what it gave in first runs and in replays."""

    def __init__(self, inner: Callable[[Tensor], Tensor], seen: dict[bool, list[str]]) -> None:
        super().__init__()
        self.inner, self.seen = inner, seen
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        self.seen[rg.is_replaying()].append(digest(result))
        return self.gain * result.reshape(x.shape).tanh()


def misaligned() -> Tensor:
    """An input whose address no fresh tensor has."""
    flat = torch.randn(N * LENGTH * WIDTH + 1, generator=torch.Generator().manual_seed(2))
    return flat[1:].view(N, LENGTH, WIDTH)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", [*OPERATIONS, *MODULES])
def test_a_replay_computes_the_bits_of_the_first_run(name: str, autocast: bool) -> None:
    if name == "LSTM" and autocast and not has_bfloat16_lstm():
        pytest.skip("oneDNN has no bfloat16 LSTM for this processor")
    for count in (1, 2):
        seen: dict[bool, list[str]] = {False: [], True: []}
        inner = [MODULES[name]() if name in MODULES else OPERATIONS[name] for _ in range(4)]
        operations = [Operation(one, seen) for one in inner]
        stack = rg.ReversibleSequence([rg.two_stream(*operations[i : i + 2]) for i in (0, 2)], exact=True)
        with threads(count):
            found = gradients(stack, "reverse", autocast)
            assert len(seen[False]) == 4
            assert seen[True] == seen[False][2::-1], "all but the last step are replayed, from the last to the first"
            assert found == gradients(stack, "store", autocast)


def has_bfloat16_lstm() -> bool:
    """Whether torch alone can run one here: a processor without AVX-512 cannot."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(WIDTH, WIDTH, batch_first=True)(misaligned().requires_grad_())
    except RuntimeError as error:
        return "could not create a primitive" not in str(error)
    return True


def gradients(stack: rg.ReversibleSequence, memory: Any, autocast: bool) -> list[str]:
    torch.manual_seed(3)
    x = misaligned().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = stack(x, memory=memory)
    return list(map(digest, torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])))


def test_the_precision_of_products_is_that_of_the_first_run() -> None:
    """A change between forward and backward concerns later products alone."""
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([rg.two_stream(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(4)])
    seen = []
    for step in (step for block in stack.blocks for step in block.each_step()):  # type: ignore[union-attr, operator]
        step.branch.register_forward_pre_hook(
            lambda *_: seen.append((rg.is_replaying(), torch.get_float32_matmul_precision()))
        )
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        y = stack(torch.randn(8, 64))
        torch.set_float32_matmul_precision("highest")
        y.sum().backward()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert {precision for replays, precision in seen if replays} == {"medium"}
