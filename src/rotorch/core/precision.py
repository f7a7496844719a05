"""Precisions of passes, as runs, plans and benches name them. Weights at rest and gradients stay in float32 in all.

float32             passes compute with the weights themselves
bfloat16            passes compute with copies of the weights in bfloat16, and no autocast: so all activations are
                    bfloat16, but for operations that a model's code runs in float32 (`param_dtype`)
autocast_bfloat16   under torch.autocast: products are bfloat16, what layers hand on is float32 (`autocast_dtype`)
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from rotorch.core.errors import ConfigError

Precision = Literal["float32", "bfloat16", "autocast_bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_FORMER_NAMES = {"param_bfloat16": "bfloat16"}
"""Taken for one more release."""


def todays_name(text: Any) -> Any:
    """The name of a precision today, if `text` was one in the release before; else `text`."""
    return _FORMER_NAMES.get(text, text) if isinstance(text, str) else text


PrecisionField = Annotated[Precision, BeforeValidator(todays_name)]
"""Of a configuration."""


def as_precision(text: str, *, of: str) -> Precision:
    """Reads the name of a precision; `of` says of what, for the error.

    Raises:
        ConfigError: there is none of that name.
    """
    for precision in PRECISIONS:
        if precision == todays_name(text):
            return precision
    raise ConfigError(f"{of} {text}: write {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")


def dtype_of_passes(precision: Precision) -> Literal["bfloat16"] | None:
    """The name of the dtype that products are computed in; None if it is the weights' own."""
    return None if precision == "float32" else "bfloat16"


def itemsize_of_passes(precision: Precision) -> int:
    """Bytes of an element of the activations."""
    return 4 if precision == "float32" else 2


def copies_itemsize(precision: Precision) -> int | None:
    """Bytes of an element of the copies of weights that passes compute with; None if there are none."""
    return 2 if precision == "bfloat16" else None
