"""A module's own forward on this rank's slice of its weights, among ranks that share a batch.

What goes in is equal on all ranks, what comes out is a part of a sum: so the module is wrapped in a pair of conjugate
operations and otherwise runs as it is, once (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Unit
from rotorch.models.compiled import compiled_forward
from rotorch.ops.conjugates import Boundary
from rotorch.ops.multihead import multihead_on_slice
from rotorch.ops.random_state import drawn_apart
from rotorch.shard.sites import Site


class CutModule:
    """Takes the place of a module's forward.

    Its outputs sum; of a tuple, the first element does, and what else it holds (attention maps of some heads) becomes
    None. `nn.MultiheadAttention`, whose own forward cannot run on slices, has one of ours, and its maps sum too.

    Args:
        module: whose forward it replaces. During a pass it holds this rank's slices.
        unit: its description.
        boundary: how activations go in and come out.
        sites: where each of its cut weights sits.
        twins: this rank's slices by name.
        once: by name, the biases that are added once, as they are during a pass.
        strategy: kind of the strategy, for errors.
        proven: whether outputs of slices are known to add up; else the first pass tries (see `_prove`).
        compiled: run its forward by torch.compile.

    [Note: nothing on this rank]
        Where there are fewer groups (heads) than ranks, the last ranks hold nothing of the unit. They run it on zeros
        of the first slice's shape, which give zeros of the right shape whatever the module does, while the others
        compute.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        unit: Unit,
        boundary: Boundary,
        sites: dict[str, tuple[Site, ...]],
        twins: dict[str, nn.Parameter],
        once: Callable[[str], Tensor],
        strategy: str,
        proven: bool,
        compiled: bool,
    ) -> None:
        self._module, self._unit, self._boundary = module, unit, boundary
        self._sites = {w.name: sites[w.name] for w in unit.weights}
        self._twins = twins
        self._once = once
        self._strategy = strategy
        self._proven = proven
        self._num_sums = 1
        self._dense_forward = compiled_forward(module) if compiled else module.forward
        n, position = boundary.line.size, boundary.line.position
        self._is_empty = not any(twins[w.name].numel() for w in unit.weights)
        if isinstance(module, nn.MultiheadAttention) and _is_by_heads(unit, module):
            index = 0 if self._is_empty else position
            (heads,) = Cut(0, module.num_heads).ranges(module.num_heads, num_slices=n, index=index)
            self._dense_forward = partial(multihead_on_slice, module, heads)
            self._num_sums = 2
            self._proven = True
        module.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward over all slices."""
        leaves, tree = tree_flatten((args, kwargs))
        entered = self._boundary.enter_all(leaves)
        if self._is_empty:
            self._put({w.name: self._zeros(w.name) for w in self._unit.weights})
        if not self._proven:
            self._prove(entered, tree)
        given, given_by_name = tree_unflatten(entered, tree)
        position, active = self._boundary.line.position, self._module.training
        with drawn_apart(position, like=leaves, active=active), self._boundary.inside():
            output = self._dense_forward(*given, **given_by_name)
        parts = output if isinstance(output, tuple) else (output,)
        sums = [self._boundary.leave(self._checked(part)) for part in parts[: self._num_sums] if part is not None]
        first, *more = sums
        for name in self._unit.added_once:
            first = first + self._once(name)
        return (first, *more, *[None] * (len(parts) - 1 - len(more))) if isinstance(output, tuple) else first

    def _checked(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{self._strategy}: {self._unit.name!r} returns a {type(output).__name__}; what is cut must return a "
                "tensor, or a tuple that begins with one. Give its weights no role in the plan"
            )
        return output

    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for site in self._sites[name]:
                site.put(tensor)

    def _zeros(self, name: str) -> Tensor:
        weight = next(w for w in self._unit.weights if w.name == name)
        return self._twins[name].new_zeros(weight.slice_shape(num_slices=self._boundary.line.size, index=0))

    def _prove(self, leaves: Sequence[Any], tree: Any) -> None:
        """Tries whether outputs of slices add up, for a plan that the user has written.

        They do if the forward is linear in its row-wise weights: those times -2 must give the output times -2, which
        in binary arithmetic is exact. A residual, a norm or an activation behind them would count once per rank.
        """
        self._proven = True
        if self._is_empty:
            return
        held = {w.name: self._twins[w.name].detach() for w in self._unit.weights}
        rows = {w.name for w in self._unit.weights if w.cut is not None and 0 < w.cut.dim == len(w.shape) - 1}
        scaled = {name: -2.0 * tensor if name in rows else tensor for name, tensor in held.items()}
        device = next(iter(held.values())).device
        outputs = []
        args, kwargs = tree_unflatten(list(leaves), tree)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for tensors in (held, scaled):
                torch.manual_seed(0)  # dropout drops the same
                self._put(tensors)
                output = self._dense_forward(*args, **kwargs)
                outputs.append(self._checked(output[0] if isinstance(output, tuple) else output).float())
        self._put({name: self._twins[name] for name in held})
        once, again = outputs
        if (again + 2.0 * once).norm() > 1e-2 * again.norm():
            raise ConfigError(
                f"{self._strategy}: {self._unit.name!r} cannot be cut as the plan says: its forward does more with the "
                "row-wise product than return it (a residual, a norm, an activation), so outputs of slices do not add "
                "up. Put column- and row-wise weights into a module of their own, or write 'colwise_gather_output' for "
                "both"
            )


def _is_by_heads(unit: Unit, attention: nn.MultiheadAttention) -> bool:
    """Whether an attention is cut as our rules do it (`models/rules.py`)."""
    return all(w.cut is not None and w.cut.groups == attention.num_heads for w in unit.weights)
