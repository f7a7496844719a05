"""A table that is read once takes as long as in `simulate`, whatever its costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotorch.pipelining.lower import lower
from rotorch.pipelining.makespan import Makespan
from rotorch.pipelining.simulate import Link, StageCosts, simulate
from rotorch.strategies import parse_parallel

TABLES = [
    *("pp=3", "pp=4[schedule=gpipe]", "pp=2[schedule=interleaved_1f1b,chunks=3]", "pp=3[schedule=zbv]"),
    *("pp=3[schedule=zb_h1]", "pp=2[schedule=looped_bfs]", "zeropp=3x2[chunks=2]", "zeropp=2x2[unit=3]"),
]

seconds = st.floats(min_value=0.0, max_value=10.0)
costs = st.builds(
    StageCosts,
    forward_s=seconds,
    backward_input_s=seconds,
    backward_weight_s=seconds,
    unshard_s=seconds,
    reduce_s=seconds,
    message_bytes=seconds,
)


@pytest.mark.parametrize("text", TABLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_same_as_simulated(text, data):
    (strategy,) = parse_parallel(text)
    table = lower(strategy.table(6), ahead=data.draw(st.booleans()))
    each = data.draw(st.lists(costs, min_size=table.num_stages, max_size=table.num_stages))
    link = Link(bytes_per_s=data.draw(st.sampled_from([1.0, 0.1])), latency_s=data.draw(seconds))
    expected = simulate(table, costs=each, link=link).makespan_s
    assert Makespan(table).seconds(each, link=link) == pytest.approx(expected, rel=1e-12)
