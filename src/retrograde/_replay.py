"""Replay: what the first run of a branch saw, its second run sees.

NOTE [What a replay restores]
 1. Random numbers: the state of every generator that the branch drew from in its first run.
    torch's generators are read after every step. Python's and NumPy's take longer to read than
    a small branch takes to run: they are read around branches that were seen to use them (or
    were never seen), and once around the whole call, which warns if one moved unexpectedly.
    Draws of another thread in the middle of a branch would make its own irreproducible: steps
    that draw take one lock, and a replay that ends in another state than the first run raises.
 2. Buffers that the branch changed: the replay sees the old values, and the new ones stay as
    they are. A buffer that was never seen to change is not copied; if it does change, the
    step's activations are kept in that call.
 3. The training flags and the tensors in the places of parameters and buffers, which
    `functional_call`, FSDP and `module.train()` may have exchanged since.
 4. Autocast, for every device type involved, and the precision of float32 products.
 An edit in place of a parameter or buffer since the first run is an error, as it is in autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import _randomness as randomness
from ._branch import name_of, reachable
from ._habits import Habits, Known
from ._torch_private import (
    BATCH_STATISTICS,
    Survey,
    float32_precision,
    outside_function_transforms,
    refresh_flat_weights,
    set_grad_enabled,
    version,
    versions,
)

Buffer = tuple[dict[str, Any], str, Any, int, bool]
"""The dictionary and name of a buffer, its value, its version, and whether it may be edited without a new version."""

_LOCK = threading.RLock()
_LOCAL = threading.local()
_PATIENCE = 600.0


def is_replaying() -> bool:
    """Whether this code runs a second time, to rebuild activations for the backward pass.

    For branches and hooks with effects of their own (counters, logs): skip them in a replay.
    """
    return getattr(_LOCAL, "replays", 0) > 0


class Ambient:
    """What surrounds a whole call: autocast, and the generators that any branch may draw from.

    `states` are those of torch's generators as they were last seen. `rare` are the global
    generators of Python and NumPy.
    """

    __slots__ = ("_autocast", "_cache", "_precision", "_rare_seen", "drew_unseen", "generators", "rare", "states")

    def __init__(self, devices: Sequence[torch.device], context: Iterable[Any]) -> None:
        kinds = dict.fromkeys(["cpu", *(d.type for d in devices if d.type != "meta")])
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self.generators = randomness.everyday(devices) + randomness.owned(context)
        self.states = self.read()
        self.rare = randomness.rare()
        self._rare_seen = [randomness.fingerprint(g) for g in self.rare]
        self.drew_unseen = False

    def read(self) -> list[Any]:
        """The states of torch's generators."""
        return [randomness.read(g) for g in self.generators]

    def stands(self) -> bool:
        """Whether torch's generators are as they were last seen."""
        if len(self.states) == 1:
            return bool(randomness.read(self.generators[0]) == self.states[0])
        return self.read() == self.states

    def look_for_unseen(self) -> None:
        """Note in `drew_unseen` if Python's or NumPy's generator moved since it was last looked at."""
        now = [randomness.fingerprint(g) for g in self.rare]
        self.drew_unseen = self.drew_unseen or now != self._rare_seen
        self._rare_seen = now

    def look_away(self) -> None:
        """What Python's or NumPy's generator did up to now is recorded."""
        self._rare_seen = [randomness.fingerprint(g) for g in self.rare]

    def holds_now(self) -> bool:
        """Whether autocast and the precision of products are as they were when the call began."""
        if float32_precision() != self._precision:
            return False
        for kind, enabled, dtype in self._autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                return False
            if enabled and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) != (dtype, self._cache):
                return False
        return True

    def again(self) -> ExitStack:
        """A context with autocast and the precision of products as they were when the call began."""
        stack = ExitStack()
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(self._precision)
        for kind, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        return stack


