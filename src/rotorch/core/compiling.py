"""Ways in which the forwards of a model's blocks run: as they are written, or by torch.compile."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BeforeValidator

Compile = Literal[False, True, "reduce-overhead"]
"""As they are written; compiled; compiled and recorded as CUDA graphs (see `models/compiled.py`)."""

RECORDED: Literal["reduce-overhead"] = "reduce-overhead"
"""torch's name of the mode."""


def is_compile(value: object) -> TypeGuard[Compile]:
    """True if a value is one of `Compile`: by its class, since 1 equals True."""
    return isinstance(value, bool) or value == RECORDED


def _check(value: Any) -> Any:
    if not is_compile(value):
        raise ValueError(f'write true, false or "{RECORDED}"')
    return value


CompileField = Annotated[Compile, BeforeValidator(_check)]
"""Of a configuration."""
