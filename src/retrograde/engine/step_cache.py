"""What is learned of a step from call to call. It saves work, and never decides a result."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_not
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.network.block import BoundStep
from retrograde.network.reachable import functions_reached, reachable
from retrograde.network.step import Step, StepError
from retrograde.network.streams import Streams

from .branch_state import BranchState
from .branch_traits import BranchTraits
from .module_state import ModuleSnapshot
from .torch_internals import casts_inputs_once, compiled_code

_requires_grad = attrgetter("requires_grad")
_WITH_MORE = (FunctionType, torch.jit.ScriptFunction, Tensor)
"""What makes the snapshot of a callable depend on more than the modules that it holds; a tensor is a caller's."""


class CachedReplay:
    """How a step was before its first run: shared by calls for as long as the step stays the same.

    The step keeps it, so it does not keep the step: a model is freed when the last reference to it goes.
    """

    __slots__ = ("compiled", "coupling", "is_steady", "requires", "state", "stride", "target", "traits")

    def __init__(
        self,
        bound: BoundStep,
        streams: Streams,
        state: BranchState,
        traits: BranchTraits,
        compiled: Sequence[CodeType] = (),
    ) -> None:
        self.compiled = compiled  # parts of the branch that the user compiled
        self.coupling = bound.step.coupling
        self.target = bound.target
        self.requires = list(map(_requires_grad, streams))
        self.stride = streams[bound.target].stride()
        self.state = state
        self.traits = traits
        self.is_steady = False  # until a first run has shown that it leaves nothing behind


class StepCache:
    """What lasts from call to call: the modules in the step's branch, its traits in each training mode.

    It is kept with the step, and forgotten when the step is copied or saved.
    """

    __slots__ = ("_compiled", "_snapshot", "_traits", "replay", "saved")

    def __init__(self) -> None:
        self.replay: CachedReplay | None = None  # of the step's last record, if it is steady
        self.saved: Any = None  # the shapes and dtypes that the last first run saved: calls share one list of them
        self._traits: dict[bool, BranchTraits] = {}
        self._snapshot: ModuleSnapshot | None = None
        self._compiled: Sequence[CodeType] | None = None  # what the user compiled of it

    def __deepcopy__(self, memo: object) -> StepCache:
        return StepCache()

    def __reduce__(self) -> tuple[type[StepCache], tuple[()]]:
        return StepCache, ()

    def look(self, bound: BoundStep, streams: Streams) -> CachedReplay:
        """The step as it is now."""
        state = self.branch_state(bound.step.branch, bound.step.coupling)
        if (scripted := state.snapshot.scripted) is not None:
            raise StepError(
                f"{bound.step.name} is or has a {scripted} of torch.jit, whose buffers a replay cannot set back, and "
                "whose interpreter may run other code in the replay than in the first run. Give the original module "
                "(torch.compile makes it fast), or give the block memory='store'."
            )
        if any(map(casts_inputs_once, state.snapshot.modules)):
            raise StepError(
                "FSDP2's MixedPrecisionPolicy casts the inputs of this branch, and this torch "
                f"({torch.__version__}) does not cast them again when the branch is recomputed. Use torch 2.13 or "
                'later, autocast with cast_forward_inputs=False, or memory="store".'
            )
        return CachedReplay(bound, streams, state, self.traits(state.snapshot.training), self._compiled_parts(state))

    def branch_state(self, branch: Any, coupling: Any) -> BranchState:
        """The state around the branch as it is now."""
        roots: list[nn.Module] = [coupling] if isinstance(coupling, nn.Module) else []
        if isinstance(branch, nn.Module):
            return BranchState(branch, self._current_snapshot([branch, *roots]), ())
        closed_over = list(reachable(branch))
        modules = [v for v in closed_over if isinstance(v, nn.Module)]
        if modules and not any(isinstance(v, _WITH_MORE) for v in closed_over):
            return BranchState(branch, self._current_snapshot(modules + roots), closed_over)
        return BranchState(branch, ModuleSnapshot(modules + roots, closed_over), closed_over)

    def _compiled_parts(self, state: BranchState) -> Sequence[CodeType]:
        """The code that the user compiled of a branch, of modules in it, and of functions that it calls.

        An object that is neither a module nor a function may run a part of its modules alone, as a converted layer does
        in each of its steps. Of a part that did not run, the graph that ran last says nothing.
        """
        if "torch._dynamo" not in sys.modules or not isinstance(state.branch, (nn.Module, FunctionType)):
            return ()
        if self._snapshot is not state.snapshot:
            return _compiled([state.branch, *state.snapshot.modules], reachable(state.branch))
        if self._compiled is None:
            self._compiled = _compiled([state.branch, *state.snapshot.modules])
        return self._compiled

    def traits(self, training: Sequence[bool]) -> BranchTraits:
        """The traits in a training mode, which is given by the flags of the branch's modules."""
        mode = training[0] if training else True
        traits = self._traits.get(mode)
        if traits is None:
            traits = self._traits[mode] = BranchTraits()
        return traits

    def _current_snapshot(self, roots: list[nn.Module]) -> ModuleSnapshot:
        """The modules below `roots` as they are now: the step's branch, or the modules that it holds."""
        snapshot = self._snapshot
        if snapshot is None or any(map(is_not, roots, snapshot.modules)) or not snapshot.is_current():
            snapshot = ModuleSnapshot(roots)
            for traits in self._traits.values():
                traits.forget_saves()
            self._snapshot = snapshot if _lasts(snapshot) and not snapshot.has_tensors else None
            self._compiled = None
        return snapshot

    def keep(self, cached: CachedReplay, *, can_replay: bool) -> None:
        """After a first run: share with later calls what left nothing behind, unless it holds a caller's tensors."""
        cached.is_steady = can_replay and not cached.traits.draws_globally and cached.state.has_left_nothing()
        snapshot = cached.state.snapshot
        if cached.is_steady and snapshot.has_tensors and _lasts(snapshot):  # in attributes, where the run left them
            self._snapshot, self._compiled = snapshot, cached.compiled
        if cached.is_steady and self._snapshot is snapshot:
            self.replay = cached

    def expect_draws(self) -> None:
        """Expect draws from any generator, whatever was learned."""
        self.replay = None
        for traits in self._traits.values():
            traits.draws_globally = True


def _compiled(parts: Iterable[Any], functions: Iterable[Any] = ()) -> Sequence[CodeType]:
    """The code that the user compiled of these parts, and of functions that they or `functions` reach."""
    parts = list(parts)
    attributes = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    reached = functions_reached([*parts, *(a for a in attributes if isinstance(a, FunctionType)), *functions])
    return tuple(dict.fromkeys(code for part in (*parts, *reached) for code in compiled_code(part)))


def _lasts(snapshot: ModuleSnapshot) -> bool:
    """Whether a snapshot may be held from call to call: what is no parameter is a caller's, not ours to hold."""
    return not snapshot.is_lazy and all(isinstance(t, nn.Parameter) for t in snapshot.tensors)


def cache_of(step: Step) -> StepCache:
    """What was learned of a step in earlier calls."""
    cache: StepCache | None = step.cache
    if cache is None:
        cache = step.cache = StepCache()
    return cache
