"""A character model whose feed-forward is a mixture of experts: each character is routed to one of them.

Without a balance loss, routers favour some experts and neglect others. Each mixture therefore returns a
second value, an auxiliary loss that is least when all experts get the same share; `aux="g"` declares it,
and the stack returns the sum over its blocks: `y, aux = stack(x)`. The example trains once without and
once with it. The text is the reference that comes with every Python.

The routers read `hint`, a context of the call. It is bit-identical in a replay, so rounding, which changes
the recomputed streams, cannot send a character to another expert than in the first run.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from memory_by_depth import Memory, print_memory
from terminal import Options, Progress, read_options, run

WIDTH, HEADS, EXPERTS, DEPTH = 64, 4, 8, 6
BATCH, LENGTH = 16, 96
BALANCE = 0.1  # how much the auxiliary loss counts


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Mixture(nn.Module):
    """Each character goes through the expert to which its router gives the highest probability."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def odds(self, hint: Tensor) -> Tensor:
        return self.router(hint).flatten(0, 1).softmax(-1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, hint: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.odds(hint)
        weight, chosen = odds.max(-1)
        counts, order = chosen.bincount(minlength=EXPERTS), chosen.argsort(stable=True)
        parts = self.norm(x).flatten(0, 1)[order].split(counts.tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        update = (weight[:, None] * outputs[order.argsort()]).view_as(x)
        balance = EXPERTS * (counts / len(chosen) * odds.mean(0)).sum()  # 1 if even, EXPERTS if one gets all
        return update, balance


class RoutedModel(nn.Module):
    def __init__(self, characters: int, depth: int, memory: Memory) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.recent = nn.Conv1d(WIDTH, WIDTH, kernel_size=4)  # the input of the routers: the last four characters
        self.stack = rg.ReversibleSequence(
            [rg.two_stream(Attention(), Mixture(), aux="g") for _ in range(depth)], memory=memory
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def hint(self, embedded: Tensor) -> Tensor:
        return self.recent(F.pad(embedded.transpose(1, 2), (3, 0))).transpose(1, 2)  # type: ignore[no-any-return]

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the next character at every position, and the auxiliary loss per block."""
        embedded = self.embed(text)
        y, aux = self.stack(embedded + self.place[: text.shape[1]], hint=self.hint(embedded))
        return self.head(self.norm(y)), aux / len(self.stack.blocks)

    def loss(self, text: Tensor, balance: float) -> tuple[Tensor, Tensor]:
        """The loss to train on, and the cross-entropy in it."""
        logits, aux = self(text[:, :-1])
        entropy = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        return entropy + balance * aux, entropy


class Corpus:
    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.numbers = torch.tensor([number[character] for character in text])

    def batch(self, size: int, generator: torch.Generator, part: str = "train") -> Tensor:
        """Windows of the first nine tenths of the text, or of the last one."""
        border = len(self.numbers) * 9 // 10
        numbers = self.numbers[:border] if part == "train" else self.numbers[border:]
        starts = torch.randint(len(numbers) - LENGTH, (size, 1), generator=generator)
        return numbers[starts + torch.arange(LENGTH + 1)]


def train(corpus: Corpus, options: Options, balance: float) -> RoutedModel:
    torch.manual_seed(options.seed)
    model = RoutedModel(len(corpus.characters), 2 if options.small else DEPTH, "reverse")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=options.steps + 1)
    generator = torch.Generator().manual_seed(options.seed + 1)
    progress = Progress(f"balance x {balance:g}", options.steps)
    for step in range(1, options.steps + 1):
        loss, entropy = model.loss(corpus.batch(BATCH, generator), balance)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.show(step, entropy.item())
    return model.eval()


@torch.no_grad()
def print_usage(model: RoutedModel, text: Tensor) -> str:
    """Print the share of unseen characters that each expert of each block gets; return a line that sums it up."""
    logits, aux = model(text[:, :-1])
    entropy = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    hint = model.hint(model.embed(text[:, :-1]))
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    shares = torch.stack([m.odds(hint).argmax(-1).bincount(minlength=EXPERTS) / text[:, :-1].numel() for m in mixtures])
    print("  block " + "".join(f"  expert {e}" for e in range(EXPERTS)))
    for i, row in enumerate(shares):
        print(f"  {i:<6}" + "".join(f"{share:>10.0%}" for share in row))
    return f"{entropy:>14.3f}{aux:>18.2f}{shares.amax(1).mean():>20.0%}"


@torch.no_grad()
def sample(model: RoutedModel, corpus: Corpus, length: int) -> str:
    text = torch.tensor([[corpus.characters.index(character) for character in "The "]])
    for _ in range(length):
        logits, _ = model(text[:, -LENGTH:])
        odds = (logits[:, -1] / 0.6).softmax(-1)
        text = torch.cat([text, odds.multinomial(1)], 1)
    return "".join(corpus.characters[i] for i in text[0])


def main() -> None:
    options = read_options(__doc__, steps=300)
    corpus = Corpus()
    print(f"{len(corpus.numbers):,} characters of text; blocks of width {WIDTH} with {EXPERTS} experts each.")
    unseen = corpus.batch(4 if options.small else 64, torch.Generator().manual_seed(2), "unseen")
    summary = f"\n  {'auxiliary loss':<16}{'unseen text':>12}{'balance per block':>18}{'busiest expert':>20}\n"
    for balance in (0.0, BALANCE):
        print(f"\nTraining with {balance:g} times the auxiliary loss, then routing unseen text:")
        model = train(corpus, options, balance)
        summary += f"  {'in use' if balance else 'not in use':<14}{print_usage(model, unseen)}\n"
    print(f"{summary}  (a balance of 1 is even, {EXPERTS} is one expert for all)")
    print("\nA sample of the last model:")
    print("  | " + sample(model, corpus, 40 if options.small else 300).replace("\n", "\n  | "))
    print_memory(
        lambda depth, memory: RoutedModel(len(corpus.characters), depth, memory),
        lambda model: model.loss(unseen[:BATCH], BALANCE)[0],
        depths=(4, 16),
    )


if __name__ == "__main__":
    run(main)