class Replay:
    """The state around one call of one branch, taken before and after its first run."""

    __slots__ = ("_locked", "_olds", "_owned", "branch", "buffers", "changed", "introduced", "loose", "random",
                 "survey")  # fmt: skip

    def __init__(self, branch: Callable[..., Any], coupling: object, known: Known) -> None:
        self.branch = branch
        roots: list[nn.Module] = [coupling] if isinstance(coupling, nn.Module) else []
        if isinstance(branch, nn.Module):
            survey = known.survey([branch, *roots])
            loose = randomness.held_in(survey.attributes)
        else:
            reach = list(reachable(branch))
            survey = Survey([v for v in reach if isinstance(v, nn.Module)] + roots)
            loose = randomness.held_in(survey.attributes) + reach
        self._owned: Sequence[Any] = ()
        self.loose: Sequence[tuple[Tensor, int]] = ()
        if loose:
            self._owned = randomness.owned(loose)
            self.loose = [(v.detach(), version(v)) for v in loose if isinstance(v, Tensor)]  # not its graph
        self.survey = survey
        self.buffers: Sequence[Buffer] = ()
        if survey.buffers:
            self.buffers = [(s, n, s[n], version(s[n]), silent) for s, n, silent in survey.buffers]
        self.changed: Sequence[tuple[dict[str, Any], str, Tensor | None]] = ()
        self.introduced: Sequence[Tensor | None] = ()
        self.random: Sequence[tuple[Any, Any, Any]] = ()
        self._locked = False

    def begin(self, ambient: Ambient, habits: Habits) -> None:
        """Note what the first run may draw from, and copy the buffers that it may change."""
        if habits.draws or habits.edits:
            _acquire()
            self._locked = True
            now = ambient.read()
            if now != ambient.states:  # if not, this step and the last one share the states that they keep
                ambient.states = now
            if self.buffers:  # as they are now that no other thread is inside such a branch
                self.buffers = [(s, n, s[n], version(s[n]), silent) for s, n, _, _, silent in self.buffers]
        if self.buffers:
            steady = habits.steady
            copies: dict[int, Tensor | None] = {}  # a buffer that two modules share is copied once
            self._olds = [
                value if (id(s), n) in steady and not silent else _copied(value, copies)
                for s, n, value, _, silent in self.buffers
            ]
        if habits.draws_rare or self._owned:
            watched = list(self._owned)
            if habits.draws_rare:
                ambient.look_for_unseen()
                watched += ambient.rare
            self.random = [(g, randomness.read(g), None) for g in watched]

    def end(self, ambient: Ambient, habits: Habits, weights: list[int]) -> bool:
        """Keep what the first run used or changed. False if it changed something of which no copy was made.

        Args:
            weights: the versions of the survey's tensors before the run.
        """
        drawn = self.random
        if drawn:
            drawn = [(g, before, now) for g, before, _ in drawn if (now := randomness.read(g)) != before]
            if habits.draws_rare:
                habits.draws_rare = any(g is r for g, _, _ in drawn for r in ambient.rare)
                ambient.look_away()
        before, now = ambient.states, ambient.read()
        if now != before:
            drawn = [*drawn, *((g, b, n) for g, b, n in zip(ambient.generators, before, now, strict=True) if b != n)]
            ambient.states = now
        self.random = drawn
        habits.draws = bool(drawn)
        known = True
        if self.buffers:
            known = self._settle_buffers(habits)
        if versions(self.survey.tensors) != weights:  # a parameter that the branch itself initialises
            known = False
        if self.survey.has_new_buffers():
            known = False
        habits.edits = bool(self.changed)
        if self._locked:
            self.leave()
        return known

    def leave(self) -> None:
        """Let other threads' branches run; after `end`, or where an exception ends the first run."""
        if self._locked:
            self._locked = False
            _LOCK.release()

    def _settle_buffers(self, habits: Habits) -> bool:
        """Sort the buffers into those that the first run left as they were and those that it changed."""
        known = True
        same, changed = [], []
        for (slots, name, value, before, silent), old in zip(self.buffers, self._olds, strict=True):
            key = (id(slots), name)
            edited = version(value) != before or (old is not value and _differ(name, silent, old, value))
            if slots.get(name) is value and not edited:
                same.append((slots, name, value, before, silent))
                habits.steady.add(key)
                continue
            known = known and (old is not value or not edited)
            changed.append((slots, name, old))
            habits.steady.discard(key)
        self.buffers, self.changed = same, changed
        self._olds = []
        return known

    def is_steady(self) -> bool:
        """Whether the first run left nothing to restore, so that another call may share this."""
        return not (self.random or self.changed or self.buffers or self.loose or self._owned)

    def is_quiet(self, weights: list[int]) -> bool:
        """Whether the branch can run again just as it stands. Raises if a tensor it reads was edited in place."""
        if versions(self.survey.tensors) != weights or self.buffers or self.loose:
            self._check_versions(weights)
        if self.random or self.changed or not self.survey.holds():
            return False
        return not self.buffers or all(s.get(n) is value for s, n, value, _, _ in self.buffers)

    def _check_versions(self, weights: list[int]) -> None:
        if versions(self.survey.tensors) != weights:
            raise edited_in_place(f"a parameter of {name_of(self.branch)}")
        for _, name, value, before, _ in self.buffers:
            if version(value) != before:
                raise edited_in_place(f"the buffer {name!r} of {name_of(self.branch)}")
        for tensor, before in self.loose:
            if version(tensor) != before:
                raise edited_in_place(f"a tensor that {name_of(self.branch)} closes over")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surroundings as the first run had them; afterwards all is as it was before the replay."""
        with ExitStack() as undo:
            _acquire()
            undo.callback(_LOCK.release)
            for module, training in zip(self.survey.modules, self.survey.training, strict=True):
                if module.training != training:
                    undo.callback(setattr, module, "training", module.training)
                    module.training = training
            self._rebind(undo)
            if self.random:
                undo.enter_context(outside_function_transforms())
            for generator, before, _ in self.random:
                undo.callback(randomness.write, generator, randomness.read(generator))
                randomness.write(generator, before)
            yield

    def _rebind(self, undo: ExitStack) -> None:
        places: list[tuple[dict[str, Any], str, Any]] = [
            (s, n, thing) for (s, n), thing in zip(self.survey.places, self.survey.held, strict=True)
            if not _sharded_since(s.get(n), thing)
        ]  # fmt: skip
        places += [(s, n, value) for s, n, value, _, _ in self.buffers]
        copies: dict[int, Tensor | None] = {}
        self.introduced = [_copied(old, copies) for _, _, old in self.changed]
        places += [(s, n, new) for (s, n, _), new in zip(self.changed, self.introduced, strict=True)]
        for slots, name, thing in places:
            if slots.get(name) is not thing:
                undo.callback(_put_back, slots, name, slots.get(name, _NOTHING))
                slots[name] = thing
        undo.callback(refresh_flat_weights, self.survey.modules)
        refresh_flat_weights(self.survey.modules)
        for tensor, requires in zip(self.survey.tensors, self.survey.requires, strict=True):
            if tensor.requires_grad != requires and tensor.is_leaf:
                undo.callback(tensor.requires_grad_, not requires)
                tensor.requires_grad_(requires)

    def check_draws(self) -> None:
        """Raise if a replay drew other numbers than the first run, as far as the generators tell."""
        for generator, before, after in self.random:
            if randomness.read(generator) not in (before, after):
                raise RuntimeError(
                    f"The replay of {name_of(self.branch)} drew other random numbers than its first run: another "
                    "thread drew from the same generator meanwhile, or the branch draws differently each time it runs. "
                    "Give each thread its own torch.Generator, or use memory='store' for this block."
                )


def edited_in_place(what: str) -> RuntimeError:
    """The error that autograd raises for the same mistake, with the tensor's role in it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was edited between the forward pass and its backward pass, which runs the branch again. "
        "Edit it after the backward pass, or edit a copy. (A FusedOptimizer edits a weight once its gradient is "
        "complete: give a weight that an earlier block uses without a gradient to an ordinary optimiser.)"
    )


