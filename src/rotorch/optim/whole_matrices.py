"""Whole matrices for an optimizer's update, of weights whose parts lie on many ranks: one owner computes for all.

[Note: owners]
    Every matrix has one owner among the ranks that hold a part of it. The others send it their parts, it computes with
    the whole, and sends each its part of the result: 2 (n-1)/n of the matrix's bytes for n ranks, in place of the
    (n-1) that gathering it everywhere takes, and 1/n of the operations on each rank. Owners are chosen by operations,
    the largest matrix first. A matrix that several ranks hold whole (`ddp`) is also computed by its owner alone: for
    updates that ask for whole matrices computing takes longer than sending, and replicas get the same bits.

[Note: rounds]
    In each round every rank owns at most one matrix, so that all compute at the same time and hold at most one whole
    matrix. Within a round ranks send in turns: to the next rank, to the one after it, and so on, each turn one message
    out and one in. Beside the whole matrix there are two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotorch.comm.collectives import gather_objects
from rotorch.comm.pairwise import Pairwise
from rotorch.shard.in_chunks import fill_part
from rotorch.shard.sharded_weight import Chunk, ShardedWeight

Give = Callable[[ShardedWeight], Tensor]
"""This rank's part of what an owner computes with; shaped like the weight's part."""

Compute = Callable[[ShardedWeight, Tensor], Tensor]
"""The result for a whole matrix, which it may overwrite; of the same shape."""

Take = Callable[[ShardedWeight, Tensor], None]
"""Gets this rank's part of the result."""


@dataclass(frozen=True)
class _Shard:
    """One rank's part of a matrix: the shape of its tensor, and the chunks of the whole that it consists of."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel() if self.chunks else 0

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole`, contiguous; a view of it where that is possible."""
        if len(self.chunks) == 1:
            return self.chunks[0].of_whole(whole).contiguous()
        return fill_part(whole.new_empty(self.shape), self.chunks, whole)


@dataclass(frozen=True)
class _Matrix:
    """A matrix on all ranks.

    Attributes:
        held: what this rank has of it.
        parts: of every rank, by position.
        owner: position of the rank that computes.
        sources: positions of the ranks whose parts together are the whole, each once.
    """

    held: ShardedWeight
    parts: tuple[_Shard, ...]
    owner: int
    sources: frozenset[int]


