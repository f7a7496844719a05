"""Calls of a module of experts on some of its experts: the pairs of a token and an expert that belong to these.

[Note: pairs]
    A module of experts is called with its tokens [T, D], the numbers of each token's experts [T, K], and the weight of
    each of them [T, K]; it returns the weighted sums [T, D]. Its code need not know of a part of the experts: it is
    given every pair of a token and one of these experts as a token with one expert ([S, D], [S, 1], [S, 1], numbers
    counted from the first of these experts), and its rows are added up by token. So each pair is computed once, with
    whatever kernel the module has. Pairs are sorted by expert once per call, which asks the device for counts once.

    Numbers behind the last expert (experts that give their input back) go with the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range


class RoutedPairs:
    """The pairs of one call, see [Note: pairs].

    Args:
        module: the module of experts.
        name: its name, for errors.
        num_experts: number of all its experts.
        leaves: what it is called with, flat.

    Attributes:
        num_experts: number of all its experts.
        tokens_at: number of the leaf that has the tokens.

    Raises:
        ConfigError: it is called with something else than tokens, numbers of experts and their weights.
    """

    def __init__(self, module: nn.Module, *, name: str, num_experts: int, leaves: Sequence[Any]) -> None:
        self._module, self._name, self.num_experts = module, name, num_experts
        numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_floating_point()]
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if len(numbers) != 1 or leaves[numbers[0]].dtype is not torch.int64 or leaves[numbers[0]].dim() != 2:
            raise self._error("no tensor of int64 [tokens, experts of a token]")
        self._place, index_TK = numbers[0], leaves[numbers[0]]
        self._shape = index_TK.shape
        if self._shape not in shapes or any(len(s) != 2 or s[0] != self._shape[0] for s in shapes):
            raise self._error(f"tensors {[list(s) for s in shapes]} beside numbers {list(self._shape)}")
        self.tokens_at = next(i for i, leaf in enumerate(leaves) if self._is_of_tokens(leaf))
        self._numbers, self._pairs = index_TK.reshape(-1).sort(stable=True)
        # The one look at the device: where the pairs of each expert begin.
        firsts = torch.arange(num_experts + 1, device=index_TK.device)
        self._starts: list[int] = torch.searchsorted(self._numbers, firsts).tolist()
        self._starts[-1] = self._numbers.numel()
        if self._starts[0]:
            raise self._error("a number below 0")

    def run(
        self, leaves: Sequence[Any], experts: Range, *, run: Callable[[list[Any]], Tensor], anchor: Tensor
    ) -> Tensor:
        """Returns what these experts add to the output [T, D]; zeros if no token goes to them.

        Args:
            leaves: what the module is called with, flat.
            experts: whose weights the module has now.
            run: calls the module.
            anchor: a tensor that requires a gradient, for a graph to begin with where no token goes to them.
        """
        if not self.num_pairs(experts):
            return with_graph(torch.zeros_like(leaves[self.tokens_at], requires_grad=False), anchor)
        output_SD = self.call(leaves, self.rows(leaves, experts), experts, run=run)
        return self.total(leaves, output_SD, experts)

    def num_pairs(self, experts: Range) -> int:
        """Number of the pairs of some experts."""
        return self._starts[experts.stop] - self._starts[experts.start]

    def rows(self, leaves: Sequence[Any], experts: Range) -> dict[int, Tensor]:
        """The pairs of some experts, sorted by these: by the number of its leaf, each tensor with a row per pair.

        These are numbers of experts [S, 1], tokens [S, D], and weights [S, 1].
        """
        chosen = slice(self._starts[experts.start], self._starts[experts.stop])
        pairs_S = self._pairs[chosen]
        found: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            if i == self._place:
                found[i] = self._numbers[chosen].unsqueeze(1)
            elif self._is_of_tokens(leaf):
                found[i] = leaf.index_select(0, pairs_S // self._shape[1])
            elif isinstance(leaf, Tensor):
                found[i] = leaf.reshape(-1).index_select(0, pairs_S).unsqueeze(1)
        return found

    def call(
        self, leaves: Sequence[Any], rows: Mapping[int, Tensor], experts: Range, *, run: Callable[[list[Any]], Tensor]
    ) -> Tensor:
        """Calls the module on pairs of the experts whose weights it has, one at least; returns a row [S, D] for each.

        Args:
            leaves: what the module is called with, flat.
            rows: as `rows` gives them.
            experts: whose weights the module has now.
            run: calls the module.
        """
        given = list(leaves)
        for i, row in rows.items():
            given[i] = row - experts.start if i == self._place else row
        with _only(self._module, experts.length, of=self.num_experts):
            output_SD = run(given)
        if output_SD.shape[1:] != leaves[self.tokens_at].shape[1:]:
            raise self._error(f"an output {list(output_SD.shape)} for tokens {list(leaves[self.tokens_at].shape)}")
        return output_SD

    def total(self, leaves: Sequence[Any], output_SD: Tensor, experts: Range) -> Tensor:
        """Adds up the rows of some experts' pairs by token: their part of the output [T, D]."""
        tokens_S = self._pairs[self._starts[experts.start] : self._starts[experts.stop]] // self._shape[1]
        total_TD: Tensor = _AddedUp.apply(output_SD, tokens_S, len(leaves[self.tokens_at]))
        return total_TD

    def _is_of_tokens(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape != self._shape

    def _error(self, found: str) -> ConfigError:
        return ConfigError(
            f"experts=whole: {self._name!r} ({type(self._module).__name__}) has {found}; experts are kept whole where "
            "they are called with tokens [T, D], numbers of experts [T, K] and their weights [T, K]. Leave experts out"
        )


def with_graph(tensor: Tensor, anchor: Tensor) -> Tensor:
    """The tensor with a graph that begins with another one, which gets no gradient."""
    made: Tensor = _WithGraph.apply(tensor, anchor)
    return made


class _AddedUp(torch.autograd.Function):
    """Rows `[S, D]` added up by token: `[T, D]`. Torch's `index_add` keeps the rows to have their shape."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, tokens_S: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(tokens_S)
        return rows_SD.new_zeros(num_tokens, *rows_SD.shape[1:]).index_add_(0, tokens_S, rows_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens_S,) = ctx.saved_tensors
        return grad_TD.index_select(0, tokens_S), None, None


class _WithGraph(torch.autograd.Function):
    """See `with_graph`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


@contextmanager
def _only(module: nn.Module, number: int, *, of: int) -> Iterator[None]:
    """A block in which the module's own count of its experts is that of the ones it has."""
    counts = [name for name, value in vars(module).items() if "experts" in name and type(value) is int and value == of]
    for name in counts:
        setattr(module, name, number)
    try:
        yield
    finally:
        for name in counts:
            setattr(module, name, of)
