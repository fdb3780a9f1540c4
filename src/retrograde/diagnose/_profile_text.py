"""A memory profile in words: what the peak is, what to do about it, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde._plan import INVERTING

from ._profile import AFTER, BEFORE, KEPT, KINDS, OWN, ModeProfile, Profile, of_peak
from ._report import in_bytes

Output = tuple[tuple[int, ...], int]  # shape and bytes


def explain(mode: ModeProfile, modes: Sequence[ModeProfile], output: Output | None) -> tuple[str, str]:
    """What the peak of a mode is, in a sentence; and what to do about it."""
    if not mode.peak:
        return "Nothing is held beyond parameters, gradients and the batch.", ""
    kind = max(KINDS, key=mode.held)
    few = sum(block.kept > 0 for block in mode.blocks) <= 2  # the last streams and the graph of their step
    if mode.memory in INVERTING and few and mode.held(KEPT) + mode.held(OWN) > max(mode.held(BEFORE), mode.held(AFTER)):
        return _own(mode)
    if kind == KEPT:
        return _kept(mode, modes)
    if kind == OWN:
        return _own(mode)
    if kind == AFTER:
        return _after(mode, output)
    return (
        f"The peak is what comes before the blocks ({of_peak(mode, BEFORE)}), not the blocks.",
        "Depth costs nothing here: make the batch or the first layers' output smaller, or put them into a checkpoint.",
    )


def _kept(mode: ModeProfile, modes: Sequence[ModeProfile]) -> tuple[str, str]:
    what = {"store": "activations that are kept for the backward pass", "checkpoint": "streams that are kept"}
    count = sum(block.kept > 0 for block in mode.blocks)
    sentence = (
        f"The peak is the {what.get(mode.memory, 'tensors that are kept')} in {count} blocks ({of_peak(mode, KEPT)})."
    )
    best = min(modes, key=lambda other: other.peak)
    if best.peak < 0.9 * mode.peak:
        return sentence, f'It grows with depth. memory="{best.memory}" peaks at {in_bytes(best.peak)}, measured.'
    return sentence, "No other mode is better here: make the batch smaller, or the blocks."


def _own(mode: ModeProfile) -> tuple[str, str]:
    direction, _, place = mode.where.partition(", ")
    operators = next((part.operators for part in mode.parts if part.kind in (OWN, KEPT)), ())
    held = in_bytes(mode.held(OWN) + mode.held(KEPT))
    return (
        f"The peak is one block's own step and its streams, {place} going {direction} ({held} of "
        f"{in_bytes(mode.peak)}; most of it from {', '.join(operators)}).",
        "It does not grow with depth. A wide branch can run a part at a time: retrograde.models.ChunkedFeedForward; or "
        "make the batch smaller.",
    )


def _after(mode: ModeProfile, output: Output | None) -> tuple[str, str]:
    largest = max(mode.held(KEPT), mode.held(OWN), mode.held(BEFORE))
    if output is not None and output[1] * 2 > largest and output[1] * 4 > mode.held(AFTER):
        shape = " × ".join(map(str, output[0]))
        flat = " More blocks would cost nothing." if mode.memory in INVERTING and mode.peak > 2 * largest else ""
        return (
            f"The peak is the output ({shape}, {in_bytes(output[1])}) and what the loss makes of it "
            f"({of_peak(mode, AFTER)}), not the blocks.",
            "If these are logits, compute the loss a part at a time: retrograde.models.chunked_cross_entropy takes the "
            f"hidden states and the head's weight.{flat}",
        )
    return (
        f"The peak is what comes after the blocks, head and loss ({of_peak(mode, AFTER)}), not the blocks.",
        "Compute the head and the loss a part at a time (retrograde.models.chunked_cross_entropy), or put them into "
        "a checkpoint.",
    )


def table(found: Profile) -> str:
    """Each mode's peak, what is in it, and the sentences."""
    lines = []
    for mode in found.modes:
        lines.append(f'memory="{mode.memory}": peak {in_bytes(mode.peak)}, at {mode.where}')
        for part in mode.parts[:5]:
            operators = ", ".join(part.operators)
            lines.append(f"  {in_bytes(part.bytes):>10}  {part.kind:<19} made at {part.made} ({operators})")
        lines += [f"  {found.sentences[mode.memory]}", f"  {found.advice[mode.memory]}", ""]
    return "\n".join(lines).rstrip()
