"""Warnings of transformers while a model is checked: each once if it is right, none if it is not."""

import logging
import os

import pytest
from transformers.utils.logging import get_logger

from rotorch.models.held_warnings import held_warnings


@pytest.fixture
def shown():
    """Texts that the handlers of transformers show."""

    class Shown(logging.Handler):
        def __init__(self):
            super().__init__()
            self.texts = []

        def emit(self, record):
            self.texts.append(record.getMessage())

    handler, logger = Shown(), logging.getLogger("transformers")
    get_logger()
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def test_each_text_is_shown_once_at_the_end(shown):
    with held_warnings():
        for number in (1, 2, 1):
            get_logger("transformers.models.any").warning("%d is no token", number)
        assert shown == []
    assert shown == ["1 is no token", "2 is no token"]
    get_logger("transformers.models.any").warning("later")
    assert shown[2:] == ["later"]


def test_nothing_is_shown_beside_an_error(shown):
    with pytest.raises(ValueError, match="wrong"), held_warnings():
        get_logger("transformers.models.any").warning("add is_decoder")
        raise ValueError("wrong")
    assert shown == []


def test_what_reaches_the_root_logger_is_held_too_and_other_libraries_are_not(shown, monkeypatch):
    """transformers passes its records on where CI=true."""
    logger, root = logging.getLogger("transformers"), logging.getLogger()
    monkeypatch.setattr(logger, "propagate", True)
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    root.addHandler(handler)
    try:
        with held_warnings():
            get_logger("transformers.models.any").warning("add is_decoder")
            logging.getLogger("transformersx").warning("another library")
            assert (shown, texts) == ([], ["another library"])
    finally:
        root.removeHandler(handler)
    assert (shown, texts) == (["add is_decoder"], ["another library", "add is_decoder"])


def test_ranks_that_are_forked_meanwhile_show_theirs(shown):
    with held_warnings():
        pid = os.fork()
        if pid == 0:
            get_logger("transformers.models.any").warning("of a rank")
            os._exit(0 if shown == ["of a rank"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shown == []
