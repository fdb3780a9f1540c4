"""The state around one run of one branch: recorded in its first run, restored for its replay.

NOTE [What a replay restores]
 1. Random numbers: the state of every generator that the branch drew from in its first run.
    torch's generators are read after every step. Python's and NumPy's take longer to read than
    a small branch takes to run: they are read around branches that were seen to use them (or
    were never seen), and once around the whole call, which warns if one moved unexpectedly.
    Draws of another thread in the middle of a branch would make its own irreproducible: steps
    that draw take one lock, and a replay that ends in another state than the first run raises.
 2. Buffers that the branch changed: the replay sees the old values, and the new ones stay.
    A buffer that was never seen to change is not copied; if it does change, the
    step's saved tensors are kept in that call.
 3. The training flags and the tensors in the places of parameters and buffers, which
    `functional_call`, FSDP and `module.train()` may have exchanged since.
 4. Attributes of the modules that are values or tensors, and global tensors that their code names: those from
    before the first run, whoever changed them. Modules that are not registered (in lists, in
    globals) are guests: a buffer of theirs is restored if the branch itself changed it.
 5. Autocast, for every device type involved, and the precision of float32 products (see `CallEnvironment`);
    what `parametrize.cached()` had computed; the context (see `RecordedContext`).
 An edit in place of a parameter or buffer since the first run is an error, as it is in autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from retrograde.network.branch import name_of
from retrograde.network.streams import version, versions

from . import rng
from .branch_traits import BranchTraits
from .call import CallEnvironment
from .context import without_graph
from .fake_internals import has_values
from .module_state import BATCH_STATISTICS, ModuleSnapshot, refresh_flat_weights
from .rng_lock import RNG_LOCK
from .saved_streams import edited_in_place
from .torch_internals import cached_parametrizations, outside_function_transforms, parametrizations_cached

Buffer = tuple[dict[str, Any], str, Any, int, bool, bool]
"""The dictionary and name of a buffer, its value, its version, whether it may be edited without a new version, and
whether it is a guest's (see `ModuleSnapshot`)."""


