"""A word from a rank that waits long for others: they may have left their loop, and never come.

Nothing tells a rank that is late from one that will never call. The group's timeout ends such a wait after minutes, and
says nothing before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SAYS_AFTER_S = 8.0
"""Time after which a rank says that it waits: longer than batches usually take to come."""

_LOOKS_EVERY_S = 0.5

_log = logging.getLogger(__name__)


class _Lookout:
    """A thread that looks at the time of the wait that is going on, if there is one. Started by the first wait."""

    def __init__(self) -> None:
        self._wait: tuple[float, str] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, text: str) -> Iterator[None]:
        if self._thread is None or not self._thread.is_alive():  # it is not there in a process that was forked since
            self._thread = threading.Thread(target=self._look, name="rotorch-lookout", daemon=True)
            self._thread.start()
        self._wait = (time.monotonic(), text)
        try:
            yield
        finally:
            self._wait = None

    def _look(self) -> None:
        said = None
        while True:
            time.sleep(_LOOKS_EVERY_S)
            wait = self._wait
            if wait is not None and wait is not said and time.monotonic() - wait[0] >= SAYS_AFTER_S:
                said = wait
                _log.warning(wait[1])


_lookout = _Lookout()


def saying_if_long(text: str) -> AbstractContextManager[None]:
    """A context in which `text` is logged, as a warning, once its block has taken `SAYS_AFTER_S`."""
    return _lookout.watching(text)
