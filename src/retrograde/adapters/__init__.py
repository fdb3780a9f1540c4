"""Drop-ins: published packages, unmodified, on retrograde's engine.

    >>> import retrograde.adapters
    >>> handle = retrograde.adapters.install("reformer_pytorch")
    >>> # from reformer_pytorch import ReformerLM: it trains on retrograde now
    >>> handle.undo()

`install` takes the name of a package and replaces its `reversible` module (in nuwa `reversible_video_audio` too) by
one of ours: `routing_transformer`, `lie_transformer_pytorch`, `nuwa_pytorch`, `axial_attention`, `reformer_pytorch`.
Names, signatures, return types and `state_dict` keys are the published ones, forward results are bit-identical, and
gradients are those of plain autograd. The sequences are `retrograde.ReversibleSequence`s: for example, `memory` can
be assigned.

NOTE [What a drop-in keeps]
 Published behaviour that is silent where we would raise, or that our own API does not encourage. A published model
 depends on each of these:

 1. routing: the argument `aux_loss` is ignored. `RoutingTransformerEncDec` passes it to its decoder, which has no
    use for it.
 2. routing: f and g receive `_reverse`, False in the first run and True in a replay.
 3. routing: k-means may write its means through `.data`, in the forward run, or by its hook in the middle of the
    backward pass. No version counter shows it; the drop-in records what each branch saw, and the replay sees the same.
 4. reformer: with `send_signal` f and g receive `_reverse` and `_depth`. In a replay the published attention reads
    the buckets that it saved in an attribute; the drop-in shows it those of the call that is replayed. With
    `attn_chunks > 1` the attention saves only the last chunk's buckets, and its gradients are wrong: a fault of the
    model, with its own sequence as with ours. In evaluation the attention saves none, and the replay passes
    `_reverse=False`.
 5. reformer: no signals are sent where `reverse_thres` turns reversing off, unless layers are dropped.
 6. nuwa: a mask may be edited in place once the call has returned. `NUWA` and `NUWAVideoAudio` do so with the mask
    of their text; the drop-in copies boolean arguments, and the replay uses the copies.
 7. video-audio: in `inter_modality_cross_attn` blocks k runs on video and g on audio, although callers pass g for
    video and k for audio. Published checkpoints are trained that way.
 8. video-audio: `intra_modality_self_attn` blocks receive no mask, whatever masks the call has.
 9. lie: f and g return the whole state; all of it except the values is ignored.
 10. A replay does not change counters and averages in plain attributes of a routing, reformer or lie branch: after it
    they have the values from before.

NOTE [Where a drop-in differs]
 1. What was silently ignored raises: a route for more or fewer blocks than there are, an argument without a route,
    fewer block types than blocks, a mask of another shape, a branch whose result would be broadcast.
 2. An input of any rank works where published code split one dimension and joined another.
 3. lie under autocast: the streams keep their dtype. The published sum is in place, in the dtype of the branch's
    result, so that its streams turn to bfloat16 in the first block, which no inverse can undo.
 4. The blocks in `blocks` are the engine's. Their own `forward` and `backward_pass` are not those published.
 5. As in the published packages, a recomputed stream differs from the original in its last bits, and where a branch
    chooses (routing's clusters, tokens that are tied in its top-k) it may choose differently. With
    `sequence.memory = "checkpoint"` nothing is inverted, and the replay is exact.
"""

from ._install import Installation as Installation
from ._install import install as install
from ._install import uninstall as uninstall
