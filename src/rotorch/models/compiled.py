"""Forwards by torch.compile: one graph for all modules of a class, so for all blocks, and for all slices of a block.

[Note: CUDA graphs]
    With `"reduce-overhead"` torch also records what a compiled forward and its backward launch (`torch._inductor`'s
    CUDA graph trees), and replays it where the same forwards run in the same order, on weights at the same addresses: a
    launch for each visit, in place of one for each operator. So a ring takes its slots in the same order in every step.
    What a graph returns is overwritten by the next micro-batch: outputs and gradients of a unit leave it in memory of
    their own (`ops/rotate.py`), and a model says where a micro-batch begins (`begin_recorded`). No GPU has run it.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotorch.core.compiling import RECORDED, Compile
from rotorch.core.errors import ConfigError
from rotorch.models.blocks import repeated_blocks


def begin_recorded() -> None:
    """Called before each micro-batch whose forwards are recorded: graphs may use the last one's memory again."""
    torch.compiler.cudagraph_mark_step_begin()


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
