"""Memory that a model's passes keep and allocate, counted on fake tensors on a shallow copy of the model.

[Note: fake tensors]
    Fake tensors on the CPU pass the same operators as real ones, attention's kernel included, so saved tensors have the
    bytes of a real run. (On the meta device attention uses another kernel.) A model of a few layers is enough, since
    layers are equal within a class.

[Note: the model alone]
    Tensors that the process had before are no part of a trace, and what a pass leaves in cycles of references counts
    until its end: nothing is collected in between. So equal models have equal bytes, whatever was computed before.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from rotorch._torch_private import ASKS_FOR_VALUES, fake_tensors, storage_key
from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision
from rotorch.core.spec import ModelSpec, Unit, UnitKind
from rotorch.core.traffic import MicroBatch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.planner.shared_tokens import TracedAttention, own_tokens
from rotorch.planner.traced import BackwardPoint, PerRow, Traced, TracedLayer
from rotorch.planner.workload import FoldedModel, fold
from rotorch.process.forking import start_autograd
from rotorch.shard.materialize import on_meta
from rotorch.shard.storages import all_tensors
from rotorch.traced.attention import attentions_alone
from rotorch.traced.backwards import Backwards, Interval, is_trained
from rotorch.traced.live_storages import GRADIENTS, LOGITS, OTHER, WEIGHTS, LiveStorages, tensors_in
from rotorch.traced.weight_copies import WeightCopies

_ROWS = (1, 2)


def trace_memory(
    model_config: Any,
    model: FoldedModel,
    *,
    tokens: int,
    precision: Precision,
    shared: Set[type] | None = None,
    make: Callable[[Any], nn.Module] = causal_lm,
) -> Traced:
    """Traces one forward and backward of a causal language model.

    Args:
        model_config: its Hugging Face configuration.
        model: folded.
        tokens: of a sequence, or of a rank's part of one.
        precision: of passes.
        shared: of a part: classes of its attentions, which keep queries only; what else they would keep is told
            apart (`TracedLayer.attentions`).
        make: makes the module of a configuration.
    """
    start_autograd()  # else fake tensors make it start threads, and no rank could be forked from here any more
    shows = [_shown_by(model, number) for number in range(len(model.classes))]
    shown = max(shows, default=0) + 1
    names = [model.spec.order.layers[place] for place in shows]
    every = list(model.spec.order.layers[:shown])
    units = [u.name for layer in model.classes for u in layer.units if u.kind is UnitKind.MODULE]
    experts = [u for layer in model.classes for u in layer.units if u.kind is UnitKind.MODULE and _has_experts(u)]
    config = _shallow(model_config, layers=shown, mixes=bool(experts))
    attentions: dict[str, list[TracedAttention]] = {}
    parts = None if shared is None else _Parts(shared, attentions)
    trace = partial(
        _trace, partial(make, config), every, units, [u.name for u in experts],
        second=model.spec.order.halves[1].children[0] if model.spec.order.halves else "",
        columns=config.get_text_config().vocab_size, tokens=tokens, precision=precision, parts=parts,
    )  # fmt: skip
    try:
        (one, ends), (two, other_ends) = (trace(rows=rows) for rows in _ROWS)
        # Of a part p that every slice keeps whole and a rest r, half of the weights keep p + r / 2.
        half, _ = trace(rows=1, halves=experts) if experts else (one, ends)
    except ASKS_FOR_VALUES as error:
        raise ConfigError(
            f"plan: {model.name}: its forward looks at values of tensors ({error}), so what it keeps cannot be counted "
            "without running it. Compare its layouts by rotorch bench"
        ) from None
    fits = {key: _line(one[key], two[key]) for key in one}
    repeated = {name: max(0.0, 2 * half[f"{name} experts"] - one[f"{name} experts"]) for name in names}
    return Traced(
        layers=tuple(
            TracedLayer(
                fits[f"{name} stream"],
                fits[f"{name} interior"] + fits[f"{name} experts"],
                fits[f"{name} given"],
                fits[f"{name} attention"],
                tuple(attentions.get(name, ())),
                _points(ends.of(name), other_ends.of(name)),
                fits[f"{name} experts"],
                PerRow(repeated[name]),
                fits[f"{name} second"],
                fits[f"{name} unsaved input"],
            )
            for name in names
        ),
        outside=fits["outside"],
        logits=fits["logits"],
        temporaries=fits["temporaries"],
        behind=fits["behind"],
        behind_backward=fits["behind backward"],
        unsaved_shared=fits["unsaved shared"],
        on_logits=int(one["on logits"]),
        kept_on_logits=int(one["kept on logits"]),
    )


def without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of transformers on the meta device, for which no first values are drawn. Tied weights are one."""
    with on_meta(), no_init_weights():
        module = make()
    module.tie_weights()  # type: ignore[operator]  # transformers ties where it draws first values
    return module