class BranchState:
    """The generators, buffers and modules of one branch, noted before and after its first run.

    Args:
        branch: the branch.
        snapshot: the modules that it and the coupling reach.
        closed_over: what the branch reaches that no module has registered.
    """

    __slots__ = ("_locked", "_old_values", "_own_generators", "_parametrizations", "branch", "buffers", "changed",
                 "drawn", "introduced", "snapshot", "unregistered")  # fmt: skip

    def __init__(self, branch: Any, snapshot: ModuleSnapshot, closed_over: Sequence[Any]) -> None:
        self.branch = branch
        self.snapshot = snapshot
        self._own_generators: Sequence[Any] = snapshot.generators
        self.unregistered: Sequence[tuple[Tensor, int]] = ()
        if closed_over:
            self._own_generators = [*snapshot.generators, *rng.generators_in(closed_over)]
            self.unregistered = [(v.detach(), version(v)) for v in closed_over if isinstance(v, Tensor)]  # no graph
        self.buffers: Sequence[Buffer] = ()
        if snapshot.buffers:
            self.buffers = [(s, n, s[n], version(s[n]), silent, guest) for s, n, silent, guest in snapshot.buffers]
        self._old_values: Sequence[Tensor | None] = [value for _, _, value, *_ in self.buffers]  # until `begin` copies
        self.changed: Sequence[tuple[dict[str, Any], str, Tensor | None]] = ()
        self.introduced: Sequence[Tensor | None] = ()
        self.drawn: Sequence[tuple[Any, Any, Any]] = ()
        self._parametrizations: dict[Any, Tensor | None] | None = None
        self._locked = False

    def begin(self, environment: CallEnvironment, traits: BranchTraits) -> None:
        """Note what the first run may draw from, and copy the buffers that it may change."""
        if environment.caches_parametrizations:
            computed = cached_parametrizations() or {}
            self._parametrizations = {key: v if v is None else without_graph(v) for key, v in computed.items()}
        if traits.draws or traits.edits:
            RNG_LOCK.__enter__()
            self._locked = True
            now = environment.read()
            if now != environment.states:  # if not, this step and the last one share the states that they keep
                environment.states = now
            if self.buffers:  # as they are now that no other thread is inside such a branch
                self.buffers = [(s, n, s[n], version(s[n]), *flags) for s, n, _, _, *flags in self.buffers]
        if self.buffers:
            unchanging = traits.unchanging
            stay = [(id(s), n) in unchanging and (guest or not silent) for s, n, _, _, silent, guest in self.buffers]
            values = [value for _, _, value, *_ in self.buffers]
            copies = iter(_copies([value for value, stays in zip(values, stay, strict=True) if not stays]))
            self._old_values = [v if stays else next(copies) for v, stays in zip(values, stay, strict=True)]
        if traits.draws_globally or self._own_generators:
            watched = list(self._own_generators)
            if traits.draws_globally:
                environment.check_global_rng()
                watched += environment.global_generators
            self.drawn = [(g, rng.read(g), None) for g in watched]

    def end(self, environment: CallEnvironment, traits: BranchTraits, weights: list[int]) -> bool:
        """Keep what the first run used or changed. False if it changed something of which no copy was made.

        Args:
            weights: the versions of the snapshot's tensors before the run.
        """
        drawn = self.drawn
        if drawn:
            drawn = [(g, before, now) for g, before, _ in drawn if (now := rng.read(g)) != before]
            if traits.draws_globally:
                traits.draws_globally = any(g is r for g, _, _ in drawn for r in environment.global_generators)
                environment.mark_global_rng()
        before, now = environment.states, environment.read()
        if now != before:
            moved = zip(environment.generators, before, now, strict=True)
            drawn = [*drawn, *((g, b, n) for g, b, n in moved if b != n)]
            environment.states = now
        self.drawn = drawn
        traits.is_new = False
        traits.draws = bool(drawn)
        traits.draws_own = bool(self._own_generators)
        can_replay = self._sort_buffers(traits) if self.buffers else True
        if versions(self.snapshot.tracked) != weights:  # a parameter that the branch itself initialises
            can_replay = False
        if self.snapshot.is_lazy or self.snapshot.has_new_buffers():
            can_replay = False
        traits.edits = bool(self.changed) or not self.snapshot.is_current()
        self.leave()
        return can_replay

    def leave(self) -> None:
        """Let other threads' branches run; after `end`, or where an exception ends the first run."""
        if self._locked:
            self._locked = False
            RNG_LOCK.__exit__()

    def _sort_buffers(self, traits: BranchTraits) -> bool:
        """Sort the buffers into unchanged and changed ones. False if one was changed of which there is no copy."""
        pairs = list(zip(self.buffers, self._old_values, strict=True))
        edited = [
            version(value) != before or (old is not value and _differ(name, silent, old, value))
            for (_, name, value, before, silent, _), old in pairs
        ]
        if any(edited):  # an edit of one is an edit of all that lie in the same storage
            storages = {_storage(pair[0][2]) for pair, is_edited in zip(pairs, edited, strict=True) if is_edited}
            edited = [e or _storage(pair[0][2]) in storages - {None} for pair, e in zip(pairs, edited, strict=True)]
        can_replay = True
        same, changed = [], []
        for (buffer, old), is_edited in zip(pairs, edited, strict=True):
            slots, name, value, _, _, is_guest = buffer
            if slots.get(name) is value and not is_edited:
                if not is_guest:
                    same.append(buffer)
                traits.unchanging.add((id(slots), name))
                continue
            can_replay = can_replay and (old is not value or not is_edited)
            changed.append((slots, name, old))
            traits.unchanging.discard((id(slots), name))
        self.buffers, self.changed = same, changed
        self._old_values = []
        return can_replay

    def has_left_nothing(self) -> bool:
        """Whether the first run left nothing to restore, so that other calls may share this."""
        if self.drawn or self.changed or self.buffers or self.unregistered or self._own_generators:
            return False
        return self._parametrizations is None and self.snapshot.is_current()

    def needs_restoring(self, weights: list[int]) -> bool:
        """Whether a replay needs `restored`. Raises if a tensor that the branch reads was edited in place."""
        if versions(self.snapshot.tracked) != weights:
            raise edited_in_place(f"a parameter of {name_of(self.branch)}, or a tensor that it has or reads elsewhere,")
        for _, name, value, before, *_ in self.buffers:
            if version(value) != before:
                raise edited_in_place(f"the buffer {name!r} of {name_of(self.branch)}")
        for tensor, before in self.unregistered:
            if version(tensor) != before:
                raise edited_in_place(f"a tensor that {name_of(self.branch)} closes over")
        if self.drawn or self.changed or self._parametrizations is not None or not self.snapshot.is_current():
            return True
        return any(s.get(n) is not value for s, n, value, *_ in self.buffers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which everything is as in the first run; afterwards it is as before the replay."""
        with ExitStack() as undo:
            undo.enter_context(RNG_LOCK)
            for module, training in zip(self.snapshot.modules, self.snapshot.training, strict=True):
                if module.training != training:
                    undo.callback(setattr, module, "training", module.training)
                    module.training = training
            self._rebind(undo)
            if self._parametrizations is not None:
                undo.enter_context(parametrizations_cached(self._parametrizations))
            if self.drawn:
                undo.enter_context(outside_function_transforms())
            for generator, before, _ in self.drawn:
                undo.callback(rng.write, generator, rng.read(generator))
                rng.write(generator, before)
            yield

    def _rebind(self, undo: ExitStack) -> None:
        """Put the parameters, buffers and attributes of the first run into their places."""
        snapshot = self.snapshot
        places = [place for place in snapshot.places if not _sharded_since(_at(*place[:2]), place[2])]
        places += [(s, n, value) for s, n, value, *_ in self.buffers]
        self.introduced = _copies([old for _, _, old in self.changed])
        places += [(s, n, new) for (s, n, _), new in zip(self.changed, self.introduced, strict=True)]
        places += [(slots, name, _NOTHING) for slots, name, _ in snapshot.new_attributes()]
        for slots, name, thing in places:
            if (now := _at(slots, name)) is not thing:
                undo.callback(_put_back, slots, name, now)
                _put_back(slots, name, thing)
        undo.callback(refresh_flat_weights, snapshot.modules)
        refresh_flat_weights(snapshot.modules)
        for tensor, requires in zip(snapshot.tensors, snapshot.requires, strict=True):
            if tensor.requires_grad != requires and tensor.is_leaf:
                undo.callback(tensor.requires_grad_, not requires)
                tensor.requires_grad_(requires)

    def check_draws(self) -> None:
        """Raise if a replay drew other numbers than the first run, as far as the generators tell."""
        for generator, before, after in self.drawn:
            if rng.read(generator) not in (before, after):
                raise RuntimeError(
                    f"The replay of {name_of(self.branch)} drew other random numbers than its first run: another "
                    "thread drew from the same generator meanwhile, or the branch draws differently each time it runs. "
                    "Give each thread its own torch.Generator, or use memory='store' for this block."
                )


_NOTHING = object()


def _at(slots: Any, name: Any) -> Any:
    """What is in a place now."""
    try:
        return slots[name]
    except LookupError:
        return _NOTHING


def _put_back(slots: Any, name: Any, thing: Any) -> None:
    """Put into a place what was there; nothing, if it was not there."""
    if thing is not _NOTHING:
        if isinstance(slots, dict) or name < len(slots):
            slots[name] = thing
    elif name in slots:
        del slots[name]


def _copies(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of tensors: one of a tensor that is there twice, and views of one copy for views of one storage."""
    storages = [_storage(value) for value in {id(v): v for v in values}.values()]
    shared = {storage for storage in storages if storage is not None and storages.count(storage) > 1}
    copied: dict[int, Any] = {}
    by_storage: dict[int | None, Any] = {}
    for value in values:
        if id(value) in copied:
            continue
        storage = _storage(value)
        if value is None or is_lazy(value):
            copied[id(value)] = value
        elif storage not in shared:
            copied[id(value)] = value.clone()
        else:
            if storage not in by_storage:
                by_storage[storage] = value.untyped_storage().clone()
            whole = torch.empty(0, dtype=value.dtype, device=value.device)
            copied[id(value)] = whole.set_(by_storage[storage], value.storage_offset(), value.shape, value.stride())
    return [copied[id(value)] for value in values]


def _storage(value: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None for those without a storage of their own to look at."""
    if value is None or is_lazy(value) or value.layout is not torch.strided or type(value) is not Tensor:
        return None
    return value.untyped_storage().data_ptr() or None


def _differ(name: str, silent: bool, old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is not new
    if silent and name in BATCH_STATISTICS:
        return True  # so they do in training; to look would make an accelerator wait
    if is_lazy(old) or is_lazy(new) or new.layout is not torch.strided:
        return False  # their versions tell
    if old.shape != new.shape:
        return True
    return has_values(old) and has_values(new) and not torch.equal(old, new)


def _sharded_since(now: Any, then: Any) -> bool:
    """FSDP2 exchanges sharded and whole parameters by itself; a replay leaves them where they are."""
    return _layout(now) != _layout(then)


def _layout(tensor: Any) -> tuple[Any, Any]:
    """How a tensor lies on a mesh; a whole parameter of a tensor parallel branch is a DTensor too, on a smaller one."""
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
