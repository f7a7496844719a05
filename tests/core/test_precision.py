"""Names of precisions as commands take them."""

import pytest

from rotorch.core.errors import ConfigError
from rotorch.core.precision import PRECISIONS, as_precision


@pytest.mark.parametrize("name", PRECISIONS)
def test_names_of_today_are_taken(name):
    assert as_precision(name, of="--precision") == name


def test_a_name_of_the_release_before_is_taken_for_todays():
    assert as_precision("param_bfloat16", of="--precision") == "bfloat16"


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="--precision float16: write float32, bfloat16 or autocast_bfloat16"):
        as_precision("float16", of="--precision")
