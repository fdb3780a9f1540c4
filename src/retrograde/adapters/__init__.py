"""Drop-ins: published packages, unmodified, on retrograde's engine.

    >>> import retrograde.adapters
    >>> handle = retrograde.adapters.install("reformer_pytorch")
    >>> # from reformer_pytorch import ReformerLM: it trains on retrograde now
    >>> handle.undo()

`install` takes the name of a package and puts a module of ours in the place of its `reversible` module
(nuwa: of `reversible_video_audio` too): `routing_transformer`, `lie_transformer_pytorch`, `nuwa_pytorch`,
`axial_attention`, `reformer_pytorch`. Names, signatures, return types and `state_dict` keys are those that were
published, forward results have the same bits, and gradients are those of plain autograd. The sequences are
`retrograde.ReversibleSequence`s: `memory`, for one, can be assigned.

NOTE [What a drop-in keeps]
 Published behaviour that says nothing where we would raise, or that our own API does not invite, kept because a
 published model depends on it:

 1. routing: the argument `aux_loss` is dropped. `RoutingTransformerEncDec` passes it to its decoder for nothing.
 2. routing: f and g receive `_reverse`, False in the first run and True in a replay.
 3. routing: k-means may write its means through `.data`, in the forward run, or by its hook in the middle of the
    backward pass. No version counter shows it; the drop-in keeps what each branch saw and replays that.
 4. reformer: with `send_signal` f and g receive `_reverse` and `_depth`. In a replay the published attention reads
    the buckets that it kept in an attribute; the drop-in shows it those of the call that is replayed. With
    `attn_chunks > 1` the attention keeps the last chunk's buckets alone, and its gradients are wrong: a fault of
    the model, with its own sequence as with ours. In evaluation the attention keeps none, and the replay says
    `_reverse=False`.
 5. reformer: no signals are sent where `reverse_thres` turns reversing off, unless layers are dropped.
 6. nuwa: a mask may be edited in place once the call has returned. `NUWA` and `NUWAVideoAudio` do so with the mask
    of their text; the drop-in takes a copy of boolean arguments, of which the replay makes use.
 7. video-audio: in `inter_modality_cross_attn` blocks k runs on video and g on audio, though callers hand over g
    with video and k with audio. Published checkpoints are trained that way.
 8. video-audio: `intra_modality_self_attn` blocks receive no mask, whatever masks the call has.
 9. lie: f and g return the whole state; all of it but the values is ignored.
 10. Counters and averages in plain attributes of a routing, reformer or lie branch are as after its first run, once
    the replay is over: it leaves no trace.

NOTE [Where a drop-in differs]
 1. What was silently ignored raises: a route for more or fewer blocks than there are, an argument without a route,
    fewer block types than blocks, a mask of another shape, a branch whose result would be broadcast.
 2. An input of any rank works where published code split one dimension and joined another.
 3. lie under autocast: the streams keep their dtype. The published sum is in place, in the dtype of the branch's
    result, so that its streams turn to bfloat16 in the first block, which no inverse can undo.
 4. The blocks in `blocks` are the engine's. Their own `forward` and `backward_pass` are not those published.
 5. As there, a stream that is rebuilt differs in its last bits from what it was, and where a branch chooses (routing's
    clusters, tokens that are tied in its top-k) it may choose otherwise. `sequence.memory = "checkpoint"` rebuilds
    nothing by an inverse, and is exact.
"""

from ._install import Installation as Installation
from ._install import install as install
from ._install import uninstall as uninstall
