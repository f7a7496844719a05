"""Logits that are not computed yet, returned by a language-model head where no rank should hold all of them.

`DeferredLogits` stand for `[.., V]` logits. Operations between head and loss (scaling, soft caps, casts, flattening,
shifting) are recorded, and replayed on the parts of the vocabulary that a strategy's head makes, one after another or
one per rank; `cross_entropy` on them is that head's own; any other function makes them real, once, and goes on.

[Note: after the pass]
    A model that was given labels returns a loss and its logits. Most training loops use the loss alone, so these logits
    stay deferred when the pass is over. Making them takes the weights again, and all ranks: `later` opens another pass.

Shapes: B tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from rotorch._torch_private import tree_flatten, tree_unflatten, wrapper_tensor
from rotorch.models.losses import Batch
from rotorch.ops.ids_in_slice import check_ids
from rotorch.ops.tensor_proxy import TensorProxy, writes

LOGITS_BLOCK = "rotorch.logits"
"""Name of the profiler's blocks in which logits are made: profiles and the memory ledger recognise them by it."""

Elementwise = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""An operation on logits that treats every element alike: (function, further arguments, keyword arguments)."""

_ELEMENTWISE = {
    torch.tanh, Tensor.tanh, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div,
    Tensor.__truediv__, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__,
    torch.neg, Tensor.neg, Tensor.__neg__, torch.clamp, Tensor.clamp, Tensor.float, Tensor.double, Tensor.to,
    Tensor.type, Tensor.bfloat16, Tensor.half,
}  # fmt: skip
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
_AS_IS = {Tensor.contiguous}
_OF_VALUES = {
    getattr(Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "grad", "is_leaf", "data", "T", "mT", "H", "mH", "real")
}
"""Properties that the proxy cannot have: it is a tensor without a graph, and without values."""

_FLOAT: Elementwise = (Tensor.float, (), {})


class Head(ABC):
    """One strategy's computation of logits, and of the loss without them."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of logits of a token, over all ranks."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """All logits `[.., V]` of `hidden [.., D]`, differentiable."""

    @abstractmethod
    def loss(self, hidden_BD: Tensor, target_B: Tensor, *, chain: tuple[Elementwise, ...], ignore_index: int) -> Tensor:
        """Per-token cross-entropy [B] of `replay(logits, chain)`, differentiable; 0 for targets of `ignore_index`."""


class Later(Protocol):
    """Runs `make` in a pass of its own, for a gradient if it `learns`. All ranks."""

    def __call__(self, make: Callable[[], Tensor], *, learns: bool) -> Tensor: ...


@dataclass
class Origin:
    """State that logits share with all logits that were made of them.

    Attributes:
        has_loss: a loss has been computed without them.
        later: makes them after the pass; None within it (see [Note: after the pass]).
    """

    has_loss: bool = False
    later: Later | None = None


