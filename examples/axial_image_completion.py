"""An image model with axial attention that completes the lower half of a handwritten digit from its upper half.

Attention runs along rows in one branch and along columns in the other, so that a pixel gets information
from every other one within a block. Images have their channels first: with `dim=1` the two streams are
halves of the channels, and are concatenated there. The digits are those that come with scikit-learn,
8 x 8 pixels.
"""

from __future__ import annotations

import importlib
import sys
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import picture
import retrograde as rg
from memory_by_depth import Memory, print_memory
from terminal import Options, Progress, read_options, run

SIDE, GIVEN = 8, 4  # pixels per side; rows that are given
WIDTH, HEADS, LAYERS = 32, 2, 3  # channels per stream; a layer has a block of attention and one of feed-forwards
BATCH, TRAINING, SHOWN = 32, 1400, 10
SHADES = " .:-=+*#%@"


class AxialAttention(nn.Module):
    def __init__(self, along: Literal["rows", "columns"]) -> None:
        super().__init__()
        self.along = along
        self.norm = nn.GroupNorm(1, WIDTH)
        self.project = nn.Conv2d(WIDTH, 3 * WIDTH, 1, bias=False)
        self.out = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x if self.along == "rows" else x.transpose(2, 3))
        queries, keys, values = self.project(x).unflatten(1, (3, HEADS, -1)).permute(1, 0, 4, 2, 5, 3)
        mixed = F.scaled_dot_product_attention(queries, keys, values)  # (batch, row, head, place in the row, channel)
        update: Tensor = self.out(mixed.permute(0, 2, 4, 1, 3).flatten(1, 2))
        return update if self.along == "rows" else update.transpose(2, 3)


def feed_forward() -> nn.Module:
    return nn.Sequential(
        nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv2d(2 * WIDTH, WIDTH, 1)
    )


class ImageModel(nn.Module):
    def __init__(self, layers: int, memory: Memory) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, 2 * WIDTH, 3, padding=1)
        self.place = nn.Parameter(0.5 * torch.randn(2 * WIDTH, SIDE, SIDE))
        blocks = []
        for _ in range(layers):
            blocks.append(rg.two_stream(AxialAttention("rows"), AxialAttention("columns")))
            blocks.append(rg.two_stream(feed_forward(), feed_forward()))
        self.stack = rg.ReversibleSequence(blocks, split="chunk", merge="concat", dim=1, memory=memory)
        self.head = nn.Sequential(nn.GroupNorm(1, 2 * WIDTH), nn.Conv2d(2 * WIDTH, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the hidden pixels' brightness, from images of which only the upper rows are read."""
        mask = torch.zeros_like(images)
        mask[:, :, :GIVEN] = 1
        x = self.embed(torch.cat([images * mask, mask], 1)) + self.place
        return self.head(self.stack(x))[:, :, GIVEN:]  # type: ignore[no-any-return]

    def loss(self, images: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(images), images[:, :, GIVEN:])


def read_digits() -> tuple[Tensor, Tensor]:
    """Images of shape (number, 1, 8, 8), from 0 to 1: those to train on, and those to test on."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError:
        sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")
    images = torch.tensor(datasets.load_digits().images, dtype=torch.float32)[:, None] / 16
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return images[:TRAINING], images[TRAINING:]


def train(images: Tensor, options: Options) -> ImageModel:
    model = ImageModel(1 if options.small else LAYERS, "reverse")
    optimiser = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=options.steps + 1)
    progress = Progress("completion", options.steps)
    for step in range(1, options.steps + 1):
        loss = model.loss(images[torch.randint(len(images), (BATCH,))])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.show(step, loss.item())
    return model.eval()


def nearest(images: Tensor, training: Tensor) -> Tensor:
    """The lower halves of the training images whose upper halves are most similar."""
    upper, candidates = images[:, :, :GIVEN].flatten(1), training[:, :, :GIVEN].flatten(1)
    return training[torch.cdist(upper, candidates).argmin(1), :, GIVEN:]


def print_errors(guesses: dict[str, Tensor], truth: Tensor) -> None:
    print(f"\nThe lower halves of {len(truth)} digits that it has not seen (brightness from 0 to 1):")
    print(f"  {'':<34}{'RMS error':>10}{'pixels off by more than 0.25':>32}")
    for name, guess in guesses.items():
        error = guess - truth
        print(f"  {name:<34}{error.square().mean().sqrt():>10.3f}{(error.abs() > 0.25).float().mean():>32.1%}")


def print_digits(completed: Tensor, truth: Tensor) -> None:
    print("\nGiven above the line, completed below it; the truth at the bottom:")
    for row in range(2 * SIDE - GIVEN):
        images = completed if row < SIDE else truth
        lines = images[:, 0, row if row < SIDE else row - SIDE + GIVEN]
        if row in (GIVEN, SIDE):
            print("  " + "   ".join("-" * 2 * SIDE for _ in lines))
        print("  " + "   ".join("".join(2 * SHADES[int(v * (len(SHADES) - 1))] for v in line) for line in lines))


def draw(rows: dict[str, Tensor]) -> None:
    figure = picture.blank(SHOWN, len(rows) * 1.1)
    if figure is None:
        return
    for axes_row, (name, images) in zip(figure.subplots(len(rows), SHOWN), rows.items(), strict=True):
        for axes, image in zip(axes_row, images, strict=True):
            axes.imshow(image[0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.axhline(GIVEN - 0.5, color="tab:red", linewidth=1)
            axes.set(xticks=[], yticks=[])
        axes_row[0].set_ylabel(name)
    picture.save(figure, "axial_image_completion.png")


@torch.no_grad()
def show(model: ImageModel, training: Tensor, images: Tensor) -> None:
    upper, truth = images[:, :, :GIVEN], images[:, :, GIVEN:]
    guess = model(images).sigmoid()
    alike = nearest(images, training)
    mean = training[:, :, GIVEN:].mean(0, keepdim=True).expand_as(truth)
    print_errors({"this model": guess, "the most similar training image": alike, "the mean image": mean}, truth)
    completed = torch.cat([upper, guess], 2)
    print_digits(completed[:5], images[:5])
    given = torch.cat([upper, torch.zeros_like(truth)], 2)
    rows = {"given": given, "completed": completed, "truth": images, "most similar": torch.cat([upper, alike], 2)}
    draw({name: images[:SHOWN] for name, images in rows.items()})


def main() -> None:
    options = read_options(__doc__, steps=900)
    training, unseen = read_digits()
    print(f"Training on {len(training)} digits:")
    model = train(training, options)
    show(model, training, unseen)
    print_memory(
        lambda blocks, memory: ImageModel(blocks // 2, memory),
        lambda model: model.loss(training[: 8 if options.small else BATCH]),
        depths=(4, 16) if options.small else (8, 32),
    )


if __name__ == "__main__":
    run(main)
