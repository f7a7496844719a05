"""Faults planted in the path of sequences that ranks share, one place each: `verify` notices every one.

Trials of the models are made before a fault is planted: they compute with the same code, and would refuse the models.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from small_configs import config_of
from torch.nn import functional as F

import rotorch
from rotorch.core import zigzag
from rotorch.core.spec import Range
from rotorch.core.zigzag import KeyExchange
from rotorch.hold import sequence_ranks
from rotorch.models import shared_sequence
from rotorch.models.shared_sequence import SharedSequence
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.testing.subjects import CausalLM, compute_exactly
from rotorch.testing.verify import BAR, verify_subject

pytestmark = pytest.mark.usefixtures("warm")

NUM_TOKENS = 30  # chunks of 8, 8, 7 and 7
TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": NUM_TOKENS,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SOFT_CAPS = {"attn_logit_softcapping": 0.01, "query_pre_attn_scalar": 64}  # felt by scores of tiny weights


@dataclass(frozen=True)
class Padded(CausalLM):
    """A causal language model whose rows begin with padding."""

    def batch(self, *, seed, step, num_shares):
        rows = super().batch(seed=seed, step=step, num_shares=num_shares)
        is_token = torch.arange(NUM_TOKENS) >= torch.arange(len(rows["labels"]))[:, None] % 4
        return {
            **rows,
            "attention_mask": is_token.long(),
            "labels": rows["labels"].masked_fill(~is_token, -100),
        }


SUBJECTS = {
    "llama": lambda: CausalLM(config_of("llama", **TINY), 1),
    "mistral": lambda: CausalLM(config_of("mistral", **TINY, sliding_window=5), 1),
    "gemma2": lambda: CausalLM(config_of("gemma2", **TINY, **WINDOWS, **SOFT_CAPS), 1),
    "documents": lambda: CausalLM(config_of("llama", **TINY), 1, documents=True),
    "heads": lambda: CausalLM(config_of("llama", **TINY), 1),  # which ranks exchange, two sets of two heads
    "again": lambda: CausalLM(config_of("llama", **TINY), 1),  # whose keys are fetched again
    "padded": lambda: Padded(config_of("llama", **TINY), 1),
}
LAYOUTS = {"heads": "tsp=2[exchange=heads]", "again": "tsp=2[recompute=slice]"}


def verified(name, plant=lambda: None):
    """The report on a subject of which two ranks share each sequence, with a fault that `plant` makes."""
    subject = SUBJECTS[name]()
    compute_exactly(subject.config)
    with rotorch.on_meta():
        assert not try_shared(subject.build()).refused
    plant()
    return verify_subject(
        subject,
        name=name,
        parallel=LAYOUTS.get(name, "tsp=2"),
        steps=1 + (name == "documents"),
        timeout_s=120,
    )  # of two steps the second has documents


@pytest.mark.parametrize("name", SUBJECTS)
def test_without_a_fault_it_is_exact(name):
    report = verified(name)
    assert report.ok and 0 < report.max_rel_err_grad <= BAR, (report.verdict, report.worst_weights)


# ---- faults: each is called with what it stands in for, and with its arguments -------------------------------------


def labels_shifted_after_the_cut(take, self, batch):
    """The last token of each chunk has no target, or at the border within a part one that does not follow it."""
    own = shared_sequence._chunks_of(batch["labels"], zigzag.zigzag(NUM_TOKENS, num_ranks=2)[self.rank])
    return take(self, batch) | {"shift_labels": F.pad(own, (0, 1), value=-100)[:, 1:].contiguous()}


def positions_counted_from_a_parts_begin(take, self, batch):
    part = take(self, batch)
    return part | {"position_ids": torch.arange(part["position_ids"].shape[1]).expand_as(part["position_ids"])}


def padding_attended_to(take, self, batch):
    part = take(self, batch)
    self._sequence = replace(self._sequence, is_token=None)
    return part


def window_one_longer(attend, *args, sliding_window=None, **options):
    return attend(*args, sliding_window=sliding_window and sliding_window + 1, **options)


def window_one_shorter(attend, *args, sliding_window=None, **options):
    return attend(*args, sliding_window=sliding_window and sliding_window - 1, **options)


def first_chunk_skipped_by_the_last_ones(seen_by, queries, *, window):
    seen = seen_by(queries, window=window)
    return Range(8, seen.stop - 8) if queries.start >= 16 else seen


def last_tokens_left_out(zigzag_of, num_tokens, *, num_ranks):
    return zigzag_of(num_tokens // 4 * 4, num_ranks=num_ranks)


def chunks_in_the_other_order(chunks_of, tensor, chunks):
    return chunks_of(tensor, chunks[::-1])


def documents_not_told_apart(documents, positions):
    return None


def token_that_does_not_see_itself(mask, block, seen, **more):
    return mask(Range(max(0, block.start - 1), block.length), seen, **more)


def grouped_heads_repeated_in_turn(repeated, x, *, times):
    return x.repeat(1, times, 1, 1)


def scale_lost(attention_of, self, module, *, scaling, **more):
    return attention_of(self, module, scaling=None if scaling is None else 1.0, **more)


def soft_caps_lost(attention_of, self, module, *, options, **more):
    return attention_of(self, module, options={k: v for k, v in options.items() if k != "softcap"}, **more)


def keys_read_one_token_off(offset, self, seen):
    return max(0, offset(self, seen) - 1)


def ranges_put_in_the_other_order(receives, self, source):
    return receives(self, source)[::-1]


def came_from_others(moves):
    """True for each token among a rank's keys that another rank has sent, `[tokens, 1]`."""
    found = torch.zeros(moves.num_made[1], 1, dtype=torch.bool)
    for source in moves.others:
        for each in moves.receives[source].tokens:
            found[each.start : each.stop] = True
    return found


