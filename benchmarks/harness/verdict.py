"""Where retrograde is not first, computed from the measurements, and why, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .compiled import COMPILED_CONTENDERS
from .contenders import BASELINES, OURS_AND_TORCH, PAIR, REVERSE, Contender
from .peers import PEERS
from .results import Comparison, Growth, Results

CONTENDERS = {c.name: c for c in (*OURS_AND_TORCH, *PEERS, *COMPILED_CONTENDERS)}
NEARLY = 1.005  # bytes are exact: this only allows for a few numbers that are saved besides the streams
LIMIT_MARGIN = 1.05
GRADIENT_MARGIN = 1.05
SLOPE_MARGIN = {"live": 0.005, "resident": 0.05}  # in pairs of streams per block; resident memory comes in pages

# The known causes, by the part of the report in which a finding stands.
CAUSES = {
    "tiny": "The fixed cost of a block is visible: retrograde lets autograd save each tensor through hooks in Python, "
    "where a backward written by hand inside one custom function saves nothing, and checks in each step whether "
    "modules, generators, weights and saved tensors are those that the replay will need. The README says what that "
    "gives: second derivatives, `autograd.grad`, hooks, losses on hidden states, and errors instead of wrong "
    'gradients. `backend="retrograde"`, among the compiled ones, has no such cost.',
    "multiply": "Branches that only multiply show the fixed cost of a block: the hooks in Python for each saved "
    "tensor, and the record of the state that a replay needs.",
    "compiled": "A compiler that may save a part of the activations recomputes less than one that saves only the "
    'streams, as `backend="retrograde"` does. Branches that are compiled one by one pay for their guards in each call.',
    "float32": "Adding and then subtracting rounds, so recomputed activations drift; stored ones do not, nor those "
    'recomputed from a checkpoint. `memory="checkpoint"` and anchors are the remedies.',
}
CAUSES["bfloat16"] = CAUSES["float32"]
CAUSES["resident memory, allocator default"] = (
    "With glibc's defaults most of the growth is fragmentation of the heap; with the tight allocator nearly all of it "
    "is gone."
)
CAUSES["resident memory, allocator tight"] = (
    "What a block costs besides tensors: the nodes of its graph, which a custom function does not have, and our record "
    "of its steps."
)
CAUSES["autocast"] = (
    "The published libraries forget autocast in the replay: their backward runs in float32, in float32's time, and is "
    "then nearer to float64 in a shallow stack than any backward of the network that ran forward. As depth grows the "
    "activations that they recompute in float32 are no longer those of the bfloat16 forward pass. " + CAUSES["float32"]
)


@dataclass(frozen=True)
class Finding:
    """A row in which retrograde is not first."""

    part: str
    text: str


def findings(results: Results) -> list[Finding]:
    """Every claim that the measurements do not support."""
    all_findings: list[Finding] = []
    for name, comparison in results.comparisons.items():
        texts = [*_not_beaten(comparison), *_smaller(comparison), *_faster_on_small(comparison), *_limit(comparison)]
        all_findings += [Finding(name, text) for text in texts]
    if results.live is not None:
        all_findings += [Finding("live memory by depth", text) for text in _slopes(results.live, SLOPE_MARGIN["live"])]
    for allocator, growth in results.resident.items():
        part = f"resident memory, allocator {allocator}"
        all_findings += [Finding(part, text) for text in _slopes(growth, SLOPE_MARGIN["resident"])]
    all_findings += _gradient_findings(results)
    return all_findings


def rivals_in(names: object, arithmetic: str = "two streams") -> list[Contender]:
    """The contenders among these that are neither plain autograd nor retrograde."""
    chosen = [CONTENDERS[name] for name in names]  # type: ignore[attr-defined]
    return [c for c in chosen if c.family in ("torch", "peer") and c.arithmetic == arithmetic]


def _not_beaten(comparison: Comparison) -> Iterator[str]:
    """Rivals that no mode of retrograde equals in both memory and time."""
    for arithmetic in ("two streams", "momentum"):
        ours = [CONTENDERS[n] for n in comparison.seconds if CONTENDERS[n].family == "retrograde"]
        ours = [c for c in ours if c.arithmetic == arithmetic]
        for rival in rivals_in(comparison.seconds, arithmetic):
            text = _against(comparison, rival, ours)
            if text:
                yield text


def _against(comparison: Comparison, rival: Contender, ours: list[Contender]) -> str:
    low, time, high = comparison.to_baseline(rival)
    size = comparison.in_pairs(rival.name)
    fits = [c for c in ours if comparison.in_pairs(c.name) <= size * NEARLY]
    if not fits:
        smallest = min(ours, key=lambda c: comparison.in_pairs(c.name))
        return f"{rival.name} peaks at {size:.1f} S; the smallest of ours, {smallest.name}, at " + (
            f"{comparison.in_pairs(smallest.name):.1f} S."
        )
    best = min(fits, key=lambda c: comparison.to_baseline(c)[1])
    our_low, our_time, our_high = comparison.to_baseline(best)
    if our_time <= time:
        return ""
    spread = " (within the spread)" if our_low <= high and low <= our_high else ""
    return (
        f"{rival.name} takes {time:.2f} of {BASELINES[rival.arithmetic]} at {size:.1f} S; the fastest of ours in that "
        f"memory, {best.name}, {our_time:.2f} at {comparison.in_pairs(best.name):.1f} S{spread}."
    )


def _smaller(comparison: Comparison) -> Iterator[str]:
    if REVERSE not in comparison.peaks:
        return
    ours = comparison.in_pairs(REVERSE)
    for rival in rivals_in(comparison.peaks):
        if comparison.in_pairs(rival.name) * NEARLY < ours:
            yield f"{rival.name} has the smaller peak: {comparison.in_pairs(rival.name):.1f} S, {REVERSE} {ours:.1f} S."


def _faster_on_small(comparison: Comparison) -> Iterator[str]:
    """On small blocks, reverse should be no slower than the fastest library that reverses."""
    peers = [c for c in rivals_in(comparison.seconds) if c.family == "peer"]
    if comparison.setting.name not in ("tiny", "multiply") or not peers or REVERSE not in comparison.seconds:
        return
    best = min(peers, key=lambda c: comparison.to_baseline(c)[1])
    low, ratio, high = comparison.ratio(REVERSE, best.name)
    if ratio > 1:
        spread = " (within the spread)" if low <= 1 else ""
        yield (
            f"{REVERSE} takes {ratio:.3f} ({low:.3f} to {high:.3f}) of the time of {best.name}, the fastest peer that "
            f"reverses{spread}."
        )


def limit(depth: int) -> float:
    """The least time in units of plain autograd's: every branch runs twice, except the last, whose graph is saved."""
    return (4 * depth - 1) / (3 * depth)


