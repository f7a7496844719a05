"""`ParallelModel`: a parallel model as training loops see it (below it lies `hold/sharded_model.py`).

[Note: one loss rule]
    Gradients are summed over micro-batches and ranks, and the loss is divided by the global number of target tokens,
    once. Hugging Face models take that number as `num_items_in_batch`; it is known before the first backward, since
    `forward_backward` gets all micro-batches of a step.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.comm.collectives import all_reduce_sum, all_reduce_sum_later, close_shared_reduces
from rotorch.comm.one_error import one_error
from rotorch.comm.roll_call import ModelCall, RollCall, digest_of, number_of_batch
from rotorch.comm.status_word import Operation, StatusWord, at
from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy
from rotorch.hold.sharded_model import ShardedModel
from rotorch.hold.unused_weights import UnusedWeights
from rotorch.mesh import batch_position, position_along
from rotorch.models.blocks import mark_blocks
from rotorch.models.checks import refuse_float16
from rotorch.models.compiled import backward_has_come, backward_is_to_come, begin_recorded
from rotorch.models.hf import head_weights
from rotorch.models.losses import Batch, LossFn, causal_lm_loss, count_targets
from rotorch.models.modes import evaluating
from rotorch.models.pretrained import load_pretrained
from rotorch.models.shared_sequence import SharedSequence, check_batch, simplified
from rotorch.ops.deferred_logits import detached, last_logits, real_for_hooks, real_outputs
from rotorch.process.host_memory import make_room
from rotorch.shard.at_rest import AtRest
from rotorch.shard.buffers import WrittenBuffers
from rotorch.shard.gradient_hooks import GradientHooks
from rotorch.shard.in_chunks import whole_of_parts
from rotorch.shard.materialize import Recipe, initialise
from rotorch.shard.sharded_weight import ChunkedTensor, ShardedWeight
from rotorch.shard.sites import persistent_buffers
from rotorch.strategies import context_ranks


@dataclass(frozen=True)
class Evaluation:
    """Loss of held-out data over all ranks: `loss_sum` in nats over `num_targets` target tokens.

    If the loss gives pairs, `beside` has what else it gave for each of this rank's micro-batches.
    """

    loss_sum: float
    num_targets: int
    beside: tuple[Any, ...] = ()

    @property
    def loss(self) -> float:
        """Mean loss per target token, in nats."""
        return self.loss_sum / max(self.num_targets, 1)


class ParallelModel:
    """A model spread over the ranks of a mesh. Made by `rotorch.parallelize`; every method is called by all ranks.

    Attributes:
        module: the user's module; its parameters are DTensors under their original names.
        mesh: the mesh of all ranks, one axis per strategy.
        strategies: outermost first.
        spec: the model's units.
        batch_rank: number of the share of a global batch that this rank computes, 0-based.
        num_batch_ranks: number of shares.
        context_rank: number of this rank among those that have a share together, 0-based.
        num_context_ranks: number of these ranks, each of which has a part of the tokens of each sequence.
        feature_rank: number of the part of the features of activations that this rank computes, 0-based.
        num_feature_ranks: number of parts.
        token_rank: number of the chunk of tokens that this rank has between the modules of layers, 0-based.
        num_token_ranks: number of these chunks.
        written_buffers: buffers that the model writes in forward.
        hooks: hooks of users on parameters.
        recorded: passes are recorded as CUDA graphs, where there is CUDA.
        in_pass: True if the module has what a pass computes with, and not its parameters at rest.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sharded: ShardedModel,
        mesh: DeviceMesh,
        strategies: Sequence[Strategy],
        spec: ModelSpec,
        recipes: Mapping[str, Recipe],
        loss: LossFn = causal_lm_loss,
        autocast_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        sequence: SharedSequence | None = None,
        recorded: bool = False,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.strategies = tuple(strategies)
        self.spec = spec
        self._recipes = recipes
        self._sharded = sharded
        self._loss = loss
        self._sequence = sequence
        self.written_buffers = WrittenBuffers(module)
        self._autocast_dtype = autocast_dtype
        self._param_dtype = param_dtype
        self.recorded = recorded
        if param_dtype is not None:
            module.register_forward_pre_hook(self._convert_inputs, with_kwargs=True)
        self._status = StatusWord()
        self._heads = {module.get_submodule(name.rpartition(".")[0]) for name in head_weights(module)}
        self._at_rest = AtRest(module)
        self.hooks = GradientHooks(sharded.weights)
        self.in_pass = False
        self.batch_axes = tuple(axis for s in strategies for axis in s.batch_axes)
        self.context_axes = {axis: size for s in strategies for axis, size in s.context_axes.items()}
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        positions = dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
        self.batch_rank, self.num_batch_ranks = batch_position(strategies, positions)
        self._group, num_groups = position_along(self.batch_axes, sizes, positions)
        self._num_sharing = mesh.size() // num_groups
        self._is_first = not any(at for axis, at in positions.items() if axis not in self.batch_axes)
        self._roll_call = RollCall(mesh, {name: held.parameter for name, held in sharded.weights.items()})
        meet_for_state = partial(self._roll_call.meet, ModelCall.STATE)
        for held in sharded.weights.values():
            held.belong_to(mesh, meet_for_state=meet_for_state)
        self._has_compared = False
        self.num_context_ranks = context_ranks(strategies)
        self.context_rank = 0 if sequence is None else sequence.rank
        self.feature_axes = tuple(axis for s in strategies for axis in s.feature_axes)
        self.feature_rank, self.num_feature_ranks = position_along(self.feature_axes, sizes, positions)
        self.token_axes = tuple(axis for s in strategies for axis in s.token_axes)
        self.token_rank, self.num_token_ranks = position_along(self.token_axes, sizes, positions)

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    @property
    def weights(self) -> dict[str, ShardedWeight]:
        """This rank's shard of each weight, by name (tied names appear once)."""
        return self._sharded.weights

    @property
    def sharded(self) -> ShardedModel:
        """The strategy's side of this model, for meters and tests."""
        return self._sharded

    @property
    def holding(self) -> ShardedModel:
        """Alias of `sharded`, for one release."""
        return self._sharded

    def parameters(self) -> Iterator[nn.Parameter]:
        """The DTensor parameters, for an optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The DTensor parameters under their original names."""
        return self.module.named_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        """Raises: hooks of a module's parts refer to this, so it would come along with a copy of one of them."""
        raise ConfigError(
            "a part of a parallel model cannot be copied by itself: its weights are spread over ranks. Copy the whole "
            "model, or the part before parallelize (with peft's modules_to_save: call get_peft_model before it)"
        )

    # ---------------------------------------------------------------- values

    def materialize(self, *, seed: int = 0, only: Sequence[str] = ("*",)) -> ParallelModel:
        """Gives weights their initial values: the same for every strategy and world size. Returns self.

        Args:
            seed: decides random values.
            only: name patterns (`"classifier.*"`) of the weights that are meant; all by default. For what a published
                model lacks, before `load`.

        Raises:
            ConfigError: it is not known how a weight is initialised.
        """
        meant = {n: h for n, h in self.weights.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in only)}
        initialise(meant, recipes=self._recipes, seed=seed)
        self._sharded.values_changed()
        return self

    def load(self, path: str, *, may_lack: Sequence[str] = (), may_have: Sequence[str] = ()) -> ParallelModel:
        """Reads weights and buffers of a published model; each rank reads only its slices. Returns self. All ranks.

        Names are followed as transformers does: renamed modules, a base model's weights for a task's model and the
        other way round, experts stored one by one. Values are converted to the dtype of the model's weights.

        Args:
            path: a Hugging Face directory of safetensors; a `.gguf` file, or a directory with one.
            may_lack: name patterns (`"classifier.*"`) of weights that need not be there; they keep the values that
                `materialize` gave them.
            may_have: name patterns of tensors in the files that the model has no use for.

        Raises:
            ConfigError: nothing there, a damaged file, or names or shapes that do not match: all of them in one line,
                before anything is read; or values that are not finite. The same on all ranks.
        """
        make_room()  # only now are most of the weights' pages taken
        with one_error(self.mesh):
            load_pretrained(
                path,
                module=self.module,
                weights=self.weights,
                buffers=persistent_buffers(self.module),
                may_lack=may_lack,
                may_have=may_have,
            )
        self._sharded.values_changed()
        return self

    def chunks(self) -> dict[str, ChunkedTensor]:
        """Returns every weight as `torch.distributed.checkpoint` saves it, and loads it in place, under any layout."""
        return {name: self.chunks_of(name) for name in self.weights}

    def chunks_of(self, name: str) -> ChunkedTensor:
        """Returns one weight as a `ChunkedTensor`."""
        held = self.weights[name]
        return ChunkedTensor(held.local, shape=held.weight.shape, chunks=held.chunks)

    def values_changed(self) -> None:
        """Publishes new values: call it after writing into `weights[..].local` or loading into `chunks()`."""
        self._sharded.values_changed()

    def full_tensor(self, name: str, *, grad: bool = False) -> Tensor:
        """Returns a whole weight (or its gradient) on every rank.

        All ranks; sends the whole weight. For tests and export.
        """
        held = self.weights[name]
        local = held.local_grad if grad else held.local
        chunks = held.chunks if held.holder == 0 and local is not None else ()
        zeros = held.local.new_zeros(held.weight.shape)
        return whole_of_parts(zeros, chunks, held.local if local is None else local, mesh=self.mesh)

    # ---------------------------------------------------------------- passes

    def write_status_to(self, status: StatusWord, *, blocks: bool = True) -> list[str]:
        """Writes this rank's place in a pass to `status` from now on. This rank only; call it once.

        Args:
            status: status to write to.
            blocks: hook the model's repeated blocks, if the strategy has no units of its own to speak of.

        Returns:
            The names of the units that it speaks of, by number.
        """
        self._status = status
        names = self._sharded.write_status_to(status)
        return names or (mark_blocks(self.module, status) if blocks else [])

    def forward_backward(
        self, batch: Batch | Sequence[Batch], *, loss: LossFn | None = None, accumulate: bool = False
    ) -> Any:
        """Computes gradients of one optimizer step; they are complete in every parameter's `.grad` when it returns.

        Args:
            batch: this rank's micro-batch, or all its micro-batches of this step; every rank gives equally many. Best
                on CPU: targets are counted there without waiting for a GPU, and copies run ahead of the passes. Ranks
                that share sequences (`context`) are all given the same whole batch, and each takes its part.
            loss: function from a batch to its loss, the same on all ranks; by default that of `parallelize`. It
                may return a pair, the loss and further results (logits, metrics).
            accumulate: add to gradients that are there. Each call gives the gradients of its own mean, and their sum
                is not that of a mean over the micro-batches of all calls.

        Returns:
            The loss per target token over the whole global batch, 0-dim, the same on all ranks. Buffers that the
            model has written (running statistics) are the same on all ranks too (see shard/buffers.py). If the loss
            gave pairs: that loss, and a list of what else it gave for each of this rank's micro-batches, detached (in
            a pipeline the rank of the last stage has them).

        Raises:
            ConfigError: ranks have different numbers of micro-batches, or one of them does something else; gradients
                of an earlier call are there, without `accumulate`; float16, whose gradients would vanish.
        """
        trained = {held.local.dtype for held in self.weights.values() if held.parameter.requires_grad}
        refuse_float16({*trained, self._autocast_dtype, self._param_dtype})
        if not all(held.is_summed() for held in self.weights.values() if held.parameter.grad is not None):
            raise ConfigError(
                "forward_backward: the last backward was within no_sync(), and its gradients are not summed over "
                "replicas. Let the last backward of a step run outside of it, or clear them by optimizer.zero_grad()"
            )
        micro_batches = [batch] if isinstance(batch, Mapping) else list(batch)
        doing = ModelCall.STEP_MORE if accumulate else ModelCall.STEP
        num_targets = self._meet_with(micro_batches, doing=doing, loss=loss)  # counted where the batches are
        micro_batches = [self._for_passes(micro_batch) for micro_batch in micro_batches]
        sharded, beside = self._sharded, list[Any]()
        self.written_buffers.start()
        with (
            self._noting_lost_gradients(),
            self.hooks.called_after(),
            self.unsharded() as callee,
            torch.enable_grad(),
            self._shared_sequences(),
        ):
            unused = UnusedWeights(sharded, mesh=self.mesh)
            sharded.start()
            try:
                total = sharded.forward_backward(
                    callee, micro_batches, self._loss_over(max(num_targets, 1), loss, beside)
                )
            finally:
                self._has_come()
            counts = torch.tensor([unused.count(), sharded.order_hash], dtype=torch.float64)
            sums = torch.cat([total.cpu().view(1), counts, self.written_buffers.written()])
            self._status.micro_batch = 0
            self._status.now = at(Operation.COMPLETE_GRADIENTS)
            summed = all_reduce_sum_later(sums, mesh=self.mesh)  # sent while gradients are completed
            sharded.finish()
            total, num_unused, order_hashes, *_ = summed()
            self._roll_call.check_orders(int(order_hashes))
            unused.drop(int(num_unused))
        self.written_buffers.even_out(summed()[3:], mesh=self.mesh)
        self._status.now = 0
        mean = total * self._weight_of_ranks
        return (mean, beside) if beside else mean

    @torch.no_grad()
    def evaluate(self, batch: Batch | Sequence[Batch]) -> Evaluation:
        """Computes the loss of held-out micro-batches without gradients, summed over all ranks.

        Every rank gives equally many.
        """
        micro_batches = [batch] if isinstance(batch, Mapping) else list(batch)
        num_targets = self._meet_with(micro_batches, doing=ModelCall.EVALUATION)
        micro_batches = [self._for_passes(micro_batch) for micro_batch in micro_batches]
        beside = list[Any]()
        loss = self._loss_over(1, beside=beside)
        with evaluating(self.module), self.unsharded() as callee, self._shared_sequences():
            self._sharded.start()
            loss_sum = sum(self._sharded.forward(callee, micro_batches, lambda *a: float(loss(*a))))
        self._status.now = 0
        return Evaluation(self._end_pass(loss_sum), num_targets, tuple(beside))

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Returns the module's outputs for this rank's own `batch`, without gradients. All ranks, as often.

        Args:
            batch: arguments of the module's forward, by name; without labels no loss is computed.
        """
        self.meet(ModelCall.PREDICTION)  # weights are as the optimizer left them
        with evaluating(self.module), self.unsharded() as callee, self.forward_pass():
            self._sharded.start()
            self.begin_recorded()
            (output,) = self._sharded.forward(callee, [batch], real_outputs)
        self._end_pass()  # and may change again
        return output

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        """Returns float32 logits [batch, vocabulary] of the token after `input_ids` [batch, sequence].

        All ranks give the same input.
        """
        self._status.passes += 1
        self.meet(ModelCall.NEXT_TOKEN)  # weights are as the optimizer left them
        with evaluating(self.module), self.unsharded() as callee, self.forward_pass():
            self._sharded.start()
            self.begin_recorded()
            (logits,) = self._sharded.forward(callee, [{"input_ids": input_ids}], last_logits)
        self._end_pass()  # and may change again
        return logits.float()

    def close(self) -> None:
        """Ends background work of the model (messages in flight, sums in shared memory). All ranks.

        Memory that slices share is free once nothing refers to the weights and gradients in it.
        """
        self._roll_call.meet(ModelCall.CLOSE)
        self._sharded.close()
        close_shared_reduces(self.mesh)

    @contextmanager
    def _noting_lost_gradients(self) -> Iterator[None]:
        """Adds a note to an exception if gradients of earlier steps are lost, since this step was adding to them."""
        before = [held.parameter for held in self.weights.values() if held.parameter.grad is not None]
        try:
            yield
        except BaseException as error:
            if any(parameter.grad is None for parameter in before):
                error.add_note("Gradients that were there before this step are gone too: it was adding to them")
            raise

    def _loss_over(
        self, num_targets: int, loss: LossFn | None = None, beside: list[Any] | None = None
    ) -> Callable[[nn.Module, Batch], Tensor]:
        """Returns the forward with its loss: summed over a micro-batch, over `num_targets`; the rest to `beside`."""
        loss = self._loss if loss is None else loss

        def loss_of(callee: nn.Module, micro_batch: Batch) -> Tensor:
            part = micro_batch if self._sequence is None else self._sequence.take(micro_batch)
            self.begin_recorded()
            if self.recorded and torch.is_grad_enabled():
                backward_is_to_come(self)  # a loss may call another model
            with self.forward_pass():
                found: Any = loss(callee, part, num_targets)
                if isinstance(found, tuple):
                    found, more = found
                    if beside is not None:
                        beside.append(detached(more))
            result: Tensor = found
            return result

        return loss_of

    def begin_recorded(self) -> None:
        """Called before each forward: see `models/compiled.py`."""
        if self.recorded:
            self._has_come()
            begin_recorded()

    def _has_come(self) -> None:
        """Called when the backward of a micro-batch has run, or never will."""
        if self.recorded:
            backward_has_come(lambda of: of is self)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Runs the module's own forward in its precision, without operations that read weights past their layers."""
        # torch's fused encoder layers read weights past the layers that hold them, and no strategy would know.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with real_for_hooks(self._heads):
                if self._autocast_dtype is None:
                    yield
                else:
                    with torch.autocast(self.mesh.device_type, dtype=self._autocast_dtype):
                        yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)

    def _convert_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Converts floating-point inputs of a pass to the dtype of the weights that it computes with, as FSDP2 does."""
        leaves, tree = tree_flatten((args, kwargs))
        found = [x.to(self._param_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
        converted: tuple[Any, Any] = tree_unflatten(found, tree)
        return converted

    @property
    def shares_batches(self) -> bool:
        """True if several ranks compute with the same tokens of the same batch, each with parts of the weights."""
        return self._num_sharing > 1

    def of_batch(self, batch: Any) -> int:
        """This rank's number of a batch for `meet`."""
        return number_of_batch(
            digest_of(batch), group=self._group, num_ranks=self._num_sharing, is_first=self._is_first
        )

    def meet(self, doing: ModelCall, *, num_micro_batches: int = 0, num_targets: int = 0, **state: int) -> int:
        """Waits for all ranks; returns the number of targets of all. Weights may be written afterwards.

        Raises:
            ConfigError: ranks are about to do different things, or weights of the module are not its own any more, or
                a step would add its mean to gradients of another one. On all ranks.
        """
        if not doing.is_end:  # since the operation began, only it can have replaced weights
            # A backward computes with what its forward has found; the next pass sees what became of it.
            self._at_rest.check(memory=not doing.is_backward)
        total, num_left = self._roll_call.meet(
            doing,
            num_micro_batches=num_micro_batches,
            num_targets=num_targets,
            num_left=int(doing is ModelCall.STEP and self._gradients_are_left()),
            order_hash=self._sharded.order_hash,
            **state,  # type: ignore[arg-type]
        )
        if num_left:
            raise ConfigError(
                "forward_backward: gradients of an earlier call are still there, and this call's, of another mean, "
                "would be added. Give all micro-batches of a step to one call, clear gradients between steps "
                "(optimizer.zero_grad()), or write accumulate=True if the sum of means is what you want"
            )
        return total

    def meet_at_rest(self, doing: ModelCall) -> None:
        """Waits for all ranks before something that is no pass; the module may have parts that it did not have.

        Raises:
            ConfigError: ranks are about to do different things.
        """
        self._roll_call.meet(doing)

    @contextmanager
    def unsharded(self, *, for_calls: bool = False) -> Iterator[nn.Module]:
        """Unshards the module within the block; yields the callable for a pass (see [Note: unsharding])."""
        with self._sharded.unsharded_for_calls() if for_calls else self._sharded.unsharded() as callee:
            self.in_pass = True
            try:
                yield callee
            finally:
                self.in_pass = False

    def _gradients_are_left(self) -> bool:
        """True if this rank has gradients that are not 0: those zeroed in place count as none."""
        gradients = (h.local_grad for h in self.weights.values() if h.parameter.grad is not None)
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def _meet_with(self, micro_batches: Sequence[Batch], *, doing: ModelCall, loss: LossFn | None = None) -> int:
        """Returns the number of targets of all ranks' micro-batches, of which each has equally many."""
        self._status.now = at(Operation.COUNT_TARGETS)
        if self._sequence is not None:
            self._check_shared(micro_batches, loss=loss)
        count = getattr(self._loss if loss is None else loss, "count_targets", count_targets)
        targets = int(sum(count(b) for b in micro_batches))
        state = {}
        if self.shares_batches and not self._has_compared and self._sharded.no_plain_call is None:
            # Once: a sampler that counts ranks in the place of shares is wrong from the first batch on. Ranks of a
            # pipeline look at parts of a batch only, and may be given no more.
            state["of_batch"], self._has_compared = self.of_batch(micro_batches), True
        total = self.meet(doing, num_micro_batches=len(micro_batches), num_targets=targets, **state)
        return total * self.num_batch_ranks // self.mesh.size()

    def _check_shared(self, micro_batches: Sequence[Batch], *, loss: LossFn | None) -> None:
        """Raises `ConfigError` for batches that ranks cannot share, or do not: this rank's, or others with it."""
        if loss is not None:
            raise ConfigError(
                f"context={self.num_context_ranks}: this loss would see a part of the sequence, and nothing has tried "
                "it on parts. Give loss=... to parallelize, which does"
            )
        assert self._sequence is not None
        for micro_batch in micro_batches:
            check_batch(micro_batch, num_ranks=self.num_context_ranks)
        if not self._sequence.all_given([tensor for batch in micro_batches for tensor in batch.values()]):
            raise ConfigError(
                f"context={self.num_context_ranks}: ranks that share a sequence were given different batches. Give all "
                f"ranks of one batch_rank the same whole batch (this is batch_rank {self.batch_rank})"
            )

    def _for_passes(self, batch: Batch) -> Batch:
        return self._on_device(batch if self._sequence is None else simplified(batch))

    def _on_device(self, batch: Batch) -> Batch:
        """Moves a batch to the model's device; returns it as it is if it is there."""
        device = self.device
        if all(not isinstance(value, Tensor) or value.device.type == device.type for value in batch.values()):
            return batch

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.device.type == device.type:
                return value
            # Pinned, so that the copy runs beside earlier passes; from pageable memory the host would wait for it.
            pinned = value.pin_memory() if device.type == "cuda" else value
            return pinned.to(device, non_blocking=True)

        return {name: moved(value) for name, value in batch.items()}

    def _end_pass(self, value: float = 0.0) -> float:
        """Ends a pass without gradients: sums a number over all ranks; ranks that share a batch share count once.

        Also a barrier: no rank passes before all came.

        Raises:
            ConfigError: ranks ran different parts of the model.
        """
        sums = torch.tensor([value, self._sharded.order_hash], dtype=torch.float64)
        total, order_hashes = all_reduce_sum(sums, mesh=self.mesh).tolist()
        self._roll_call.check_orders(int(order_hashes))
        return total * self._weight_of_ranks

    @property
    def _weight_of_ranks(self) -> float:
        """Factor of sums over all ranks: ranks with the same rows and tokens have the same numbers."""
        return self.num_batch_ranks * self.num_context_ranks / self.mesh.size()

    def _shared_sequences(self) -> AbstractContextManager[None]:
        """Lets attentions see the tokens of all ranks that share a sequence with this one, within the block."""
        return nullcontext() if self._sequence is None else self._sequence.attention()
