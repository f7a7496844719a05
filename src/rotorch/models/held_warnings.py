"""Warnings of transformers while a model is read and built, kept back until it is known to be right."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("transformers")


@contextmanager
def held_warnings() -> Iterator[None]:
    """Keeps back transformers' warnings, and gives each text once at the end; also a decorator.

    After an error none: it is one line that says what is wrong, and they would stand before it. Ranks that are forked
    within it show theirs.
    """
    from transformers.utils.logging import get_logger

    get_logger()  # makes the handler of all its loggers, if that is not there yet
    handlers = [*_LOGGER.handlers, *(logging.root.handlers if _LOGGER.propagate else ())]
    held: dict[str, logging.LogRecord] = {}
    holder = os.getpid()

    def hold(record: logging.LogRecord) -> bool:
        if os.getpid() != holder or record.name.partition(".")[0] != _LOGGER.name:
            return True
        held.setdefault(record.getMessage(), record)
        return False

    for handler in handlers:
        handler.addFilter(hold)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(hold)
    for record in held.values():
        _LOGGER.handle(record)
