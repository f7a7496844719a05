"""summa: 2-D tensor parallelism. Every matrix in blocks on one square grid of ranks.

Idea
    `tesseract` with a single layer, by the same code: each matrix product goes block by block, blocks of activations
    broadcast along rows of the grid and blocks of weights along columns. Source: Optimus (Xu et al., arXiv 2104.05343);
    SUMMA (van de Geijn and Watts, 1997).

Picture (q = 2; y = x W; a digit pair is a block's row and column)
               holds    t = 0: x . W       t = 1: x . W
    rank 0,0 | 00 00 |  00 . 00 <- own  |  01 . 10 <- x from its row, W from its column |  y 00
    rank 0,1 | 01 01 |  00 . 01         |  01 . 11                                     |  y 01
    rank 1,0 | 10 10 |  10 . 00         |  11 . 10                                     |  y 10
    rank 1,1 | 11 11 |  10 . 01         |  11 . 11                                     |  y 11

Layout
    `W[D_row, F_col]`, `E[V_row, D_col]`, norms and biases `[D_col]`, activations `[b/q, s, D_col]`.

Cost (a layer of P bytes of weights; x, w this rank's parts of its inputs and weights)
    Resident P/q^2. Transient one or two blocks of other ranks and two or three parts of gradients; over shared memory
    slots as large as the largest blocks. Sent (q-1) (x + w) in forward, twice that in backward; numbers per token for
    norms and the loss.

Deviations
    Attention is local: heads lie in columns, whole sequences in rows. Vocabularies need not divide by q.
"""

from __future__ import annotations

from typing import ClassVar

from rotorch.core.grid_strategy import GridStrategy


class SUMMA(GridStrategy):
    """Blocks on a grid of `rows` x `columns` ranks. Written `summa=2x2`."""

    kind: ClassVar[str] = "summa"
