"""tesseract: 2.5-D tensor parallelism. Every matrix in blocks on a grid of ranks, and the grid several layers deep.

Idea
    On a grid of q x q ranks each product of activations with weights goes block by block: blocks of activations are
    broadcast along rows, blocks of weights along columns, and no rank ever has a whole row or column of either. d such
    grids, one behind another, hold the same weights and each its own rows of the batch. Source: Tesseract (Wang et al.,
    arXiv 2105.14500).

Picture (q = 2, d = 2; one layer of the grid computes y = x W; a digit pair is a block's row and column)
               holds    t = 0: x . W       t = 1: x . W
    rank 0,0 | 00 00 |  00 . 00 <- own  |  01 . 10 <- x from its row, W from its column |  y 00
    rank 0,1 | 01 01 |  00 . 01         |  01 . 11                                     |  y 01
    rank 1,0 | 10 10 |  10 . 00         |  11 . 10                                     |  y 10
    rank 1,1 | 11 11 |  10 . 01         |  11 . 11                                     |  y 11
    The other layer does the same with its own x and the same W; gradients of W are summed over layers after backward.

Layout
    `W[D_row, F_col]`: inputs by rows of the grid, outputs by columns; heads are cut between key/value heads. Embedding
    `E[V_row, D_col]`, a head that is tied to it as well; others as linear layers, `W[D_row, V_col]`. Norms and biases
    `[D_col]`. Activations `[b/(d q), s, D_col]` everywhere, the residual stream included: ranks that differ only in
    their column share a batch, row i of layer k has batch share i + k q. Logits exist for V/q columns, the loss is
    computed on those.

Cost (a layer of P bytes of weights, X of inputs and Y of outputs on this rank's tokens, all per rank: P/q^2 and so on)
    resident   P/q^2, on each of d layers; with `zero` P/(d q^2), optimizer's state alike (ZeRO, arXiv 1910.02054). Then
               a step gathers the blocks once and frees them at its end: P/q^2 more while it lasts, and for gradients.
    transient  One to three blocks of other ranks' x and w, and two or three parts of gradients of either. Over shared
               memory two parts, and slots that stay: three or more as large as the largest block of each group of
               ranks, and two of up to 4 MiB over the depth.
    sent       Forward (q-1) (x + w) in broadcasts; backward the same again and (q-1) (x + w) in reductions; the sum of
               gradients over layers 2 (d-1)/d w, with `zero` half of it for sums of parts and half for gathering. A
               norm sums one number per token (layer norms two), forward and backward; an embedding sends its
               rows where they are asked for; the loss three numbers per token.
    hides      Blocks for the next step of a product come while this one is computed; in backward, where half of the
               products need this rank's own blocks only, all of them. Over messages the sum over layers leaves in
               parts under backward.

Deviations
    Gradients of weights are summed over the depth of the grid; the best-known implementation leaves that out. Attention
        is local: heads lie in columns, whole sequences in rows. Vocabularies need not divide by q.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import PositiveInt

from rotorch.core.grid import DEPTH
from rotorch.core.grid_strategy import GridStrategy


class Tesseract(GridStrategy):
    """Blocks on `depth` grids of `rows` x `columns` ranks. Written `tesseract=2x2x2`: rows, columns, depth.

    Attributes:
        depth: number of grids that hold the same weights.
        zero: each of them holds a part of its blocks at rest, with the optimizer's state of that part (ZeRO).
    """

    kind: ClassVar[str] = "tesseract"
    size_fields: ClassVar[tuple[str, ...]] = ("rows", "columns", "depth")
    depth: PositiveInt
    zero: bool = False

    @property
    def in_shards(self) -> bool:
        return self.zero

    def without_idle_options(self) -> Self:
        return self.model_copy(update={"zero": False}) if self.depth == 1 else self

    @property
    def num_layers(self) -> int:
        return self.depth

    @property
    def axes(self) -> dict[str, int]:
        return {DEPTH: self.depth, **super().axes}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (DEPTH, *super().batch_axes)
