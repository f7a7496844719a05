"""A line on the terminal with the present phase, until the next one. It needs no thread: ranks are forked."""

from __future__ import annotations

import sys

_ERASE = "\r\x1b[2K"


def tell_phase(text: str = "") -> None:
    """Shows `text` in place of the last phase; "" erases it. Prints nothing where stderr is no terminal.

    Whoever prints anything else erases it before.
    """
    if sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
        return
    sys.stderr.write(f"{_ERASE}{text} ..." if text else _ERASE)
    sys.stderr.flush()
