"""The user's own module, parallel in place: the result of `parallelize`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.comm.one_error import one_error
from rotorch.core.errors import ConfigError
from rotorch.drop_in.calls import PlainCalls
from rotorch.drop_in.optimizers import look_at_steps_of_optimizers
from rotorch.drop_in.origin import Origin
from rotorch.drop_in.published_tensors import published_tensors
from rotorch.drop_in.whole import copy_into, full_state_dict, parts_by_name
from rotorch.models.lora import base_of, is_wrapped, saved_names
from rotorch.models.packed_rows import nothing_packed
from rotorch.ops.partial_module import SEES_SLICES
from rotorch.parallel_model import ParallelModel
from rotorch.shard.in_chunks import CutInName
from rotorch.shard.sharded_weight import Chunk

Module = TypeVar("Module", bound=nn.Module)
_KEPT, _ORIGIN = "_rotorch", "_rotorch_origin"
"""Where a module keeps its `PlainCalls`, and its `Origin`."""


class ParallelModule(nn.Module):
    """Members of a parallel module beside those of its own class; a class made on the fly inherits from both.

    All public names of `ParallelModel` are there too (`forward_backward`, `evaluate`, `weights`, ...), but those that
    the module's own class has; `parallel` has all of them.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a module of its own class: one that is made anew is not parallel."""
        return cls.__bases__[1](*args, **kwargs)

    @property
    def parallel(self) -> ParallelModel:
        """The passes, weights and ranks of this module."""
        return calls_of(self).model

    @property
    def module(self) -> nn.Module:
        """This module itself: wrappers of other libraries have theirs here."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass of this module's own forward (see [Note: nothing stays open]). All ranks, equally often.

        Raises:
            ConfigError: ranks do different things; the strategy has no such pass; torch.compile traces it.
        """
        if torch.compiler.is_dynamo_compiling():
            _refuse_compile()
        calls = calls_of(self)
        calls.settle()
        if calls.model.in_pass:
            calls.refuse_reentrant()
            return super().__call__(*args, **kwargs)
        return calls(args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it leave sums over replicas to the first one behind it, as under DistributedDataParallel.

        For all but the last micro-batch of a step, where `ddp` is on slow links. Gradients are this replica's alone in
        between, and an optimizer's step is refused. What other strategies do in a backward they do as ever; so does
        `ddp` while a parameter has a gradient hook. All ranks.
        """
        calls = calls_of(self)
        before, calls.sums = calls.sums, False
        try:
            yield
        finally:
            calls.sums = before

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: see `_refuse_compile`."""
        _refuse_compile()

    @functools.cached_property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuses `DistributedDataParallel`, which asks its module for this before ranks send anything.

        The `ddp` strategy, which wraps the module itself, sets it for that moment.
        """
        raise ConfigError(
            "DistributedDataParallel(model) of what parallelize returned: its gradients are means over ranks already. "
            "Call the model itself"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Works as in every module; parameters are at rest also after an interrupted backward."""
        calls_of(self).settle()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Works as in every module; weights have the form that `torch.distributed.checkpoint` saves and loads.

        Weights that all ranks have whole are plain tensors.
        """
        calls = calls_of(self)
        calls.settle()
        found = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars"):
            return found
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        # A module around it is peft's, if there are adapters, and saves them as tensors that a rank has whole.
        parts = parts_by_name(self, calls.model, whole_adapters=bool(prefix))
        found.update({prefix + name: part for name, part in parts.items()})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Works as in every module; all ranks. Weights are whole (of a plain module), or the result of `state_dict()`.

        Raises:
            ConfigError: `assign`, or a part of a weight that is not the one that this rank has.
        """
        if assign:
            raise ConfigError("load_state_dict: assign=True would replace weights that ranks share. Leave it out")
        calls_of(self).settle()
        return super().load_state_dict(state_dict, strict=strict)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Gathers whole weights and buffers on CPU, as the module on one process has them. All ranks call it.

        Args:
            all_ranks: every rank gets them; by default the first one does, and the others get an empty dict.
        """
        calls = calls_of(self)
        calls.settle()
        return full_state_dict(self, calls.model, all_ranks=all_ranks)

    def iter_full_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole weights and buffers, one after another, on every rank; for an inference server. All ranks, to the end.

        Names and shapes are those that the model's family publishes (experts one by one), tied weights come once, and
        adapters are merged into their layers. One weight at a time is gathered; let go of it before the next.

        Args:
            dtype: of floating-point tensors; by default their own.
        """
        calls = calls_of(self)
        calls.settle()
        return published_tensors(self, calls.model, dtype=dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parallel module of its own, with the same values and without gradients. All ranks.

        Raises:
            ConfigError: a pass is going on.
        """
        calls = calls_of(self)
        calls.settle()
        if calls.model.in_pass:
            raise ConfigError(f"copy.deepcopy of a {type(self).__name__} within a pass. Copy it between steps")
        return _origin_of(self).copy(self, calls.model, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises: memory that ranks share, and the group of the ranks, cannot be pickled."""
        raise ConfigError(
            f"a {type(self).__name__} that is spread over ranks cannot be pickled. Write "
            "torch.save(model.full_state_dict(), path), model.save_pretrained(directory), or copy.deepcopy(model)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Does nothing if nothing would change (`.to(device)`), and raises otherwise (`.half()`)."""
        for parameter in self.parameters():
            sample = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            changed = fn(sample)
            if (changed.dtype, changed.device) != (sample.dtype, sample.device):
                raise ConfigError(
                    f"{type(self).__name__} is spread over ranks as {sample.dtype} on {sample.device}, and would "
                    f"become {changed.dtype} on {changed.device}. Convert it before parallelize"
                )
        return self


def make_parallel(module: Module, model: ParallelModel, *, origin: Origin, compiled: bool = False) -> Module:
    """Gives `module` a class made on the fly, with its own class and `ParallelModule`; returns it.

    Args:
        module: the user's.
        model: its passes, weights and ranks.
        origin: what it was before, for copies.
        compiled: blocks are; parts of them then get no hooks, which would be compiled too.
    """
    own = type(module)
    look_at_steps_of_optimizers()
    # States of optimizers that torch.save wrote have them, and torch.load knows torch's own classes alone.
    torch.serialization.add_safe_globals([CutInName, Chunk])
    names = [n for n in (*vars(ParallelModel), *vars(model)) if not n.startswith("_") and not hasattr(module, n)]
    added: dict[str, Any] = {name: _passed_on(name) for name in names if name != "module"}
    added.update(__module__=own.__module__, __qualname__=own.__qualname__, __doc__=own.__doc__)
    if hasattr(module, "module"):
        added["module"] = getattr(own, "module", None) or _own_attribute("module")
    replaced: dict[str, Callable[..., Any]] = {
        "save_pretrained": _save_pretrained,
        "generate": _generate,
        "get_encoder": _get_encoder,
        "resize_token_embeddings": _resize_token_embeddings,
    }
    if not is_wrapped(module):  # peft's own writes into the ranks' parts
        replaced["load_adapter"] = _load_adapter
    for name, method in {"forward": _forward, **replaced}.items():
        if hasattr(own, name):
            added[name] = functools.wraps(getattr(own, name))(method)
    if not hasattr(own, "peft_config"):
        added["peft_config"] = property(_adapters, _take_adapters, _keep_adapters)
    vars(module)[_KEPT], vars(module)[_ORIGIN] = PlainCalls(model), origin
    module.__class__ = type(own.__name__, (ParallelModule, own), added)
    module.register_load_state_dict_pre_hook(_load_weights)
    module.register_load_state_dict_post_hook(_publish_weights)
    _, base = base_of(module)
    if base is not module:
        vars(base)["forward"] = _through(module, base=base)
    called = set(base.children())
    with suppress(AttributeError, NotImplementedError):
        called.add(base.get_input_embeddings())  # type: ignore[operator]
    for name, part in base.named_modules():
        if part in called or (part is not base and not compiled):
            hook = functools.partial(_refuse_part, model, name)
            setattr(hook, SEES_SLICES, True)
            part.register_forward_pre_hook(hook, prepend=True)  # before that of fully_shard, which would gather
    return module


def _load_weights(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Copies weights out of a state that is loaded into the module, or into one around it, into this rank's parts."""
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    for name, value in copy_into(module, calls_of(module).model, own).items():
        state[prefix + name] = value


def _publish_weights(module: Any, _: Any) -> None:
    calls_of(module).model.values_changed()


def _refuse_part(model: ParallelModel, name: str, part: nn.Module, _: Any) -> None:
    """Raises `ConfigError` if a part of the model is called by itself, outside of a pass."""
    if not model.in_pass and isinstance(next(part.parameters(), None), DTensor):
        raise ConfigError(
            f"model.{name}(...) is called by itself, and its weights are there within calls of the model only. Call "
            "model(...), or put what you need of it into the model's forward"
        )


def _through(module: nn.Module, *, base: nn.Module) -> Callable[..., Any]:
    """The forward of what peft has wrapped: a call of that alone (`generate`) is one of the parallel module."""
    own = base.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if calls_of(module).model.in_pass:
            with nothing_packed(base, args, kwargs):
                return own(*args, **kwargs)
        return module(**dict(zip(inspect.signature(own).parameters, args, strict=False)), **kwargs)

    return forward


def calls_of(module: ParallelModule) -> PlainCalls:
    """The calls of a module that is parallel."""
    found: PlainCalls = vars(module)[_KEPT]
    return found


def _origin_of(module: ParallelModule) -> Origin:
    found: Origin = vars(module)[_ORIGIN]
    return found


def _passed_on(name: str) -> Any:
    """Passes a name of `ParallelModel` on to a module's class; methods that return the model return the module."""
    its = inspect.getattr_static(ParallelModel, name, None)
    if not callable(its):
        return property(lambda self: getattr(self.parallel, name), doc=inspect.getdoc(its))

    @functools.wraps(its)
    def call(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.parallel, name)(*args, **kwargs)
        return self if result is self.parallel else result

    return call


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward within a pass; called by a user it is a pass, as `model(...)` is."""
    if not calls_of(self).model.in_pass:
        return self(*args, **kwargs)
    with nothing_packed(self, args, kwargs):
        return super(ParallelModule, self).forward(*args, **kwargs)


@torch.compiler.disable
def _refuse_compile() -> None:
    """Disabled, so that torch.compile breaks its graph here, and the error is raised as anywhere."""
    raise ConfigError(
        "torch.compile would trace through what goes between ranks. Write rotorch.parallelize(model, ..., "
        "compile=True), which compiles the blocks in between, and leave calls of the model out of compiled functions"
    )


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes whole weights, once: all ranks gather them, the first one writes. One rank alone may give `state_dict`."""
    model: ParallelModel = self.parallel
    own: Any = super(ParallelModule, self)
    first = not any(model.mesh.get_coordinate() or [0])
    if (whole := kwargs.pop("state_dict", None)) is not None:
        with _origin_of(self).as_given():
            return own.save_pretrained(save_directory, *args, state_dict=whole, **kwargs) if first else None
    calls_of(self).settle()
    whole = full_state_dict(self, model, all_ranks=False, only=saved_names(self, **kwargs))
    result = None
    with one_error(model.mesh), _origin_of(self).as_given():
        if first:
            result = own.save_pretrained(save_directory, *args, state_dict=whole, **kwargs)
    return result


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Works as in every model; ranks with shorter sequences continue until all are done, since each holds slices."""
    if self.parallel.num_feature_ranks > 1 and _has_encoder(self):
        raise ConfigError(
            f"generate: the encoder's output is cut along its features under this layout, and {type(self).__name__} "
            "hands it on. Write ddp, fsdp, rtp or megatron, or generate from model.save_pretrained(directory)"
        )
    if self.parallel.mesh.size() > 1:
        kwargs["synced_gpus"] = True
    if "generation_config" not in kwargs:
        kwargs.setdefault("use_cache", True)  # parallelize has switched it off, for passes with gradients
    return super(ParallelModule, self).generate(*args, **kwargs)


def _resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """The embeddings, if they have this size already; another one is refused."""
    own: Any = super(ParallelModule, self)
    if new_num_tokens not in (None, self.get_input_embeddings().num_embeddings) or args or kwargs:
        raise ConfigError(
            f"resize_token_embeddings({new_num_tokens}) of a {type(self).__name__} that is spread over ranks: each has "
            "parts of the rows. Call it before parallelize"
        )
    return own.get_input_embeddings()


def _load_adapter(self: Any, peft_model_id: str | None = None, *_: Any, **__: Any) -> None:
    """Refused: transformers would put whole tensors in place of the ranks' parts."""
    raise ConfigError(
        f"load_adapter({peft_model_id!r}) of a {type(self).__name__} that is spread over ranks: call it before "
        "parallelize, or write peft.PeftModel.from_pretrained(model, directory, is_trainable=True)"
    )


def _has_encoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The encoder; of a model with a decoder one that can be called by itself, as `generate` does."""
    calls, encoder = calls_of(self), super(ParallelModule, self).get_encoder(*args, **kwargs)
    return encoder if encoder is self or calls.model.in_pass or not _has_encoder(self) else _Encoder(encoder, calls)


class _Encoder:
    """An encoder whose call is a pass of the model that it is part of. All ranks call it; without gradients.

    Args:
        module: the encoder.
        calls: of the model.
    """

    def __init__(self, module: nn.Module, calls: PlainCalls) -> None:
        self._module, self._calls = module, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "model.get_encoder()(...) is called by itself, and weights get gradients by calls of the model only. "
                "Call model(...), or write torch.no_grad()"
            )
        self._calls.settle()
        return self._calls(args, kwargs, part=self._module)


def _own_attribute(name: str) -> property:
    return property(lambda self: nn.Module.__getattr__(self, name))


def _adapters(self: Any) -> Any:
    """The adapters that were there before `parallelize`; as in a plain module, an error if there were none."""
    try:
        return vars(self)["peft_config"]
    except KeyError:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute 'peft_config'") from None


def _take_adapters(self: Any, value: Any) -> None:
    """Spreads the model once more: peft sets this when it has put adapters into it."""
    calls = calls_of(self)
    calls.settle()
    if "peft_config" in vars(self):
        raise ConfigError(
            f"peft has put further adapters into a {type(self).__name__} that is parallel and had some. Put all of "
            "them in at once, before the first step"
        )
    _origin_of(self).take_adapters(self, calls.model, value)
    vars(self)["peft_config"] = value


def _keep_adapters(self: Any) -> None:
    """Raises: peft deletes this when it has taken adapters out of the model."""
    raise ConfigError(
        f"peft has taken the adapters out of a {type(self).__name__} that is parallel: it is of no more use. Write "
        "model.save_pretrained(directory), and merge or unload them on one process"
    )
