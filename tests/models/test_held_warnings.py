"""Warnings of transformers while a model is checked: each once if it is right, none if it is not."""

import logging

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