def traced_parts(model_config: Any, *, tokens: int, num_ranks: int, precision: Precision) -> tuple[ModelSpec, Traced]:
    """Describes a model for ranks that share sequences, and traces the longest part of one.

    Args:
        model_config: its Hugging Face configuration.
        tokens: of a sequence.
        num_ranks: of those that share it.
        precision: of passes.

    Returns:
        Of a model whose sequences cannot be shared, nothing is traced.
    """
    module = without_values(partial(causal_lm, model_config))
    spec = describe(module, context=True)
    if spec.sequences_stay_whole:
        nothing = PerRow()
        return spec, Traced((), nothing, nothing, nothing)
    own = own_tokens(MicroBatch(1, tokens), num_ranks=num_ranks).num_tokens
    return spec, trace_memory(
        model_config, fold(spec), tokens=own, precision=precision, shared=try_shared(module).attentions
    )


def _shown_by(model: FoldedModel, number: int) -> int:
    """The layer that represents a class: its first one, or the second where the very first keeps less than others.

    What a frozen embedding gives has no gradient, so the first layer of a model with adapters need not keep it.
    """
    first = model.pattern.index(number)
    learns = all(weight.trained for unit in model.before for weight in unit.weights)
    if first or learns or model.pattern.count(number) == 1:
        return first
    return model.pattern.index(number, 1)


def _has_experts(unit: Unit) -> bool:
    return any(len(weight.shape) > 2 for weight in unit.weights)


def _halve(module: nn.Module, units: Sequence[Unit]) -> None:
    """Gives modules the first of two slices of their weights."""
    for weight in (w for unit in units for w in unit.weights if w.cut is not None):
        place, _, attribute = weight.name.rpartition(".")
        whole = module.get_parameter(weight.name)
        shape = list(whole.shape)
        shape[weight.cut.dim] = sum(r.length for r in weight.cut.ranges(shape[weight.cut.dim], num_slices=2, index=0))
        setattr(module.get_submodule(place), attribute, nn.Parameter(whole.new_empty(shape)))


def _line(one: float, two: float) -> PerRow:
    """Through two points; where the moment of a peak moved between them, what covers both."""
    row_bytes = max(0.0, (two - one) / (_ROWS[1] - _ROWS[0]))
    return PerRow(row_bytes, max(0.0, one - _ROWS[0] * row_bytes, two - _ROWS[1] * row_bytes))


def _points(one: Sequence[Interval], two: Sequence[Interval]) -> tuple[BackwardPoint, ...]:
    """The moments of a layer's backward that are the highest for some number of rows, of traces of one row and two.

    Operators are the same for any number of rows, and so are changes of memory, one by one.
    """
    total, rows, extra = max((each.made for each in one), default=0), _ROWS[0], _ROWS[1] - _ROWS[0]
    found: set[BackwardPoint] = set()
    for first, second in zip(one, two, strict=True):
        moments = zip(first.alive, second.alive, strict=False)
        if len(first.alive) != len(second.alive):
            moments = zip([max(first.alive)], [max(second.alive)], strict=True)
        for low, high in moments:
            row_bytes = (high - low) / extra
            found.add(BackwardPoint(first.made / max(total, 1), row_bytes, low - rows * row_bytes))
    highest = sorted(found, key=lambda p: (p.made, p.row_bytes, p.constant_bytes), reverse=True)
    kept: list[BackwardPoint] = []
    for point in highest:
        if not any(k.row_bytes >= point.row_bytes and k.constant_bytes >= point.constant_bytes for k in kept):
            kept.append(point)
    return tuple(kept)