class Replaying:
    """Marks the code inside as a replay, for `is_replaying`, and runs it in grad mode, like the first run."""

    __slots__ = ("_grad_enabled", "_inference")

    def __enter__(self) -> None:
        _LOCAL.replays = getattr(_LOCAL, "replays", 0) + 1
        self._grad_enabled = torch.is_grad_enabled()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        _LOCAL.replays -= 1
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        set_grad_enabled(self._grad_enabled)


class TakingTurns:
    """Lets no other thread draw in a branch meanwhile; for branches that are not recorded but may draw."""

    __slots__ = ()

    def __enter__(self) -> None:
        _acquire()

    def __exit__(self, *error: object) -> None:
        _LOCK.release()


def _acquire() -> None:
    if not _LOCK.acquire(timeout=_PATIENCE):
        raise RuntimeError(
            f"A branch that draws random numbers or changes buffers waited {_PATIENCE:.0f} s for another thread that "
            "is inside such a branch. Branches of this kind run one at a time; do not let one wait for another."
        )


_NOTHING = object()


def _put_back(slots: dict[str, Any], name: str, thing: Any) -> None:
    """Put into a place what was there; nothing, if it was not there."""
    if thing is _NOTHING:
        del slots[name]
    else:
        slots[name] = thing


def _copied(value: Tensor | None, copies: dict[int, Tensor | None]) -> Tensor | None:
    if id(value) not in copies:
        copies[id(value)] = None if value is None else value.clone()
    return copies[id(value)]


def _differ(name: str, silent: bool, old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is not new
    if silent and name in BATCH_STATISTICS:
        return True  # so they do in training; to look would make an accelerator wait
    return old.shape != new.shape or not torch.equal(old, new)


def _sharded_since(now: Any, then: Any) -> bool:
    """FSDP2 exchanges sharded and whole parameters by itself; a replay leaves them as it finds them."""
    return _layout(now) != _layout(then)


def _layout(tensor: Any) -> tuple[Any, Any]:
    """How a tensor lies on a mesh; a whole parameter of a tensor parallel branch is a DTensor too, on a smaller one."""
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
