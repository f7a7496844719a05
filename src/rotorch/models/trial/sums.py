"""The two proofs that outputs of a module on slices of its weights add up: with all slices, or with one.

[Note: sums]
    Outputs of slices add up only if a module's forward is linear in its row-wise weights: a residual, a norm or an
    activation behind them would count once per slice, and the loss would look right. Where there is a tiny model of the
    same kind, all slices of a module run, before ranks start, and the sum is compared (`adds_up`): this shows besides
    that the module's code runs on slices at all. A user's own plan for a module without a tiny one is tried on the
    first input of a real pass, where a rank has one slice: row-wise weights times -2 must give the output times -2,
    which in binary arithmetic is exact (`is_linear_in_rows`). Biases of row-wise weights are added behind the sum, so
    the module must not do anything to them either: a bias put there must come out as it is (`passes_biases_on`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.core.spec import Cut, Unit
from rotorch.core.whole_experts import WholeExperts
from rotorch.models.routed_pairs import RoutedPairs
from rotorch.shard.buffers import buffers_untouched
from rotorch.shard.sharded_weight import cut_chunks

_NUM_SLICES = 3
"""Of a module, and sets of its experts: of four heads 2 + 1 + 1. Two would be halves of anything, heads or not."""
_TOLERANCE = 1e-4
"""Relative, of outputs; norms and rotary positions may compute in float32 where all else is float64."""
_TOLERANCE_OF_SCALED = 1e-2
"""The same where outputs have the precision of a real pass, bfloat16 at worst."""


def adds_up(module: nn.Module, unit: Unit, sites: Any, args: Any, kwargs: Any, output: Any) -> bool:
    """True if a module's outputs on the slices of its weights sum to its output on all of them.

    Of a tuple the first element does. What else it holds must be maps of single heads, as many as a slice has: such
    are left out, while anything else may be what later layers ask for.
    """
    whole = {w.name: sites[w.name][0].module._parameters[sites[w.name][0].attribute] for w in unit.weights}
    once = {name: sites[name][0].module._parameters[sites[name][0].attribute] for name in unit.added_once}
    try:
        first, *others = _tensors(output)
        total = torch.zeros_like(first)
        for name in once:
            for site in sites[name]:
                site.put(None)
        note = unit.note(WholeExperts)
        for index in range(_NUM_SLICES):
            if not unit.slice_bytes(num_slices=_NUM_SLICES, index=index):  # of two groups; it visits nobody
                continue
            for weight in unit.weights:
                chunks = cut_chunks(weight, num_slices=_NUM_SLICES, index=index)
                if not chunks:
                    continue
                part = torch.cat([chunk.of_whole(whole[weight.name]) for chunk in chunks], dim=chunks[0].dim)
                for site in sites[weight.name]:
                    site.put(nn.Parameter(part))
            again, kwargs_again = copied((args, kwargs))
            if note is None:
                part, *more = _tensors(module(*again, **kwargs_again))
            else:
                part, more = _of_experts(module, unit, note.number, index, again, kwargs_again), []
            if part.shape != total.shape or any(a.shape == b.shape for a, b in zip(others, more, strict=True)):
                return False
            total += part
        for bias in once.values():
            total += bias
    except Exception:  # whatever its code does not like about slices
        return False
    finally:
        for name, tensor in (whole | once).items():
            for site in sites[name]:
                site.put(tensor)
    return bool((total - first).norm() <= _TOLERANCE * first.norm())


def _of_experts(module: nn.Module, unit: Unit, number: int, index: int, args: Any, kwargs: Any) -> Tensor:
    """Output of a module on set `index` of its experts, whose weights it has now."""
    leaves, tree = tree_flatten((args, kwargs))

    def run(leaves: list[Any]) -> Tensor:
        args, kwargs = tree_unflatten(leaves, tree)
        (output,) = _tensors(module(*args, **kwargs))
        return output

    pairs = RoutedPairs(module, name=unit.name, num_experts=number, leaves=leaves)
    (experts,) = Cut(0, number).ranges(number, num_slices=_NUM_SLICES, index=index)
    return pairs.run(leaves, experts, run=run, anchor=torch.zeros(()))


def is_linear_in_rows(
    module: nn.Module, unit: Unit, weights: Sequence[Tensor], *, run: Callable[[Sequence[Tensor]], Tensor]
) -> bool:
    """True if a module's output on one slice follows its row-wise weights, on which sums over slices rest.

    Args:
        module: whose buffers stay as they are.
        unit: its description.
        weights: of the slice, in the unit's order.
        run: puts weights into the module and returns its output, with the same random numbers each time.
    """
    rows = [w.cut is not None and 0 < w.cut.dim == len(w.shape) - 1 for w in unit.weights]
    # By a power of two, which changes no mantissa: a linear forward gives exactly -2 times its output.
    scaled = [-2.0 * weight if row else weight for weight, row in zip(weights, rows, strict=True)]
    devices = [weights[0].device] if weights[0].device.type == "cuda" else []
    outputs = []
    with torch.no_grad(), torch.random.fork_rng(devices), buffers_untouched(module):
        for given in (weights, scaled):
            outputs.append(run(given).float())
    once, again = outputs
    # Not `<=`: outputs that are not numbers fail later, where their cause is named.
    return not (again + 2.0 * once).norm() > _TOLERANCE_OF_SCALED * again.norm()


def passes_biases_on(module: nn.Module, biases: Sequence[Tensor], *, run: Callable[[Sequence[Tensor]], Tensor]) -> bool:
    """True if biases of a module's row-wise weights are added to its output, each as it is.

    Args:
        module: whose buffers stay as they are.
        biases: of their shapes and dtypes; their values, which are often zeros at first, are not looked at.
        run: puts biases into the module and returns its output on one slice, with the same random numbers each time.
    """
    devices = [biases[0].device] if biases[0].device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), buffers_untouched(module):
        without = run([torch.zeros_like(bias) for bias in biases]).float()
        size = max(1.0, float(without.abs().max())) if without.numel() else 1.0  # else it would be lost in rounding
        tried = [size * torch.linspace(-1.0, 1.0, len(bias), device=bias.device).to(bias.dtype) for bias in biases]
        added = run(tried).float() - without
    wanted = torch.stack([bias.float() for bias in tried]).sum(0).expand_as(added)
    return not (added - wanted).norm() > _TOLERANCE_OF_SCALED * wanted.norm()


def _tensors(output: Any) -> list[Tensor]:
    """The output, or the tensors in the tuple that it is, which must begin with one."""
    outputs = output if isinstance(output, tuple) else (output,)
    if not isinstance(outputs[0], Tensor):
        raise TypeError(f"returns a {type(outputs[0]).__name__}")
    return [each for each in outputs if isinstance(each, Tensor)]


def copied(values: Any) -> Any:
    """A copy of nested values whose tensors have memory of their own."""
    leaves, tree = tree_flatten(values)
    return tree_unflatten([copy.copy(leaf) if not isinstance(leaf, Tensor) else leaf.clone() for leaf in leaves], tree)