def _shallow(model_config: Any, *, layers: int, mixes: bool) -> Any:
    config = copy.deepcopy(model_config)
    text = config.get_text_config()
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    setattr(text, key, layers)
    if isinstance(getattr(text, "layer_types", None), list):
        text.layer_types = text.layer_types[:layers]
    if mixes and getattr(text, "_experts_implementation", None) == "eager":
        # Which looks for each expert's tokens by value; grouped products keep as much.
        config._experts_implementation = "grouped_mm"
    return config


@dataclass(frozen=True)
class _Parts:
    """Parts of sequences are traced.

    Attributes:
        classes: of attentions.
        attentions: found, by the name of their layer.
    """

    classes: Set[type]
    attentions: dict[str, list[TracedAttention]]

    def add(self, saved: _Saved, attention: TracedAttention) -> None:
        """Notes an attention that is called."""
        self.attentions.setdefault(saved.layer, []).append(attention)


class _Saved:
    """Storages that autograd keeps, by the layer whose forward saved them."""

    def __init__(self, module: nn.Module, *, columns: int) -> None:
        self.held: dict[int, tuple[Tensor, str]] = {}
        """By storage: a tensor in it, and its key."""
        self.second: dict[int, tuple[Tensor, str]] = {}
        """Of these, what the second half of a layer saved: with the layer's name."""
        self._columns = columns
        self._weights = {storage_key(p) for p in module.parameters()}
        self.layer = ""
        self.given = 0
        """Storage of this layer's input."""
        self.saves_given: set[str] = set()
        """Layers that save their input as it is."""
        self.is_behind = False
        """True once the last layer has run."""
        self.is_second = False
        """True while the second half of a layer runs."""
        self.attends = False
        """True while an attention of a part of a sequence runs."""
        self.unit: set[int] | None = None
        """Storages that the unit was given whose forward runs, if one does."""
        self.inside = "interior"
        """Kind of what that unit keeps."""
        self._shared: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        """Storages that all layers are given, while they live: what comes later may have the key of one that died."""
        self._unsaved_shared: dict[int, int] = {}
        """Bytes of those of them that nothing has saved."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Notes tensors that all layers are given: tables of positions, masks."""
        for tensor in tensors:
            key, storage = storage_key(tensor), tensor.untyped_storage()
            self._shared[key] = storage
            if key not in self.held:
                self._unsaved_shared[key] = storage.nbytes()

    def pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in self._weights:
            return tensor
        if tensor.shape and tensor.shape[-1] == self._columns:
            kind = "logits"
        elif not self.layer or key in self._shared:
            kind = "behind" if self.is_behind and key not in self._shared else "outside"
        else:
            is_inside = self.unit is not None and key not in self.unit
            kind = f"{self.layer} {'attention' if self.attends else self.inside if is_inside else 'stream'}"
        if key in self._shared:
            self._unsaved_shared.pop(key, None)
        if self.layer and key == self.given:
            self.saves_given.add(self.layer)
        if self.is_second and key not in self.held:
            self.second[key] = tensor, f"{self.layer} second"
        self.held.setdefault(key, (tensor, kind))
        return tensor

    def bytes_of(self, kind: str) -> int:
        every = (*self.held.values(), *self.second.values())
        return sum(tensor.untyped_storage().nbytes() for tensor, found in every if found == kind)

    @property
    def unsaved_shared_bytes(self) -> int:
        """Bytes of what all layers are given and autograd does not keep: masks that are added."""
        return sum(self._unsaved_shared.values())


