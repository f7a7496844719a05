"""Layouts against reality: the bytes that a rank holds and sends, and what its strategies' Layouts say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rotorch.comm.meter import Meter
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import Kind, MicroBatch
from rotorch.mesh import flat_position
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import parallelize
from rotorch.planner.prediction import unit_layout
from rotorch.strategies import as_they_run

_TO_THE_BYTE = (Kind.SEND, Kind.BROADCAST, Kind.REDUCE)
_ROUNDING_BYTES = 64
"""Per message: sizes round up to what a library aligns to, shares round down."""


def expected_resident_bytes(model: ParallelModel, unit: Unit) -> int:
    """Bytes of a unit that this rank holds, by the Layouts; 0 if an outer strategy puts it elsewhere."""
    positions = [_position(model, strategy) for strategy in model.strategies]
    return unit_layout(unit, strategies=model.strategies, positions=positions).resident_bytes


def expected_copies_bytes(model: ParallelModel) -> int:
    """Bytes of this rank's copies of weights in the dtype of passes, by the Layouts."""
    positions = [_position(model, strategy) for strategy in model.strategies]
    units = _part_of_rank(model).units
    return sum(unit_layout(u, strategies=model.strategies, positions=positions).copies_bytes for u in units)


def micro_batch_of(model: ParallelModel, batch: Mapping[str, Tensor]) -> MicroBatch:
    """Returns the micro-batch size of token ids for a model without autocast.

    Of experts that tokens travel to, the pairs are those of the model's last pass.
    """
    num_rows, num_tokens = batch["input_ids"].shape
    itemsize = max(w.itemsize_in_pass for w in model.spec.weights)
    loss_itemsize = max(itemsize, 4)  # models convert logits in half precision
    routed = model.sharded.routed
    return MicroBatch(num_rows, num_tokens, itemsize=itemsize, loss_itemsize=loss_itemsize, routed=routed)


def expected_sent_bytes(model: ParallelModel, *, batch: MicroBatch | None = None) -> dict[Kind, int]:
    """Returns the bytes that this rank sends in a step of one micro-batch by the Layouts, by kind.

    Args:
        model: whose step.
        batch: the micro-batch; None leaves out activations.
    """
    sent: dict[Kind, int] = defaultdict(int)
    sharded = model.sharded
    strategies = as_they_run(
        model.strategies, transport=sharded.transport, within=sharded.transport_within, num_hosts=sharded.num_hosts
    )
    positions = [_position(model, strategy) for strategy in strategies]
    for unit in _part_of_rank(model).units:
        transfers = list(unit_layout(unit, strategies=strategies, positions=positions).transfers)
        if batch is not None:
            for strategy, position in zip(strategies, positions, strict=True):
                transfers += strategy.activation_transfers(unit, batch=batch, position=position)
        for transfer in transfers:
            sent[transfer.kind] += transfer.sent_bytes
    return {kind: num_bytes for kind, num_bytes in sent.items() if num_bytes}


def sent_and_said(
    module: nn.Module, parallel: str, *, batch: Mapping[str, Tensor]
) -> tuple[dict[Kind, int], dict[Kind, int]]:
    """Bytes that this rank sends in a first step, by kind, and the Layouts' bytes. All ranks call it.

    Args:
        module: a model of token ids; its weights are initialised.
        parallel: the layout.
        batch: this rank's micro-batch.
    """
    model = parallelize(module, parallel, device="cpu").materialize(seed=0)
    with Meter() as meter:
        model.forward_backward(batch)
    if meter.not_counted:
        raise AssertionError(f"the meter has no rule for {dict(meter.not_counted)}")
    said = expected_sent_bytes(model, batch=micro_batch_of(model, batch))
    model.close()
    return dict(meter.sent_bytes), said


def traffic_problems(model: ParallelModel, meter: Meter, *, batch: MicroBatch | None = None) -> Iterator[str]:
    """Says where a metered step of one micro-batch differs from the Layouts, and what they say of activations.

    Messages between two ranks, and along chains, are counted to the byte; collectives up to rounding. A strategy that
    chose for itself among several ways (a field whose value is "auto") may have sent less than its Layout says, never
    more.
    """
    for name, times in meter.not_counted.items():
        yield f"{name} was called {times} times, and the meter knows no rule for it"
    expected = expected_sent_bytes(model, batch=batch)
    chose = any(value == "auto" for s in model.strategies for value in s.model_dump().values())
    for kind in sorted({*expected, *meter.sent_bytes}):
        said, found = expected.get(kind, 0), meter.sent_bytes[kind]
        slack = 0 if kind in _TO_THE_BYTE else _ROUNDING_BYTES * max(meter.num_messages[kind], len(model.spec.units))
        too_little = found < said - slack and not (chose and kind is Kind.SEND)
        if found > said + slack or too_little:
            number = meter.num_messages[kind]
            yield f"{kind}: sent {found} bytes in {number} messages, the Layouts say {said}"


def _part_of_rank(model: ParallelModel) -> ModelSpec:
    """The units that strategies around the innermost one leave to this rank."""
    spec = model.spec
    for strategy in model.strategies[:-1]:
        spec = strategy.part_of(spec, position=_position(model, strategy))
    return spec


def _position(model: ParallelModel, strategy: Strategy) -> int:
    """This rank's position on a strategy's axes."""
    names = model.mesh.mesh_dim_names or ()
    return flat_position(strategy.axes, dict(zip(names, model.mesh.get_coordinate() or [], strict=True)))
