"""The strategies' Layouts as closed formulas, on units of any shape."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.core.layout import combine_layouts
from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import Kind, Phase
from rotorch.strategies import DDP, FSDP, RTP, STRATEGIES, Single, parse_parallel


@st.composite
def cut_units(draw):
    """An MLP or an attention: some weights cut into the same groups, along different dims."""
    groups, other = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    weights = []
    for number in range(draw(st.integers(1, 4))):
        size = groups * draw(st.integers(1, 4))
        shape = draw(st.sampled_from([(size, other), (other, size), (size,)]))
        dim = 1 if shape == (other, size) and len(shape) == 2 else 0
        weights.append(Weight(f"w{number}", shape, 4, Cut(dim, groups)))
    return Unit("unit", UnitKind.MODULE, Combine.SUM, tuple(weights))


WHOLE = Unit("replicated", UnitKind.REPLICATED, Combine.NONE, (Weight("norm", (96,), 4), Weight("bias", (7,), 4)))
SIZES = st.integers(1, 12)
EVEN = Unit(
    "mlp",
    UnitKind.MODULE,
    Combine.SUM,
    (Weight("up", (64, 16), 4, Cut(0, 64)), Weight("down", (16, 64), 4, Cut(1, 64))),
)


@given(cut_units())
def test_one_process_holds_all_and_sends_nothing(unit):
    assert Single().layout(unit) == combine_layouts([Single().layout(unit)])
    assert (Single().layout(unit).resident_bytes, Single().layout(unit).sent_bytes()) == (unit.num_bytes, 0)


@given(cut_units(), SIZES)
def test_ddp_holds_all_and_sends_the_gradient_almost_twice(unit, size):
    layout = DDP(size=size).layout(unit)
    assert layout.resident_bytes == unit.num_bytes
    assert layout.sent_bytes(kind=Kind.ALL_REDUCE) == layout.sent_bytes() == 2 * unit.num_bytes * (size - 1) // size


@pytest.mark.parametrize("kind", [k for k, s in STRATEGIES.items() if s.cuts_weights and s.size_fields == ("size",)])
@given(unit=cut_units(), size=SIZES)
def test_what_is_cut_is_held_once_by_all_ranks_together(kind, unit, size):
    strategy = STRATEGIES[kind](size=size)
    held = [strategy.layout(unit, position=k).resident_bytes for k in range(size)]
    assert sum(held) == unit.num_bytes


@pytest.mark.parametrize("kind", STRATEGIES)
@given(unit=cut_units())
def test_one_rank_is_one_process(kind, unit):
    strategy = STRATEGIES[kind](**dict.fromkeys(STRATEGIES[kind].size_fields, 1))
    assert strategy.layout(unit).resident_bytes == unit.num_bytes
    assert strategy.layout(unit).sent_bytes() == 0


@given(cut_units(), st.integers(2, 12))
def test_fsdp_gathers_twice_and_scatters_once(unit, size):
    kept, again = FSDP(size=size, reshard=False).layout(unit), FSDP(size=size).layout(unit)
    padded = sum(w.num_bytes // w.shape[0] * -(-w.shape[0] // size) for w in unit.weights)
    assert again.sent_bytes(kind=Kind.ALL_GATHER) == 2 * (size - 1) * padded
    assert kept.sent_bytes(kind=Kind.ALL_GATHER) == (size - 1) * padded
    assert (
        again.sent_bytes(kind=Kind.REDUCE_SCATTER) == kept.sent_bytes(kind=Kind.REDUCE_SCATTER) == (size - 1) * padded
    )


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_rtp_sends_weights_twice_and_gradients_once(size):
    layout = RTP(size=size, transport="send_receive").layout(EVEN, position=size - 1)
    assert layout.resident_bytes == EVEN.num_bytes // size
    assert layout.sent_bytes(kind=Kind.SEND) == layout.sent_bytes() == 3 * EVEN.num_bytes * (size - 1) // size
    by_phase = {t.phase: t for t in layout.transfers}
    assert by_phase[Phase.FORWARD].sent_bytes * 2 == by_phase[Phase.BACKWARD].sent_bytes
    assert (by_phase[Phase.FORWARD].num_messages, by_phase[Phase.BACKWARD].num_messages) == (size - 1, 2 * (size - 1))


def test_a_second_message_ahead_takes_one_more_slot_and_sends_the_same():
    one, two = (RTP(size=4, transport="send_receive", ahead=ahead).layout(EVEN) for ahead in (1, 2))
    assert two.slots_bytes - one.slots_bytes == two.transient_bytes - one.transient_bytes == EVEN.num_bytes // 4
    assert two.transfers == one.transfers and two.resident_bytes == one.resident_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("transport=send_receive,wire=fp8", "wire=fp8 packs slices to send them"),
        ("buffering=in_place", "with buffering=in_place slices replace each other"),
    ],
)
def test_more_than_one_message_ahead_needs_slots_of_its_own(options, reason):
    (strategy,) = parse_parallel(f"rtp=2[ahead=2,{options}]")
    with pytest.raises(ConfigError) as refused:
        strategy.check(ModelSpec("model", (EVEN,)))
    assert str(refused.value) == f"rtp: ahead=2, but {reason}, so one is under way at a time. Leave ahead out"
    with pytest.raises(ConfigError, match="rtp: ahead=2, but slices are converted to bfloat16 to be sent"):
        RTP(size=2, ahead=2).at_precision("bfloat16")
    assert RTP(size=1, ahead=2).at_precision("bfloat16") == RTP(size=1, compute="bfloat16")


def test_rtp_over_shared_memory_sends_nothing():
    layout = RTP(size=4, transport="shared_memory").layout(EVEN)
    assert (layout.resident_bytes, layout.transient_bytes, layout.transfers) == (EVEN.num_bytes // 4, 0, ())


@given(cut_units(), st.integers(2, 12))
def test_options_that_are_idle_change_no_layout(unit, size):
    """There is nothing to buffer in memory that ranks share: so one of the two is tested on ranks."""
    for transport in ("shared_memory", "symmetric_memory"):
        in_place = RTP(size=size, transport=transport, buffering="in_place", ahead=2)
        assert in_place.without_idle_options() == RTP(size=size, transport=transport)
        for k in range(size):
            assert in_place.layout(unit, position=k) == in_place.without_idle_options().layout(unit, position=k)
    for strategy in (RTP(size=size, transport="send_receive", buffering="in_place"), FSDP(size=size, reshard=False)):
        assert strategy.without_idle_options() == strategy


@given(cut_units(), st.integers(2, 12))
def test_on_the_whole_ring_uneven_slices_cost_what_even_ones_do(unit, size):
    strategy = RTP(size=size, transport="send_receive")
    sent = [strategy.layout(unit, position=k).sent_bytes() for k in range(size)]
    assert sum(sent) == 3 * (size - 1) * unit.num_bytes


def test_a_table_with_two_uses_moves_twice_and_a_lookup_needs_nothing_in_backward():
    lookup = Unit("embed", UnitKind.WEIGHT, Combine.SUM, (Weight("embed", (64, 8), 4, Cut(0, 64)),), 1, 0)
    tied = Unit("embed", UnitKind.WEIGHT, Combine.SUM, lookup.weights, uses=2, reads_in_backward=1)
    part = lookup.num_bytes * 3 // 4
    strategy = RTP(size=4, transport="send_receive")
    assert strategy.layout(lookup).sent_bytes() == (1 + 0 + 1) * part
    assert strategy.layout(tied).sent_bytes() == (2 + 1 + 2) * part


def test_a_head_whose_logits_are_kept_moves_once():
    head = Unit("head", UnitKind.WEIGHT, Combine.CONCAT, (Weight("head", (64, 8), 4, Cut(0, 64)),), logits=True)
    part = head.num_bytes * 3 // 4
    computed_again, kept = (RTP(size=4, transport="send_receive", recompute=r) for r in ("head", "none"))
    assert computed_again.layout(head).sent_bytes() == 3 * part
    assert kept.layout(head).sent_bytes() == 2 * part
    assert kept.layout(replace(head, logits=False)).sent_bytes() == 3 * part
    twice = replace(head, uses=2, reads_in_backward=2)
    assert kept.layout(twice).sent_bytes() == 4 * part
    elsewhere = replace(head, uses=1, reads_in_backward=0)  # of a tied one, a stage that has the embedding alone
    assert kept.layout(elsewhere).sent_bytes() == computed_again.layout(elsewhere).sent_bytes() == 2 * part


@pytest.mark.parametrize("size", [2, 5])
def test_what_rtp_cannot_cut_it_replicates_and_sums(size):
    layout = RTP(size=size).layout(WHOLE)
    assert layout.resident_bytes == WHOLE.num_bytes
    assert layout.sent_bytes(kind=Kind.ALL_REDUCE) == layout.sent_bytes() == 2 * WHOLE.num_bytes * (size - 1) // size


def test_rtp_refuses_a_model_that_it_cannot_cut_and_says_what_to_write():
    with pytest.raises(ConfigError, match=r"nothing to cut in Plain.*Write plan="):
        RTP(size=2).check(ModelSpec("Plain", (WHOLE,)))
    RTP(size=1).check(ModelSpec("Plain", (WHOLE,)))
    with pytest.raises(ConfigError, match=r"65 ranks over Small, whose finest cut has 64 groups.*Write rtp=64 or less"):
        RTP(size=65).check(ModelSpec("Small", (EVEN, WHOLE)))
    RTP(size=64).check(ModelSpec("Small", (EVEN, WHOLE)))
