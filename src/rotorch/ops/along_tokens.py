"""Activations cut along the sequence inside of a model's layers, over ranks that share a batch.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198): the operations between a layer's attention and its MLP work
on every token alone, so each rank does them for a shard of the tokens, and keeps only that. All tokens are gathered
at the input of a module that needs them; partial sums are reduce-scattered along the sequence. Before the first layer
and behind the last one (of each stage of a pipeline) activations are whole, so masks and positions are made for all
tokens.

[Note: gradients of token shards]
    Outside of the layers, and in modules that every rank computes whole, activations and gradients are equal on all
    ranks. Inside, a rank's shard and its gradient are its own, and weights that are used there (norms, biases that
    are added behind a sum) get partial gradients. See `ops/conjugates.py` for the other convention.

[Note: gathered again]
    A linear layer keeps its input for its weight's gradient: here that would be all tokens. So where autograd saves a
    view of the gathered tensor, the rank's own shard is kept in its place, and backward gathers it once more.

[Note: random numbers]
    Dropout between modules differs from shard to shard; dropout inside of a module that all ranks compute whole
    must be equal. So a rank's generator is seeded with a number that all ranks share, plus its position, and anew
    behind every such module. The shared number is read back from the generator: a layer that is recomputed in backward
    (`torch.utils.checkpoint`) finds the number of its forward there, even if other layers ran in between.

Shapes: B sequences, T tokens, S tokens of this rank, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import saved_tensor_hooks, storage_key, tree_flatten, tree_unflatten
from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut
from rotorch.ops import random_state
from rotorch.ops.conjugates import (
    ParallelRegion,
    all_gather_along,
    copy_to_region,
    gather_from_region,
    gather_to_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from rotorch.ops.no_saved_tensor_hooks import to_save
from rotorch.ops.random_state import RandomState, seed_generators, seeded_rng

_DIM = 1
"""The dim of tokens in hidden states `[B, T, D]`."""


class TokenShard:
    """This rank's tokens in a pass, shared by all layers of one model.

    Attributes:
        axis_group: the ranks that share the tokens.
        rows: sequences of the micro-batch that is under way.
        lengths: tokens of every rank.
    """

    def __init__(self, axis_group: AxisGroup) -> None:
        self.axis_group = axis_group
        self.rows = 0
        self.lengths: tuple[int, ...] = ()
        self._before: RandomState | None = None

    @property
    def is_cut(self) -> bool:
        """True if activations are cut in this pass; without gradients, fewer tokens than ranks stay whole."""
        return min(self.lengths, default=1) > 0

    def is_own(self, x: Any) -> bool:
        """Returns True if `x` may be hidden states of this rank's tokens."""
        own = (self.rows, self.lengths[self.axis_group.position])
        return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == own

    def is_whole(self, x: Any) -> bool:
        """Returns True if `x` may be hidden states of all tokens."""
        return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == self._all_tokens

    @property
    def _all_tokens(self) -> tuple[int, int]:
        return self.rows, sum(self.lengths)

    def own(self, x_BTD: Tensor) -> Tensor:
        """This rank's shard of an equal tensor; the gradient is gathered."""
        return scatter_to_region(x_BTD, dim=_DIM, lengths=self.lengths, axis_group=self.axis_group)

    def whole(self, x_BSD: Tensor) -> Tensor:
        """All tokens, equal on all ranks; each rank takes its shard of the gradient."""
        return gather_from_region(x_BSD, dim=_DIM, lengths=self.lengths, axis_group=self.axis_group)

    @contextmanager
    def shared_rng(self) -> Iterator[None]:
        """Makes all ranks draw the same inside the block, other numbers each time (see [Note: random numbers])."""
        # Read back, not stored: a layer that is recomputed finds the number of its own forward here.
        shared = torch.initial_seed() - 1 - self.axis_group.position
        with seeded_rng(shared):
            yield
        # A number that neither a rank's own seed nor the shared one of this pass has had.
        self._seed(shared + 1 + self.axis_group.size)

    def _seed(self, shared: int) -> None:
        seed_generators(shared + 1 + self.axis_group.position)

    def run_in(self, layers: Sequence[nn.Module]) -> None:
        """Makes a row of layers run on shards of the tokens, by permanent hooks on the first and the last one."""
        layers[0].register_forward_pre_hook(partial(self._begin, layers), with_kwargs=True)
        layers[-1].register_forward_hook(self._end)

    def of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """Notes the tokens of the pass that is under way; the result makes contexts in which they are this rank's."""
        then = self.rows, self.lengths

        @contextmanager
        def context() -> Iterator[None]:
            now = self.rows, self.lengths
            self.rows, self.lengths = then
            try:
                yield
            finally:
                self.rows, self.lengths = now

        return context

    def _begin(
        self, layers: Sequence[nn.Module], _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.rows, tokens = hidden.shape[:2]
        shards = (
            Cut(_DIM, tokens).ranges(tokens, num_slices=self.axis_group.size, index=k)
            for k in range(self.axis_group.size)
        )
        self.lengths = tuple(shard.length for (shard,) in shards)
        self._before = None  # a recomputed first layer has left one, and no last layer ran behind it
        if not self.is_cut:
            # Without gradients they go on whole: generation decodes one token at a time, fewer than there are ranks.
            if torch.is_grad_enabled():
                raise ConfigError(
                    f"megatron: sequence_parallel: sequences of {tokens} tokens over {self.axis_group.size} ranks "
                    "leave some without any. Give longer sequences, or leave sequence_parallel out"
                )
            return args, kwargs
        if any(module.training for layer in layers for module in layer.modules()):
            shared = random_state.draw_seed()
            # Put back behind the last layer: outside of the layers all ranks draw alike again.
            self._before = RandomState.now(hidden)
            self._seed(shared)
        own = self.own(hidden)
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": own})

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._before is not None:
            self._before.put_back()
            self._before = None
        if not self.is_cut:
            return output
        return (self.whole(output[0]), *output[1:]) if isinstance(output, tuple) else self.whole(output)


class SequenceParallelRegion(ParallelRegion):
    """Region of a module on slices: all tokens go in, this rank's shard of the sum of parts comes out.

    Args:
        tokens: this rank's tokens.
        name: of the module, for errors.
    """

    def __init__(self, tokens: TokenShard, *, name: str) -> None:
        super().__init__(tokens.axis_group)
        self._tokens, self._name = tokens, name
        self._again: list[_GatheredAgain] = []

    def enter_all(self, inputs: Sequence[Any]) -> list[Any]:
        tokens = self._tokens
        if not tokens.is_cut:
            return super().enter_all(inputs)
        self._again, entered, has_tokens = [], [], False
        for x in inputs:
            if tokens.is_own(x):
                whole = gather_to_region(x, dim=_DIM, lengths=tokens.lengths, axis_group=self.axis_group)
                has_tokens = True
                if torch.is_grad_enabled():
                    # Detached: the record must not hold the graph before the module.
                    self._again.append(_GatheredAgain(x.detach(), whole, tokens.lengths, self.axis_group))
                entered.append(whole)
            else:
                entered.append(
                    copy_to_region(x, axis_group=self.axis_group) if isinstance(x, Tensor) and x.requires_grad else x
                )
        if not has_tokens:
            raise _no_tokens(self._name)
        return entered

    def inside(self) -> AbstractContextManager[object]:
        # Taken once: the records belong to this call, and the module's next call makes its own.
        again, self._again = self._again, []
        # Where a checkpoint computes the layer again it gathers again, and keeps nothing of it until then.
        return _saved_as_shards(again) if again and saved_tensor_hooks() is None else nullcontext()

    def leave(self, x: Tensor) -> Tensor:
        """This rank's shard of the sum over ranks of `x [B, T, D]`; the gradient is gathered."""
        if not self._tokens.is_cut:
            return super().leave(x)
        if not self._tokens.is_whole(x):
            raise _no_tokens(self._name)
        return reduce_scatter_from_region(x, dim=_DIM, lengths=self._tokens.lengths, axis_group=self.axis_group)


class OnAllTokens:
    """Replaces the forward of a module that all ranks compute whole: all tokens in, this rank's out.

    Args:
        module: a child of a layer.
        name: its name, for errors.
        tokens: this rank's tokens.
    """

    def __init__(self, module: nn.Module, *, name: str, tokens: TokenShard) -> None:
        self._module, self._name, self._tokens = module, name, tokens
        self._forward = module.forward
        module.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward on all tokens."""
        tokens = self._tokens
        if not tokens.is_cut:
            return self._forward(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        if not any(map(tokens.is_own, leaves)):
            raise _no_tokens(self._name)
        args, kwargs = tree_unflatten([tokens.whole(x) if tokens.is_own(x) else x for x in leaves], tree)
        # All ranks compute the same here: dropout must drop the same, or equal outputs would differ.
        with tokens.shared_rng() if self._module.training else nullcontext():
            output = self._forward(*args, **kwargs)
        leaves, tree = tree_flatten(output)
        # Only hidden states are cut again: attention maps and the like stay whole.
        return tree_unflatten([tokens.own(x) if tokens.is_whole(x) else x for x in leaves], tree)


def refuse_hidden_states(module: nn.Module) -> None:
    """Makes a model refuse, by a permanent hook, to return hidden states between layers, which are token shards."""

    def hook(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_hidden_states")
        if getattr(module.config, "output_hidden_states", False) if asked is None else asked:
            raise ConfigError(
                "megatron: sequence_parallel: hidden states between layers are cut along the sequence. Leave "
                "output_hidden_states out, or sequence_parallel"
            )

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _no_tokens(name: str) -> ConfigError:
    return ConfigError(
        f"megatron: sequence_parallel: {name!r} does not take and return hidden states of [rows, tokens, features], "
        "or a checkpoint computes it again behind a pass with sequences of another length. Leave sequence_parallel "
        "out, or write fsdp=1[recompute=block] around it in place of the checkpoint"
    )


class _GatheredAgain:
    """A gathered tensor that is freed after forward and gathered once more in backward."""

    def __init__(self, own: Tensor, whole: Tensor, lengths: tuple[int, ...], axis_group: AxisGroup) -> None:
        self._own, self._along = own, (_DIM, lengths, axis_group)
        self._key, self._version, self._dtype = storage_key(whole), whole._version, whole.dtype
        self.alive: Tensor | None = whole  # until the module is through: nothing else may take its storage
        self._made: Tensor | None = None
        self._num_left = 0

    def take(self, tensor: Tensor) -> _View | None:
        """The record to save in place of `tensor`, if that is a view of the gathered one, not written to since."""
        whole = self.alive
        if whole is None or tensor.dtype != self._dtype or storage_key(tensor) != self._key:
            return None
        if whole._version != self._version:  # it was written to
            return None
        self._num_left += 1
        return _View(self, tensor.shape, tensor.stride(), tensor.storage_offset())

    def give(self, view: _View) -> Tensor:
        """Returns the view again. All ranks, equally often and in one order."""
        # The first of several saved views gathers for all of them; the last one frees it.
        if self._made is None:
            self._made = all_gather_along(self._own, *self._along)
        made = self._made.as_strided(view.shape, view.stride, view.offset)
        self._num_left -= 1
        if not self._num_left:
            self._made = None
        return made


@dataclass(frozen=True)
class _View:
    of: _GatheredAgain
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def _saved_as_shards(gathered: Sequence[_GatheredAgain]) -> Iterator[None]:
    """Keeps autograd from saving some gathered tensors inside the block (see [Note: gathered again])."""

    def pack(tensor: Tensor) -> Tensor | _View:
        return next((view for each in gathered if (view := each.take(tensor)) is not None), to_save(tensor))

    def unpack(saved: Tensor | _View) -> Tensor:
        return saved.of.give(saved) if isinstance(saved, _View) else saved

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for each in gathered:
            # Its storage may be used again now: a later tensor at this address must not be taken for a view of it.
            each.alive = None
