import pytest

from rotorch.core.errors import ConfigError, RankFailure, RotorchError, nearest


def test_errors_are_also_what_python_calls_them():
    assert issubclass(ConfigError, RotorchError) and issubclass(ConfigError, ValueError)
    assert issubclass(RankFailure, RotorchError) and issubclass(RankFailure, RuntimeError)


@pytest.mark.parametrize(
    ("word", "text"), [("fsd", " (did you mean 'fsdp'?)"), ("rpt", " (did you mean 'rtp'?)"), ("zzzz", ""), ("", "")]
)
def test_the_nearest_known_word_is_named(word, text):
    assert nearest(word, known=["ddp", "fsdp", "rtp"]) == text


def test_with_nothing_known_nothing_is_near():
    assert nearest("x", known=()) == ""
