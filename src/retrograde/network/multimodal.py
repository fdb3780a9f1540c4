"""Blocks for several modalities, each with two streams of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from .block import Block
from .branch import accepted
from .choices import check_choice
from .step import Step

Attends = Literal["itself", "context", "each other"]
Branches = tuple[Callable[..., Any], Callable[..., Any]]


def multimodal(attends: Attends, /, **modalities: Branches) -> Block:
    """A block of attention and feed-forward for each modality, in the order given.

    Each modality `m` has two streams: `m += attention(m_memory, ...)`, then
    `m_memory += feed_forward(m)`. An attention branch receives, if its signature names them,
    `mask` (the call's `m_mask`), and what it attends to:

    - "itself": its own memory stream alone;
    - "context": `context` and `context_mask` of the call;
    - "each other": the memory streams of the other modalities, by position after its own, and
      `context_mask`, the mask of the other modality if there is one other, otherwise `<name>_mask` of each.

    Examples:
        >>> import torch, retrograde as rg
        >>> class Cross(torch.nn.Linear):
        ...     def forward(self, x, other): return super().forward(x) + other.mean(1, keepdim=True)
        >>> block = rg.multimodal("each other", video=(Cross(8, 8), torch.nn.Linear(8, 8)),
        ...                       audio=(Cross(8, 8), torch.nn.Linear(8, 8)))
        >>> stack = rg.ReversibleSequence([block])
        >>> out = stack({"video": torch.randn(2, 5, 8), "audio": torch.randn(2, 3, 8)})
        >>> out["video"].shape, out["audio"].shape
        (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """
    check_choice("attends", attends, get_args(Attends))
    if not modalities or (attends == "each other" and len(modalities) < 2):
        raise ValueError(f"A block that attends to {attends} cannot be made of the modalities {list(modalities)}.")
    for name, branches in modalities.items():
        if len(branches) != 2:
            raise TypeError(f"{name} needs a pair (attention, feed_forward), not {branches!r}.")
    steps: list[Step] = []
    for name, (attention, feed_forward) in modalities.items():
        others = [other for other in modalities if other != name] if attends == "each other" else []
        steps.append(_attention(attention, name, others, attends))
        steps.append(Step(feed_forward, _memory(name), (name,), takes=(), name=f"{name} feed-forward"))
    return Block(
        *steps,
        streams=[stream for name in modalities for stream in (name, _memory(name))],
        groups={name: (name, _memory(name)) for name in modalities},
    )


def _attention(branch: Callable[..., Any], name: str, others: list[str], attends: Attends) -> Step:
    wanted = {"mask": f"{name}_mask"}
    masks = {"mask": name}
    if attends == "context":
        wanted |= {"context": "context", "context_mask": "context_mask"}
    elif len(others) == 1:
        wanted |= {"context_mask": f"{others[0]}_mask"}
        masks |= {"context_mask": others[0]}
    else:
        wanted |= {f"{other}_mask": f"{other}_mask" for other in others}
        masks |= {f"{other}_mask": other for other in others}
    takes = accepted(branch, wanted)
    return Step(
        branch,
        name,
        (_memory(name), *(_memory(other) for other in others)),
        takes=takes,
        masks={parameter: stream for parameter, stream in masks.items() if parameter in takes},
        name=f"{name} attention to {attends}",
    )


def _memory(name: str) -> str:
    return f"{name}_memory"
