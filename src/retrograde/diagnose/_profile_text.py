"""A memory profile in words: what the peak is, what to do about it, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde.measure.formatting import format_bytes

from ._profile import AFTER, BEFORE, KINDS, OWN, SAVED, ModeProfile, Profile

Output = tuple[tuple[int, ...], int]  # shape and bytes


def explain(mode: ModeProfile, modes: Sequence[ModeProfile], output: Output | None) -> tuple[str, str]:
    """What the peak of a mode is, in a sentence; and what to do about it."""
    if not mode.peak:
        return "Nothing is alive beyond parameters, gradients and the batch.", ""
    kind = max(KINDS, key=mode.bytes_of)
    in_blocks, elsewhere = mode.bytes_of(SAVED, OWN), max(mode.bytes_of(BEFORE), mode.bytes_of(AFTER))
    if kind == OWN or (_is_flat(mode) and in_blocks > elsewhere):
        return _own(mode)
    if kind == SAVED:
        return _saved(mode, modes)
    if kind == AFTER:
        return _after(mode, output)
    return (
        f"The peak is what comes before the blocks ({_of_peak(mode, BEFORE)}), not the blocks.",
        f"{_growth(mode)} Make the batch or the first layers' output smaller, or put them into a checkpoint.",
    )


def _is_flat(mode: ModeProfile) -> bool:
    """Whether more blocks would save nothing more: only the last streams and the graph of their step are saved."""
    return mode.needs_inverse and sum(block.saved > 0 for block in mode.blocks) <= 2


def _growth(mode: ModeProfile) -> str:
    """Whether the memory grows with depth, and by how much."""
    if _is_flat(mode):
        return "It does not grow with depth."
    saving = sorted(block.saved for block in mode.blocks[:-1] if block.saved)  # the last one keeps a graph too
    return f"It grows with depth{f', by {format_bytes(saving[len(saving) // 2])} per block' if saving else ''}."


def _saved(mode: ModeProfile, modes: Sequence[ModeProfile]) -> tuple[str, str]:
    what = {"store": "activations that are stored for the backward pass", "checkpoint": "streams that are saved"}
    count = sum(block.saved > 0 for block in mode.blocks)
    sentence = (
        f"The peak is the {what.get(mode.memory, 'tensors that are saved')} in {count} blocks "
        f"({_of_peak(mode, SAVED)})."
    )
    best = min(modes, key=lambda other: other.peak)
    if best.peak < 0.9 * mode.peak:
        return sentence, f'It grows with depth. memory="{best.memory}" peaks at {format_bytes(best.peak)}, measured.'
    return sentence, "No other mode is better here: make the batch smaller, or the blocks."


def _own(mode: ModeProfile) -> tuple[str, str]:
    direction, _, place = mode.where.partition(", ")
    operators = next((part.operators for part in mode.parts if part.kind in (OWN, SAVED)), ())
    return (
        f"The peak is one block's own step and its streams, in the {direction} pass of {place} "
        f"({_of_peak(mode, OWN, SAVED)}; most of it from {', '.join(operators)}).",
        f"{_growth(mode)} Run a wide branch in chunks (retrograde.models.ChunkedFeedForward), or make the batch "
        "smaller.",
    )


def _after(mode: ModeProfile, output: Output | None) -> tuple[str, str]:
    largest = max(mode.bytes_of(SAVED), mode.bytes_of(OWN), mode.bytes_of(BEFORE))
    if output is not None and output[1] * 2 > largest and output[1] * 4 > mode.bytes_of(AFTER):
        shape = " × ".join(map(str, output[0]))
        flat = " More blocks would cost nothing." if _is_flat(mode) and mode.peak > 2 * largest else ""
        return (
            f"The peak is the output ({shape}, {format_bytes(output[1])}) and what the loss computes from it "
            f"({_of_peak(mode, AFTER)}), not the blocks.",
            "If these are logits, compute the loss in chunks: retrograde.models.chunked_cross_entropy takes the "
            f"hidden states and the head's weight.{flat}",
        )
    return (
        f"The peak is what comes after the blocks, head and loss ({_of_peak(mode, AFTER)}), not the blocks.",
        "Compute the head and the loss in chunks (retrograde.models.chunked_cross_entropy), or put them into a "
        "checkpoint.",
    )


def _of_peak(mode: ModeProfile, *kinds: str) -> str:
    return f"{format_bytes(mode.bytes_of(*kinds))} of {format_bytes(mode.peak)}"


def table(profile: Profile) -> str:
    """Each mode's peak, what is in it, and the sentences."""
    lines = []
    for mode in profile.modes:
        lines.append(f'memory="{mode.memory}": peak {format_bytes(mode.peak)}, at {mode.where}')
        for part in mode.parts[:5]:
            operators = ", ".join(part.operators)
            lines.append(f"  {format_bytes(part.bytes):>10}  {part.kind:<19} made at {part.made} ({operators})")
        lines += [f"  {profile.sentences[mode.memory]}", f"  {profile.advice[mode.memory]}", ""]
    return "\n".join(lines).rstrip()
