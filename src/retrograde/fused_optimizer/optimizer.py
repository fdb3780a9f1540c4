"""The fused optimiser: each parameter is stepped as soon as its gradient is complete, and the gradient is freed.

NOTE [When a parameter is stepped]
 1. Autograd adds up what a parameter gets from all its uses in one backward pass, tied weights and context included,
    and then runs the parameter's hooks, once. The step is taken there. Every node that has a gradient for
    the parameter has run by then, so no replay of a tape needs its old value any more.
 2. The exception is a use without a gradient (`weight.detach()`, a shared module that a branch has and does not
    use) in an earlier block. The tape, and autograd where it saved the value, raise there: the weight was edited.
 3. From the first step of a backward pass to the call of `step()` is one round. A parameter is stepped once per round;
    anything that needs all gradients of a round together, or a gradient twice, is refused.
 4. `parameter.grad` becomes a `SpentGradient`, which has no values: reading it, or adding to it, raises an error that
    says why, where None would be skipped silently. `step()` removes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from retrograde.engine.torch_internals import keeps_graph
from retrograde.network.streams import version

from .spent_gradient import SpentGradient, check_clipping, shared, twice, unmeasured


class FusedOptimizer(torch.optim.Optimizer):
    """An optimiser that steps each parameter during the backward pass, so that gradients are not all alive at once.

    The arithmetic, the state and the `state_dict` are bit-identical to those of the wrapped optimiser. The training
    loop does not change: `zero_grad()`, `backward()`, `step()`, where `step()` ends the round. Learning rates and other
    options are read during the backward pass, so set them before it; a scheduler stepped after `step()` does.

    Args:
        kind: the optimiser's class, such as `torch.optim.AdamW`. Its step of one parameter must not depend on others.
        params: parameters, named parameters or parameter groups, as for any optimiser.
        clip_value: clip each gradient's entries to this, as `torch.nn.utils.clip_grad_value_` does.
        clip_norm: clip the norm of all gradients to this, as `torch.nn.utils.clip_grad_norm_` does. It is known
            only after a backward pass, so each step needs one more, in `norm_pass()`.
        options: the options of `kind`.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde import FusedOptimizer
        >>> stack = rg.ReversibleSequence([rg.two_stream(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))])
        >>> optimizer = FusedOptimizer(torch.optim.AdamW, stack.parameters(), lr=1e-3, clip_value=1.0)
        >>> stack(torch.randn(2, 8)).square().mean().backward()
        >>> next(stack.parameters()).grad
        SpentGradient(shape=(8, 8))
        >>> optimizer.step()
    """

    norm: Tensor | None = None
    """The norm of all gradients in the last `norm_pass()`, before clipping."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None:
        _check_kind(kind, options)
        check_clipping(clip_value, clip_norm)
        self._inner = kind(params, **options)
        self._handles: dict[Tensor, Any] = {}
        self._group_of: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        self._options_before: list[dict[str, Any]] = []
        self._norms: dict[Tensor, Tensor] | None = None
        self._measured: set[Tensor] | None = None
        self._detached = False
        self._refused = False
        self._is_made = False
        self._lock = threading.RLock()
        self.clip_value = clip_value
        self.clip_norm = clip_norm
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state, self._is_made = self._inner.state, True
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._attach()

    # The interface of every optimiser

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End the round; parameters whose gradients were set other than by `backward` are stepped now."""
        if closure is not None:
            raise ValueError(
                "A FusedOptimizer takes no closure: its parameters are stepped during the backward pass that the "
                "closure would run. Call the closure's code, then step()."
            )
        self._check_options_unchanged()
        self._check_none_discarded()
        self._attach()  # parameters may have been put into the groups by hand
        remaining = [p for p in self._parameters() if p.grad is not None and not isinstance(p.grad, SpentGradient)]
        for p in remaining:
            if p in self._stepped:
                raise twice(self._name(p))
            if self._measured is not None and p not in self._measured:
                raise unmeasured(self._name(p))
        if remaining and self.clip_norm is not None and self._measured is None:
            self.norm = _norm([_norm_of(p) for p in remaining])
        for p in remaining:
            self._step_one(p)
        self._end_round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; there are none, unless they were set other than by `backward`."""
        if self._stepped:
            self._refused = True
            raise RuntimeError(
                f"zero_grad() would discard gradients that were used already: {len(self._stepped)} parameters were "
                "stepped since step() was last called. Call step() after each backward pass; if a loss is not meant to "
                "train these parameters, set requires_grad=False for them meanwhile; if the pass failed half-way, load "
                "a state_dict, or call step() to continue from here."
            )
        if not set_to_none and not self._detached:
            raise ValueError(
                "zero_grad(set_to_none=False) leaves gradients of zeros, with which an ordinary optimiser steps what "
                "the next backward pass does not reach. A FusedOptimizer keeps no gradients. Omit set_to_none, or use "
                "an ordinary optimiser."
            )
        super().zero_grad(set_to_none)
        self._end_round()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimiser: an ordinary one can load it, and the other way round."""
        return self._inner_with(self.param_groups).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this or of an ordinary optimiser, and begin a new round."""
        self._inner_with(self.param_groups).load_state_dict(state_dict)
        self.state, self.param_groups = self._inner.state, self._inner.param_groups
        self._end_round()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which are fused too."""
        if self._is_made:
            self._inner_with(self.param_groups).add_param_group(param_group)
            self._attach()
        else:  # the wrapped optimiser has made the group
            self.param_groups.append(param_group)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._inner.register_load_state_dict_post_hook(hook, prepend)

    # Its own interface

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """Measure the norm of all gradients in a first backward pass, which steps nothing; then clip in the second.

        Examples:
            with optimizer.norm_pass():
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        """
        if self.clip_norm is None:
            raise ValueError("norm_pass() is for a FusedOptimizer with clip_norm, and this one has none.")
        if self._stepped:
            raise twice(f"{len(self._stepped)} of them")
        if any(p.grad is not None for p in self._parameters()):
            raise RuntimeError(
                "There are gradients from before norm_pass(), which would discard them together with those that it "
                "measures. Call zero_grad() first, and do not set gradients by hand."
            )
        self._attach()
        self._norms, self._measured = {}, None
        try:
            yield
            self.norm = _norm([self._norms[p] for p in self._parameters() if p in self._norms])
            self._measured = set(self._norms)
        finally:
            self._norms = None

    def detach(self) -> None:
        """Remove the hooks. From then on gradients stay until `step()`, which steps all parameters and frees them."""
        self._end_round()
        self._detached = True
        _remove(self._handles)

    # Internals

    def _attach(self) -> None:
        """Hook the parameters that require grad and have no hook yet: new ones, and ones that were frozen before.

        Parameters that were removed from the groups lose their hooks.
        """
        self._group_of = self._parameters()
        for p in [p for p in self._handles if p not in self._group_of]:
            self._handles.pop(p).remove()
        weak_self = weakref.ref(self)  # a strong reference would be a cycle: the optimiser holds the parameter

        def on_gradient(p: Tensor) -> None:
            if (optimizer := weak_self()) is not None:
                with _outside_autocast(p.device.type):  # as in an ordinary step
                    optimizer._on_gradient(p)

        for p in () if self._detached else self._group_of:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, p: Tensor) -> None:
        """The gradient of a parameter is complete."""
        with self._lock:
            if self._norms is None and not self._stepped:
                self._group_of = self._parameters()
            if p not in self._group_of:  # removed from the groups by hand
                return
            if p.grad is None or isinstance(p.grad, SpentGradient):
                raise shared(self._name(p))
            if self._norms is not None:
                if p in self._norms:
                    raise twice(self._name(p))
                self._norms[p] = _norm_of(p)
                p.grad = None
                return
            self._check_can_step(p)
            if not self._stepped:
                self._options_before = _options(self.param_groups)
            self._stepped.add(p)
            self._step_one(p)
            if type(p.data) is Tensor:
                p.grad = p.detach().as_subclass(SpentGradient)  # shares the weight's storage: no bytes of its own

    def _check_can_step(self, p: Tensor) -> None:
        if (reason := self._why_not_step(p)) is not None:
            self._refused = True
            p.grad = None  # otherwise a repeated pass would add to it
            raise reason

    def _why_not_step(self, p: Tensor) -> RuntimeError | None:
        if p in self._stepped:
            return twice(self._name(p))
        if keeps_graph():
            return RuntimeError(
                "A FusedOptimizer cannot step parameters in a backward pass with retain_graph=True or "
                "create_graph=True: the graph is kept for another pass, in which they would have changed. Add the "
                "losses up and call backward once, or use an ordinary optimiser."
            )
        if self.clip_norm is not None and self._measured is None:
            return RuntimeError(
                f"clip_norm={self.clip_norm} needs the norm of all gradients before the first parameter is stepped, "
                "but a FusedOptimizer frees each as soon as it is complete. Measure it in a pass of its own: `with "
                "optimizer.norm_pass(): loss.backward(retain_graph=True)`, then `loss.backward()`. That costs one more "
                "backward pass; clip_value costs nothing."
            )
        return None if self._measured is None or p in self._measured else unmeasured(self._name(p))

    def _check_none_discarded(self) -> None:
        """Raise if a gradient was set to None between the backward pass and `step()`: it was used already."""
        discarded = [p for p in self._stepped if p.grad is None and type(p.data) is Tensor]
        if discarded and not self._refused:  # after an error, step() is how to continue
            which = self._name(discarded[0])
            self._end_round()
            raise RuntimeError(
                f"The gradients of {len(discarded)} parameters, among them {which}, were set to None between the "
                "backward pass and step(), but the backward pass had used them already. Set requires_grad=False for "
                "what a loss is not meant to train, or use an ordinary optimiser. To undo the steps, load a "
                "state_dict; the round is over."
            )

    def _step_one(self, p: Tensor) -> None:
        """Step one parameter with the wrapped optimiser, and free its gradient."""
        if self.clip_value is not None:
            clip_grad_value_([p], self.clip_value)
        if self.clip_norm is not None:
            assert self.norm is not None
            clip_grads_with_norm_([p], self.clip_norm, self.norm)
        group = self.param_groups[self._group_of[p]]
        single = {**group, "params": [p]}
        self._inner_with([single]).step()
        p.grad = None
        written = sorted(key for key in single if key != "params" and single[key] is not group.get(key))
        if written:
            raise TypeError(
                f"{type(self._inner).__name__} cannot be fused: its step writes {written} into the parameter group, "
                "so a step of one parameter would count for all. Use it as an ordinary optimiser."
            )

    def _inner_with(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The wrapped optimiser, with our state and these groups."""
        self._inner.state, self._inner.param_groups = self.state, groups
        return self._inner

    def _check_options_unchanged(self) -> None:
        if not self._stepped:
            return
        for i, (now, then) in enumerate(zip(_options(self.param_groups), self._options_before, strict=False)):
            changed = sorted(key for key in now if now[key] != then.get(key))
            if changed:
                raise RuntimeError(
                    f"{changed} of parameter group {i} changed between the backward pass and step(). The parameters "
                    "were stepped during the backward pass, with the old values. Change them before backward, or after "
                    "step(), as schedulers do."
                )

    def _end_round(self) -> None:
        for p in (*self._parameters(), *self._stepped):
            if isinstance(p.grad, SpentGradient):
                p.grad = None
        self._stepped.clear()
        self._refused = False
        self._measured = None
        self._attach()

    def _parameters(self) -> dict[Tensor, int]:
        """All parameters, each with the number of its group."""
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def _name(self, p: Tensor) -> str:
        group = self.param_groups[self._group_of[p]]
        if "param_names" in group:
            position = next(i for i, other in enumerate(group["params"]) if other is p)
            return f"{group['param_names'][position]!r}"
        return f"one of shape {tuple(p.shape)}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this first. By then the scaled gradients have been used, so it raises."""
        raise RuntimeError(
            "A FusedOptimizer does not work with GradScaler, which skips the whole step if any gradient overflowed: "
            "here parameters are stepped, with scaled gradients, before that is known. Use bfloat16 autocast, which "
            "needs no scaling, or an ordinary optimiser."
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "A FusedOptimizer cannot be copied or pickled: it is hooked to its parameters. Save its state_dict() and "
            "load it into a new one."
        )

    def __repr__(self) -> str:
        return f"FusedOptimizer of {super().__repr__().replace(type(self).__name__, type(self._inner).__name__, 1)}"


def _check_kind(kind: Any, options: dict[str, Any]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"FusedOptimizer takes an optimiser's class first, such as torch.optim.AdamW, not {kind!r}.")
    if issubclass(kind, (torch.optim.LBFGS, FusedOptimizer)):
        raise TypeError(
            f"{kind.__name__} cannot be fused: it must see all gradients at once. Use one that steps each parameter by "
            "its own gradient, such as SGD, Adam or AdamW."
        )
    if options.get("differentiable"):
        raise ValueError("differentiable=True cannot be fused: a differentiable step needs its gradients later.")


def _outside_autocast(device: str) -> Any:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _options(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the groups, in a form that can be compared later."""
    return [
        {k: (id(v), version(v)) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]


def _norm_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    norm: Tensor = torch.linalg.vector_norm(p.grad.detach(), 2.0)
    return norm


def _norm(norms: list[Tensor]) -> Tensor:
    """The norm of several norms, summed in the order of `clip_grad_norm_`: bit-identical to it."""
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
    return total


def _remove(handles: dict[Tensor, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
