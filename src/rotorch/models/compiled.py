"""Forwards by torch.compile: one graph for all modules of a class, so for all blocks, and for all slices of a block.

[Note: CUDA graphs]
    With `"reduce-overhead"` torch also records what a compiled forward and its backward launch (`torch._inductor`'s
    CUDA graph trees), and replays it where the same forwards run in the same order, on weights at the same addresses:
    a launch for each visit, in place of one for each operator. So a ring takes its slots in the same order in every
    step. What a graph returns is overwritten by the next pass of any model: outputs and gradients of a unit leave it
    in memory of their own (`ops/rotate.py`), and models say where a pass begins (`begin_recorded`). No GPU has run it.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from rotorch.core.compiling import RECORDED, Compile, is_compile
from rotorch.core.errors import ConfigError
from rotorch.models.blocks import repeated_blocks

_log = logging.getLogger(__name__)


class _Recorded:
    """Recorded passes of all models of this process: their graphs share memory."""

    def __init__(self) -> None:
        self.to_come: WeakSet[Any] = WeakSet()
        """What stands for passes whose backward is to come."""
        self.num_waiting = 0
        """Passes in a row that began while there were some."""


@functools.cache
def _of_process() -> _Recorded:
    return _Recorded()


_MOST_WAITING = 8


def begin_recorded() -> None:
    """Called before each pass whose forwards are recorded: graphs may use the last one's memory again.

    Nothing begins while the backward of a pass is to come, of whichever model.
    """
    recorded = _of_process()
    if not recorded.to_come:
        recorded.num_waiting = 0
        torch.compiler.cudagraph_mark_step_begin()
        return
    recorded.num_waiting += 1
    if recorded.num_waiting == _MOST_WAITING:
        _log.warning(
            "compile='reduce-overhead': %d passes have begun while the backward of an earlier one is to come. Each is "
            "recorded anew and keeps its memory. Call models under torch.no_grad() where no backward follows",
            _MOST_WAITING,
        )


def backward_is_to_come(of: Any) -> None:
    """Notes a recorded pass, by a node of its graph or by its model: what it has kept must stay."""
    _of_process().to_come.add(of)


def backward_has_come(is_run: Callable[[Any], bool]) -> None:
    """Forgets the passes for which `is_run` is true."""
    to_come = _of_process().to_come
    for of in [of for of in to_come if is_run(of)]:
        to_come.discard(of)


def check_mode(compile: object) -> Compile:
    """Returns the argument of `parallelize`; raises `ConfigError` if it is none of its values."""
    if is_compile(compile):
        return compile
    raise ConfigError(f"compile={compile!r}: write True, False or {RECORDED!r}")


def check_compiler(device_type: str) -> None:
    """Raises `ConfigError` if there is nothing that turns torch.compile's code for the CPU into machine code."""
    names = [os.environ[name] for name in ("CXX",) if name in os.environ] or ["g++", "clang++"]
    if device_type == "cpu" and not any(map(shutil.which, names)):
        raise ConfigError(
            f"compile: no C++ compiler ({' or '.join(names)} was looked for). Install one, name one by the environment "
            "variable CXX, or leave compile out"
        )


def compile_blocks(module: nn.Module) -> None:
    """Compiles the forward of every repeated block, in place. Hooks of the block stay outside of it.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ConfigError(f"compile: {type(module).__name__} has no nn.ModuleList of blocks. Leave compile out")
    for block in blocks:
        block.forward = compiled_forward(block, True)  # type: ignore[method-assign]


def compiled_forward(module: nn.Module, compile: Compile) -> Callable[..., Any]:
    """Returns the module's forward, compiled at its first call for the shapes that come.

    Weights are inputs of the graph, so modules of one class share it, and so do weights that are put into one module
    one after another. Other shapes (of a slice that is larger than others) make a graph of their own.
    """
    own = type(module).forward
    if getattr(module.forward, "__func__", None) is not own:  # somebody gave this one a forward of its own
        return torch.compile(module.forward, dynamic=False, mode=_mode(compile))
    return functools.partial(_of_class(own, _mode(compile)), module)


@functools.cache
def _of_class(forward: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=False, mode=mode)


def _mode(compile: Compile) -> str | None:
    return RECORDED if compile == RECORDED else None
