"""megatron: 1-D tensor parallelism. Weights stay, ranks share a batch, activations are summed after pairs of products.

Idea
    Every rank holds the columns of the first and the rows of the second of two products in a row, computes its heads or
    MLP columns for the whole batch, and the outputs are summed. Source: Megatron-LM (Shoeybi et al., arXiv 1909.08053):
    its communication, not its kernels.

Picture (4 ranks, one attention or MLP over time; A = all-reduce of an activation)
              forward                backward
    rank 0 | x W1[0] W2[0] A y | dy dW2[0] dW1[0] A dx |
    rank 1 | x W1[1] W2[1] A y | dy dW2[1] dW1[1] A dx |     x, y and their gradients are the same on all ranks
    rank 2 | x W1[2] W2[2] A y | dy dW2[2] dW1[2] A dx |
    rank 3 | x W1[3] W2[3] A y | dy dW2[3] dW1[3] A dx |

Layout
    `W[F_tp, D]` or `W[F, D_tp]`: cut where the model's tensor-parallel plan says, by whole heads, by rows of the
    vocabulary. A weight that is cut alone (no second product takes the cut away) has its outputs placed side by side.
    Uncut weights are whole on every rank. Logits stay cut along the vocabulary; the loss exchanges three
    numbers per token.

Cost (unit of P bytes, n ranks, activations of A bytes at its input and output)
    resident   P/n: weights do not move. Over shared memory two slots as large as an activation, up to 4 MiB each.
    sent       2 (n-1)/n A in forward, as much in backward, for each attention and each MLP: it grows with the batch,
               not with the weights. An embedding only in forward. Gradients of weights that are used beside slices
               (norms of heads) are summed once per step.
    hides      Nothing: the next product needs the sum.

    along      With `sequence_parallel` (Korthikanti et al., arXiv 2205.05198) a rank has 1/n of the tokens between
    tokens     attentions and MLPs, so norms, dropout and the residual stream take 1/n of the work and of saved
               activations. Each sum becomes a reduce-scatter and an all-gather, for the same bytes; a linear layer's
               input is not saved but gathered again in backward, (n-1)/n A for each attention and MLP. Once per pass A
               is gathered behind the last layer, and its gradient before the first (of each stage in a pipeline).
               Gradients of norms and of biases behind sums are parts, and join the one sum of a step.
    changed    `sync_fraction=p` sums the first p of an output's channels only, and p A moves; the others stay each
               rank's own (CAAT-Net, arXiv 2506.19645). That is ANOTHER MODEL than the one on one process, made of the
               same weights, and depends on n; `rotorch verify` refuses it.

Deviations
    Local tensors and these sums in place of torch's DTensor styles: modules run as they are, cuts may be uneven, fused
    in one matrix, or tied (docs/decisions). Where heads do not divide evenly the first ranks compute one more; where
    there are fewer than ranks the last hold none and wait. With `sync_fraction` gradients are the exact derivative
    of forward; so backward sums at a unit's output and not at its input. With `sequence_parallel` the embedding, the
    last norm and the head see all tokens, since masks and positions are made from the embedding's output; models
    without a pipeline plan, which names their layers, are refused. Under autocast a linear layer keeps
    its converted input, of all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.messages import SUM_CHUNK_BYTES, lane_bytes
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.strategy import OneAxis
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer, all_gather, all_reduce
from rotorch.strategies.megatron.along_tokens import check_tokens, token_shards_sent, tokens_cut, with_tokens_cut

_AXIS = "megatron"


class Megatron(OneAxis):
    """Weights cut over `size` ranks that share a batch. Written `megatron=4`.

    Attributes:
        size: number of ranks.
        sync_fraction: fraction of the channels of a row-wise output that is summed over ranks. Below 1 it changes the
            model.
        sequence_parallel: between the attentions and MLPs of its layers a rank has a shard of the tokens only.
        transport: of sums of activations: by "messages", or over "shared_memory" of one host, where nothing is
            sent; "auto" takes that on CPU where it can be had.
    """

    kind: ClassVar[str] = "megatron"
    not_compiled: ClassVar[str] = ""
    cuts_weights: ClassVar[bool] = True
    sync_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    sequence_parallel: bool = False
    transport: Literal["auto", "shared_memory", "messages"] = "auto"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        return (_AXIS,) if self._cuts_tokens else ()

    @property
    def _cuts_tokens(self) -> bool:
        return self.sequence_parallel and self.size > 1

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        """The model's units, with notes of gathers along the sequence and of weights whose gradients are parts."""
        spec = spec.with_inside_whole()  # a ring around would cut these, and make them whole for each call
        return with_tokens_cut(spec) if self._cuts_tokens else spec

    @property
    def changes_the_model(self) -> str:
        if self.sync_fraction == 1.0 or self.size == 1:
            return ""
        return (
            f"of the channels of attentions' and MLPs' outputs only the first {self.sync_fraction:.0%} are summed over "
            f"the {self.size} ranks, the others stay each rank's own"
        )

    def num_synced(self, width: int) -> int:
        """Number of channels that are summed, of a row-wise output of `width` channels."""
        return round(self.sync_fraction * width)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        n = self.size
        if unit.kind is not UnitKind.REPLICATED:
            return Layout(resident_bytes=unit.slice_bytes(num_slices=n, index=position))
        parts = bool(self.changes_the_model)  # then every rank has a part of every gradient
        summed = sum(w.num_bytes for w in unit.weights if w.trained and (w.beside_slices or parts))
        transfers = (all_reduce(summed, axis=_AXIS, size=n, phase=Phase.STEP),) if n > 1 and summed else ()
        return Layout(resident_bytes=unit.num_bytes, transfers=transfers)

    def held(self, unit: Unit, *, layout: Layout, position: int = 0) -> Unit:
        return unit if unit.kind is UnitKind.REPLICATED else unit.slice(num_slices=self.size, index=position)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        """Transfers of one micro-batch for `unit`: hidden states at the unit's input and output.

        Further inputs that require a gradient (weights of a router) are not in it.
        """
        return () if self.transport == "shared_memory" else self._sums(unit, batch)

    def layout_of(self, spec: ModelSpec, *, batch: MicroBatch | None = None, position: int = 0) -> Layout:
        layout = super().layout_of(spec, batch=batch, position=position)
        if self.transport != "shared_memory" or batch is None:
            return layout
        whole, part = 0, 0
        for transfer in (t for unit in spec.units for t in self._sums(unit, batch)):
            if transfer.kind is Kind.REDUCE_SCATTER:
                part = max(part, transfer.payload_bytes // self.size)
            else:  # sums pass in chunks
                summed = transfer.kind is Kind.ALL_REDUCE
                whole = max(whole, min(transfer.payload_bytes, SUM_CHUNK_BYTES) if summed else transfer.payload_bytes)
        slots = lane_bytes(self.size, whole=whole, part=part)
        return replace(layout, transient_bytes=slots, slots_bytes=slots)

    def _sums(self, unit: Unit, batch: MicroBatch) -> tuple[Transfer, ...]:
        if self.size == 1:
            return ()
        widths = {"width_in": input_width(unit), "width_out": output_width(unit)}
        gathers_and_sums = token_shards_sent(unit, batch=batch, axis=_AXIS, size=self.size, **widths)
        return (*gathers_and_sums, *self._whole_sums(unit, batch))

    def _whole_sums(self, unit: Unit, batch: MicroBatch) -> tuple[Transfer, ...]:
        """Transfers of a unit around which all ranks have all tokens."""
        if unit.kind is UnitKind.REPLICATED or tokens_cut(unit).around:
            return ()
        tokens = batch.num_rows * batch.num_tokens
        parts = bool(self.changes_the_model)
        if unit.kind is UnitKind.MODULE:
            forward = self.num_synced(output_width(unit))
            backward = forward if parts else input_width(unit)
            sums = (
                self._sum(tokens * forward * batch.itemsize, Phase.FORWARD),
                self._sum(tokens * backward * batch.itemsize, Phase.BACKWARD),
            )
            return sums * unit.uses
        matrix = unit.weights[0]
        width = matrix.numel // matrix.shape[_dim(matrix)]
        transfers: list[Transfer] = []
        num_products = unit.uses if unit.combine is Combine.CONCAT else unit.reads_in_backward
        for _ in range(unit.uses - num_products):
            transfers.append(self._sum(tokens * width * batch.itemsize, Phase.FORWARD))
            if parts:
                transfers.append(self._sum(tokens * width * batch.itemsize, Phase.BACKWARD))
        for _ in range(num_products):
            if unit.logits:
                per_token = tokens * batch.loss_itemsize
                transfers += [self._sum(per_token, Phase.FORWARD), self._sum(2 * per_token, Phase.FORWARD)]
            else:
                most = max(self._rows(matrix, index=k) for k in range(self.size))
                part = tokens * most * batch.itemsize
                transfers.append(all_gather(part, axis=_AXIS, size=self.size, phase=Phase.FORWARD))
            if not parts:
                transfers.append(self._sum(tokens * width * batch.itemsize, Phase.BACKWARD))
        return tuple(transfers)

    def gradients_in_parts(self, spec: ModelSpec) -> list[str]:
        """Names of the weights that every rank has whole, and of whose gradients it has a part.

        Raises:
            ConfigError: one of them is also used where every rank has the whole gradient.
        """
        whole = [w for unit in spec.units if unit.kind is UnitKind.REPLICATED for w in unit.weights]
        if self.changes_the_model:
            return [w.name for w in whole]
        parts = [w.name for w in whole if w.beside_slices]
        for unit in spec.cut_units:
            for name in unit.replicated:
                if name not in parts:
                    raise ConfigError(
                        f"megatron: {name!r} is used inside {unit.name!r}, which is cut, and outside of it. "
                        "Give the weights of that module no role in the plan, or write rtp or fsdp alone"
                    )
        return parts

    def check(self, spec: ModelSpec) -> None:
        self._check_cut(spec)

        if self._cuts_tokens:
            if self.changes_the_model:
                raise ConfigError(
                    f"{self}: sequence_parallel needs outputs that are summed over ranks, and sync_fraction sums only "
                    "some channels. Write one of the two"
                )
            check_tokens(spec, strategy=f"megatron={self.size}[sequence_parallel=true]", num_ranks=self.size)
        if self.changes_the_model:
            self._check_synced(spec)

    def on_device(self, device_type: str) -> Self:
        if self.transport == "shared_memory" and device_type != "cpu":
            raise ConfigError(f"{self}: shared_memory is between CPU ranks, not on {device_type}. Write transport=auto")
        return self

    def _check_synced(self, spec: ModelSpec) -> None:
        """Refuses models whose loss is not each rank's own part of the logits: gradients would count once per rank."""
        if not any(u.logits for u in spec.cut_units):
            raise ConfigError(
                f"{self}: {spec.name} has no language-model head that is cut, so ranks whose activations differ have "
                f"no loss in common. Write megatron={self.size}"
            )
        for unit in spec.cut_units:
            if unit.kind is UnitKind.WEIGHT and unit.combine is Combine.CONCAT and not unit.logits:
                raise ConfigError(
                    f"{self}: {unit.name!r} is cut alone, so its outputs are placed side by side and not summed: there "
                    f"is nothing to sum a part of. Write megatron={self.size}"
                )

    def _rows(self, weight: Weight, *, index: int) -> int:
        return weight.slice_shape(num_slices=self.size, index=index)[_dim(weight)]

    def _sum(self, payload_bytes: int, phase: Phase) -> Transfer:
        return all_reduce(payload_bytes, axis=_AXIS, size=self.size, phase=phase)


def _dim(weight: Weight) -> int:
    """The dim of a WEIGHT unit's outputs, which it is cut along."""
    return 0 if weight.cut is None else weight.cut.dim


def output_width(unit: Unit) -> int:
    """Features at the output of a MODULE unit: the outputs of its row-wise weights."""
    return next((w.shape[-2] for w in unit.weights if _is_row(w)), 0)


def input_width(unit: Unit) -> int:
    """Features at the input of a MODULE unit: the inputs of its column-wise weights."""
    return next((w.shape[-1] for w in unit.weights if len(w.shape) > 1 and not _is_row(w)), 0)


def _is_row(weight: Weight) -> bool:
    return weight.cut is not None and len(weight.shape) > 1 and weight.cut.dim == len(weight.shape) - 1
