"""Sequences that ranks share: the part of a batch that a rank computes, and attention over tokens of all its ranks.

[Note: attention over ranks]
    Each rank has some tokens of a sequence (`core/zigzag.py`), under their own positions, and all of its model's code
    runs on them as on any batch. Only attentions look at other tokens. For the time of a pass a function of ours stands
    in transformers' `AttentionInterface`, under a name that the model's configurations then have: it gets keys and
    values of the tokens that this rank's attend to, as they are (those of grouped heads once), and calls the attention
    that the model has without us, block by block of this rank's tokens, with a mask made from positions. So scales,
    soft caps and sinks are the model's own. Or (`by_heads`) it gets all tokens of some heads, calls the attention in
    the same way, and gives the outputs of all tokens back. Transformers makes no masks for a name that its table of
    masks does not have. Under autocast, whose dtype attentions compute in, tensors are converted before they travel.

    Outside of passes everything is as it was: trials on tiny models, and calls of the model, know nothing of us.

[Note: blocks]
    A block of queries needs no keys behind its last token, nor any before its window. Blocks are at most a sixteenth of
    a sequence, so of the scores that are computed at most a sixteenth of a causal half is masked. Backward computes a
    block again: masks and scores, of which there are tokens times tokens, exist for one block at a time. Where a token
    sees all before it, without documents, windows, or padding, torch's fused attention takes a chunk at once
    (`models/attend_last.py`).

[Note: fetched again]
    Keys of all tokens, kept in every layer, would be as much as a rank that has whole sequences keeps. Where backward
    computes layers again (`fetches_again`), their memory is freed behind an attention's forward, and filled once more
    when the gradient of its output is there.

[Note: interleaved passes]
    In a pipeline the forward of another micro-batch comes before the backward of this one. So what backward runs again
    must see the sequence of its own forward: a layer that is recomputed asks for it in forward (`of_pass`). A
    checkpoint that knows nothing of us is refused.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rotorch._torch_private import in_backward
from rotorch.core.errors import ConfigError
from rotorch.core.redistribution import Redistribution
from rotorch.core.shared_context import KeysAndValues
from rotorch.core.spec import Range
from rotorch.core.zigzag import HeadExchange, KeyExchange, blocks_of, seen_by, sees_all, zigzag
from rotorch.models.attend_last import Span, attend_spans, can_fuse
from rotorch.models.attention_interface import as_computed, attending_by, attention_configs, attention_names
from rotorch.models.losses import Batch


class Exchange(Protocol):
    """Makes `[rows, heads, tokens, features]` of those of all ranks.

    In backward each rank gets the sum of all ranks' gradients of its own. `into` is an earlier result of the same
    moves, whose memory takes this one, without autograd.
    """

    def __call__(self, x: Tensor, moves: Redistribution, *, into: Tensor | None = None) -> Tensor: ...


_Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys, values and a mask (True: seen)."""

_TEXT = ("input_ids", "inputs_embeds")
_KNOWN = (*_TEXT, "labels", "shift_labels", "attention_mask", "position_ids")
_IGNORED = -100
_NO_OPTIONS = {"softcap", "s_aux", "position_bias", "cache"}  # of attentions: scaled_dot_product_attention has none


@dataclass(frozen=True)
class _Sequence:
    """The sequence that is computed.

    Attributes:
        num_tokens: of it.
        chunks: this rank's.
        is_token: of `[rows, tokens]`, those that are there; None: all.
        document: of `[rows, tokens]`, the number of each one's document; None: there is one per row.
    """

    num_tokens: int
    chunks: tuple[Range, Range]
    is_token: Tensor | None
    document: Tensor | None

    @property
    def is_plain(self) -> bool:
        """True if each token sees all before it."""
        return self.is_token is None and self.document is None


