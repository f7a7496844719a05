"""megatron: 1-D tensor parallelism. Weights stay, ranks share a batch, activations are summed after pairs of products.

Idea
    Every rank holds the columns of the first and the rows of the second of two products in a row, computes its heads or
    MLP columns for the whole batch, and the outputs sum. Source: Megatron-LM (Shoeybi et al., arXiv 1909.08053); what
    is exchanged, not how its kernels are written.

Picture (4 ranks, one attention or MLP over time; A = all-reduce of an activation)
              forward                backward
    rank 0 | x W1[0] W2[0] A y | dy dW2[0] dW1[0] A dx |
    rank 1 | x W1[1] W2[1] A y | dy dW2[1] dW1[1] A dx |     x, y and their gradients are the same on all ranks
    rank 2 | x W1[2] W2[2] A y | dy dW2[2] dW1[2] A dx |
    rank 3 | x W1[3] W2[3] A y | dy dW2[3] dW1[3] A dx |

Layout
    `W[F_tp, D]` or `W[F, D_tp]`: cut where the model's tensor-parallel plan says, by whole heads, by rows of the
    vocabulary. A weight that is cut alone (no second product takes the cut away) has its outputs placed side by side.
    Weights that nobody cuts are whole on every rank. Logits stay cut along the vocabulary; the loss exchanges three
    numbers per token.

Cost (unit of P bytes, n ranks, activations of A bytes at its input and output)
    resident   P/n, without slots: weights do not move.
    sent       2 (n-1)/n A in forward, as much in backward, for each attention and each MLP: it grows with the batch,
               not with the weights. An embedding only in forward. Gradients of weights that are used beside slices
               (norms of heads) are summed once per step.
    hides      Nothing: the next product needs the sum.

Deviations
    Local tensors and these sums in place of torch's DTensor styles: modules run as they are, cuts may be uneven, fused
    in one matrix, or tied (docs/decisions). Where heads do not divide evenly the first ranks compute one more; where
    there are fewer than ranks the last hold none and wait.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Phase, Transfer, all_gather, all_reduce

_AXIS = "megatron"


class Megatron(Strategy):
    """Weights cut over `size` ranks that share a batch. Written `megatron=4`.

    Attributes:
        size: number of ranks.
    """

    kind: ClassVar[str] = "megatron"
    cuts_weights: ClassVar[bool] = True
    size: PositiveInt

    @property
    def axes(self) -> dict[str, int]:
        return {_AXIS: self.size}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        n = self.size
        if unit.kind is not UnitKind.REPLICATED:
            return Layout(resident_bytes=unit.slice_bytes(num_slices=n, index=position))
        summed = sum(w.num_bytes for w in unit.weights if w.trained and w.beside_slices)
        transfers = (all_reduce(summed, axis=_AXIS, size=n, phase=Phase.STEP),) if n > 1 and summed else ()
        return Layout(resident_bytes=unit.num_bytes, transfers=transfers)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        """What one micro-batch sends for `unit`: hidden states at the unit's input and output.

        Further inputs that require a gradient (weights of a router) are not in it.
        """
        if self.size == 1 or unit.kind is UnitKind.REPLICATED:
            return ()
        tokens = batch.num_rows * batch.num_tokens
        if unit.kind is UnitKind.MODULE:
            forward, backward = output_width(unit), input_width(unit)
            sums = (
                self._sum(tokens * forward * batch.itemsize, Phase.FORWARD),
                self._sum(tokens * backward * batch.itemsize, Phase.BACKWARD),
            )
            return sums * unit.uses
        matrix = unit.weights[0]
        width = matrix.numel // matrix.shape[0]
        transfers: list[Transfer] = []
        num_products = unit.uses if unit.combine is Combine.CONCAT else unit.reads_in_backward
        for _ in range(unit.uses - num_products):
            transfers.append(self._sum(tokens * width * batch.itemsize, Phase.FORWARD))
        for _ in range(num_products):
            if unit.logits:
                per_token = tokens * batch.loss_itemsize
                transfers += [self._sum(per_token, Phase.FORWARD), self._sum(2 * per_token, Phase.FORWARD)]
            else:
                most = max(self._rows(matrix, index=k) for k in range(self.size))
                part = tokens * most * batch.itemsize
                transfers.append(all_gather(part, axis=_AXIS, size=self.size, phase=Phase.FORWARD))
            transfers.append(self._sum(tokens * width * batch.itemsize, Phase.BACKWARD))
        return tuple(transfers)

    def check(self, spec: ModelSpec) -> None:
        if self.size > 1 and not spec.cut_units:
            raise ConfigError(
                f"megatron: nothing to cut in {spec.name}: no weight has a role in its tensor-parallel plan. "
                "Write plan={...} with roles for its weights, or use ddp or fsdp"
            )
        most = max((w.cut.groups for u in spec.cut_units for w in u.weights if w.cut), default=1)
        if self.size > most:
            raise ConfigError(
                f"megatron: {self.size} ranks over {spec.name}, whose finest cut has {most} groups: "
                f"ranks would hold nothing. Write megatron={most} or less"
            )

    def _rows(self, weight: Weight, *, index: int) -> int:
        return weight.slice_shape(num_slices=self.size, index=index)[0]

    def _sum(self, payload_bytes: int, phase: Phase) -> Transfer:
        return all_reduce(payload_bytes, axis=_AXIS, size=self.size, phase=phase)

    def __str__(self) -> str:
        return f"megatron={self.size}{self._options_text()}"


def output_width(unit: Unit) -> int:
    """Features at the output of a MODULE unit: what its row-wise weights make."""
    return next((w.shape[-2] for w in unit.weights if _is_row(w)), 0)


def input_width(unit: Unit) -> int:
    """Features at the input of a MODULE unit: what its column-wise weights take."""
    return next((w.shape[-1] for w in unit.weights if len(w.shape) > 1 and not _is_row(w)), 0)


def _is_row(weight: Weight) -> bool:
    return weight.cut is not None and len(weight.shape) > 1 and weight.cut.dim == len(weight.shape) - 1
