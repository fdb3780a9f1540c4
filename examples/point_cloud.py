"""Energies of molecules whose atoms are points in space: the prediction does not change when a molecule is rotated.

The state of such a model has four parts, and only one of them is updated: the values of the atoms
are the streams, while their coordinates, the mask of atoms that exist and the bonds between them
are context, `stack(values, coords=..., mask=..., edges=...)`. The branches use only distances.
Context is a true input: gradients reach the coordinates, where they are forces, and the bonds.

The molecules are synthetic. Their energy, whose formula the model does not know, is that of springs along
the bonds and of charges that attract or repel each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import picture
import retrograde as rg
from memory_by_depth import Memory, print_memory
from terminal import Options, Progress, read_options, run

ATOMS, FEWEST = 10, 6
WIDTH, WAVES, DEPTH, BATCH = 48, 16, 4, 48
Molecules = dict[str, Tensor]  # values, coords, mask, edges


def distances(coords: Tensor) -> Tensor:
    """The distances of all pairs; the small number keeps the gradient of a point's distance to itself finite."""
    return ((coords[:, :, None] - coords[:, None]).square().sum(-1) + 1e-6).sqrt()


class Messages(nn.Module):
    """Every atom gets messages of all others, through a filter made of their distance and bond."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.send = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Sequential(nn.Linear(WAVES + 1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.receive = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, coords: Tensor, mask: Tensor, edges: Tensor) -> Tensor:
        centres = torch.linspace(0, 5, WAVES)
        basis = torch.exp(-3 * (distances(coords)[..., None] - centres).square())
        filters = self.filter(torch.cat([basis, edges[..., None] / 20], -1))
        others = (mask[:, None] & mask[:, :, None]) & ~torch.eye(mask.shape[1], dtype=torch.bool)
        messages = (filters * others[..., None] * self.send(self.norm(x))[:, None]).sum(2) / math.sqrt(ATOMS)
        return self.receive(messages)  # type: ignore[no-any-return]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))


class EnergyModel(nn.Module):
    def __init__(self, depth: int, memory: Memory) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        blocks = [rg.two_stream(Messages(), feed_forward()) for _ in range(depth)]
        self.stack = rg.ReversibleSequence(blocks, memory=memory)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, values: Tensor, coords: Tensor, mask: Tensor, edges: Tensor) -> Tensor:
        """The energy of each molecule: the sum of what its atoms contribute."""
        y = self.stack(self.embed(values[..., None]), coords=coords, mask=mask, edges=edges)
        return (self.head(y)[..., 0] * mask).sum(1)  # type: ignore[no-any-return]


def make_molecules(count: int, generator: torch.Generator) -> Molecules:
    """Chains of atoms with bonds of various stiffness between neighbours, at random positions; the rest is padding."""
    steps = torch.randn(count, ATOMS, 3, generator=generator)
    lengths = 0.5 + torch.rand(count, ATOMS, 1, generator=generator)
    coords = (steps / steps.norm(dim=-1, keepdim=True) * lengths).cumsum(1)
    mask = torch.arange(ATOMS) < torch.randint(FEWEST, ATOMS + 1, (count, 1), generator=generator)
    stiffness = 5 + 15 * torch.rand(count, ATOMS, ATOMS, generator=generator)
    chain = torch.ones(ATOMS, ATOMS).triu(1).tril(1) * stiffness * (mask[:, None] & mask[:, :, None])
    charges = 0.7 * torch.randn(count, ATOMS, generator=generator) * mask
    return {"values": charges, "coords": coords, "mask": mask, "edges": chain + chain.transpose(1, 2)}


def true_energy(values: Tensor, coords: Tensor, mask: Tensor, edges: Tensor) -> Tensor:
    apart = distances(coords)
    springs = edges * (apart - 1).square() / 2
    charges = values[:, :, None] * values[:, None] / (apart + 0.5) * (1 - torch.eye(ATOMS))
    return (springs + charges).sum((1, 2)) / 2


def gradients(energy: Tensor, molecules: Molecules) -> tuple[Tensor, Tensor]:
    """The gradients of the energies to coordinates and edges."""
    coords, edges = torch.autograd.grad(energy.sum(), [molecules["coords"], molecules["edges"]])
    return coords, edges


def rotated(molecules: Molecules, generator: torch.Generator) -> tuple[Molecules, Tensor]:
    """The same molecules, each rotated at random, and the rotations."""
    count = len(molecules["coords"])
    rotations = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator, dtype=torch.float64))[0]
    rotations = (rotations * torch.linalg.det(rotations)[:, None, None]).to(molecules["coords"].dtype)
    return {**molecules, "coords": molecules["coords"] @ rotations}, rotations


def train(options: Options, scale: float) -> EnergyModel:
    model = EnergyModel(2 if options.small else DEPTH, "reverse")
    optimiser = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=options.steps + 1)
    generator = torch.Generator().manual_seed(options.seed + 1)
    progress = Progress("energy", options.steps)
    for step in range(1, options.steps + 1):
        molecules = make_molecules(BATCH, generator)
        loss = nn.functional.smooth_l1_loss(model(**molecules), true_energy(**molecules) / scale)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.show(step, loss.item())
    return model.eval()


def print_agreement(name: str, predicted: Tensor, true: Tensor) -> None:
    likeness = torch.cosine_similarity(predicted.flatten(), true.flatten(), dim=0)
    print(
        f"  gradient to {name}: RMS {predicted.square().mean().sqrt():.3g} for {true.square().mean().sqrt():.3g}",
        end="",
    )
    print(f", cosine {likeness:.3f}")


def print_accuracy(model: EnergyModel, molecules: Molecules, scale: float) -> None:
    guess, truth = model(**molecules) * scale, true_energy(**molecules)
    predicted, true = gradients(guess, molecules), gradients(truth, molecules)
    atoms, bonds = molecules["mask"], molecules["edges"] > 0
    print(f"\n{len(truth)} molecules that it was not trained on, of {FEWEST} to {ATOMS} atoms, against the truth:")
    print(f"  energy: RMS error {(guess - truth).square().mean().sqrt():.3f}, a spread of {truth.std():.3f}")
    print_agreement("coords", predicted[0][atoms], true[0][atoms])
    print_agreement("edges", predicted[1][bonds], true[1][bonds])


def print_changes(model: EnergyModel, molecules: Molecules) -> None:
    """Print how predictions change when molecules are rotated; and when they are stretched, as a control."""
    turned, rotations = rotated(molecules, torch.Generator().manual_seed(5))
    stretched = {**molecules, "coords": 1.01 * molecules["coords"]}
    before, after, other = model(**molecules), model(**turned), model(**stretched)
    forces = gradients(before, molecules)[0]
    change_of_forces = gradients(after, turned)[0] - forces @ rotations
    print("\nEach molecule rotated at random; changes in units of the spread of all energies (or forces):")
    print(f"  largest change of an energy: {(after - before).abs().max() / before.std():.1e}")
    print(f"  largest change of a force, rotated as the molecule is: {change_of_forces.abs().max() / forces.std():.1e}")
    print(f"  for comparison, an energy when stretched by 1%: {(other - before).abs().max() / before.std():.1e}")


def draw(model: EnergyModel, molecules: Molecules, scale: float) -> None:
    figure = picture.blank(13, 4.5)
    if figure is None:
        return
    turned, _ = rotated(molecules, torch.Generator().manual_seed(5))
    left, *others = figure.subplots(1, 3)
    guess, truth = model(**molecules) * scale, true_energy(**molecules)
    left.scatter(truth.detach(), guess.detach(), s=6, alpha=0.5)
    left.axline((0, 0), slope=1, color="black", linewidth=0.8)
    left.set(title="Energies of unseen molecules", xlabel="true", ylabel="predicted")
    for axes, title, shown in zip(others, ("A molecule", "The same, rotated"), (molecules, turned), strict=True):
        energy = model(**shown) * scale
        predicted, true = gradients(energy, shown)[0][0], gradients(true_energy(**shown), shown)[0][0]
        atoms = int(shown["mask"][0].sum())
        places = (shown["coords"][0, :atoms] - shown["coords"][0, :atoms].mean(0)).detach()
        reach = 1.2 * places.norm(dim=1).max().item()
        axes.plot(*places[:, :2].T, color="silver", linewidth=3, zorder=0)
        axes.scatter(*places[:, :2].T, c=shown["values"][0, :atoms], cmap="coolwarm", vmin=-2, vmax=2, s=120)
        for gradient, colour, width in ((true, "black", 0.011), (predicted, "tab:orange", 0.005)):
            x, y, dx, dy = *places[:, :2].T, *-gradient[:atoms, :2].T
            axes.quiver(x, y, dx, dy, color=colour, angles="xy", scale_units="xy", scale=8, width=width)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[])
        axes.set(title=f"{title}: energy {energy[0]:.5f}", xlabel="forces: true (black), of the model (orange)")
    picture.save(figure, "point_cloud.png")


def main() -> None:
    options = read_options(__doc__, steps=2000)
    unseen = make_molecules(64 if options.small else 1000, torch.Generator().manual_seed(options.seed + 2))
    scale = true_energy(**unseen).std().item()
    print("Training on the energies of molecules, new ones at every step:")
    model = train(options, scale)
    for name in ("coords", "edges"):
        unseen[name].requires_grad_()
    print_accuracy(model, unseen, scale)
    print_changes(model, unseen)
    draw(model, {name: part[:300] for name, part in unseen.items()}, scale)
    batch = make_molecules(8 if options.small else BATCH, torch.Generator().manual_seed(3))
    print_memory(EnergyModel, lambda model: model(**batch).square().mean(), (4, 16))


if __name__ == "__main__":
    run(main)
