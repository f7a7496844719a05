"""Users' gradient hooks on parameters, called when a step's gradients are complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rotorch._torch_private import (
    has_hooks_after_accumulation,
    hooks_of_gradient,
    put_hooks_after_accumulation,
    put_hooks_of_gradient,
    take_hooks_after_accumulation,
    take_hooks_of_gradient,
)
from rotorch.shard.sharded_weight import EarlierGradient, ShardedWeight


class GradientHooks:
    """Calls hooks that users registered by `register_hook` and `register_post_accumulate_grad_hook` on parameters.

    Autograd computes with other tensors, and never calls hooks of these. As in a plain loop, a `register_hook` hook
    gets the gradient of this step alone and may return another one, and a hook after accumulation gets the parameter.
    Both get this rank's part, complete, as a DTensor.

    Args:
        weights: this rank's weights, by name.
    """

    def __init__(self, weights: Mapping[str, ShardedWeight]) -> None:
        self._weights = weights

    @property
    def any(self) -> bool:
        """True if there are any, on this rank."""
        return any(
            hooks_of_gradient(held.parameter) or has_hooks_after_accumulation(held.parameter)
            for held in self._weights.values()
        )

    @contextmanager
    def called_after(self, *, all_gradients: bool = True) -> Iterator[None]:
        """Encloses a backward and calls hooks at its end, unless it raised or was not for the weights' gradients."""
        # fully_shard would call hooks after accumulation itself, before replicas are summed.
        taken = {n: hooks for n, h in self._weights.items() if (hooks := take_hooks_after_accumulation(h.parameter))}
        earlier = self._set_aside() if all_gradients else []
        try:
            with self._unseen():
                yield
            if all_gradients:
                self._call_on_gradients()
        finally:
            for name, hooks in taken.items():
                put_hooks_after_accumulation(self._weights[name].parameter, hooks)
            for gradient in earlier:
                gradient.add_back()
        if all_gradients:
            for name, hooks in taken.items():
                if self._weights[name].parameter.grad is not None:
                    for after in list(hooks[1].values()):
                        after(self._weights[name].parameter)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Takes hooks of gradients off parameters: where these are in a graph, autograd would call them with None."""
        taken = {
            name: hooks for name, held in self._weights.items() if (hooks := take_hooks_of_gradient(held.parameter))
        }
        try:
            yield
        finally:
            for name, hooks in taken.items():
                put_hooks_of_gradient(self._weights[name].parameter, hooks)

    def _set_aside(self) -> list[EarlierGradient]:
        """Takes gradients that the user has not cleared away, where a hook must see this step's alone."""
        hooked = [held for held in self._weights.values() if hooks_of_gradient(held.parameter)]
        return [EarlierGradient(held) for held in hooked if held.local_grad is not None]

    def _call_on_gradients(self) -> None:
        for held in self._weights.values():
            for hook in hooks_of_gradient(held.parameter):
                if held.parameter.grad is not None and (other := hook(held.parameter.grad)) is not None:
                    held.parameter.grad = other
