"""Trial on a tiny model: is a sequence computed in two parts, with keys and values exchanged, the same as whole?

[Note: trial of a shared sequence]
    Ranks that share a sequence exchange keys and values in attentions that go through transformers' interface, and
    nothing else. A layer's code may look at other tokens in other ways: convolutions, states that pass along the
    sequence, attentions and masks of its own, statistics over all tokens. So a model with the same configuration but
    smaller sizes runs twice at once, in two threads, each with its part of the tokens; logits of both must be those of
    the whole model, and their losses must add up to its loss. Sequences are longer than windows and chunks, and of two
    lengths, each longer than a limit at which rotary embeddings change: one part is then below it. Where that is so,
    the same is tried with heads exchanged in place of keys and values: an attention may do with its heads what it
    cannot with some of them.

    A model without a loss that is a sum over tokens is tried by its outputs alone. A loss of the user's own is tried in
    the same way once it is given: called with parts of a batch it must add up to what the whole batch gives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotorch.core.errors import ConfigError
from rotorch.core.redistribution import Redistribution
from rotorch.core.shared_context import KeysAndValues
from rotorch.core.spec import ModelSpec, UnitKind
from rotorch.core.zigzag import zigzag
from rotorch.models.configuration import of_every_layer
from rotorch.models.losses import Batch, CausalLMLoss, LossFn, count_targets, loss_of
from rotorch.models.moved_parts import moved
from rotorch.models.shared_sequence import SharedSequence, takes_any_group
from rotorch.models.trial.two_threads import (
    ThreadExchange,
    differ,
    first_tensor,
    in_two_threads,
    key_of,
    tiny_of,
    trial,
)

_LENGTHS = (40, 72)
_NUM_PARTS = 2


@dataclass(frozen=True)
class SharedTrial:
    """Result of the trial.

    Attributes:
        refused: the reason why sequences of the model cannot be shared; "" if they can.
        heads_refused: the reason why heads cannot be exchanged where they are.
        has_loss: the model has a loss of its own that is a sum over tokens.
        attentions: classes of modules that attend.
        knows_traffic: `_keys_and_values` of a configuration and of a module are those of its attentions.
    """

    refused: str = ""
    heads_refused: str = ""
    has_loss: bool = False
    attentions: frozenset[type] = frozenset()
    knows_traffic: bool = False


_known: dict[str, SharedTrial] = {}


def try_shared(module: nn.Module) -> SharedTrial:
    """Tries a tiny model like `module` (see [Note: trial of a shared sequence]); once per class and configuration.

    Deterministic, the same on all ranks; draws from no random generator of the caller's.
    """
    if not hasattr(module, "config") or not hasattr(module.config, "to_dict"):
        return SharedTrial("it is no model of transformers, whose attentions could be told apart from the rest")
    key = key_of(module)
    if key not in _known:
        with trial():
            _known[key] = _try(module)
    return _known[key]


def why_loss_stays_whole(module: nn.Module, loss: LossFn) -> str:
    """Returns why a loss of the user's own is not the sum of those of parts of a sequence; "" if it is.

    Tried on a tiny model like `module`, whose sequences can be shared.
    """
    with trial():
        return _try(module, loss).refused


def _try(module: nn.Module, loss: LossFn | None = None) -> SharedTrial:
    result, heads_refused = SharedTrial("nothing of it attends by transformers' interface"), ""
    for number, num_tokens in enumerate(_LENGTHS):
        found = tiny_of(module, num_tokens=num_tokens)
        if isinstance(found, str):
            return result if number else SharedTrial(found)  # shorter ones run: its positions end before
        tiny, inputs, _ = found
        if set(inputs) != {"input_ids"}:
            return SharedTrial(f"it takes more than tokens ({', '.join(sorted(inputs))})")
        if module.config._attn_implementation == "eager":
            tiny.config._attn_implementation = "eager"
        ids = inputs["input_ids"]
        # A loss of the user's own is always given targets that are shifted, since parts have no others.
        of_text = {"labels": ids} if loss is None else {"shift_labels": F.pad(ids[:, 1:], (0, 1), value=-100)}
        batch = {**inputs, **of_text}
        result = _in_parts(tiny, batch, loss)
        if result.refused:
            return result
        if loss is None:
            heads_refused = heads_refused or _in_parts(tiny, batch, None, by_heads=True).refused
            result = replace(result, heads_refused=heads_refused)
    return result


def _in_parts(tiny: nn.Module, batch: dict[str, Tensor], loss: LossFn | None, *, by_heads: bool = False) -> SharedTrial:
    models, num_targets = [copy.deepcopy(tiny) for _ in range(_NUM_PARTS)], count_targets(batch)
    of_whole = _loss_over_tokens(tiny) if loss is None else loss
    try:
        expected, sum_of_whole = _passes(tiny, batch, of_whole, num_targets=num_targets)
    except Exception as error:  # whatever a loss does not like about a tiny model
        return SharedTrial(f"a tiny one's loss cannot be computed ({type(error).__name__}: {_line(error)})")
    if isinstance(of_whole, CausalLMLoss) and of_whole.adds_terms:
        return SharedTrial("its loss is more than a sum over tokens: a router's, for one, is of all tokens together")
    shared: list[SharedSequence] = []
    losses: dict[int, Tensor] = {}

    def run(mine: int, exchange: ThreadExchange) -> Tensor:
        model = models[mine]

        def redistribute(x: Tensor, moves: Redistribution, *, into: Tensor | None = None) -> Tensor:
            return moved(x, moves, swap=partial(_swapped, exchange, mine), into=into)

        sequence = SharedSequence(model, rank=mine, num_ranks=_NUM_PARTS, exchange=redistribute, by_heads=by_heads)
        with sequence.attention():
            part = sequence.take(batch)
            of_part = _loss_over_tokens(model) if loss is None else loss
            logits, losses[mine] = _passes(model, part, of_part, num_targets=num_targets)
        shared.append(sequence)
        return logits

    parts = in_two_threads(run)
    if isinstance(parts, ConfigError):
        return SharedTrial(_line(parts))
    if isinstance(parts, Exception):
        why = f"{type(parts).__name__}: {_line(parts)}"
        return SharedTrial(f"a tiny one does not run on parts of a sequence, for which there are no masks ({why})")
    if not all(sequence.attended for sequence in shared):
        return SharedTrial("nothing of it attends by transformers' interface")
    cut = zigzag(batch["input_ids"].shape[1], num_ranks=_NUM_PARTS)
    for logits, chunks in zip(parts, cut, strict=True) if loss is None else ():
        whole = torch.cat([expected.narrow(1, chunk.start, chunk.length) for chunk in chunks], dim=1)
        if differ(logits, whole):
            return SharedTrial(
                "a tiny one gives something else on parts of a sequence with keys and values exchanged: its tokens "
                "look at others by more than attention"
            )
    if differ(losses[0] + losses[1], sum_of_whole):
        return SharedTrial("the losses of parts do not add up to that of the whole")
    knows = all(
        found == _keys_and_values(tiny.config, each)
        for sequence in shared
        for each, found in zip(sequence.attended, sequence.exchanged, strict=True)
    )
    attentions = frozenset(type(each) for sequence in shared for each in sequence.attended)
    has_loss = isinstance(of_whole, CausalLMLoss)
    return SharedTrial(has_loss=has_loss, attentions=attentions, knows_traffic=knows)


def _passes(model: nn.Module, batch: dict[str, Tensor], loss_fn: LossFn, *, num_targets: int) -> tuple[Tensor, Tensor]:
    """Logits or the first output, and the loss as a parallel model computes it."""
    heard: list[Tensor] = []

    def hear(_: nn.Module, __: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        heard.append(first_tensor(output) if logits is None else logits)

    handle = model.register_forward_hook(hear)
    try:
        loss: Any = loss_fn(model, batch, num_targets)
    finally:
        handle.remove()
    summed: Tensor = loss[0] if isinstance(loss, tuple) else loss
    summed = summed.view(1).double()
    return heard[0] if heard else summed, summed


def _line(error: Exception) -> str:
    """The error's text in one line, the same in every process."""
    return " ".join(re.sub(r"\b(rotorch_shared_sequence)_\d+", r"\1", str(error)).split())[:200]