class SharedSequence:
    """This rank's part in computing sequences (see [Note: attention over ranks]).

    Args:
        module: a Hugging Face model.
        rank: this rank's number among those that share a sequence.
        num_ranks: of them.
        exchange: redistributes heads and tokens among them.
        by_heads: each gets all tokens of some heads; if not, the keys and values that its own tokens attend to.
        fetches_again: keys and values of others are not kept for backward (see [Note: fetched again]).
        all_equal: True if all of them gave the same number.
        interleaved: passes of other micro-batches come between forward and backward of one.

    Attributes:
        rank: this rank's number.
        attended: modules that have called the attention since the last `take`.
        exchanged: their keys and values, in the order of calls.

    Raises:
        ConfigError: the model's attention is neither "sdpa" nor "eager".
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int,
        num_ranks: int,
        exchange: Exchange,
        by_heads: bool = False,
        fetches_again: bool = False,
        all_equal: Callable[[int], bool] = lambda _: True,
        interleaved: bool = False,
    ) -> None:
        self._name = f"rotorch_shared_sequence_{id(self)}"
        self._configs = attention_configs(module)
        self._own = attention_names(self._configs)
        refuse_attentions(module)
        self.rank, self._num_ranks, self._exchange = rank, num_ranks, exchange
        self._by_heads, self._fetches_again = by_heads, fetches_again
        self._all_equal, self._interleaved, self._runs_again = all_equal, interleaved, False
        self._sequence: _Sequence | None = None
        self.attended: list[nn.Module] = []
        self.exchanged: list[KeysAndValues] = []

    # ---------------------------------------------------------------- batches

    def take(self, batch: Batch) -> dict[str, Tensor]:
        """Begins a micro-batch; returns this rank's part of it: its tokens, their targets and their positions.

        Args:
            batch: the same on all ranks that share it; `check_batch` has seen it.
        """
        first = next(batch[name] for name in _TEXT if name in batch)
        num_tokens, mask = first.shape[1], batch.get("attention_mask")
        chunks = zigzag(num_tokens, num_ranks=self._num_ranks)[self.rank]
        is_token = None if mask is None else mask.bool()
        self._sequence = _Sequence(num_tokens, chunks, is_token, _documents(batch.get("position_ids")))
        self.attended, self.exchanged = [], []
        whole = {name: tensor for name, tensor in batch.items() if name not in ("attention_mask", "labels")}
        if "labels" in batch and "shift_labels" not in batch:
            # Before the cut: the target of a chunk's last token is the first token of the next chunk.
            whole["shift_labels"] = F.pad(batch["labels"], (0, 1), value=_IGNORED)[:, 1:]
        if "position_ids" not in batch:
            whole["position_ids"] = torch.arange(num_tokens, device=first.device).expand(first.shape[0], -1)
        return {name: _chunks_of(tensor, chunks) for name, tensor in whole.items()}

    def all_given(self, tensors: Sequence[Tensor]) -> bool:
        """True if all ranks that share sequences were given the same tensors, by shapes and a checksum."""
        checksum = 0
        for tensor in tensors:
            numbers = tensor.reshape(-1).double()
            places = torch.arange(1, 1 + numbers.numel(), dtype=torch.float64, device=tensor.device)
            found = (tuple(tensor.shape), float(numbers.sum()), float(numbers @ places))
            checksum = zlib.crc32(repr(found).encode(), checksum)
        return self._all_equal(checksum)

    # ---------------------------------------------------------------- attention

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Lets the model's attentions see the keys of all ranks within the block, in forward and in backward."""
        try:
            with attending_by(self._attend, name=self._name, configs=self._configs):
                yield
        finally:
            self._sequence = None

    def of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """Notes the sequence that is computed; the result makes contexts in which backward runs a part of it again."""
        then = self._sequence

        @contextmanager
        def context() -> Iterator[None]:
            now, self._sequence, self._runs_again = (self._sequence, self._runs_again), then, True
            try:
                yield
            finally:
                self._sequence, self._runs_again = now

        return context

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention as transformers' models call it: `[rows, heads, tokens, features]` to `[rows, tokens, heads, ..]`.

        Raises:
            ConfigError: an attention that is not causal over the tokens of one sequence.
        """
        sequence = self._sequence
        if sequence is None:
            raise AssertionError("a pass over a shared sequence begins with `take`")
        mine = sum(chunk.length for chunk in sequence.chunks)
        if attention_mask is not None or query.shape[2] != mine or key.shape[2] != mine:
            raise ConfigError(
                f"{type(module).__name__} attends with a mask of its own, or to other tokens than those of the sequence"
            )
        if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
            raise ConfigError(f"{type(module).__name__} attends in both directions")
        if self._interleaved and in_backward() and not self._runs_again:
            raise ConfigError(
                f"{type(module).__name__} is run again in backward by a checkpoint that is not rotorch's, after other "
                "micro-batches have passed. Call activation_checkpointing_disable(), and write recompute=block for "
                "fsdp, or recompute=slice for rtp"
            )
        query, key, value = (as_computed(x) for x in (query, key, value))
        heads, key_heads = query.shape[1], key.shape[1]
        note = KeysAndValues(
            width=key_heads * (key.shape[3] + value.shape[3]),
            window=sliding_window,
            heads=heads,
            key_heads=key_heads,
            query_width=heads * query.shape[3],
            output_width=heads * value.shape[3],
        )
        self.attended.append(module)
        self.exchanged.append(note)
        attend = self._attention_of(module, dropout=dropout, scaling=scaling, window=sliding_window, options=options)
        if sees_all(sliding_window, num_tokens=sequence.num_tokens):
            sliding_window = None
        repeats = takes_any_group(self._own_name(module))
        fuses = repeats and sliding_window is None and sequence.is_plain and not dropout and can_fuse(query, value)
        of_blocks = _Blocks(
            attend,
            sequence,
            sliding_window,
            has_dropout=dropout > 0,
            fused=partial(attend_spans, scale=scaling) if fuses else None,
        )
        if not self._by_heads:
            part = KeyExchange(sequence.num_tokens, self._num_ranks, self.rank, sliding_window)
            # One message; keys and values may differ in their features.
            own, moves = torch.cat([key, value], dim=-1), part.moves(num_heads=key_heads)
            fetched = self._exchange(own, moves)
            keys, values = fetched.split([key.shape[3], value.shape[3]], dim=-1)
            output = of_blocks.attend(query, keys, values, chunks=sequence.chunks, place_of=part.offset)
            # In backward a checkpoint of the model's own runs this again, and reads what it has fetched at once.
            if self._fetches_again and own.requires_grad and not in_backward():
                self._fetch_again(fetched, own=own, moves=moves, output=output)
            return output, None
        num_sets = replace(note, repeats=repeats).num_sets(self._num_ranks)
        moves = HeadExchange(sequence.num_tokens, self._num_ranks, self.rank, num_sets).moves
        dealt = self._exchange(_as_sets(query, key, value, num_sets=num_sets), moves)
        queries, keys, values = _of_sets(dealt, query, value)
        everything = Range(0, sequence.num_tokens)
        output = of_blocks.attend(queries, keys, values, chunks=[everything], place_of=lambda seen: seen.start)
        features = output.shape[3]
        outputs = self._exchange(_sets(output.transpose(1, 2), num_sets=dealt.shape[1]), moves.back)
        return outputs.unflatten(3, (-1, features)).transpose(1, 2).flatten(2, 3), None

    def _fetch_again(self, fetched: Tensor, *, own: Tensor, moves: Redistribution, output: Tensor) -> None:
        """Frees the memory of keys and values from here to the attention's backward, and behind that.

        Args:
            fetched: keys and values that the attention was computed with.
            own: those of this rank's tokens, of which `fetched` was made.
            moves: which made it.
            output: of the attention.
        """
        storage = fetched.untyped_storage()
        num_bytes, sent = storage.nbytes(), own.detach()

        def fill(_: Tensor) -> None:
            # All ranks of the sequence are at this attention's backward, and exchange once more.
            storage.resize_(num_bytes)
            self._exchange(sent, moves, into=fetched.data)  # `data`: equal values are no new version for autograd

        def free(_: Tensor) -> None:
            storage.resize_(0)  # the gradient of `own` is there, so nothing reads `fetched` any more

        storage.resize_(0)
        output.register_hook(fill)
        own.register_hook(free)

    def _own_name(self, module: nn.Module) -> str:
        return str(self._own.get(id(getattr(module, "config", None)), "eager"))

    def _attention_of(
        self, module: nn.Module, *, dropout: float, scaling: float | None, window: int | None, options: dict[str, Any]
    ) -> _Attention:
        """The model's own attention of one block."""
        if self._own_name(module) == "sdpa":
            if unknown := sorted(name for name in _NO_OPTIONS if options.get(name) is not None):
                raise ConfigError(f"{type(module).__name__}: attention 'sdpa' has no {', '.join(unknown)}")

            def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
                # Kernels that take masks take no grouped heads on every device.
                key, value = (_repeated(x, times=query.shape[1] // x.shape[1]) for x in (key, value))
                found = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
                return found.transpose(1, 2)

            return fused
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ConfigError(f"{type(module).__name__} has no attention 'eager' that could be called by itself")

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
            added.masked_fill_(~mask, torch.finfo(query.dtype).min)
            found: Tensor = eager(
                module, query, key, value, added, scaling=scaling, dropout=dropout, sliding_window=window, **options
            )[0]
            return found

        return plain


@dataclass(frozen=True)
class _Blocks:
    """An attention, block by block of queries (see [Note: blocks]).

    Attributes:
        of_block: the attention of one block.
        sequence: whose tokens attend.
        window: tokens that a token attends to; None: all before it.
        has_dropout: it draws random numbers.
        fused: attention of all queries at once, where they see all tokens before them: `models/attend_last.py`.
    """

    of_block: _Attention
    sequence: _Sequence
    window: int | None
    has_dropout: bool
    fused: Callable[..., Tensor] | None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        chunks: Sequence[Range],
        place_of: Callable[[Range], int],
    ) -> Tensor:
        """Outputs `[rows, tokens, heads, features]` of queries `[rows, heads, tokens, features]`.

        Args:
            queries: of the tokens of some chunks, one chunk after the other.
            keys: of all tokens that these attend to.
            values: of the same.
            chunks: ranges of the sequence.
            place_of: where consecutive tokens of the sequence lie among the keys.
        """
        outputs, done = [], 0
        if self.fused:
            spans = []
            for chunk in chunks:
                if chunk.length:
                    seen = seen_by(chunk, window=None)
                    spans.append(Span(Range(done, chunk.length), Range(place_of(seen), seen.length)))
                    done += chunk.length
            return self.fused(queries, keys, values, spans=spans)
        for chunk in chunks:
            for block in blocks_of(chunk, num_tokens=self.sequence.num_tokens):
                seen = seen_by(block, window=self.window)
                here, place = queries.narrow(2, done, block.length), place_of(seen)
                its_keys, its_values = (x.narrow(2, place, seen.length) for x in (keys, values))
                if torch.is_grad_enabled():
                    output = checkpoint(
                        self._attend_block, here, its_keys, its_values, block, seen,
                        use_reentrant=False, preserve_rng_state=self.has_dropout,
                    )  # fmt: skip
                else:
                    output = self._attend_block(here, its_keys, its_values, block, seen)
                outputs.append(output)
                done += block.length
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_block(self, queries: Tensor, keys: Tensor, values: Tensor, block: Range, seen: Range) -> Tensor:
        mask = _mask(block, seen, window=self.window, sequence=self.sequence, device=queries.device)
        return self.of_block(queries, keys, values, mask)


def check_batch(batch: Batch, *, num_ranks: int) -> None:
    """Raises `ConfigError` for a batch whose sequences cannot be cut: too short, packed documents, unknown entries."""
    if unknown := sorted(set(batch) - set(_KNOWN)):
        raise ConfigError(
            f"context={num_ranks}: the batch's {', '.join(map(repr, unknown))} cannot be cut along the sequence. "
            f"Give {', '.join(_KNOWN)} only, or leave context out"
        )
    first = next((batch[name] for name in _TEXT if name in batch), None)
    if first is None or first.dim() < 2:
        raise ConfigError(f"context={num_ranks}: the batch needs 'input_ids' [rows, tokens], has {sorted(batch)}")
    num_tokens = first.shape[1]
    if num_tokens < num_ranks:
        raise ConfigError(
            f"context={num_ranks}: a sequence of {num_tokens} tokens has none for some ranks. Give {num_ranks} or more"
        )
    for name, tensor in batch.items():
        if tensor.shape[:2] != (first.shape[0] if name != "position_ids" else tensor.shape[0], num_tokens) or (
            name not in _TEXT and tensor.dim() != 2
        ):
            raise ConfigError(
                f"context={num_ranks}: {name!r} is {list(tensor.shape)}, not [rows, tokens] = {list(first.shape[:2])}"
            )
    positions = batch.get("position_ids")
    if "attention_mask" in batch and positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise ConfigError(
            f"context={num_ranks}: position_ids that begin anew tell documents apart, unless there is an "
            "attention_mask, beside which models take no notice of them. Leave attention_mask out"
        )


def simplified(batch: Batch) -> Batch:
    """A batch without entries that say nothing: a mask of ones, positions that number the tokens of every row.

    Without them attentions need no masks. The device that the batch lies on is asked, so call it before a batch moves.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    needless = {"attention_mask"} if mask is not None and bool(mask.all()) else set()
    if positions is not None and bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all()):
        needless.add("position_ids")
    return {name: tensor for name, tensor in batch.items() if name not in needless}


def takes_any_group(attention: str | None) -> bool:
    """True if an attention of this name takes any number of query heads per head of keys; the model's own may not."""
    return attention == "sdpa"


def refuse_attentions(module: nn.Module) -> None:
    """Raises `ConfigError` for attentions whose masks are not tensors: no block of theirs can be computed."""
    for config in attention_configs(module):
        name = config._attn_implementation
        if name not in ("sdpa", "eager", None):
            raise ConfigError(
                f"context: attn_implementation={name!r} takes no masks made from positions. Write 'sdpa' or 'eager'"
            )


def _chunks_of(tensor: Tensor, chunks: Sequence[Range]) -> Tensor:
    """This rank's tokens of `[rows, tokens, ..]`, one chunk after the other."""
    return torch.cat([tensor.narrow(1, chunk.start, chunk.length) for chunk in chunks], dim=1)


def _as_sets(query: Tensor, key: Tensor, value: Tensor, *, num_sets: int) -> Tensor:
    """Query heads with the keys and values that they share: `[rows, sets, tokens, features]`, all in one tensor."""
    keys, values = (_repeated(x, times=num_sets // x.shape[1]) for x in (key, value))
    return torch.cat([_sets(query, num_sets=num_sets), keys, values], dim=-1)


def _of_sets(dealt: Tensor, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of `_as_sets`, each of as many features as those of `query` and `value`."""
    features = query.shape[3], value.shape[3]
    queries, keys, values = dealt.split([dealt.shape[3] - sum(features), *features], dim=-1)
    # Copies, each of its own: a view of one would keep all of them for backward beside copies of the others.
    queries = queries.unflatten(3, (-1, features[0])).transpose(2, 3).flatten(1, 2)
    return queries.contiguous(), keys.contiguous(), values.contiguous()


def _sets(x: Tensor, *, num_sets: int) -> Tensor:
    """Heads `[rows, heads, tokens, features]` in sets, a set's side by side: `[rows, sets, tokens, features]`."""
    return x.unflatten(1, (num_sets, -1)).transpose(2, 3).flatten(3)


def _repeated(x: Tensor, *, times: int) -> Tensor:
    """Heads of keys or values, each as often as query heads share it."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _mask(block: Range, seen: Range, *, window: int | None, sequence: _Sequence, device: torch.device) -> Tensor:
    """The keys that each query of a block sees: `[rows or 1, 1, queries, keys]`."""
    queries = torch.arange(block.start, block.stop, device=device)[:, None]
    keys = torch.arange(seen.start, seen.stop, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    mask = mask[None, None]
    if sequence.is_token is not None:
        mask = mask & sequence.is_token[:, None, None, seen.start : seen.stop]
    if (document := sequence.document) is not None:
        of_keys = document[:, None, None, seen.start : seen.stop]
        mask = mask & (document[:, None, block.start : block.stop, None] == of_keys)
    return mask


def _documents(positions: Tensor | None) -> Tensor | None:
    """The number of each token's document, by positions that begin anew, as transformers' masks read them.

    None if all rows are known to hold one: a GPU would have to be asked, and waited for.
    """
    if positions is None:
        return None
    begins = positions.diff(dim=-1) != 1
    if begins.device.type == "cpu" and not begins.any():
        return None
    return F.pad(begins.cumsum(dim=-1), (1, 0))