class DeferredLogits(TensorProxy):
    """Logits `[.., V]` that are not computed yet: `elementwise(hidden @ weight.T + bias)`.

    Once a function has made them real they stay real: its writes, hooks and requests to autograd must last.
    """

    hidden: Tensor
    head: Head
    chain: tuple[Elementwise, ...]
    origin: Origin
    made: Tensor | None

    @staticmethod
    def __new__(
        cls, hidden: Tensor, head: Head, *, chain: tuple[Elementwise, ...] = (), origin: Origin | None = None
    ) -> DeferredLogits:
        """Makes logits of `hidden [.., D]`; `D` may be this rank's part of the features."""
        shape = (*hidden.shape[:-1], head.vocab_size)
        # An empty tensor that went through the chain has the dtype of the logits to come.
        self = wrapper_tensor(cls, shape, like=replay(hidden.new_empty(0), chain))
        self.hidden, self.head, self.chain, self.made = hidden, head, chain, None
        self.origin = origin or Origin()
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_VALUES:
            return func(args[0].real_logits(), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # C++ code has unpacked the proxy, above which autograd has seen no graph: right if none is wanted.
        leaves, tree = tree_flatten((tuple(args), kwargs or {}))
        proxies = [leaf for leaf in leaves if isinstance(leaf, DeferredLogits)]
        if torch.is_grad_enabled() and any(proxy.hidden.requires_grad for proxy in proxies):
            return super().__torch_dispatch__(func, types, args, kwargs)
        real_args, real_kwargs = tree_unflatten([with_real_logits(leaf) for leaf in leaves], tree)
        return func(*real_args, **real_kwargs)

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Records the operation, computes the loss, or makes the logits real."""
        if func is F.cross_entropy and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if logits is not None and writes(func):
            # The model's code refers to the proxy, which from now on stands for the logits that were written.
            func(logits.real_logits(), *args[1:], **kwargs)
            return logits
        if logits is not None and logits.made is None:
            others = [*args[1:], *kwargs.values()]
            if func in _AS_IS:
                return logits
            # A tensor among the arguments may differ along the vocabulary, which the parts would have to be cut like.
            if func in _ELEMENTWISE and not any(isinstance(a, Tensor) for a in others):
                if logits._is_as_it_was(func, args[1:], kwargs):
                    return logits
                return logits._with(logits.hidden, (*logits.chain, (func, tuple(args[1:]), kwargs)))
            if logits.origin.later is not None:
                pass  # made once, whole, also for a part of them
            elif func in _RESHAPES and (hidden := _reshaped(logits, func, args[1:], kwargs)) is not None:
                return logits._with(hidden, logits.chain)
            elif func is Tensor.__getitem__ and _keeps_last_dim(args[1], logits.dim()):
                return logits._with(logits.hidden[args[1]], logits.chain)
            elif func is F.cross_entropy and _is_plain(args, kwargs):
                return _cross_entropy(logits, *args[1:], **kwargs)
        leaves, tree = tree_flatten((tuple(args), kwargs))  # `torch.cat` and others take lists
        real_args, real_kwargs = tree_unflatten([with_real_logits(leaf) for leaf in leaves], tree)
        return func(*real_args, **real_kwargs)

    def _with(self, hidden: Tensor, chain: tuple[Elementwise, ...]) -> DeferredLogits:
        return DeferredLogits(hidden, self.head, chain=chain, origin=self.origin)

    def _is_as_it_was(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True if a function does nothing, as a cast to the dtype that logits have already (HF's losses cast)."""
        sample = torch.empty(0, dtype=self.dtype, device=self.hidden.device)
        return func(sample, *args, **kwargs) is sample

    def real_logits(self) -> Tensor:
        """Computes the logits, whole, once. After the pass all ranks call it."""
        if self.made is None:
            later = self.origin.later
            self.made = self._make() if later is None else later(self._make, learns=self.hidden.requires_grad)
        return self.made

    def _make(self) -> Tensor:
        with record_function(LOGITS_BLOCK):
            return replay(self.head.logits(self.hidden), self.chain)


def with_real_logits(value: Any) -> Any:
    """The value itself, or the logits if they were deferred."""
    return value.real_logits() if isinstance(value, DeferredLogits) else value


def real_outputs(callee: nn.Module, batch: Batch) -> Any:
    """Calls the module and makes deferred logits real at once, while all ranks are here; a caller alone could not."""
    leaves, tree = tree_flatten(callee(**batch))
    return tree_unflatten([with_real_logits(leaf) for leaf in leaves], tree)


def last_logits(callee: nn.Module, batch: Batch) -> Tensor:
    """The logits of the token after the batch's last."""
    # A copy: a view would keep the logits of all tokens in memory.
    logits: Tensor = callee(**batch, use_cache=False).logits[:, -1, :].clone()
    return logits


def detached(value: Any) -> Any:
    """Returns `value` with real tensors, detached from their graphs."""
    leaves, tree = tree_flatten(value)
    return tree_unflatten([with_real_logits(x).detach() if isinstance(x, Tensor) else x for x in leaves], tree)


@contextmanager
def real_for_hooks(heads: Iterable[nn.Module]) -> Iterator[None]:
    """Makes hooked heads give real logits inside the block: hooks see the tensors that they would see on one process.

    torch attaches backward hooks to a module's output after its forward hooks; of deferred logits it would lose them.
    """
    hooked = [head for head in heads if head._forward_hooks or head._backward_hooks or head._backward_pre_hooks]
    # First of all hooks, so that the user's own see real tensors.
    handles = [head.register_forward_hook(lambda *a: with_real_logits(a[-1]), prepend=True) for head in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def replay(values: Tensor, chain: tuple[Elementwise, ...]) -> Tensor:
    """Applies recorded operations to some of the logits."""
    for func, args, kwargs in chain:
        values = func(values, *args, **kwargs)
    return values


def overwritable(logits: Tensor, *, of: Tensor) -> Tensor:
    """Logits that a chain has made of others, in memory that may be written to: its gradient is right all the same."""
    is_needed = hasattr(logits.grad_fn, "_saved_result") or logits.data_ptr() == of.data_ptr()
    return logits.detach().clone() if is_needed else logits.detach()


def _reshaped(logits: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The hidden states of reshaped logits, if the vocabulary stays the last dim."""
    # torch itself resolves -1, ranges of dims and illegal shapes.
    target = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not target or target[-1] != logits.shape[-1]:
        return None
    return logits.hidden.reshape(*target[:-1], logits.hidden.shape[-1])


def _keeps_last_dim(index: Any, dim: int) -> bool:
    """True if `logits[index]` only picks tokens."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all((isinstance(p, (int, slice)) and not isinstance(p, bool)) or p is Ellipsis for p in parts):
        return False
    if parts[-1] == slice(None):
        return True
    if Ellipsis in parts[:-1]:
        return False  # an index behind an ellipsis picks from the last dim
    return sum(p is not Ellipsis for p in parts) < dim


def _is_plain(args: Any, kwargs: Any) -> bool:
    """True if slices can answer a cross_entropy call: class indices, no class weights, no smoothing."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given.get("target")
    return (
        given["input"].dim() == 2
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
        and not given.get("label_smoothing", 0.0)
    )


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of `[B, V]` deferred logits and int64 `target [B]`."""
    check_ids(target, num_rows=logits.shape[-1], of="target", ignore_index=ignore_index)
    chain, autocast = logits.chain, torch.is_autocast_enabled(logits.device.type)
    of_half = logits.dtype in (torch.bfloat16, torch.float16)
    if autocast or of_half:  # torch, too, computes their losses in float32
        chain = (*chain, _FLOAT)
    # Per token: the reduction below is the same for every head.
    logits.origin.has_loss = True
    loss = logits.head.loss(logits.hidden, target, chain=chain, ignore_index=ignore_index)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        # On the device: nothing waits for the number, and 0 / 0 is NaN as in torch.
        loss = loss / (target != ignore_index).sum()
    return loss.to(logits.dtype) if of_half and not autocast else loss
