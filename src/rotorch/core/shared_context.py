"""Traffic of ranks that share a sequence: keys and values of every attention, and their gradients.

A strategy with an option `context` names it in `context_axes` and takes its transfers and its refusals from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer
from rotorch.core.zigzag import KeyExchange


@dataclass(frozen=True)
class KeysAndValues:
    """Note of the first unit of an attention.

    Attributes:
        width: features of its keys and its values together, per token.
        window: tokens that a token attends to; None: all before it.
    """

    width: int
    window: int | None = None


def key_value_transfers(
    unit: Unit, *, batch: MicroBatch, num_ranks: int, axis: str, position: int, num_forwards: int = 1
) -> tuple[Transfer, ...]:
    """Transfers of one micro-batch for the attention that begins with `unit`; none for other units.

    Args:
        unit: of a model's description for ranks that share sequences.
        batch: the micro-batch; its tokens are those of the whole sequence.
        num_ranks: of those that share it.
        axis: of the mesh.
        position: of the rank on it.
        num_forwards: 2 if backward runs the attention's forward again.
    """
    note = unit.note(KeysAndValues)
    if note is None or num_ranks == 1:
        return ()
    exchange = KeyExchange(batch.num_tokens, num_ranks, position % num_ranks, note.window)
    per_token = batch.num_rows * note.width * batch.itemsize

    def sent(num_tokens: int, phase: Phase) -> Transfer:
        return Transfer(Kind.SEND, axis, phase, num_tokens * per_token, num_tokens * per_token, num_ranks - 1)

    return (
        sent(exchange.num_sent, Phase.FORWARD),
        *(sent(exchange.num_sent, Phase.BACKWARD) for _ in range(num_forwards - 1)),
        sent(exchange.num_received, Phase.BACKWARD),
    )


def check_divides(*, size: int, context: int, kind: str) -> None:
    """Raises `ValueError` unless groups of `context` ranks make up `size` ranks."""
    if size % context:
        near = max(c for c in range(1, context) if size % c == 0)
        raise ValueError(
            f"context={context} does not divide {kind}={size}: every {context} neighbours share a sequence. "
            f"Write context={near}, or a size that {context} divides"
        )


def check_shares(spec: ModelSpec, *, context: int, kind: str) -> None:
    """Raises `ConfigError` for a model whose sequences cannot be shared."""
    if context > 1 and spec.sequences_stay_whole:
        raise ConfigError(
            f"{kind}: context={context} gives each rank a part of a sequence, and {spec.name} cannot be computed so: "
            f"{spec.sequences_stay_whole}. Leave context out"
        )
