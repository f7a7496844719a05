from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.layout import Layout, combine_layouts
from rotorch.core.traffic import Kind, Phase, Transfer, all_reduce, sent_bytes


def transfer(kind, num_bytes):
    return Transfer(kind, "ring", Phase.FORWARD, num_bytes, num_bytes)


def test_together_residents_and_traffic_add_up_and_transients_share():
    some = Layout(10, 7, (transfer(Kind.SEND, 3),))
    more = Layout(20, 5, (transfer(Kind.SEND, 4), transfer(Kind.ALL_REDUCE, 9)))
    both = combine_layouts([some, more])
    assert (both.resident_bytes, both.transient_bytes) == (30, 7)
    assert both.sent_bytes() == 16
    assert both.sent_bytes(kind=Kind.SEND) == 7
    assert both.sent_bytes(kind=Kind.ALL_GATHER) == 0
    assert combine_layouts([]) == Layout(0)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_a_ring_all_reduce_sends_almost_twice_its_payload(payload, size):
    found = all_reduce(payload, axis="x", size=size)
    assert found.payload_bytes == payload
    assert found.sent_bytes == 2 * payload * (size - 1) // size <= 2 * payload
    assert sent_bytes([found, found]) == 2 * found.sent_bytes
    assert size > 1 or found.sent_bytes == 0
