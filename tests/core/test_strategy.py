import pytest
from pydantic import ValidationError

from rotorch.core.strategy import Strategy
from rotorch.strategies import STRATEGIES


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_is_frozen_and_knows_its_fields(kind):
    cls = STRATEGIES[kind]
    assert issubclass(cls, Strategy) and cls.kind == kind
    fields = dict.fromkeys(cls.size_fields, 2)
    strategy = cls(**fields)
    with pytest.raises(ValidationError):
        cls(**fields, no_such_option=1)
    for name in fields:
        with pytest.raises(ValidationError):
            setattr(strategy, name, 3)
    assert strategy == cls(**fields) and hash(strategy) == hash(cls(**fields))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_ranks_are_the_product_of_axes_and_batch_axes_are_axes(kind):
    cls = STRATEGIES[kind]
    strategy = cls(**dict.fromkeys(cls.size_fields, 3))
    product = 1
    for size in strategy.axes.values():
        product *= size
    assert strategy.num_ranks == product
    assert {*strategy.batch_axes, *strategy.feature_axes} <= set(strategy.axes)


def test_the_interface_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Strategy()
