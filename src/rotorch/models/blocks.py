"""The repeated blocks of a model: what libraries gather whole, and what activation checkpointing computes again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotorch.comm.status_word import Operation, StatusWord, at
from rotorch.core.errors import ConfigError
from rotorch.shard.buffers import buffers_untouched


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The members of a model's outermost module lists that have weights; [] for a model without any list.

    A list in a list is never called, and its members are.
    """
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    inner = {id(c) for outer in lists for c in outer.modules() if c is not outer}
    blocks = [block for each in lists if id(each) not in inner for block in _members(each)]
    return [b for b in blocks if any(True for _ in b.parameters())]


def _members(modules: nn.ModuleList) -> Iterator[nn.Module]:
    for member in modules:
        if isinstance(member, nn.ModuleList):
            yield from _members(member)
        else:
            yield member


def block_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a model's repeated blocks, in order."""
    wanted = {id(block) for block in repeated_blocks(module)}
    return tuple(name for name, block in module.named_modules() if id(block) in wanted)


def mark_blocks(module: nn.Module, status: StatusWord) -> list[str]:
    """Has a model write down on `status` at which of its repeated blocks it is; returns their names, by number.

    Forward by hooks of the blocks, backward by hooks of what they return: neither changes what is computed.
    """
    names = list(block_names(module))
    for number, name in enumerate(names):
        _mark_block(module.get_submodule(name), status, unit=number)
    return names


def _mark_block(block: nn.Module, status: StatusWord, *, unit: int) -> None:
    forward, backward = (at(way, unit=unit) for way in (Operation.BLOCK_FORWARD, Operation.BLOCK_BACKWARD))

    def begin(_: nn.Module, __: Any) -> None:
        status.now = forward

    def begin_backward(_: Any) -> None:
        status.now = backward

    def end(_: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(begin_backward)

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)


Contexts = Callable[[], AbstractContextManager[None]]
"""Makes the context in which backward computes something again; each backward through a graph asks for one."""


def recompute_blocks(
    module: nn.Module,
    *,
    strategy: str,
    names: Collection[str] | None = None,
    contexts: Callable[[], Contexts] | None = None,
) -> None:
    """Lets repeated blocks keep only their inputs in forward; backward runs them again. In place.

    This is `torch.utils.checkpoint`, not reentrant, around a block's forward. Hooks of the block stay outside of it:
    those of `fully_shard` gather its weights once in backward, not once more for the second forward.

    Args:
        module: the model.
        strategy: kind of the strategy that asks, for the error.
        names: of the blocks; None: all.
        contexts: called in every forward of a block, where a second forward needs more than its inputs.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ConfigError(
            f"{strategy}: recompute=block: {type(module).__name__} has no nn.ModuleList of blocks. Write recompute=none"
        )
    for block in blocks if names is None else map(module.get_submodule, names):
        recompute(block, contexts=contexts)


def recompute(module: nn.Module, *, contexts: Callable[[], Contexts] | None = None) -> None:
    """Lets a module keep only its inputs in forward; backward runs it again (see `recompute_blocks`). In place."""
    module.forward = partial(_run_again_in_backward, module.forward, module, contexts)  # type: ignore[method-assign]


def _run_again_in_backward(
    forward: Any, module: nn.Module, contexts: Callable[[], Contexts] | None, /, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    each = [contexts()] if contexts is not None else []
    if any(True for _ in module.buffers()):  # running statistics move once per step
        each.append(partial(buffers_untouched, module))
    if each:
        kwargs["context_fn"] = lambda: (nullcontext(), _Together(each))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class _Together:
    """Contexts that are made anew whenever this one is entered."""

    def __init__(self, each: Sequence[Contexts]) -> None:
        self._each = each
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for make in self._each:
                entered.enter_context(make())
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
