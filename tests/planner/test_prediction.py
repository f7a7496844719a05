from dataclasses import replace

import pytest
from shapes import on_grids, transformer

from rotorch.core.layout import Layout
from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import MicroBatch
from rotorch.planner.prediction import predict, predict_ranks
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.strategies.rtp.plan import RTP

MLP = Unit(
    "mlp", UnitKind.MODULE, Combine.SUM, (Weight("up", (12, 8), 4, Cut(0, 12)), Weight("down", (8, 12), 4, Cut(1, 12)))
)
NORM = Unit("replicated", UnitKind.REPLICATED, Combine.NONE, (Weight("norm", (8,), 4),))
SPEC = ModelSpec("spec", (MLP, NORM))
P, R = 2 * 12 * 8 * 4, 8 * 4


def of(text, rank=0):
    return predict(SPEC, strategies=parse_parallel(text), rank=rank)


def test_one_process_holds_all_and_sends_nothing():
    assert (of("single").weights_bytes, of("single").total_sent_bytes) == (P + R, 0)


def test_replicas_send_twice_their_gradients():
    assert (of("ddp=4").weights_bytes, of("ddp=4").sent_bytes) == (P + R, {"all_reduce": 2 * (P + R) * 3 // 4})


def test_a_ring_sends_weights_twice_and_gradients_once():
    found = of("rtp=4[transport=send_receive]")
    assert found.weights_bytes == P // 4 + R
    assert found.sent_bytes == {"send": 3 * P * 3 // 4, "all_reduce": 2 * R * 3 // 4}


def test_the_ledger_counts_gradients_moments_counters_and_slots():
    found, largest = of("rtp=4[transport=send_receive]").ledger, P // 4
    held = largest + R
    assert (found["weights"], found["gradients"], found["optimizer"]) == (held, held, 2 * held + 4 * 3)
    assert found["slots"] == 4 * largest == of("ddp=2,rtp=4[transport=send_receive]", rank=7).ledger["slots"]
    assert of("rtp=4[transport=shared_memory]").ledger["slots"] == of("fsdp=4").ledger["slots"] == 0
    assert [category for category, num_bytes in found.items() if num_bytes is None] == [
        "activations",
        "logits",
        "other",
    ]


def test_replicas_of_a_ring_reduce_what_the_ring_left():
    inner, outer = of("rtp=2[transport=send_receive]"), of("ddp=3,rtp=2[transport=send_receive]", rank=5)
    assert outer.weights_bytes == inner.weights_bytes == P // 2 + R
    assert outer.sent_bytes["send"] == inner.sent_bytes["send"]
    assert outer.sent_bytes["all_reduce"] - inner.sent_bytes["all_reduce"] == 2 * (P // 2) * 2 // 3 + 2 * R * 2 // 3


def test_ranks_have_their_own_slices():
    uneven = [of("rtp=5[transport=send_receive]", rank=rank).weights_bytes for rank in range(5)]
    assert sum(uneven) == P + 5 * R and len(set(uneven)) == 2
    assert [of("ddp=2,rtp=5[transport=send_receive]", rank=r).weights_bytes for r in range(10)] == uneven * 2


@pytest.mark.parametrize(
    "text", ["ddp=4", "ddp=3,rtp=5[transport=send_receive]", "fsdp=5", "ddp=2,megatron=2", "rtp=4"]
)
def test_all_ranks_at_once_are_each_of_them(text):
    batch, strategies = MicroBatch(3, 5), parse_parallel(text)
    each = [predict(SPEC, strategies=strategies, rank=r, batch=batch) for r in range(num_ranks(strategies))]
    assert predict_ranks(SPEC, strategies=strategies, batch=batch) == each


def test_frozen_weights_have_no_gradients_on_any_rank():
    frozen = replace(NORM, weights=(replace(NORM.weights[0], trained=False),))
    found = predict_ranks(replace(SPEC, units=(MLP, frozen)), strategies=parse_parallel("ddp=2,rtp=4"))
    assert {(each.weights_bytes, each.trained_bytes) for each in found} == {(P // 4 + R, P // 4)}


@pytest.mark.parametrize("replicas", [2, 128])
def test_replicas_are_worked_out_once(replicas, monkeypatch):
    asked = []
    monkeypatch.setattr(
        RTP, "layout", lambda self, unit, *, position=0: asked.append(position) or Layout(unit.num_bytes)
    )
    predict_ranks(SPEC, strategies=parse_parallel(f"ddp={replicas},rtp=8"))
    assert len(asked) == 8 * 2 * len(SPEC.units)  # once in its replicas, once for buffers that all units share


def test_activations_that_move_are_counted_where_the_batch_is_known():
    """Two sums of batch x sequence x 8 features: at the MLP's output, and of the gradient at its input."""
    batch, strategies = MicroBatch(3, 5), parse_parallel("ddp=2,megatron=2")
    weights = predict(SPEC, strategies=strategies, rank=3).sent_bytes["all_reduce"]
    found = predict(SPEC, strategies=strategies, rank=3, batch=batch).sent_bytes["all_reduce"]
    assert found - weights == 2 * (3 * 5 * 8 * 4)


def test_stages_send_hidden_states_up_and_their_gradients_down():
    """Features of 3 x 5 tokens, once per micro-batch and neighbour; a stage's other units send nothing."""
    spec, strategies = transformer(layers=6, width=64), parse_parallel("pp=3")
    sent = [each.sent_bytes for each in predict_ranks(spec, strategies=strategies, batch=MicroBatch(3, 5))]
    assert sent == [{"send": neighbours * 3 * 5 * 64 * 4} for neighbours in (1, 2, 1)]


@pytest.mark.parametrize("text", ["summa=2x2[transport=messages]", "tesseract=2x2x2[zero=true,transport=messages]"])
def test_without_a_position_a_layout_is_the_first_ranks(text):
    """The planner gives none where it estimates a step's time. Parts of an odd vocabulary are not equally large."""
    (strategy,), batch = parse_parallel(text), MicroBatch(3, 5)
    tied = replace(on_grids(transformer(layers=1, vocabulary=999)).units[0], uses=2, reads_in_backward=1)
    assert strategy.layout(tied) == strategy.layout(tied, position=0) != strategy.layout(tied, position=2)
    first, second = (strategy.activation_transfers(tied, batch=batch, position=k) for k in (0, 1))
    assert strategy.activation_transfers(tied, batch=batch) == first != second
