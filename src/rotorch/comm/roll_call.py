"""Comparison of the ranks' next operations, so that a rank that does something else is named instead of awaited.

Before a pass all ranks meet: no weight changes while another rank reads it. A rank that left its loop a batch early, or
calls the model once more than the others, would be waited for until a timeout. So each brings a number for the
operation that it is about to do, and all compare them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import tree_flatten
from rotorch.comm.checksums import cancelling, differ, sum_by_place, with_squares
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.long_wait import SAYS_AFTER_S, saying_if_long
from rotorch.comm.ring import ORDER_MODULUS
from rotorch.core.errors import ConfigError


class ModelCall(IntEnum):
    """The operation that a rank is about to do, or has just done, with one model."""

    FORWARD = 1
    FORWARD_DONE = 2
    LOOK = 3
    LOOK_DONE = 4
    BACKWARD = 5
    BACKWARD_DONE = 6
    STEP = 7
    EVALUATION = 8
    PREDICTION = 9
    NEXT_TOKEN = 10
    CLOSE = 11
    LOGITS = 12
    LOGITS_DONE = 13
    STEP_MORE = 14
    COPY = 15
    ADAPTERS = 16
    GATHER = 17
    SAVE = 18
    LOAD = 19
    BACKWARD_UNSUMMED = 20
    STATE = 21

    @property
    def is_backward(self) -> bool:
        """True if the rank is about to come back through a forward."""
        return self in _BACKWARDS

    @property
    def is_end(self) -> bool:
        """True if the rank has just done it."""
        return self in (ModelCall.FORWARD_DONE, ModelCall.LOOK_DONE, ModelCall.BACKWARD_DONE, ModelCall.LOGITS_DONE)


_TEXTS = {
    ModelCall.FORWARD: "calls the model",
    ModelCall.FORWARD_DONE: "calls the model",
    ModelCall.LOOK: "calls the model without gradients",
    ModelCall.LOOK_DONE: "calls the model without gradients",
    ModelCall.BACKWARD: "calls backward",
    ModelCall.BACKWARD_DONE: "calls backward",
    ModelCall.BACKWARD_UNSUMMED: "calls backward within no_sync()",
    ModelCall.STEP: "calls forward_backward",
    ModelCall.EVALUATION: "calls evaluate",
    ModelCall.PREDICTION: "calls predict",
    ModelCall.NEXT_TOKEN: "asks for the logits of the next token",
    ModelCall.CLOSE: "closes the model",
    ModelCall.LOGITS: "reads logits beside a loss",
    ModelCall.LOGITS_DONE: "reads logits beside a loss",
    ModelCall.COPY: "copies the model",
    ModelCall.ADAPTERS: "puts adapters into the model",
    ModelCall.GATHER: "gathers whole weights",
    ModelCall.SAVE: "calls rotorch.save",
    ModelCall.LOAD: "calls rotorch.load",
    ModelCall.STATE: "steps an optimizer into which it has loaded the state of one process",
    ModelCall.STEP_MORE: "calls forward_backward(accumulate=True)",
}


_OF_ALL_RANKS = (ModelCall.GATHER, ModelCall.SAVE, ModelCall.LOAD, ModelCall.STATE)
_BACKWARDS = (ModelCall.BACKWARD, ModelCall.BACKWARD_UNSUMMED)
_OF_LOOPS = (ModelCall.FORWARD, ModelCall.LOOK, *_BACKWARDS, ModelCall.LOGITS, ModelCall.COPY, *_OF_ALL_RANKS)
"""Operations of loops of users' own; steps of `rotorch train` have a watchdog (`train/launch/watchdog.py`)."""

_LEARN = (ModelCall.FORWARD, *_BACKWARDS, ModelCall.STEP, ModelCall.STEP_MORE)

_IN_ORDER = "give every rank equally many batches, and let all of them call models, and backward, in the same order"
_BY_ALL = "let all ranks call it, and only one write what comes of it"
_SAME_PARTS = (
    "They may be slower. If weights are cut and they wait for a part of the model that this rank has left out (layers "
    "dropped at random, experts without tokens), they never come: let all ranks run the same parts in each pass"
)

_ODD = 0x9E3779B97F4A7C15
"""Golden ratio in 64 bits: differences within several groups of ranks do not add up to 0."""

_TARGETS = 2**48
"""More target tokens than a step has: two small numbers are summed as one, and a message stays below 64 bytes."""


def digest_of(batch: Any) -> int:
    """A number of all whole-number tensors in a batch, in order: ids, labels, masks, positions.

    Others are left out: ranks may have computed them, each with its own rounding.
    """
    found = 0
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex():
            words = leaf.detach().flatten().to(torch.int64)
            found = (31 * found + int(sum_by_place(words)) + words.numel()) % 2**64
    return found


