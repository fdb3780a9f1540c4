"""Routing that reads the streams: the effect of rounding on it, and how `decide` prevents it.

Each block sends every character to two of eight experts, by scores that it computes from a stream. Where
the backward pass recomputes that stream by inversion, its last digits differ, and a near tie may be broken
differently: the replay then computes another function than the first run did, and its gradient is wrong by
more than rounding. `rg.decide(indices)` records the choice (here 16 bytes per character and block), and the
replay reuses it. The example trains with it, and then computes the same model's gradients with stored
activations, and with recomputed ones with and without `decide`.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from memory_by_depth import Memory
from retrograde.engine.drift import relative_error
from terminal import Options, Progress, read_options, run

WIDTH, EXPERTS, CHOSEN = 32, 8, 2
BATCH, LENGTH = 8, 64


class Recent(nn.Module):
    """Each position sees the four characters up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.convolve = nn.Conv1d(WIDTH, WIDTH, kernel_size=4)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.convolve(F.pad(self.norm(x).transpose(1, 2), (3, 0)))
        return mixed.transpose(1, 2)


class Mixture(nn.Module):
    """The two best experts of each position, weighted by their scores.

    Args:
        routing: "decided" reuses the first run's choice in a replay, "free" chooses a second time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routing = "decided"
        self.used: dict[bool, Tensor] = {}  # the last choices, of first runs and of replays
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.inner = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.outer = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows)
        chosen = scores.topk(CHOSEN, -1).indices
        if self.routing == "decided":
            chosen = rg.decide(chosen)
        weights = scores.gather(-1, chosen).softmax(-1)
        self.used[rg.is_replaying()] = chosen
        share = torch.zeros_like(scores).scatter(-1, chosen, weights)  # nothing for experts that were not chosen
        inner = F.gelu(torch.einsum("rw,ewi->rei", rows, self.inner)) * share[..., None]
        return torch.einsum("rei,eiw->rw", inner, self.outer).view_as(x)


class Model(nn.Module):
    def __init__(self, characters: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.stack = rg.ReversibleSequence([rg.two_stream(Recent(), Mixture()) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def loss(self, text: Tensor) -> Tensor:
        logits = self.head(self.stack(self.embed(text[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Corpus:
    """The reference documentation that comes with every Python."""

    def __init__(self, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.numbers = torch.tensor([number[character] for character in text])
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        starts = torch.randint(len(self.numbers) - LENGTH, (BATCH, 1), generator=self.generator)
        return self.numbers[starts + torch.arange(LENGTH + 1)]


def train(corpus: Corpus, options: Options) -> Model:
    model = Model(len(corpus.characters), 8 if options.small else 24)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = Progress("decided routing", options.steps)
    for step in range(1, options.steps + 1):
        loss = model.loss(corpus.batch())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress.show(step, loss.item())
    return model


def gradients(model: Model, text: Tensor, *, memory: Memory, routing: str = "decided") -> tuple[Tensor, float]:
    """All gradients of the model in one vector, and the share of choices in which replays differ from first runs."""
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    for mixture in mixtures:
        mixture.routing, mixture.used = routing, {}
    model.stack.memory = memory
    grads = torch.autograd.grad(model.loss(text), list(model.parameters()))
    replayed = [m.used for m in mixtures if len(m.used) == 2]  # the last one keeps its graph
    flips = [(used[True] != used[False]).any(-1).float().mean() for used in replayed]
    return torch.cat([g.float().flatten() for g in grads]), float(torch.stack(flips).mean()) if flips else 0.0


def print_row(model: Model, text: Tensor, dtype: torch.dtype) -> None:
    """Recompute activations with and without `decide`: how many choices differ, and the effect on the gradients."""
    model = model.to(dtype)
    stored, _ = gradients(model, text, memory="store")
    free, flips = gradients(model, text, memory="reverse", routing="free")
    decided, decided_flips = gradients(model, text, memory="reverse")
    errors = [relative_error(recomputed, stored) for recomputed in (free, decided)]
    name = str(dtype).removeprefix("torch.")
    print(f"  {name:<12}{flips:>10.3%}{decided_flips:>12.3%}{errors[0]:>16.2e}{errors[1]:>12.2e}")


def main() -> None:
    options = read_options(__doc__, steps=60)
    corpus = Corpus(options.seed)
    print(f"{len(corpus.numbers):,} characters of text; {EXPERTS} experts per block, of which {CHOSEN} are chosen.")
    model = train(corpus, options)
    text = corpus.batch()
    blocks = len(model.stack.blocks)
    print(
        f"\nPositions that a replay sends to other experts, in {blocks} blocks, and the relative error of all gradients"
    )
    print("against stored activations:")
    print(f"  {'':<12}{'other experts':>22}{'gradient error':>28}")
    print(f"  {'streams':<12}{'free':>10}{'decided':>12}{'free':>16}{'decided':>12}")
    for dtype in (torch.float32, torch.bfloat16):
        print_row(model, text, dtype)


if __name__ == "__main__":
    run(main)
