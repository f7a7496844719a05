"""Warnings of transformers while a model is read and built, kept back until it is known to be right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("transformers")


@contextmanager
def held_warnings() -> Iterator[None]:
    """Keeps back transformers' warnings, and gives each text once at the end.

    After an error none: it is one line that says what is wrong, and they would stand before it.
    """
    from transformers.utils.logging import get_logger

    get_logger()  # makes the handler of all its loggers, if that is not there yet
    handlers = list(_LOGGER.handlers)
    held: dict[str, logging.LogRecord] = {}

    def hold(record: logging.LogRecord) -> bool:
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