def _loss_over_tokens(model: nn.Module) -> LossFn:
    """The model's own loss if that is a sum over tokens, else none: outputs alone."""
    own = loss_of(model)
    return own if isinstance(own, CausalLMLoss) else _outputs_alone


def _outputs_alone(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    outputs = module(**{name: rows for name, rows in batch.items() if name not in ("labels", "shift_labels")})
    return first_tensor(outputs).new_zeros(1)


def _swapped(
    exchange: ThreadExchange, mine: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, peers: Sequence[int]
) -> Callable[[], None]:
    """An exchange with the other thread, over before it returns."""
    (theirs,) = (exchange.both(mine, outgoing)[peer] for peer in peers)
    for there, came in zip(incoming, theirs, strict=True):
        there.copy_(came)
    return lambda: None


def _keys_and_values(config: Any, attention: nn.Module) -> KeysAndValues:
    """An attention's note, by its configuration; with a width of 0 if that does not say."""
    text = config.get_text_config()

    def field(name: str) -> int:
        value = of_every_layer(text, name)
        return value if isinstance(value, int) else 0

    heads = field("num_attention_heads")
    if field("kv_lora_rank"):
        key_heads, of_values = heads, field("v_head_dim")
        of_keys = field("qk_nope_head_dim") + field("qk_rope_head_dim")
    else:
        key_heads = field("num_key_value_heads") or heads
        of_keys = of_values = field("head_dim") or field("hidden_size") // max(heads, 1)
    width, window = key_heads * (of_keys + of_values), _window_of(attention)
    return KeysAndValues(width, window, heads, key_heads, heads * of_keys, heads * of_values)


def _window_of(attention: nn.Module) -> int | None:
    """The window that an attention's module declares, or its configuration for all of them; None: there is none."""
    source = attention if hasattr(attention, "sliding_window") else getattr(attention, "config", None)
    window = getattr(source, "sliding_window", None)
    return window if isinstance(window, int) else None


def runs_whole(module: nn.Module, classes: frozenset[type], found: SharedTrial) -> frozenset[type]:
    """Returns the classes, out of `classes`, that may run on slices of weights: those without an attention inside.

    A slice of an attention has some of the heads. Ranks have different slices at a moment, and keys of one head would
    be exchanged for those of another.
    """
    attends = {
        type(part)
        for part in module.modules()
        if type(part) in classes and any(type(inner) in found.attentions for inner in part.modules())
    }
    return classes - attends


def with_sequences_shared(spec: ModelSpec, module: nn.Module, found: SharedTrial) -> ModelSpec:
    """The same model with the trial's result, and a note of its keys and values at the first unit of each attention."""
    if found.refused:
        return replace(spec, sequences_stay_whole=found.refused)
    attentions = {name: part for name, part in module.named_modules() if type(part) in found.attentions}
    for unit in spec.units:
        if unit.kind is UnitKind.MODULE and any(f"{name}.".startswith(f"{unit.name}.") for name in attentions):
            return replace(spec, sequences_stay_whole=f"its {unit.name!r} is cut by heads, by a plan of the user's own")
    spec = replace(spec, heads_stay_together=found.heads_refused)
    repeats = takes_any_group(module.config._attn_implementation)
    units = list(spec.units)
    for name, part in attentions.items() if found.knows_traffic else ():
        note = replace(_keys_and_values(module.config, part), repeats=repeats)
        if not note.width:
            continue
        place = next((i for i, u in enumerate(units) if any(_inside(w.name, name) for w in u.weights)), None)
        if place is not None and units[place].kind is not UnitKind.REPLICATED:
            units[place] = units[place].with_note(note)
    return replace(spec, units=tuple(units))


def _inside(weight: str, module: str) -> bool:
    return weight.startswith(f"{module}.")
