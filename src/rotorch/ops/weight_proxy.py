"""A proxy in the module's place of a weight that no rank has whole.

A `WeightProxy` has the shape, dtype and device of a weight. Functions that use a weight as a layer does (linear layers,
look-ups, convolutions) go to its `WeightUse`, in which one algorithm computes them with this rank's part:

    ring_use.py    slices that visit, or lie whole in shared memory (rtp)
    shard_use.py   this rank's shard, on ranks that share a batch (megatron)
    plane_use.py   a block on two axes of ranks that share a batch (atp)
    grid_use.py    a block on a square grid (summa, tesseract)

So a layer's own forward runs unchanged. Any other function gets the weight gathered for the call, and the log says so
once, or the use refuses it: always where the user's own plan says that the weight is cut.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import tree_flatten, tree_unflatten, wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Weight
from rotorch.models.products import as_linear, is_transpose
from rotorch.ops.conv import CONVOLUTIONS
from rotorch.ops.ids_in_slice import check_ids
from rotorch.ops.tensor_proxy import TensorProxy, writes

_log = logging.getLogger(__name__)


class WeightUse(ABC):
    """One algorithm's computations with one weight. Where a method returns None the whole weight is used, or refused.

    Attributes:
        weight: the whole weight's description.
        strategy: kind of the strategy, for errors.
    """

    weight: Weight
    strategy: str

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`F.linear(x, weight, bias)`; a bias may be a proxy, too."""
        return None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x @ weight` plus a bias, which may be a proxy: a linear layer whose weight lies `[inputs, outputs]`."""
        return None

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """Rows of the weight for int64 `ids`; `padding_idx`, not negative, gets no gradient."""
        return None

    def convolution(
        self, func: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """`func(x, weight, bias, *args, **kwargs)`, a convolution."""
        return None

    @abstractmethod
    def refusal(self) -> str | None:
        """The reason why no function gets the whole weight, and what to write instead: "cannot ..."; None if it can."""

    def copies_whole(self) -> bool:
        """True if a whole weight takes memory that was not taken before."""
        return True

    @classmethod
    def gather(cls, uses: Sequence[Any]) -> list[Tensor]:
        """The weights of some uses of this class, whole, for one function; differentiable."""
        raise NotImplementedError


class WeightProxy(TensorProxy):
    """Stands for one weight. The transpose of a matrix is followed to the product that takes it.

    Attributes:
        use: its algorithm's computations.
        was_whole: True if it has been gathered for a function before; the log says so once.
    """

    use: WeightUse
    was_whole: bool

    @staticmethod
    def __new__(cls, use: WeightUse, *, like: Tensor) -> WeightProxy:
        """Makes the proxy of a weight, with the dtype and device of `like`."""
        self: WeightProxy = wrapper_tensor(cls, use.weight.shape, like=like)
        self.use, self.was_whole = use, False
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], WeightProxy) and is_transpose(func, args, kwargs or {}):
            # Not gathered yet: most transposes go straight into a product, which the use can answer.
            return Transposed(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def answer(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Lets the weight's use answer a layer's function; else calls `func` with whole weights, or refuses."""
        output = None
        if func is F.linear:
            output = _linear(*args, **kwargs)
        elif func is F.embedding:
            output = _embedding(*args, **kwargs)
        elif func in CONVOLUTIONS:
            output = _convolution(func, *args, **kwargs)
        elif (found := as_linear(func, args, kwargs, is_matrix=_is_matrix)) is not None:
            output = _product(*found)
        return _on_whole_weights(func, args, kwargs) if output is None else output


def use_of(tensor: Tensor | None) -> WeightUse | None:
    """The use of a proxy; None for any other tensor."""
    return tensor.use if isinstance(tensor, WeightProxy) else None


# These take the arguments of torch's functions; None: the use has no answer.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    use = use_of(weight)  # None if only the bias is cut
    return None if use is None else use.linear(input, bias)


def _product(input: Tensor, matrix: WeightProxy, bias: Tensor | None) -> Tensor | None:
    # An input that is cut itself has no product by slices: then whole weights are multiplied.
    return None if isinstance(input, TensorProxy) else matrix.use.product(input, bias)


def _is_matrix(argument: Any) -> bool:
    return isinstance(argument, WeightProxy) and argument.dim() == 2


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    use = use_of(weight)
    # These change the table or count its ids: only the whole weight has the right answer.
    if use is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    num_rows = weight.shape[0]
    # Here, with the whole table's size: behind this an id of no rank's rows would be zeros without a word.
    check_ids(input, num_rows=num_rows, of=f"{use.weight.name!r}: token")
    return use.embedding(input, padding_idx=None if padding_idx is None else padding_idx % num_rows)


def _convolution(
    func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    use = use_of(weight)
    return None if use is None else use.convolution(func, input, bias, *args, **kwargs)


def _on_whole_weights(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    held = [leaf for leaf in leaves if isinstance(leaf, WeightProxy)]
    name = getattr(func, "__name__", str(func))
    # Before anything is gathered: a refusal on one rank is one on all, and no rank waits for another.
    for use in (proxy.use for proxy in held):
        if (refusal := use.refusal()) is not None:
            raise ConfigError(f"{use.strategy}: {use.weight.name!r} is used by {name!r}, which {refusal}")
    # A write to the gathered copy would be lost without a word.
    if isinstance(leaves[0], WeightProxy) and writes(func):
        use = leaves[0].use
        raise ConfigError(
            f"{use.strategy}: {use.weight.name!r} is changed by {name!r} in forward: no rank holds all of it, and "
            "other ranks would not see the change. Change weights between steps, in `model.weights[..].local`"
        )
    for proxy in held:
        if not proxy.was_whole and proxy.use.copies_whole():
            proxy.was_whole = True
            _log.warning(
                "%s: %r is used by %r, which takes no slices: its %d bytes are gathered on every rank for the call",
                proxy.use.strategy, proxy.use.weight.name, name, proxy.use.weight.num_bytes,
            )  # fmt: skip
    # All in one call, so that weights of one unit are gathered once.
    whole = iter(type(held[0].use).gather([proxy.use for proxy in held]))
    args, kwargs = tree_unflatten([next(whole) if isinstance(x, WeightProxy) else x for x in leaves], tree)
    return func(*args, **kwargs)


class Transposed(TensorProxy):
    """Stands for the transpose of a matrix that is cut: `x @ weight.T` is the linear layer `weight`.

    Attributes:
        of: the matrix.
    """

    of: WeightProxy

    @staticmethod
    def __new__(cls, of: WeightProxy) -> Transposed:
        """Makes the transpose of `of`."""
        self: Transposed = wrapper_tensor(cls, tuple(reversed(of.shape)), like=of)
        self.of = of
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Transposed) and is_transpose(func, args, kwargs or {}):
            # The transpose of the transpose is the matrix, which a product may still take by slices.
            return args[0].of
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def answer(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Multiplies as a linear layer does; other functions get the transpose of the whole weight, or are refused."""
        found = as_linear(func, args, kwargs, is_matrix=lambda x: isinstance(x, Transposed))
        if found is not None and not isinstance(found[0], TensorProxy):  # see `_product`
            input, matrix, bias = found
            return F.linear(input, matrix.of, bias)
        if func is F.linear and (output := _linear_transposed(*args, **kwargs)) is not None:
            return output
        leaves, tree = tree_flatten((args, kwargs))
        given = [WeightProxy.answer(Tensor.t, (x.of,), {}) if isinstance(x, Transposed) else x for x in leaves]
        args, kwargs = tree_unflatten(given, tree)
        return func(*args, **kwargs)


def _linear_transposed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return _product(input, weight.of, bias) if isinstance(weight, Transposed) else None
