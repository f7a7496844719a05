"""Whether rows do the same work: their losses against those of one process that trains on the whole global batch.

Some libraries degrade silently, so that every rank trains alone, or a gradient is missing: fast, and worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GATE_STEPS = 5
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-3}
"""Largest relative difference of losses, by precision."""


@dataclass(frozen=True)
class Verdict:
    """Whether a row's losses are right.

    Attributes:
        max_rel_err: largest relative difference from the reference.
        reason: what is wrong, or None.
    """

    max_rel_err: float
    reason: str | None = None


def judge(losses: Sequence[Sequence[float]], *, reference: Sequence[float], precision: str, alone: bool) -> Verdict:
    """Compares a row's first losses with the reference's.

    Args:
        losses: per step, what each rank returned.
        reference: per step, the loss of one process with the global batch.
        precision: decides the tolerance.
        alone: whether each rank trains on its own (the limit): then the mean of the first step's losses is compared,
            since
            the ranks' weights differ afterwards.
    """
    tolerance = TOLERANCES[precision]
    worst = 0.0
    for step, (mine, right) in enumerate(zip(losses, reference, strict=False)):
        found = [sum(mine) / len(mine)] if alone else mine
        error = max(abs(loss - right) / abs(right) if loss == loss else float("inf") for loss in found)
        worst = max(worst, error)
        if error > tolerance:
            shown = found[0] if max(found) == min(found) else found
            return Verdict(worst, f"loss of step {step + 1} is {shown}, one process has {right} (relative {error:.1e})")
        if alone:
            break
    return Verdict(worst)


def says_little(reference: Sequence[float], *, precision: str, num_batches: int) -> bool:
    """Whether the reference's losses hardly change, so that wrong gradients would not show."""
    pairs = list(zip(reference, reference[num_batches:], strict=False))
    return all(abs(b - a) <= 10 * TOLERANCES[precision] * abs(a) for a, b in pairs)
