"""Checks that all rows of a bench do the same work, and cut the model as they claim.

Losses are compared with those of one process that trains on the whole global batch, and weights at rest with the cut
that a row claims. Some libraries degrade silently: every rank trains alone, a gradient is missing, or nothing is cut.
Such a row is fast, but worthless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rotorch.core.precision import Precision
from rotorch.core.spec import ModelSpec

GATE_STEPS = 5
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 5e-3, "autocast_bfloat16": 5e-3}
"""Largest relative difference of losses, by precision."""


@dataclass(frozen=True)
class Verdict:
    """Result of checking a row's losses.

    Attributes:
        max_rel_err: largest relative difference from the reference.
        reason: description of an error, or None.
    """

    max_rel_err: float
    reason: str | None = None


def judge(
    losses: Sequence[Sequence[float]],
    *,
    reference: Sequence[float],
    precision: Precision,
    alone: bool = False,
    shares: bool = False,
) -> Verdict:
    """Compares a row's first losses with the reference's.

    Args:
        losses: per step, what each rank returned.
        reference: per step, the loss of one process with the global batch.
        precision: decides the tolerance.
        alone: True if each rank trains on its own (the limit): then the mean of the first step's losses is compared,
            since the ranks' weights differ afterwards.
        shares: True if each rank returns the loss of its own share of the batch: then the mean over ranks is compared.
    """
    tolerance = TOLERANCES[precision]
    worst = 0.0
    for step, (mine, right) in enumerate(zip(losses, reference, strict=False)):
        found = [sum(mine) / len(mine)] if alone or shares else mine
        error = max(abs(loss - right) / abs(right) if loss == loss else float("inf") for loss in found)
        worst = max(worst, error)
        if error > tolerance:
            shown = found[0] if max(found) == min(found) else found
            return Verdict(worst, f"loss of step {step + 1} is {shown}, one process has {right} (relative {error:.1e})")
        if alone:
            break
    return Verdict(worst)


def judge_sharding(held: Sequence[int], *, at_most: int, whole: int) -> str | None:
    """Checks that ranks together hold no more weights than a row claims; returns the error, or None.

    Args:
        held: elements of weights at rest, by rank.
        at_most: elements that all of them together may hold.
        whole: elements of the model.
    """
    if whole <= sum(held) <= at_most:
        return None
    return (
        f"ranks hold {sum(held) / whole:.2f} times the model's weights between them, {list(held)} elements of {whole}; "
        f"at most {at_most / whole:.2f} times was claimed"
    )


def may_hold(spec: ModelSpec, *, num_ranks: int) -> int:
    """Elements of weights that ranks may hold between them which claim to cut a model.

    Each matrix once; vectors (norms, biases), which nobody needs to cut, on every rank and once more in parts; and
    padding, of less than one element a weight and rank.
    """
    vectors = sum(weight.numel for weight in spec.weights if len(weight.shape) < 2)
    return spec.num_parameters + num_ranks * (vectors + len(spec.weights))


def says_little(reference: Sequence[float], *, precision: Precision, num_batches: int) -> bool:
    """True if the reference's losses hardly change, so that wrong gradients would not show."""
    pairs = list(zip(reference, reference[num_batches:], strict=False))
    return all(abs(b - a) <= 10 * TOLERANCES[precision] * abs(a) for a, b in pairs)