def _limit(comparison: Comparison) -> Iterator[str]:
    if comparison.setting.name != "large" or not {REVERSE, PAIR} <= set(comparison.seconds):
        return
    bound, (_, ratio, _) = limit(comparison.setting.depth), comparison.ratio(REVERSE, PAIR)
    if ratio > LIMIT_MARGIN * bound:
        yield (
            f"{REVERSE} takes {ratio:.3f} of plain autograd on a pair of streams, {ratio / bound - 1:.1%} above the "
            f"limit (4D−1)/3D = {bound:.3f}."
        )


def _slopes(growth: Growth, margin: float) -> Iterator[str]:
    if REVERSE not in growth.peaks:
        return
    ours = growth.slope(REVERSE) / growth.pair_bytes
    for rival in rivals_in(growth.peaks):
        theirs = growth.slope(rival.name) / growth.pair_bytes
        if theirs + margin < ours:
            yield f"{rival.name} grows by {theirs:.3f} S per block, {REVERSE} by {ours:.3f} S."


def _gradient_findings(results: Results) -> Iterator[Finding]:
    if results.gradients is None:
        return
    for precision, by_depth in results.gradients.errors.items():
        for depth, errors in by_depth.items():
            if REVERSE not in errors:
                continue
            better = [
                rival
                for rival in rivals_in(errors)
                if errors[rival.name] * GRADIENT_MARGIN < errors[REVERSE] and not errors[rival.name] > 1
            ]
            if better:
                best = min(better, key=lambda c: errors[c.name])
                yield Finding(
                    precision,
                    f"Gradients at depth {depth}: {len(better)} have a smaller error than {REVERSE}, whose error is "
                    f"{errors[REVERSE]:.2g}; that of {best.name} is {errors[best.name]:.2g}.",
                )
