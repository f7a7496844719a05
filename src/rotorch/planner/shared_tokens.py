"""Sequences that ranks share (`context`): tokens of a rank, and the memory and work of attention to tokens of others.

[Note: rank that has most]
    All ranks of a sequence wait for each other in every attention, and memory is that of the rank which holds most. So
    each figure here is the largest over these ranks: the longest part of the tokens, the most keys, the most scores.

[Note: blocks of queries]
    A rank's queries attend block by block, and backward computes a block again (`models/shared_sequence.py`). Of a
    block's scores at most its last tokens are masked, so a rank computes little more than its part of a causal half.
    For one block at a time there are a mask, heads of keys and values repeated for the queries that share them, and
    scores where no fused kernel computes them. Where each token sees all before it, a fused attention takes a whole
    chunk, or with exchanged heads all queries; it keeps its output, and nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rotorch.core.shared_context import KeysAndValues, SequenceRanks
from rotorch.core.spec import Range, Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Transfer
from rotorch.core.zigzag import KeyExchange, block_size, blocks_of, num_head_sets, seen_by, sees_all, zigzag
from rotorch.planner.speeds import Row, Work
from rotorch.planner.workload import FoldedModel, LayerClass, Passes


@dataclass(frozen=True)
class TracedAttention:
    """One attention of a layer.

    Attributes:
        query_bytes: of queries, per token.
        key_bytes: of keys and values together, per token, as ranks exchange them.
        score_bytes: of a score of every head; 0 if a fused kernel computes them.
        window: tokens that a token attends to; None: all before it.
        heads: of queries.
        key_heads: of keys and values.
        is_square: values have as many features as queries.
    """

    query_bytes: float
    key_bytes: float
    score_bytes: float = 0.0
    window: int | None = None
    heads: int = 1
    key_heads: int = 1
    is_square: bool = True

    @property
    def sum_bytes(self) -> float:
        """Bytes of the sums of scores that a fused attention keeps, per token."""
        return float(_SUM_OF_SCORES_BYTES * self.heads)

    @property
    def head_bytes(self) -> float:
        """Bytes of keys and values with as many heads as queries have; 0 if they have as many."""
        return self.key_bytes * self.heads / self.key_heads if self.heads > self.key_heads else 0.0

    def is_fused(self, num_tokens: int) -> bool:
        """True if one kernel takes all queries of a sequence's chunk (see [Note: blocks of queries])."""
        return sees_all(self.window, num_tokens=num_tokens) and self.is_square and not self.score_bytes

    def dealt(self, num_ranks: int) -> tuple[float, float, float]:
        """A rank's share of the heads where these are exchanged, and bytes of its queries and keys, per token."""
        sets = num_head_sets(heads=self.heads, key_heads=self.key_heads, num_ranks=num_ranks, repeats=True)
        share = most_of(sets, num_ranks)
        return share, share * self.query_bytes, share * self.key_bytes * sets / self.key_heads


