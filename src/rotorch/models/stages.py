"""Pipeline stages of an unmodified Hugging Face model: some of its layers run, the others are skipped.

[Note: stages]
    A model's pipeline plan (`base_model_pp_plan`) names the list of layers that its hidden states pass, and the modules
    before and after. A stage runs the model's own forward, so masks and rotary embeddings are made as ever, from
    `inputs_embeds` of the shape of the received tensor. Layers keep their numbers: layers before the stage do
    nothing, the first layer of the stage gets the received tensor in place of its argument, and the forward ends at the
    beginning of the next stage (`StageOutput`), so norm, head and loss run in the last stage only. Layers are skipped
    by other entries in the module list, for the time of one forward; names and modules stay.

[Note: half layers]
    In a layer h + mlp(norm(h)) follows h + attention(norm(h)). A stage may end, or begin, between the two: the layer's
    own forward runs in both stages, with other entries for the modules of the other half: the block adds zeros, which
    take no memory, and what lies before or behind it passes on what it is given. A tiny model shows that this is the
    same (`models/trial/stages.py`): it is not where both blocks are given the same input, or hidden states are scaled.
    Hooks of the layer itself would act in both stages, and a second forward of it have all modules: both are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import NO_ORDER, Half, LayerOrder
from rotorch.models.configuration import of_every_layer

_OF_ALL_LAYERS = {"output_hidden_states": "hidden states", "output_attentions": "attention weights"}
"""What a model can be asked for that no single stage has."""

_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k_experts")
"""What configurations call the number of experts that a token goes to."""


class StageOutput(Exception):
    """Ends the forward of a stage that is not the last, with the hidden states for the next one."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__("the forward of a pipeline stage ends here")
        self.hidden_states = hidden_states


def layer_order(module: nn.Module) -> LayerOrder:
    """Returns the places where `module` may be cut into stages, by the pipeline plan of its configuration."""
    config = getattr(module, "config", None)
    plan = getattr(config, "base_model_pp_plan", None)
    if config is None or not plan:
        return NO_ORDER
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return LayerOrder(refused="the loss of its routers needs those of all layers (output_router_logits)")
    for asked, what in _OF_ALL_LAYERS.items():
        if getattr(text, asked, False):
            return LayerOrder(refused=f"it would return the {what} of all layers ({asked})")
    trunk = module.base_model
    children = dict(trunk.named_children())
    lists = [name for name in plan if isinstance(children.get(name), nn.ModuleList)]
    if len(lists) != 1:
        return LayerOrder(refused=f"its pipeline plan names {len(lists)} lists of layers, not one")
    names = {id(child): name for name, child in module.named_modules()}
    prefix = f"{names[id(trunk)]}." if names[id(trunk)] else ""
    entries = list(plan)
    behind = {name for name in entries[entries.index(lists[0]) + 1 :] if name in children}
    stateful = {name for name, child in children.items() if any(True for _ in child.parameters())}
    own = {name for name, _ in trunk.named_parameters(recurse=False)}
    if unknown := sorted((stateful | own) - set(entries)):
        return LayerOrder(refused=f"its pipeline plan says nothing of {', '.join(unknown)}, which have weights")
    layers = children[lists[0]]
    assert isinstance(layers, nn.ModuleList)
    outside = [
        name
        for name, child in module.named_modules()
        if name and "." not in name and child is not trunk and trunk is not module
    ]
    return LayerOrder(
        layers=tuple(f"{prefix}{lists[0]}.{number}" for number in range(len(layers))),
        after=(*(f"{prefix}{name}" for name in sorted(behind)), *outside),
        width=width_of(text),
        attention_width=_attention_width(text),
        experts_per_token=experts_per_token(text),
        kinds=_kinds(text, num_layers=len(layers)),
    )


def width_of(config: Any) -> int:
    """Features of hidden states between layers, by a text model's configuration; 0 if it does not say."""
    return int(of_every_layer(config, "hidden_size") or 0)


def experts_per_token(config: Any) -> int:
    """Number of experts that a token goes to, by a text model's configuration; 0 if it does not say."""
    return next((int(k) for name in _EXPERTS if isinstance(k := of_every_layer(config, name), int)), 0)