def _trace(
    make: Callable[[], nn.Module],
    names: list[str],
    units: list[str],
    experts: Sequence[str] = (),
    *,
    columns: int,
    second: str = "",
    rows: int,
    tokens: int,
    precision: Precision,
    parts: _Parts | None,
    halves: Sequence[Unit] = (),
) -> tuple[dict[str, float], Backwards]:
    module = without_values(make)  # here: peft's code does not know fake tensors
    others = list(all_tensors())
    with _no_collection(), fake_tensors(), _one_sequence_per_row(), _groups_of_any_dtype():
        _fake(module.train())
        _halve(module, halves)
        if precision == "bfloat16":
            WeightCopies(module).put()
        for parameter in filter(is_trained, module.parameters()):
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        saved = _Saved(module, columns=columns)
        given: dict[str, float] = {}
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        if parts is not None:
            parts.attentions.clear()
            inputs["position_ids"] = torch.zeros(rows, tokens, dtype=torch.int64)  # of a part: each row's own
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast_bfloat16" else nullcontext()
        live = LiveStorages()
        classes = frozenset() if parts is None else parts.classes
        backwards = Backwards(live)
        for name in names:
            backwards.watch(name, module.get_submodule(name))
        backwards.watch_head(module.get_output_embeddings())
        with live, _named(module, names, units, experts, classes, second, live=live, saved=saved, given=given):
            live.name(others, category=WEIGHTS)  # whatever they are, they neither come nor go
            with (
                nullcontext() if parts is None else attentions_alone(module, found=partial(parts.add, saved)),
                torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
                autocast,
            ):
                loss = module(**inputs, use_cache=False).loss
            kept = {f"{name} {kind}": float(saved.bytes_of(f"{name} {kind}")) for name in names for kind in _KINDS}
            kept["behind"] = float(saved.bytes_of("behind"))
            kept["outside"] = float(saved.bytes_of("outside")) + kept["behind"]
            kept["unsaved shared"] = float(saved.unsaved_shared_bytes)
            kept["on logits"], kept["kept on logits"] = map(float, backwards.on_logits(loss))
            kept |= {
                f"{name} unsaved input": given[f"{name} given"] * (name not in saved.saves_given) for name in names
            }
            saved.held.clear()
            saved.second.clear()
            loss.backward()
            live.name(module.parameters(), category=WEIGHTS)
            live.name((p.grad for p in module.parameters() if p.grad is not None), category=GRADIENTS)
        highest = live.highest()
    kept["behind backward"] = float(backwards.behind)
    return {**kept, **given, "logits": float(highest[LOGITS]), "temporaries": float(highest[OTHER])}, backwards


def _fake(module: nn.Module) -> None:
    """Gives a module on the meta device tensors of the mode that is on, on the CPU."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_weight else new
        return None if tensor is None else made[id(tensor)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: fake(tensor) for name, tensor in held.items()})


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leaves garbage until the end (see [Note: the model alone])."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """Has transformers take rows as single sequences, as it finds in a real run.

    On fake tensors it does not look for several in a row, and makes a mask for the case: attention with a mask keeps
    it, and heads repeated.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def _groups_of_any_dtype() -> Iterator[None]:
    """Has transformers multiply experts by an operator of its own, which keeps and makes the same.

    Torch's grouped product takes fake tensors of bfloat16 only (2.13).
    """
    from transformers.integrations import moe

    original = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = original


_KINDS = ("stream", "interior", "experts", "attention", "second")


@contextmanager
def _named(
    module: nn.Module,
    names: list[str],
    units: list[str],
    experts: Sequence[str],
    attentions: Set[type],
    second: str = "",
    *,
    live: LiveStorages,
    saved: _Saved,
    given: dict[str, float],
) -> Iterator[None]:
    """Tells `saved` whose forward runs and `live` what logits are, and notes the bytes that each layer is given."""
    handles = []
    for name in names:
        layer = module.get_submodule(name)

        def begins(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            saved.layer = name
            hidden = args[0] if args else kwargs["hidden_states"]
            saved.share(tensor for tensor in tensors_in((args, kwargs)) if tensor is not hidden)
            given[f"{name} given"], saved.given = float(hidden.untyped_storage().nbytes()), storage_key(hidden)

        def ends(*_: Any, name: str = name) -> None:
            saved.layer, saved.is_behind, saved.is_second = "", name == names[-1], False

        handles.append(layer.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(layer.register_forward_hook(ends))
        if second:
            begins_second = layer.get_submodule(second).register_forward_pre_hook
            handles.append(begins_second(lambda *_: setattr(saved, "is_second", True)))
    for name in units:
        unit = module.get_submodule(name)

        def goes_in(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            inside: str = "experts" if name in experts else "interior",
        ) -> None:
            saved.unit = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
            saved.inside = inside

        def comes_out(*_: Any) -> None:
            saved.unit = None

        handles.append(unit.register_forward_pre_hook(goes_in, with_kwargs=True))
        handles.append(unit.register_forward_hook(comes_out))
    for part in module.modules():
        if type(part) in attentions:
            handles.append(part.register_forward_pre_hook(lambda *_: setattr(saved, "attends", True)))
            handles.append(part.register_forward_hook(lambda *_: setattr(saved, "attends", False)))
    head = module.get_output_embeddings()
    handles.append(head.register_forward_hook(lambda _, __, output: live.name([output], category=LOGITS)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