def most_of(sets: int, num_ranks: int) -> float:
    """Share of the rank that most sets of heads are dealt to."""
    return -(-sets // num_ranks) / sets


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries of the rank that computes most scores (see [Note: blocks of queries]).

    Attributes:
        number: of blocks.
        queries: tokens of all of them.
        keys: tokens that they attend to, those of each block counted apart.
        pairs: scores of one head.
    """

    number: int
    queries: int
    keys: int
    pairs: int


def own_tokens(batch: MicroBatch, *, num_ranks: int) -> MicroBatch:
    """The part of a micro-batch that a rank computes, the longest one."""
    return batch if num_ranks == 1 else replace(batch, num_tokens=-(-batch.num_tokens // num_ranks))


@lru_cache(maxsize=1024)
def blocks_of_rank(num_tokens: int, num_ranks: int, window: int | None) -> Blocks:
    """Blocks of a sequence's rank that computes most scores."""
    ranks = zigzag(num_tokens, num_ranks=num_ranks)
    return max((_blocks(chunks, num_tokens, window) for chunks in ranks), key=lambda blocks: blocks.pairs)


def _blocks(chunks: Sequence[Range], num_tokens: int, window: int | None) -> Blocks:
    each = [block for chunk in chunks for block in blocks_of(chunk, num_tokens=num_tokens)]
    seen = [seen_by(block, window=window).length for block in each]
    return Blocks(
        number=len(each),
        queries=sum(block.length for block in each),
        keys=sum(seen),
        pairs=sum(block.length * keys for block, keys in zip(each, seen, strict=True)),
    )


@lru_cache(maxsize=1024)
def most_keys(num_tokens: int, num_ranks: int, window: int | None) -> int:
    """Tokens whose keys the rank has that needs most."""
    return max(KeyExchange(num_tokens, num_ranks, rank, window).num_needed for rank in range(num_ranks))


# ---------------------------------------------------------------- memory


def kept_bytes(
    attention: TracedAttention,
    *,
    batch: MicroBatch,
    shared_by: SequenceRanks,
    device: str,
) -> float:
    """Bytes that an attention keeps for backward beside its own tokens' queries.

    Args:
        attention: as it was traced.
        batch: the micro-batch; its tokens are those of the whole sequence.
        shared_by: the ranks that share it.
        device: "cpu" or "cuda".
    """
    num_ranks = shared_by.num_ranks
    own = own_tokens(batch, num_ranks=num_ranks).num_tokens
    if shared_by.by_heads:
        share, queries, keys = attention.dealt(num_ranks)
        outputs = queries + share * attention.sum_bytes if attention.is_fused(batch.num_tokens) else 0.0
        return batch.num_rows * (batch.num_tokens * (queries + keys + outputs) - own * attention.query_bytes)
    needed = own if shared_by.fetches_again else most_keys(batch.num_tokens, num_ranks, attention.window)
    outputs = 0.0
    if attention.is_fused(batch.num_tokens):
        # On CPU the outputs of both chunks are one tensor, which is counted; elsewhere each chunk's is kept beside it.
        outputs = attention.sum_bytes + (attention.query_bytes if device != "cpu" else 0.0)
    return batch.num_rows * (needed * attention.key_bytes + own * outputs)


_SUM_OF_SCORES_BYTES = 4
"""Of a head and a query, which a fused attention keeps: float32."""


def backward_bytes(
    attention: TracedAttention,
    *,
    batch: MicroBatch,
    shared_by: SequenceRanks,
) -> float:
    """Bytes beside the kept ones while an attention's longest block of queries is in backward.

    Its heads of keys and values repeated, the gradient of each, its mask, and gradients of all queries, keys and
    values, to which those of each block are added. Of heads that are exchanged: the gradients of outputs, and those of
    queries, keys and values twice, apart and together.

    Args:
        attention: as it was traced.
        batch: the micro-batch; its tokens are those of the whole sequence.
        shared_by: the ranks that share it.
    """
    num_ranks = shared_by.num_ranks
    rows, queries, window = batch.num_rows, block_size(batch.num_tokens), attention.window
    seen = batch.num_tokens if window is None else min(batch.num_tokens, window + queries - 1)
    heads = 2.0 * attention.head_bytes if attention.head_bytes else attention.key_bytes
    if shared_by.by_heads:
        share, of_queries, of_keys = attention.dealt(num_ranks)
        gradients = rows * batch.num_tokens * (of_queries + 2 * (of_queries + of_keys))
        if attention.is_fused(batch.num_tokens):
            return gradients
        scores = _SCORES_AT_ONCE * rows * attention.score_bytes * share
        return gradients + rows * seen * heads * share + queries * seen * (1.0 + batch.itemsize + scores)
    own, needed = own_tokens(batch, num_ranks=num_ranks).num_tokens, most_keys(batch.num_tokens, num_ranks, window)
    sums = own * attention.query_bytes + needed * attention.key_bytes
    sums += needed * attention.key_bytes if shared_by.fetches_again else 0.0
    if attention.is_fused(batch.num_tokens):
        return rows * (sums + _GRADIENTS_OF_KEYS * needed * attention.key_bytes)
    scores = _SCORES_AT_ONCE * rows * attention.score_bytes
    mask = 1.0 + batch.itemsize
    return rows * (seen * heads + sums) + queries * seen * (mask + scores)


_SCORES_AT_ONCE = 4
"""Scores, their soft-max, and the gradient of each."""

_GRADIENTS_OF_KEYS = 1
"""Of a chunk, beside the sum of both chunks' gradients."""

# ---------------------------------------------------------------- traffic


def slowest_exchange(unit: Unit, *, strategy: Strategy, batch: MicroBatch) -> tuple[Transfer, ...]:
    """Messages of the attention that begins with a unit, as long as the busiest rank has them.

    A link carries both directions at once. Of keys, a rank gets back in backward what it sends in forward; heads and
    their outputs are as many both ways, and each has messages of its own.

    Args:
        unit: of a model's description for ranks that share sequences.
        strategy: whose ranks share them.
        batch: the micro-batch; its tokens are those of the whole sequence.
    """
    num_ranks = strategy.sequence_ranks.num_ranks
    if num_ranks == 1 or unit.note(KeysAndValues) is None:
        return ()
    ranks = [strategy.activation_transfers(unit, batch=batch, position=rank) for rank in range(num_ranks)]
    each = [max(transfer.sent_bytes for transfer in same) for same in zip(*ranks, strict=True)]
    most = each if strategy.sequence_ranks.by_heads else [max(each)] * len(each)
    return tuple(replace(t, payload_bytes=m, sent_bytes=m) for t, m in zip(ranks[0], most, strict=True))


# ---------------------------------------------------------------- work


def attention_passes(model: FoldedModel, layer: LayerClass, *, batch: MicroBatch, shared_by: SequenceRanks) -> Passes:
    """The operators of a layer's attention on the rank that computes most (see [Note: blocks of queries]).

    Args:
        model: folded, of a description for ranks that share sequences.
        layer: of it.
        batch: the micro-batch; its tokens are those of the whole sequence.
        shared_by: the ranks that share one.
    """
    num_ranks, by_heads = shared_by.num_ranks, shared_by.by_heads
    width, size, rows = float(model.attention_width), batch.itemsize, batch.num_rows
    note = next((note for unit in layer.units if (note := unit.note(KeysAndValues)) is not None), None)
    exchanged, window = (float(note.width), note.window) if note is not None else (2 * width, None)
    share = 1.0 if by_heads else 1.0 / num_ranks  # of the queries that a rank attends with
    if by_heads:
        sets, key_heads = (num_ranks,) * 2 if note is None else (note.num_sets(num_ranks), note.key_heads)
        dealt = most_of(sets, num_ranks)
        width, exchanged = width * dealt, exchanged * dealt * sets / key_heads
    has_kernel = note is None or (note.repeats and note.query_width == note.output_width)
    if has_kernel and sees_all(window, num_tokens=batch.num_tokens):
        pairs = share * batch.num_tokens**2 / 2
        moved = rows * batch.num_tokens * (2.0 * share * width + exchanged) * size
        sides = 2.0 / batch.num_tokens + 1.0 / 128
        fused: Row = (4.0 * rows * pairs * width, sides, moved, 2.0 if by_heads else _OPERATORS_OF_CHUNKS)
        again: Row = (2.5 * fused[0], fused[1], 2 * moved, 3.0 if by_heads else 2.0 * _OPERATORS_OF_CHUNKS)
        return Passes(Work.of(fused), Work.of(again), Work.of())
    blocks = blocks_of_rank(batch.num_tokens, 1 if by_heads else num_ranks, window)
    flops = 4.0 * rows * blocks.pairs * width
    sides = blocks.number / blocks.queries + blocks.number / blocks.keys + 1.0 / 128
    repeated = 3.0 * 2 * width if exchanged < 2 * width else 0.0
    moved = rows * (2.0 * blocks.queries * width + blocks.keys * (exchanged + repeated)) * size
    mask = 2.0 * blocks.pairs * (1 + size)
    operators = float(_OPERATORS_OF_BLOCK * blocks.number)
    forward: Row = (flops, sides, moved + mask, operators)
    # The gradient of a block's queries and keys is one of all queries and keys, to which the next one's is added.
    needed = most_keys(batch.num_tokens, 1 if by_heads else num_ranks, window)
    whole = rows * (blocks.queries * width + needed * exchanged)
    sums = 4.0 * blocks.number * whole * size
    backward: Row = (2.5 * flops, sides, 2 * moved + sums, operators)
    return Passes(Work.of(forward), Work.of(forward, backward), Work.of())


_OPERATORS_OF_CHUNKS = 14.0
"""Of two chunks: attention in two parts, the parts' weights, and their sum."""

_OPERATORS_OF_BLOCK = 8
"""Its mask, heads repeated, and the attention itself."""
