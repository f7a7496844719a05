"""A module whose outputs are partial sums: its own forward runs on slices of its weights (rtp, megatron, atp).

See [Note: sums] in `models/trial/sums.py` for the modules that may run so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.core.compiling import Compile
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Range, Unit
from rotorch.models.compiled import compiled_forward
from rotorch.models.trial.sums import is_linear_in_rows, passes_biases_on
from rotorch.ops.multihead import multihead_on_slice
from rotorch.ops.random_state import seed_generators
from rotorch.ops.sliced_cache import is_cache
from rotorch.shard.sites import Site

RunOnSlice = Callable[[Sequence[Tensor] | None, Sequence[Any]], list[Tensor]]
"""(weights of a slice, or None for the module's own; leaves of the arguments) -> outputs to be summed."""

Prove = Callable[[Callable[[Sequence[Tensor]], Tensor]], None]
"""Takes `weights -> first output` and raises if outputs do not add up; does nothing if they are known to."""


class ModuleSlices(ABC):
    """The slices that one module's forward runs on, on one rank: their source, and the sum of their outputs.

    Attributes:
        strategy: kind of the strategy, for errors.
        num_slices: number of slices.
    """

    strategy: str
    num_slices: int

    @property
    @abstractmethod
    def index(self) -> int:
        """Number of the slice that the module has now."""

    def ranges(self, cut: Cut, size: int) -> tuple[Range, ...]:
        """The ranges of a cut of `size` that belong to the slice which the module has now."""
        return cut.ranges(size, num_slices=self.num_slices, index=self.index)

    @abstractmethod
    def own(self) -> list[Tensor] | None:
        """Weights of this rank's own slice, detached; None if it is empty."""

    @abstractmethod
    def total(self, run: RunOnSlice, leaves: list[Any], prove: Prove) -> list[Tensor]:
        """The sums over all slices of the outputs that `run` gives.

        Args:
            run: runs the module on one slice.
            leaves: of the arguments that the module is called with.
            prove: called once at the end.
        """


SEES_SLICES = "sees_slices"
"""A hook with this attribute expects slices inside of modules that are cut; others are refused there."""


class PartialModule:
    """Replaces a module's forward.

    Its outputs are summed; of a tuple the first element is, and the others (attention maps of some heads) become None.
    `nn.MultiheadAttention`, whose own forward cannot run on slices, gets one of ours, whose maps are summed too.

    Args:
        module: whose forward it replaces.
        unit: its description.
        slices: of its weights.
        sites: places of each of its weights.
        once: by name, the biases that are added once, as they are during a pass.
        proven: True if outputs of slices are known to add up; else the first pass tries.
        compiled: run its forward by torch.compile, but where it is given a cache, which is longer in every call.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        unit: Unit,
        slices: ModuleSlices,
        sites: Mapping[str, tuple[Site, ...]],
        once: Callable[[str], Tensor],
        proven: bool,
        compiled: Compile,
    ) -> None:
        self._module, self._unit, self._slices = module, unit, slices
        self._sites = [sites[w.name] for w in unit.weights]
        self._once_sites = [sites[name] for name in unit.added_once]
        self._whole_sites = [sites[name] for name in unit.replicated if name not in unit.added_once]
        self._inside = {
            site.module: w.name for w in unit.weights for site in sites[w.name] if site.module is not module
        }
        self._once = once
        self._proven = proven
        self._before_forward: Callable[[], None] | None = None
        """Of a trial: puts other weights into the module."""
        self._num_sums = 1
        self._dense_forward = self._forward_with_cache = module.forward
        if compiled:
            self._dense_forward = compiled_forward(module, compiled)
        if isinstance(module, nn.MultiheadAttention) and _is_by_heads(unit, module):
            self._dense_forward = self._forward_with_cache = partial(self._attend, module)
            # Our forward adds up over heads by construction; its maps do as well.
            self._num_sums = 2
            self._proven = True
        module.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward over all slices."""
        self._refuse_hooks()
        leaves, tree = tree_flatten((args, kwargs))
        length: list[int | None] = [None]  # of the tuple that the module returns, if it returns one
        forward = self._forward_with_cache if any(map(is_cache, leaves)) else self._dense_forward

        def run(weights: Sequence[Tensor] | None, leaves: Sequence[Any]) -> list[Tensor]:
            if weights is not None:
                self._put(weights)
            if self._before_forward is not None:
                self._before_forward()
            args, kwargs = tree_unflatten(list(leaves), tree)
            output = forward(*args, **kwargs)
            length[0] = len(output) if isinstance(output, tuple) else None
            first, *more = output[: self._num_sums] if isinstance(output, tuple) else (output,)
            return [self._checked(first), *(part for part in more if part is not None)]

        # Flattened, so that autograd and `total` see every tensor among nested arguments.
        first, *more = self._slices.total(run, leaves, self._prove)
        # Behind the sum: every slice would add the whole bias once more.
        for name in self._unit.added_once:
            first = first + self._once(name)
        return first if length[0] is None else (first, *more, *[None] * (length[0] - 1 - len(more)))

    def _refuse_hooks(self) -> None:
        """Raises `ConfigError` for hooks that would see outputs of slices, and under another transport whole ones."""
        for child, name in self._inside.items() if self._slices.num_slices > 1 else ():
            hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]
            hooks += [*child._backward_hooks.values(), *child._backward_pre_hooks.values()]
            if not all(getattr(hook, SEES_SLICES, False) for hook in hooks):
                raise ConfigError(
                    f"{self._slices.strategy}: a hook on {name.rpartition('.')[0]!r} would see a slice of its output. "
                    f"Hook {self._unit.name!r}, whose outputs are whole, or use ddp or fsdp"
                )

    def _put(self, weights: Sequence[Tensor | None]) -> None:
        for sites, weight in zip(self._sites, weights, strict=True):
            for site in sites:
                site.put(weight)

    def _checked(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{self._slices.strategy}: {self._unit.name!r} returns a {type(output).__name__}; a module that is "
                "cut must return a tensor, or a tuple that begins with one. Give its weights no role in the plan"
            )
        return output

    def _attend(self, attention: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        """The attention's forward on the slice's heads."""
        (heads,) = self._slices.ranges(Cut(0, attention.num_heads), attention.num_heads)
        return multihead_on_slice(attention, heads, *args, **kwargs)

    def _prove(self, run: Callable[[Sequence[Tensor]], Tensor]) -> None:
        """Tries on this rank's slice whether outputs of slices add up, once; see [Note: sums]."""
        if self._proven:
            return
        self._proven = True
        weights = self._slices.own()
        if weights is None:
            return
        # `run` puts weights into the module, where the pass still needs its own.
        before = [sites[0].get() for sites in self._sites]

        def seeded(given: Sequence[Tensor]) -> Tensor:
            seed_generators(0)  # dropout drops the same
            return run(given)

        adds_up = is_linear_in_rows(self._module, self._unit, weights, run=seeded)
        if adds_up and self._unit.added_once:
            biases = [self._once(name).detach() for name in self._unit.added_once]
            adds_up = passes_biases_on(self._module, biases, run=lambda given: self._biased(given, seeded, weights))
        self._put(before)
        if not adds_up:
            raise ConfigError(
                f"{self._slices.strategy}: {self._unit.name!r} cannot be cut as the plan says: its forward does more "
                "with the row-wise product than return it (a residual, a norm, an activation, a factor), so outputs of "
                "slices do not add up. Put column- and row-wise weights into a module of their own, or write "
                "'colwise_gather_output' for both"
            )

    def _biased(
        self, biases: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Tensor], weights: Sequence[Tensor]
    ) -> Tensor:
        """The output on a slice with biases in their places, where a pass has none.

        With other whole weights, since a factor behind the row-wise product is often 1 at first; and without dropout.
        """
        modes = [(child, child.training) for child in self._module.modules()]
        before = [(site, site.get()) for sites in (*self._once_sites, *self._whole_sites) for site in sites]

        def put() -> None:
            for sites, bias in zip(self._once_sites, biases, strict=True):
                for site in sites:
                    site.put(nn.Parameter(bias))
            for site in (site for sites in self._whole_sites for site in sites):
                if isinstance(whole := site.get(), Tensor) and whole.is_floating_point():
                    site.put(nn.Parameter(1.5 * whole.detach() + 0.25))

        self._before_forward = put  # not now: slices that visit bring whole weights along
        self._module.eval()
        try:
            return run(weights)
        finally:
            self._before_forward = None
            for site, tensor in before:
                site.put(tensor)
            for child, mode in modes:
                child.training = mode


def _is_by_heads(unit: Unit, attention: nn.MultiheadAttention) -> bool:
    """Returns True if an attention is cut by whole heads, as our rules do it (`models/rules.py`)."""
    return all(w.cut is not None and w.cut.groups == attention.num_heads for w in unit.weights)
