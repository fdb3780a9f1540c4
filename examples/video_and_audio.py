"""A model of clips with video and audio that predicts missing audio from the video.

A ball flies about in a box, pushed at random; its height is the loudness of a tone, and it clicks
when it meets a wall. The model gets the whole video, but only the first quarter of the sound, and
predicts the rest. Blocks in which each modality attends to itself alternate with blocks in which
they attend to each other. A second model, of the same size, has only blocks of the first kind: the
difference shows what attention between the modalities makes possible.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import picture
import retrograde as rg
from memory_by_depth import Memory, print_memory
from terminal import Options, Progress, read_options, run

FRAMES, SIDE, SAMPLES = 24, 10, 8  # frames per clip, pixels per side, samples of sound per frame
HEARD = FRAMES // 4
WIDTH, HEADS, DEPTH, BATCH = 48, 4, 6, 32
Between = Literal["itself", "each other"]


class Clips(NamedTuple):
    video: Tensor  # (clip, frame, pixel)
    audio: Tensor  # (clip, frame, sample)


class Attention(nn.Module):
    """Attention of a modality to itself, or to the other one if it is given; masked positions are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.read = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, *others: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        source, present = (others[0], context_mask) if others else (x, mask)
        queries = self.query(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        keys, values = self.read(self.norm(source)).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        present = None if present is None else present[:, None, None]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=present)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class ClipModel(nn.Module):
    """Every second block is of the kind `between`: "each other", or "itself" like the rest."""

    def __init__(self, depth: int, memory: Memory, between: Between = "each other") -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"video": nn.Linear(SIDE * SIDE, WIDTH), "audio": nn.Linear(SAMPLES, WIDTH)})
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.time = nn.Parameter(0.5 * torch.randn(FRAMES, WIDTH))
        blocks = [
            rg.multimodal(
                "itself" if i % 2 == 0 else between,
                video=(Attention(), feed_forward()),
                audio=(Attention(), feed_forward()),
            )
            for i in range(depth)
        ]
        self.stack = rg.ReversibleSequence(blocks, memory=memory)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SAMPLES))

    def forward(self, clips: Clips) -> Tensor:
        """The whole sound of each clip, from the first frames of the given one."""
        heard = (torch.arange(FRAMES) < HEARD).expand(len(clips.audio), -1)
        audio = torch.where(heard[..., None], self.embed["audio"](clips.audio), self.hidden)
        streams = {"video": self.embed["video"](clips.video) + self.time, "audio": audio + self.time}
        return self.head(self.stack(streams, audio_mask=heard)["audio"])  # type: ignore[no-any-return]

    def loss(self, clips: Clips) -> Tensor:
        error: Tensor = (self(clips) - clips.audio)[:, HEARD:]
        return error.square().mean()


def make_clips(count: int, generator: torch.Generator) -> Clips:
    place, velocity = torch.rand(count, 2, generator=generator), torch.zeros(count, 2)
    places, clicks = [], []
    for _ in range(FRAMES):
        velocity = 0.9 * velocity + 0.08 * torch.randn(count, 2, generator=generator)
        place = place + velocity
        meets_wall = (place < 0) | (place > 1)
        velocity = torch.where(meets_wall, -velocity, velocity)
        place = torch.where(meets_wall, place.round() * 2 - place, place).clamp(0, 1)
        places.append(place)
        clicks.append(meets_wall.any(1))
    trace = torch.stack(places, 1)
    near = torch.exp(-40 * (trace[..., None] - torch.linspace(0, 1, SIDE)).square())  # (clip, frame, axis, pixel)
    video = (near[:, :, 1, :, None] * near[:, :, 0, None, :]).flatten(2)
    time = torch.arange(FRAMES * SAMPLES).view(FRAMES, SAMPLES) / SAMPLES
    tone = torch.sin(2 * math.pi * 0.75 * time) * trace[..., 1, None]
    click = torch.sin(2 * math.pi * 3 * time) * torch.exp(-3 * time[0]) * torch.stack(clicks, 1)[..., None]
    return Clips(video, tone + click)


def train(between: Between, options: Options) -> ClipModel:
    torch.manual_seed(options.seed)
    model = ClipModel(2 if options.small else DEPTH, "reverse", between)
    optimiser = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=options.steps + 1)
    generator = torch.Generator().manual_seed(options.seed + 1)
    progress = Progress(between, options.steps)
    for step in range(1, options.steps + 1):
        loss = model.loss(make_clips(BATCH, generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.show(step, loss.item())
    return model.eval()


@torch.no_grad()
def print_errors(models: dict[Between, ClipModel], clips: Clips) -> None:
    others = clips._replace(video=clips.video.roll(1, 0))
    mean = make_clips(2000, torch.Generator().manual_seed(4)).audio.mean(0).expand_as(clips.audio)
    predictions = {
        "itself and each other": models["each other"](clips),
        "the same model, shown another clip's video": models["each other"](others),
        "itself only": models["itself"](clips),
        "no model: the mean of many clips": mean,
    }
    spread = (mean - clips.audio)[:, HEARD:].square().mean()
    print(f"\nThe sound that was not given, in {len(clips.audio)} clips that the models were not trained on:")
    print(f"  {'modalities attend to':<44}{'RMS error':>10}{'explained':>11}")
    for name, prediction in predictions.items():
        error = (prediction - clips.audio)[:, HEARD:].square().mean()
        print(f"  {name:<44}{error.sqrt():>10.3f}{1 - error / spread:>11.0%}")


@torch.no_grad()
def draw(models: dict[Between, ClipModel], clips: Clips) -> None:
    figure = picture.blank(12, 8)
    if figure is None:
        return
    rows = figure.subplots(4, 1, sharex=True, height_ratios=(1, 2.5, 1, 2.5))
    time = torch.arange(FRAMES * SAMPLES) / SAMPLES
    for i, (film, wave) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        frames = clips.video[i].view(FRAMES, SIDE, SIDE).permute(1, 0, 2).flatten(1)
        film.imshow(frames, cmap="gray_r", extent=(0, FRAMES, 0, 1), aspect="auto", origin="lower")
        film.vlines(range(FRAMES), 0, 1, color="silver", linewidth=0.5)
        film.set(yticks=[], ylabel="video")
        wave.plot(time, clips.audio[i].flatten(), color="silver", linewidth=4, label="true")
        for (between, model), colour in zip(models.items(), ("tab:blue", "tab:red"), strict=True):
            sound = model(clips)[i].flatten()
            wave.plot(time[HEARD * SAMPLES :], sound[HEARD * SAMPLES :], color=colour, linewidth=1.2, label=between)
        wave.axvspan(0, HEARD, color="gold", alpha=0.2, label="given")
        wave.set(ylabel="audio", ylim=(-1.6, 1.6))
    rows[1].legend(ncols=4, loc="lower right", title="modalities attend to", fontsize=8, title_fontsize=8)
    rows[-1].set(xlabel="frame", xlim=(0, FRAMES))
    picture.save(figure, "video_and_audio.png")


def main() -> None:
    options = read_options(__doc__, steps=600)
    unseen = make_clips(64 if options.small else 512, torch.Generator().manual_seed(options.seed + 2))
    print("Training to predict audio from video, new clips at every step; modalities attend to")
    models: dict[Between, ClipModel] = {"each other": train("each other", options), "itself": train("itself", options)}
    print_errors(models, unseen)
    draw(models, unseen)
    batch = make_clips(8 if options.small else BATCH, torch.Generator().manual_seed(3))
    print_memory(ClipModel, lambda model: model.loss(batch), (4, 16))


if __name__ == "__main__":
    run(main)
