"""A tiny model of some kind, run twice at once, each time on one half of something: trials of cuts of activations.

If code needs the other half, the two threads exchange theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten
from rotorch.models.attention_interface import attention_configs, attention_names
from rotorch.models.trial.slices import one_thread
from rotorch.models.trial.tiny import inputs_for, shrunk_like, with_values
from rotorch.shard.materialize import off_meta

_TOLERANCE = 1e-4
"""Relative, of outputs in float64, where norms and rotary positions may compute in float32."""

_PATIENCE_S = 60.0


def key_of(module: nn.Module) -> str:
    """Returns the key that equal models share: class, configuration, and attention, which that does not tell."""
    of_config, attention = sorted(module.config.to_dict().items(), key=str), attention_names(attention_configs(module))
    return f"{type(module).__module__}.{type(module).__qualname__} {of_config!r} {list(attention.values())}"


@contextmanager
def trial() -> Iterator[None]:
    """Runs a trial without gradients, meta tensors, effects on random numbers, or threads of torch."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), off_meta(), one_thread():
        yield


def tiny_of(module: nn.Module, *, num_tokens: int = 12) -> tuple[nn.Module, dict[str, Any], Tensor] | str:
    """A tiny model that runs, its inputs and its outputs; or why there is none."""
    why = "there is no tiny one to try it on"
    for config in shrunk_like(module.config):
        config.use_cache = False
        config._experts_implementation = "eager"  # others know no float64
        try:
            torch.default_generator.manual_seed(0)
            tiny = with_values(type(module), config).double().eval()
            inputs = inputs_for(type(tiny), tiny.config, num_rows=2, num_tokens=num_tokens)
            return tiny, inputs, first_tensor(tiny(**inputs))
        except Exception as error:  # this variant does not run at all
            why = f"no tiny one runs ({error})"
    return why


def differ(found: Tensor, expected: Tensor) -> bool:
    """True if outputs differ by more than rounding."""
    return found.shape != expected.shape or bool((found - expected).abs().max() > _TOLERANCE * expected.abs().max())


def first_tensor(output: Any) -> Tensor:
    """The first floating-point tensor of a model's outputs."""
    return next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point())


Given = TypeVar("Given")


class ThreadExchange:
    """Two threads give each other tensors, in turns."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=_PATIENCE_S)
        self._given: list[Any] = [None, None]

    def both(self, mine: int, given: Given) -> list[Given]:
        """Exchanges tensors between both threads; returns what both gave, the first thread's first."""
        self._given[mine] = given
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def give_up(self) -> None:
        self._barrier.abort()


def in_two_threads(run: Callable[[int, ThreadExchange], Tensor]) -> list[Tensor] | Exception:
    """Calls `run` for the halves 0 and 1 at once; returns what both gave, or the first error that one of them made."""
    exchange = ThreadExchange()
    outputs: list[Tensor | Exception | None] = [None, None]

    def half(mine: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                outputs[mine] = run(mine, exchange)
        except Exception as error:  # whatever the model's code does not like about a half
            outputs[mine] = error
            exchange.give_up()

    threads = [threading.Thread(target=half, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [output for output in outputs if isinstance(output, Exception)]
    if errors:
        return next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [output for output in outputs if isinstance(output, Tensor)]
