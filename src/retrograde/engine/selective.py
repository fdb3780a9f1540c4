"""Selective recomputation: results that are expensive to compute and cheap to hold are saved, the rest is recomputed.

Attention over long sequences costs time that grows with their square, and its result is as large as a stream. Matrix
products are most of the rest of a transformer's time, and their results most of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from retrograde.network.save_ops import SaveOps, operators_of

from .capture import replay_mismatch
from .step_record import StepRecord
from .torch_internals import TELLS_RESULTS, let_others_run, results_left_over, tree_flatten

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _SavedResults:
    """Contexts for a branch's first run, which saves results, and for its replay, which reuses them.

    A result that the branch edits later (relu_ after a product, the gates of a GRU) cannot be reused, nor can one
    that drew random numbers: a replay that did not draw them would draw others after it. Such a branch saves nothing.
    """

    __slots__ = ("_asks", "_notes", "first", "replay")

    def __init__(self, save_ops: SaveOps) -> None:
        self._asks = callable(save_ops)  # a policy of the user's, which may decide anew each time
        self._notes = _Notes()
        self.first, self.replay = create_selective_checkpoint_contexts(_noting(_as_policy(save_ops), self._notes))
        if hasattr(self.first, "respect_saved_tensors_hooks"):  # torch 2.15 asks; what is saved is not recomputed
            self.first.respect_saved_tensors_hooks = False

    def end(self) -> Literal["saved", "nothing", "not this time"]:
        """After the first run: whether a replay can reuse results."""
        saved, self._notes.saved, self._notes.storages = self._notes.saved, [], set()
        if saved and not self._notes.is_unusable and all(tensor._version == seen for tensor, seen in saved):
            let_others_run(self.replay)
            return "saved"
        return "not this time" if self._asks else "nothing"


class _Notes:
    """What a first run saves, each with its version, and whether a replay could not reuse it."""

    def __init__(self) -> None:
        self.saved: list[tuple[Tensor, int]] = []
        self.storages: set[int] = set()
        self.is_unusable = False

    def add(self, tensors: list[Tensor]) -> None:
        """Note tensors that a replay will reuse."""
        self.saved += [(tensor, tensor._version) for tensor in tensors]
        self.storages.update(filter(None, map(_storage, tensors)))

    def add_aliases(self, tensors: list[Tensor]) -> None:
        """Note those that lie in the storage of a saved one.

        `_unsafe_view` (a product of a 3-d input without bias ends in it) and `unsafe_split` return views of which
        nothing is known: an edit of one raises no version of the other.
        """
        self.saved += [(tensor, tensor._version) for tensor in tensors if _storage(tensor) in self.storages]


def _noting(policy: Callable[..., Any], notes: _Notes) -> Callable[..., Any]:
    """The policy, with notes of what it saves."""

    def noting(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        answer = policy(context, operator, *args, **kwargs)
        tensors = [value for value in tree_flatten(context.op_output)[0] if isinstance(value, Tensor)]
        if answer in _SAVES:
            notes.is_unusable = notes.is_unusable or _draws(operator, args, kwargs)
            notes.add(tensors)
        elif notes.storages:
            notes.add_aliases(tensors)
        return answer

    return noting


def _as_policy(save_ops: SaveOps) -> Callable[..., Any]:
    """What to save, as a policy of torch's selective checkpoint."""
    if callable(save_ops):
        return save_ops
    operators = operators_of(save_ops)

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _saving_nothing() -> Any:
    """A context in which a branch runs as it does where results are saved: torch takes other kernels there."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)[0]


def run_saving_results(
    record: StepRecord, run: Callable[..., Any], inputs: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> Any:
    """Run a branch and save results for its replay. Where there were none to save, it does not look again."""
    step, traits = record.bound.step, record.cached.traits
    case = (str(step.save_ops), *((t.shape, t.dtype) for t in inputs))
    if not TELLS_RESULTS or traits.saves_nothing(case):
        return run(*inputs, **kwargs)
    results = _SavedResults(step.save_ops)
    with results.first:
        result = run(*inputs, **kwargs)
    record.is_selective = True
    outcome = results.end()
    if outcome == "saved":
        record.saved_results = results.replay
    elif outcome == "nothing":
        traits.note_saves_nothing(case)
    return result


@contextmanager
def reusing_results(record: StepRecord) -> Iterator[None]:
    """A context in which a branch reuses the results of its first run; the second time there are none left."""
    results, record.saved_results = record.saved_results, None
    with results or _saving_nothing():
        yield
    if results is not None and results_left_over(results):
        raise replay_mismatch(record, "ran fewer of the operators whose results were saved than its first run")


def _draws(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention does if its dropout, its one number by position, is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    given = (*args, kwargs.get("dropout_p", 0.0))
    return "attention" not in str(operator) or any(isinstance(value, float) and value > 0 for value in given)


def _storage(tensor: Tensor) -> int | None:
    """Where a tensor's numbers are; None for those that have no storage, or one without an address."""
    return tensor.untyped_storage().data_ptr() or None if tensor.layout is torch.strided else None