def _attention_width(config: Any) -> int:
    heads = of_every_layer(config, "num_attention_heads")
    if not isinstance(heads, int):
        return 0  # of each layer its own
    return int(heads * (of_every_layer(config, "head_dim") or (of_every_layer(config, "hidden_size") or 0) // heads))


def _kinds(config: Any, *, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, by a text model's configuration; none if it does not tell layers apart."""
    kinds = tuple(map(str, getattr(config, "layer_types", None) or ()))[:num_layers]
    return kinds if len(kinds) == num_layers and len(set(kinds)) > 1 else ()


class _SkippedLayer(nn.Module):
    """Stands in for a layer of an earlier stage; its output is not used."""

    def __init__(self, received: Tensor) -> None:
        super().__init__()
        self._received = received

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._received


class _StageEnd(nn.Module):
    """Stands where the first layer of the next stage is."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise StageOutput(args[0] if args else kwargs["hidden_states"])


class _AddsNothing(nn.Module):
    """Stands in for a block of the other half of a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        nothing = given.new_zeros(()).expand_as(given)
        return (nothing, *[None] * (self._outputs - 1)) if self._outputs else nothing


class _PassesOn(nn.Module):
    """Stands in for a norm or a dropout of the other half of a layer."""

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        return given


class StagedModule:
    """Runs one stage of a module at a time.

    Args:
        module: the whole model.
        order: its layers.
        places: half layers of each stage.
    """

    def __init__(self, module: nn.Module, *, order: LayerOrder, places: Sequence[range]) -> None:
        self._trunk = module.base_model
        self._layers = module.get_submodule(order.layers[0].rpartition(".")[0])
        self._halves = order.halves
        self._places = places

    @property
    def num_stages(self) -> int:
        return len(self._places)

    @contextmanager
    def stage(self, number: int, *, received: Tensor | None) -> Iterator[None]:
        """Makes the module's forward that of one stage within the block; it raises `StageOutput` unless it is the last.

        Args:
            number: number of the stage.
            received: hidden states of the stage before; None for the first.

        Raises:
            ConfigError: within it, the model is run twice, or asked for what only all stages together have.
        """
        first, begins_inside = divmod(self._places[number].start, 2)
        last, ends_inside = divmod(self._places[number].stop, 2)
        with ExitStack() as undone:
            hooks = []
            if len(self._places) > 1:
                hooks = [self._trunk.register_forward_pre_hook(_once(), with_kwargs=True)]
            if received is not None:
                hooks += [
                    self._trunk.register_forward_pre_hook(_embedded(received), with_kwargs=True),
                    self._layers[first].register_forward_pre_hook(_received(received), with_kwargs=True, prepend=True),
                ]
                passed = _SkippedLayer(received.detach())
                undone.enter_context(_replaced(self._layers, {str(layer): passed for layer in range(first)}))
            if begins_inside:
                undone.enter_context(self._without(first, self._halves[0]))
            if ends_inside:
                undone.enter_context(self._without(last, self._halves[1]))
                hooks.append(self._layers[last].register_forward_hook(_ends))
            elif number + 1 < len(self._places):
                undone.enter_context(_replaced(self._layers, {str(last): _StageEnd()}))
            for hook in hooks:
                undone.callback(hook.remove)
            yield

    def _without(self, layer: int, half: Half) -> AbstractContextManager[None]:
        """Lets a layer run without one of its halves (see [Note: half layers])."""
        _check_alone(self._layers[layer], number=layer)
        instead: dict[str, nn.Module] = {name: _PassesOn() for name in half.children}
        return _replaced(self._layers[layer], {**instead, half.block: _AddsNothing(half.outputs)})


@contextmanager
def _replaced(module: nn.Module, entries: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts other modules in the place of children within the block."""
    there = module._modules
    kept = {name: there[name] for name in entries}
    there.update(entries)
    try:
        yield
    finally:
        there.update(kept)


def _check_alone(layer: nn.Module, *, number: int) -> None:
    """Raises `ConfigError` if something else than its forward depends on a layer that runs in two stages."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    for hook in (hook for each in hooks for hook in each.values()):
        made_by = getattr(getattr(hook, "func", hook), "__module__", "")
        if not made_by.startswith("rotorch."):
            raise ConfigError(
                f"a hook on layer {number} would act in both stages that have a half of it. Put it on its modules, or "
                "write whole numbers of layers"
            )
    if getattr(layer, "gradient_checkpointing", False):
        raise ConfigError(
            f"gradient checkpointing is enabled on layer {number}, of which a stage has one half. Write "
            "recompute=block of pp or zeropp in its place, or whole numbers of layers"
        )


def _ends(_: nn.Module, __: Any, output: Any) -> None:
    """Ends the forward behind a layer of which this stage has the first half."""
    raise StageOutput(output[0] if isinstance(output, tuple) else output)


def _once() -> Any:
    """Lets a model run once, for what its last stage can give."""
    has_run = False

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal has_run
        for asked, what in _OF_ALL_LAYERS.items():
            if kwargs.get(asked):
                raise ConfigError(
                    f"{asked}: the last stage of a pipeline does not have the {what} of all layers. Leave {asked} out, "
                    "or use a layout without pp and zeropp"
                )
        if has_run:  # what was received is of the first one
            raise ConfigError(
                "the model is run twice for one micro-batch, and stages of a pipeline run it once. Give both inputs as "
                "rows of one batch, or use a layout without pp and zeropp"
            )
        has_run = True

    return hook


def _embedded(received: Tensor) -> Any:
    """Lets a model take embeddings of the shape of what was received in place of token ids."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = {"input_ids": None} if not args else {}  # token ids come first, or by name
        return (None, *args[1:]) if args else args, {**kwargs, **ids, "inputs_embeds": received.detach()}

    return hook


def _received(received: Tensor) -> Any:
    """Lets a layer take what was received in place of its hidden states."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received}

    return hook