def heads_swapped(redistribute, x, moves, **more):
    made = redistribute(x, moves, **more)
    return torch.where(came_from_others(moves), made.flip(1), made)


def keys_taken_for_values(redistribute, x, moves, **more):
    made = redistribute(x, moves, **more)
    return torch.where(came_from_others(moves), made.roll(x.shape[-1] // 2, -1), made)


def gradients_that_do_not_come_home(redistribute, x, moves, **more):
    made = redistribute(x, moves, **more)
    return torch.where(came_from_others(moves), made.detach(), made)


def gradients_that_come_home_twice(redistribute, x, moves, **more):
    made = redistribute(x, moves, **more)
    return torch.where(came_from_others(moves), 2 * made - made.detach(), made)


def keys_of_the_layer_before(redistribute, x, moves, *, axis_group, **more):
    earlier = vars(axis_group).setdefault("earlier", [])
    earlier.append(redistribute(x, moves, axis_group=axis_group, **more))
    return earlier[-1 - (len(earlier) % 2 == 0)]


def heads_of_sets_side_by_side_in_turn(sets, x, *, num_sets):
    return x.unflatten(1, (-1, num_sets)).transpose(1, 2).transpose(2, 3).flatten(3)


def outputs_back_in_the_other_order(redistribute, x, moves, **more):
    made = redistribute(x, moves, **more)
    return made.flip(1) if moves.sends[moves.rank].heads.length < moves.num_made[0] else made


def attention_to_later_tokens(attend_spans, query, key, value, *, spans, scale):
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True).transpose(1, 2)


def attention_to_ones_own_tokens_alone(attend_spans, query, key, value, *, spans, scale):
    own = [replace(span, keys=span.own) for span in spans]
    return attend_spans(query, key, value, spans=own, scale=scale)


def keys_not_fetched_again(redistribute, x, moves, *, into=None, **more):
    return redistribute(x, moves, **more) if into is None else into.zero_()


FAULTS = [
    (labels_shifted_after_the_cut, "llama", [(SharedSequence, "take")]),
    (positions_counted_from_a_parts_begin, "llama", [(SharedSequence, "take")]),
    (padding_attended_to, "padded", [(SharedSequence, "take")]),
    (window_one_longer, "mistral", [(SharedSequence, "_attend")]),
    (window_one_shorter, "gemma2", [(SharedSequence, "_attend")]),
    (first_chunk_skipped_by_the_last_ones, "llama", [(zigzag, "seen_by"), (shared_sequence, "seen_by")]),
    (last_tokens_left_out, "llama", [(zigzag, "zigzag"), (shared_sequence, "zigzag")]),
    (chunks_in_the_other_order, "llama", [(shared_sequence, "_chunks_of")]),
    (documents_not_told_apart, "documents", [(shared_sequence, "_documents")]),
    (token_that_does_not_see_itself, "mistral", [(shared_sequence, "_mask")]),
    (grouped_heads_repeated_in_turn, "mistral", [(shared_sequence, "_repeated")]),
    (scale_lost, "gemma2", [(SharedSequence, "_attention_of")]),
    (soft_caps_lost, "gemma2", [(SharedSequence, "_attention_of")]),
    (keys_read_one_token_off, "mistral", [(KeyExchange, "offset")]),
    (ranges_put_in_the_other_order, "llama", [(KeyExchange, "receives")]),
    (heads_swapped, "llama", [(sequence_ranks, "redistribute")]),
    (keys_taken_for_values, "llama", [(sequence_ranks, "redistribute")]),
    (gradients_that_do_not_come_home, "llama", [(sequence_ranks, "redistribute")]),
    (gradients_that_come_home_twice, "llama", [(sequence_ranks, "redistribute")]),
    (keys_of_the_layer_before, "llama", [(sequence_ranks, "redistribute")]),
    (heads_of_sets_side_by_side_in_turn, "heads", [(shared_sequence, "_sets")]),
    (outputs_back_in_the_other_order, "heads", [(sequence_ranks, "redistribute")]),
    (attention_to_later_tokens, "heads", [(shared_sequence, "attend_spans")]),
    (attention_to_ones_own_tokens_alone, "llama", [(shared_sequence, "attend_spans")]),
    (keys_not_fetched_again, "again", [(sequence_ranks, "redistribute")]),
]
"""A fault, the subject that it matters for, and the function that it stands in for, under each name that has it."""


ALIKE = {
    window_one_shorter, chunks_in_the_other_order, token_that_does_not_see_itself, grouped_heads_repeated_in_turn,
    scale_lost, keys_read_one_token_off, ranges_put_in_the_other_order, keys_taken_for_values,
    gradients_that_come_home_twice, keys_of_the_layer_before, heads_of_sets_side_by_side_in_turn,
}  # fmt: skip
"""Faults of a kind that another one of the list shows; among the slow tests."""


@pytest.mark.parametrize(
    ("fault", "name", "places"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] in ALIKE else []) for each in FAULTS],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_noticed(monkeypatch, fault, name, places):
    def plant():
        for owner, attribute in places:
            original = getattr(owner, attribute)
            monkeypatch.setattr(
                owner, attribute, lambda *args, original=original, **kwargs: fault(original, *args, **kwargs)
            )

    report = verified(name, plant)
    assert not report.ok
    # Far above rounding: the fault itself, in the loss or in gradients, and so from the first step that it touches.
    assert max(report.max_rel_err_loss, report.max_rel_err_grad) > 1e4 * BAR, report.verdict
