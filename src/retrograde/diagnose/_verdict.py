"""A diagnosis in a sentence or two: where the fault is, and what stands out among its causes."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde.measure.formatting import format_bytes, format_error

from ._report import Peak, StackReport


def verdict(stacks: Sequence[StackReport], examined: Peak, stored: Peak, *, reverses: bool) -> str:
    """What was seen, in words.

    Args:
        examined: the peak of the run that was examined.
        stored: the peak of a run that stores all activations.
        reverses: whether the stacks are set to reverse a block, or were only examined as if they were.
    """
    peaks = (
        f'memory="{examined.memory}" peaks at {format_bytes(examined.bytes)}, "store" at {format_bytes(stored.bytes)}.'
    )
    supposed = "" if reverses else "No block is set to be reversed; what follows is about a run in which all are. "
    return f"{supposed}{_refused(stacks)}{_drift(stacks)} {peaks}"


def _refused(stacks: Sequence[StackReport]) -> str:
    """About branches that a stack does not run; the rest of the verdict is for copies of their sources."""
    edits = [f"block {block} of {stack.name} ({branch})" for stack in stacks for block, branch in stack.edits]
    if not edits:
        return ""
    more = f" and {len(edits) - 1} more" if len(edits) > 1 else ""
    return (
        f"Fault: a branch edits its source in place, which a stack refuses: {edits[0]}{more}. Use an out-of-place "
        "operation, or let the branch clone its source. With copies of the sources: "
    )


def _drift(stacks: Sequence[StackReport]) -> str:
    bad = [stack for stack in stacks if stack.first_bad is not None]
    if not bad:
        count, error = sum(len(stack.blocks) for stack in stacks), max(stack.gradient_error for stack in stacks)
        return (
            f"Healthy: all {count} blocks are within the tolerance {stacks[0].tolerance:.2g}; "
            f"the gradient error is at most {format_error(error)}."
        )
    stack = max(bad, key=lambda s: s.drift)  # the gradients of the others may be wrong because of this one's
    assert stack.first_bad is not None
    block = stack.blocks[stack.first_bad]
    return (
        f"Fault: on the way back, block {block.index} of {stack.name} ({block.name}) is the first "
        f"past the tolerance {stack.tolerance:.2g}, and {len(stack.past)} of {len(stack.blocks)} blocks are. "
        f"The gradient error is up to {format_error(stack.gradient_error)}, the drift of recomputed streams up to "
        f"{format_error(stack.drift)}{_cause(stack)}."
    )


def _cause(stack: StackReport) -> str:
    """What stands out among the causes of drift, in half a sentence."""
    causes = []
    sizes = [b.magnitude for b in stack.blocks if b.magnitude]
    if sizes and max(sizes) > 100 * min(sizes):
        causes.append(f"the streams grow from {min(sizes):.1e} to {max(sizes):.1e} on the way")
    gains = [b.amplification for b in stack.blocks if b.amplification]
    if gains and max(gains) > 2:
        causes.append(f"the inverse magnifies errors up to {max(gains):.3g} times per block")
    if stack.flips:
        causes.append(f"{stack.flips} decisions flip")
    if not causes and stack.floor > 1e-3:
        causes.append(f"{stack.dtype} streams round to {stack.floor:.0e} at every step")
    return f": {', '.join(causes)}" if causes else ""