def number_of_batch(digest: int, *, group: int, num_ranks: int, is_first: bool) -> int:
    """This rank's `of_batch`: these of ranks with equal digests add up to 0, modulo 2**64.

    Args:
        digest: of the batch.
        group: number of the ranks that share it, among such groups.
        num_ranks: number of them.
        is_first: of one of them.
    """
    # A digest is a sum, and batches of three ranks could differ so that its multiples add up to 0. Python's own hash of
    # a small number is nearly one, too.
    mixed = int.from_bytes(blake2b(digest.to_bytes(8, "little"), digest_size=8).digest(), "little")
    number = cancelling(mixed, group=group, num_ranks=num_ranks, is_first=is_first) * _ODD % 2**64
    return number - 2**64 if number >= 2**63 else number


class RollCall:
    """The meeting of the ranks of one model. All of them call every method, in one order.

    [Note: seven numbers]
        For any number of ranks seven integers are summed: three numbers that must be equal on all ranks, their squares
        (see `comm/checksums.py`), and one for both the targets and the ranks with gradients left. Ranks send each
        other their numbers only if they differ. At the end of a pass the third one is `Ring.order_hash`, whose sum
        must be 0.

    Args:
        mesh: the ranks.
        parameters: by name, in the same order on all ranks; which of them are frozen is compared.
    """

    def __init__(self, mesh: DeviceMesh, parameters: Mapping[str, Tensor]) -> None:
        self._mesh = mesh
        self._parameters = parameters
        # Powers of a primitive root: sums of them, unlike sums of places, seldom agree for two sets of one size.
        self._codes = [pow(6, place, 251) for place in range(len(parameters))]
        self._ranks = mesh.mesh.flatten().tolist()
        self._is_alone = self._is_spoilt = False
        self._mine = self._ranks.index(mesh.get_rank()) if mesh.size() > 1 else 0
        me, waited = f"rank {self._ranks[self._mine]}", f"and has waited {SAYS_AFTER_S:.0f} s for others"
        self._waits = {
            doing: f"{me} {_TEXTS[doing]}, {waited}. Ranks that have left their loop, or wait for something else, "
            "never come: " + (_BY_ALL if doing in _OF_ALL_RANKS else _IN_ORDER)
            for doing in _OF_LOOPS
        }
        self._waits |= {
            doing: f"{me} {_TEXTS[doing]}, is through with it, {waited}. {_SAME_PARTS}"
            for doing in ModelCall
            if doing.is_end
        }
        # Identifies the model among others of the ranks; not drawn from torch's generators, which the user has seeded.
        drawn = int.from_bytes(os.urandom(3)) if self._mine == 0 else 0  # its square is summed in 64 bits
        self._model = int(all_reduce_sum(torch.tensor([drawn]), mesh=mesh))

    def meet(
        self,
        doing: ModelCall,
        *,
        num_micro_batches: int = 0,
        num_targets: int = 0,
        num_left: int = 0,
        is_changed: bool = False,
        has_gradients: bool = False,
        of_batch: int | None = None,
        order_hash: int = 0,
    ) -> tuple[int, int]:
        """Waits for all ranks and returns the sums of their `num_targets` and of their `num_left`.

        Args:
            doing: the operation that this rank is about to do.
            num_micro_batches: of this rank.
            num_targets: of this rank.
            num_left: 1 if this rank has gradients that the operation must not find.
            is_changed: this rank has written weights since its last pass, as an optimizer's step does.
            has_gradients: this rank has gradients that it has not cleared.
            of_batch: where ranks share batches, a number whose sum over ranks, modulo 2**64, is 0 if all that share one
                were given the same.
            order_hash: this rank's `Ring.order_hash`, compared at the end of a pass.

        Raises:
            ConfigError: on all ranks: some are about to do something else, or have another number of micro-batches, or
                another batch than ranks that share it with them, or have run other parts of the model.
        """
        frozen = self._number_of_frozen() if doing in _LEARN else 0
        alike = (int(doing), self._model, 1024 * num_micro_batches + 4 * frozen + 2 * has_gradients + is_changed)
        numbers = with_squares(alike)
        if doing.is_end:  # the third of these is 0 then
            numbers[2] = order_hash
        sums = torch.tensor([*numbers, num_left * _TARGETS + num_targets])
        with saying_if_long(self._waits[doing]) if doing in self._waits else nullcontext():
            *sums, total = all_reduce_sum(sums, mesh=self._mesh).tolist()
        self._is_alone = is_alone = sums[0] == doing  # the other ranks are faked
        order_hashes = 0
        if doing.is_end:
            order_hashes, sums[2] = sums[2], 0
        if not is_alone and any(differ(sums, num_ranks=len(self._ranks))):
            self._refuse(alike)
        if doing is not ModelCall.CLOSE:
            self.check_orders(order_hashes)
        # A message of its own: ranks that do something else have none.
        if of_batch is not None and not is_alone and int(all_reduce_sum(torch.tensor([of_batch]), mesh=self._mesh)):
            raise ConfigError(
                "ranks that share a batch were given different ones: token ids, labels or masks differ. Give all ranks "
                "of one model.batch_rank the same batch, as DistributedSampler(data, "
                "num_replicas=model.num_batch_ranks, rank=model.batch_rank) does"
            )
        left, targets = divmod(int(total), _TARGETS)
        return targets, left

    def check_orders(self, total: int) -> None:
        """Raises `ConfigError` if ranks of a ring have visited other units in a pass, then and from then on.

        They have taken slices of one unit for those of another one, without an error. Called on all ranks, after the
        meeting before the pass.

        Args:
            total: the sum of the ranks' `Ring.order_hash`.
        """
        self._is_spoilt |= bool(total % ORDER_MODULUS) and not self._is_alone
        if self._is_spoilt:
            raise ConfigError(
                "ranks have run different parts of the model in a pass, or in another order, and weights and gradients "
                "of different parts were exchanged for each other: the model cannot go on. Start again from a "
                "checkpoint, and let all ranks run the same parts in each pass (no layers dropped at random; experts "
                "without tokens are called with none), or write ddp"
            )

    def _number_of_frozen(self) -> int:
        """A number below 256 of the set of parameters that are frozen."""
        pairs = zip(self._codes, self._parameters.values(), strict=True)
        return sum(code for code, parameter in pairs if not parameter.requires_grad) % 251

    def _refuse(self, alike: tuple[int, ...]) -> None:
        # A sum of tables with one row each is a gather; it costs a second message only where an error is certain.
        table = torch.zeros(len(self._ranks), len(alike), dtype=torch.int64)
        table[self._mine] = torch.tensor(alike)
        doing, model, states = all_reduce_sum(table, mesh=self._mesh).T.tolist()
        texts = [_TEXTS[ModelCall(each)] for each in doing]
        if len(set(texts)) == len(set(model)) == 1:
            num_micro_batches = [state // 1024 for state in states]
            if len(set(num_micro_batches)) == 1:
                if len({state // 4 for state in states}) > 1:
                    self._refuse_frozen()
                self._refuse_states(states)
            theirs = self._by_ranks([str(number) for number in num_micro_batches])
            raise ConfigError(f"ranks have different numbers of micro-batches: {theirs}. Give every rank equally many")
        if len(set(texts)) == 1:
            texts = [f"{text} that is not the others'" for text in texts]
        raise ConfigError(f"ranks do different things: {self._by_ranks(texts)}. {_IN_ORDER[0].upper()}{_IN_ORDER[1:]}")

    def _refuse_frozen(self) -> None:
        flags = [not parameter.requires_grad for parameter in self._parameters.values()]
        table = torch.zeros(len(self._ranks), len(flags), dtype=torch.int64)
        table[self._mine] = torch.tensor(flags)
        for name, frozen in zip(self._parameters, all_reduce_sum(table, mesh=self._mesh).T.tolist(), strict=True):
            if len(set(frozen)) > 1:
                said = self._by_ranks(["frozen" if each else "trained" for each in frozen])
                raise ConfigError(
                    f"ranks differ in the weights that they train: {name!r} ({said}). Let all ranks call "
                    "requires_grad_() on the same parameters, at the same places"
                )

    def _refuse_states(self, states: Sequence[int]) -> None:
        if len({state % 2 for state in states}) > 1:
            said = self._by_ranks(["yes" if state % 2 else "no" for state in states])
            raise ConfigError(
                f"some ranks have written their weights since the last pass, and others have not: {said}. Let all of "
                "them call optimizer.step(), and write into parameters, at the same places"
            )
        said = self._by_ranks(["some" if state // 2 % 2 else "none" for state in states])
        raise ConfigError(
            f"ranks differ in gradients that are not cleared: {said}. Let all of them call optimizer.zero_grad() "
            "at the same places"
        )

    def _by_ranks(self, texts: Sequence[str]) -> str:
        """Text of all ranks' `texts` (by place in the mesh), ranks with the same text together."""
        said = {text: [rank for rank, other in zip(self._ranks, texts, strict=True) if other == text] for text in texts}
        return ", ".join(f"{_named(ranks)} {text}" for text, ranks in said.items())


def _named(ranks: Iterable[int]) -> str:
    """`rank 3`; `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"rank {runs}" if len(ordered) == 1 else f"ranks {runs}"