class WholeMatrices:
    """Matrices of one parallel model, each with an owner (see [Note: owners]). All ranks make it, with the same ones.

    Args:
        matrices: what this rank holds of each (`rotorch.optim.weight_of(parameter)`); some may be empty.
        operations: what the owner's work on a matrix of a shape takes, in any unit.
    """

    def __init__(self, matrices: Sequence[ShardedWeight], *, operations: Callable[[tuple[int, ...]], float]) -> None:
        mesh = matrices[0].mesh
        if mesh is None or any(held.mesh is not mesh for held in matrices):
            raise AssertionError("matrices of one parallel model")
        self._ranks = Pairwise(mesh)
        mine = [(held.name, _Shard(tuple(held.local.shape), held.chunks)) for held in matrices]
        of_ranks = gather_objects(mine, mesh=mesh)
        if any([name for name, _ in theirs] != [name for name, _ in mine] for theirs in of_ranks):
            raise AssertionError("ranks have given different matrices")
        parts = [tuple(theirs[number][1] for theirs in of_ranks) for number in range(len(matrices))]
        owners = _balanced(parts, costs=[operations(held.weight.shape) for held in matrices], size=self._ranks.size)
        self.matrices = [
            _Matrix(held, of_matrix, owner, _sources(of_matrix, owner=owner, of=held))
            for held, of_matrix, owner in zip(matrices, parts, owners, strict=True)
        ]
        self._rounds = _rounds(self.matrices)

    @torch.no_grad()
    def update(
        self, give: Give, compute: Compute, take: Take, *, dtype: torch.dtype, names: Collection[str] | None = None
    ) -> None:
        """Has every matrix computed by its owner. All ranks, with the same names.

        Args:
            give: called where a part is needed; its tensor is converted to `dtype`.
            compute: called by the owner.
            take: called on every rank that holds a part.
            dtype: in which parts travel, and wholes and results are.
            names: of the matrices that are meant; None: all.
        """
        for whole_round in self._rounds:
            meant = {o: m for o, m in whole_round.items() if names is None or m.held.name in names}
            if meant:
                self._scatter(meant, self._computed(meant, give, compute, dtype=dtype), take, dtype=dtype)

    def _computed(self, owned: dict[int, _Matrix], give: Give, compute: Compute, *, dtype: torch.dtype) -> Tensor:
        """The result for the matrix that this rank owns; an empty tensor if it owns none in this round."""
        mine = owned.get(self._ranks.position)
        if mine is None:
            self._gather(owned, None, give, dtype=dtype)
            return torch.empty(0, dtype=dtype)
        whole = torch.empty(mine.held.weight.shape, dtype=dtype, device=mine.held.local.device)
        self._gather(owned, whole, give, dtype=dtype)
        return compute(mine.held, whole).to(dtype).contiguous()

    def _gather(self, owned: dict[int, _Matrix], whole: Tensor | None, give: Give, *, dtype: torch.dtype) -> None:
        ranks = self._ranks
        for distance in range(ranks.size):
            to, source = (ranks.position + distance) % ranks.size, (ranks.position - distance) % ranks.size
            send, receive = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
            theirs, mine = owned.get(to), owned.get(ranks.position)
            if theirs is not None and ranks.position in theirs.sources:
                send = give(theirs.held).to(dtype).contiguous()
            part = None if mine is None or source not in mine.sources else mine.parts[source]
            if distance == 0:
                receive = send
            else:
                if mine is not None and part is not None:
                    receive = torch.empty(part.shape, dtype=dtype, device=mine.held.local.device)
                ranks.swap(send.view(-1), to=to, receive=receive.view(-1), source=source)
            if whole is not None and part is not None:
                for chunk in part.chunks:
                    chunk.of_whole(whole).copy_(chunk.of_local(receive))

    def _scatter(self, owned: dict[int, _Matrix], result: Tensor, take: Take, *, dtype: torch.dtype) -> None:
        ranks = self._ranks
        for distance in range(ranks.size):
            to, source = (ranks.position + distance) % ranks.size, (ranks.position - distance) % ranks.size
            send, receive = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
            theirs, mine = owned.get(source), owned.get(ranks.position)
            if mine is not None and mine.parts[to].numel:
                send = mine.parts[to].of(result)
            comes = theirs is not None and theirs.parts[ranks.position].numel > 0
            if distance == 0:
                receive = send
            else:
                if theirs is not None and comes:
                    receive = torch.empty(theirs.held.local.shape, dtype=dtype, device=theirs.held.local.device)
                ranks.swap(send.view(-1), to=to, receive=receive.view(-1), source=source)
            if theirs is not None and comes:
                take(theirs.held, receive)


def _balanced(parts: Sequence[tuple[_Shard, ...]], *, costs: Sequence[float], size: int) -> list[int]:
    """An owner for each matrix: the largest first, to the least loaded of its holders."""
    owners, load = [0] * len(parts), [0.0] * size
    for number in sorted(range(len(parts)), key=lambda n: (-costs[n], n)):
        holders = [rank for rank, part in enumerate(parts[number]) if part.numel]
        owner = min(holders, key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += costs[number]
    return owners


def _sources(parts: tuple[_Shard, ...], *, owner: int, of: ShardedWeight) -> frozenset[int]:
    """Ranks whose parts together are the whole: of holders of one part, the one of the owner's own replica."""
    holders: dict[tuple[Chunk, ...], list[int]] = {}
    for rank, part in enumerate(parts):
        if part.numel:
            holders.setdefault(part.chunks, []).append(rank)
    replica = holders[parts[owner].chunks].index(owner)
    sources = frozenset(ranks[replica % len(ranks)] for ranks in holders.values())
    if sum(parts[rank].numel for rank in sources) != of.weight.numel:
        raise AssertionError(f"the parts of {of.name} are not the whole")
    return sources


def _rounds(matrices: Sequence[_Matrix]) -> list[dict[int, _Matrix]]:
    """Matrix of each owner in each round: the largest ones of all owners together."""
    owned: dict[int, list[_Matrix]] = {}
    for matrix in sorted(matrices, key=lambda m: -m.held.weight.numel):
        owned.setdefault(matrix.owner, []).append(matrix)
    return [
        {owner: of_owner[number] for owner, of_owner in sorted(owned.items()) if number < len(of_owner)}
        for number in range(max(map(len, owned.values()), default=0))
    ]
