"""Traffic of ranks that share a sequence: what they exchange in every attention, and the gradients.

A strategy with the options `context` and `exchange` names the first in `context_axes` and takes its transfers and its
refusals from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer
from rotorch.core.zigzag import HeadExchange, KeyExchange, num_head_sets


@dataclass(frozen=True)
class SequenceRanks:
    """Ranks that share a sequence, and what they exchange in its attentions.

    Attributes:
        num_ranks: of one sequence.
        by_heads: they exchange heads, not keys and values.
        fetches_again: keys and values are not kept for backward, but exchanged once more.
    """

    num_ranks: int = 1
    by_heads: bool = False
    fetches_again: bool = False


@dataclass(frozen=True)
class KeysAndValues:
    """Note of the first unit of an attention.

    Attributes:
        width: features of its keys and its values together, per token.
        window: tokens that a token attends to; None: all before it.
        heads: of queries.
        key_heads: of keys and values.
        query_width: features of its queries, of all heads.
        output_width: features of its output, of all heads.
        repeats: it takes any number of query heads per head of keys.
    """

    width: int
    window: int | None = None
    heads: int = 1
    key_heads: int = 1
    query_width: int = 0
    output_width: int = 0
    repeats: bool = True

    def num_sets(self, num_ranks: int) -> int:
        """Sets of heads that are dealt to so many ranks. Raises `ConfigError` if that cannot be."""
        return num_head_sets(heads=self.heads, key_heads=self.key_heads, num_ranks=num_ranks, repeats=self.repeats)


def key_value_transfers(
    unit: Unit,
    *,
    batch: MicroBatch,
    shared_by: SequenceRanks,
    axis: str,
    position: int,
    num_forwards: int = 1,
) -> tuple[Transfer, ...]:
    """Transfers of one micro-batch for the attention that begins with `unit`; none for other units.

    Args:
        unit: of a model's description for ranks that share sequences.
        batch: the micro-batch; its tokens are those of the whole sequence.
        shared_by: the ranks that share it.
        axis: of the mesh.
        position: of the rank on it.
        num_forwards: 2 if backward runs the attention's forward again.
    """
    note, num_ranks = unit.note(KeysAndValues), shared_by.num_ranks
    if note is None or num_ranks == 1:
        return ()
    rank, size = position % num_ranks, batch.num_rows * batch.itemsize

    def sent(numbers: int, phase: Phase) -> Transfer:
        return Transfer(Kind.SEND, axis, phase, numbers * size, numbers * size, num_ranks - 1)

    if not shared_by.by_heads:
        keys = KeyExchange(batch.num_tokens, num_ranks, rank, note.window)
        forward, backward = [keys.num_sent * note.width], [keys.num_received * note.width]
    else:
        sets = note.num_sets(num_ranks)
        moves = HeadExchange(batch.num_tokens, num_ranks, rank, sets).moves
        given = note.query_width // sets + note.width // note.key_heads  # of a set, per token
        came = note.output_width // sets
        forward = [moves.sent * given, moves.received * came]
        backward = [moves.sent * came, moves.received * given]
    return (
        *(sent(numbers, Phase.FORWARD) for numbers in forward),
        *(sent(numbers, Phase.BACKWARD) for numbers in forward * (num_forwards - 1)),
        *(sent(numbers, Phase.BACKWARD) for numbers in backward),
    )


def check_divides(*, size: int, context: int, kind: str) -> None:
    """Raises `ValueError` unless groups of `context` ranks make up `size` ranks."""
    if size % context:
        near = max(c for c in range(1, context) if size % c == 0)
        raise ValueError(
            f"context={context} does not divide {kind}={size}: every {context} neighbours share a sequence. "
            f"Write context={near}, or a size that {context} divides"
        )


def check_shares(spec: ModelSpec, *, context: int, exchange: str, kind: str) -> None:
    """Raises `ConfigError` for a model whose sequences cannot be shared, or whose heads cannot be exchanged."""
    if context == 1:
        if exchange != "gather":
            raise ConfigError(
                f"{kind}: exchange={exchange} says what ranks that share a sequence exchange, and none do. Write "
                "context=.. with it, or leave it out"
            )
        return
    if spec.sequences_stay_whole:
        raise ConfigError(
            f"{kind}: context={context} gives each rank a part of a sequence, and {spec.name} cannot be computed so: "
            f"{spec.sequences_stay_whole}. Leave context out"
        )
    if exchange == "heads":
        if spec.heads_stay_together:
            raise ConfigError(
                f"{kind}: exchange=heads gives each rank some heads of an attention, and {spec.name} cannot be "
                f"computed so: {spec.heads_stay_together}. Write exchange=gather"
            )
        for unit in spec.units:
            if (note := unit.note(KeysAndValues)) is not None:
                note.num_sets(context)
