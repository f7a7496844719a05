"""Calls of a parallel module in a loop of the user's own: forward and backward passes.

[Note: nothing stays open]
    A call of the model is one pass: a barrier, `unsharded`, the module's forward, the DTensors again, a barrier.
    Between the pass and `loss.backward()` nothing is open but autograd's graph, so a forward without a backward, an
    exception, or another model in the same loss leave nothing to undo.
    Every tensor that leaves the forward passes an exit. The first exit that a backward reaches opens the second pass.
    When this backward has ended, gradients are complete; earlier gradients were set aside, and are added. See
    docs/decisions/0035-a-call-is-a-pass.md.

[Note: means]
    Strategies sum gradients over ranks, as `forward_backward` needs them; a loop of the user's own expects means over
    ranks that have different batches. So exits scale gradients by a constant, and entrances scale the gradients of
    inputs by its reciprocal: these are the user's own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rotorch._torch_private import (
    graph_task,
    in_backward,
    saved_tensor_hooks,
    when_backward_ends,
    will_be_run,
)
from rotorch.comm.checksums import sum_of_bits
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.roll_call import ModelCall
from rotorch.core.errors import ConfigError
from rotorch.drop_in.cut_outputs import refuse_cut_outputs, refuse_cut_request
from rotorch.hold.unused_weights import UnusedWeights
from rotorch.models.compiled import backward_has_come, backward_is_to_come
from rotorch.models.hf import head_weights
from rotorch.models.nested import mapped
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.deferred_logits import DeferredLogits, Later, with_real_logits
from rotorch.parallel_model import ParallelModel
from rotorch.shard.sharded_weight import ShardedWeight

_VERSION = attrgetter("_version")
_PASSES = "passes"
"""Counts passes among uses, where the model itself has none to tell of."""


class PlainCalls:
    """Forward and backward passes of a parallel model that its user calls (see [Note: nothing stays open]).

    Args:
        model: whose.

    Attributes:
        model: whose.
        sums: backwards sum gradients over replicas; False within `no_sync`.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.sums = model, True
        self.scale = model.sharded.loss_scale / model.num_batch_ranks
        self._leaf = torch.zeros((), requires_grad=True)
        """A leaf of every graph: a backward comes to it if it is for all gradients."""
        self._end = get_gradient_edge(self._leaf).node
        self._backward: _Backward | None = None
        self._versions_then: int | None = None
        self._written = [tensor for held in model.weights.values() for tensor in (held.parameter, held.local)]
        heads = head_weights(model.module)
        self._to_note: list[list[Tensor]] = []
        self._of_head = [held for name, held in model.weights.items() if heads & {name, *held.weight.aliases}]
        self._uses: Counter[str] = Counter()
        """Of the forward that runs: what tells sums over replicas how often a backward adds to a gradient."""
        self._uses_of: WeakKeyDictionary[Node, Counter[str]] = WeakKeyDictionary()
        """Those of each forward whose graph is there, by the node of its anchor."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, part: nn.Module | None = None) -> Any:
        """Runs the module's forward, or that of a part of it, on this rank's own input; returns its output."""
        if self.model.sharded.no_plain_call is not None:
            raise ConfigError(self.model.sharded.no_plain_call)
        if self.model.num_context_ranks > 1 and torch.is_grad_enabled():
            raise ConfigError(
                "context: model(...) would compute whole sequences on every rank. Write "
                "loss = model.forward_backward(batch), or call it under torch.no_grad()"
            )
        refuse_cut_request(self.model, kwargs)
        args, kwargs = self._entered((args, kwargs))

        def run(callee: nn.Module) -> Any:
            output = _called(callee, part, args, kwargs, at_root=self.model.sharded.calls_start_at_root)
            refuse_cut_outputs(self.model, kwargs, output)
            return self._left(output)

        learns = torch.is_grad_enabled()
        state = self._state()
        if self.model.shares_batches:
            state["of_batch"] = self.model.of_batch((args, kwargs))
        self.model.meet(ModelCall.FORWARD if learns else ModelCall.LOOK, **state)
        return self._pass(run, done=ModelCall.FORWARD_DONE if learns else ModelCall.LOOK_DONE)

    def _pass(
        self, run: Callable[[nn.Module], Any], *, done: ModelCall, behind: Mapping[str, int] | None = None
    ) -> Any:
        """Runs part of the model between two meetings of all ranks, of which the first has been.

        Args:
            run: the part.
            done: what the second meeting is of.
            behind: uses of a pass whose graph this one goes on with.
        """
        model = self.model
        model.written_buffers.start()
        sums, self._uses = model.sharded.early_sums, Counter(behind)
        self._uses[_PASSES] += 1
        noted = nullcontext() if sums is None else sums.forward(self._uses)
        model.begin_recorded()
        with _gradients_kept(model), model.unsharded(for_calls=True) as callee, model.forward_pass(), noted:
            with torch.no_grad():  # gradients are the backward's affair
                model.sharded.start()
            output = run(callee)
        # Not within the pass: where slices replace each other, this rank's place holds another one's until the end.
        while self._to_note:
            self._to_note.pop().extend(self._bits_of_head())
        written = model.written_buffers.written()
        model.meet(done)  # weights may change from here on
        self._versions_then = self._versions()
        if written.numel():
            model.written_buffers.even_out(all_reduce_sum(written, mesh=model.mesh), mesh=model.mesh)
        return output

    def settle(self) -> None:
        """Gives the module its parameters back after an interrupted backward. Does nothing otherwise."""
        if self._backward is not None and self._backward.task != graph_task():
            broken, self._backward = self._backward, None
            broken.break_off()
            self._versions_then = self._versions()

    def refuse_reentrant(self) -> None:
        """Raises `ConfigError` for a call of the model that a backward of its own would come back through."""
        if self._backward is None or not (in_backward() and torch.is_grad_enabled()) or saved_tensor_hooks():
            return  # also where a checkpoint only computes again what was saved
        raise ConfigError(
            "a torch.utils.checkpoint(..., use_reentrant=True) around the call of a parallel model is run within the "
            "backward of another call, where gradients cannot be told apart. Write use_reentrant=False"
        )

    def _state(self) -> dict[str, int]:
        """The loop's work since the last pass, for ranks to compare: a step that one leaves out is named."""
        return {
            "is_changed": self._versions_then not in (None, self._versions()),
            "has_gradients": any(held.parameter.grad is not None for held in self.model.weights.values()),
        }

    def _versions(self) -> int:
        """A number that writes into weights raise: an optimizer's steps, and others into DTensors or parts of them.

        Not by `parameter.data`, which has a version of its own, nor by torch's `_foreach` functions on DTensors.
        """
        return sum(map(_VERSION, self._written))

    # ---------------------------------------------------------------- what comes and goes

    def _entered(self, given: Any) -> Any:
        if self.scale == 1.0 or not torch.is_grad_enabled():
            return given
        return mapped(given, lambda t: _Entrance.apply(t, 1.0 / self.scale) if t.requires_grad else t)

    def _left(self, output: Any) -> Any:
        """Output of the module, as the user gets it."""
        known: dict[int, Tensor] = {}
        anchor = self._anchor()

        def leave(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = self._leave(tensor, anchor)
            return known[id(tensor)]

        return mapped(output, leave)

    def _anchor(self) -> Tensor | None:
        """A scalar that every exit has in its graph, made of the weights at rest: who asks for theirs comes by it."""
        if not torch.is_grad_enabled():
            return None
        # Anew in each call: a graph that stays refers to the weights, and garbage collection does not see it.
        anchor: Tensor = _AtRest.apply(self._leaf, *(held.parameter for held in self.model.weights.values()))
        if self.model.sharded.early_sums is not None:
            self._uses_of[get_gradient_edge(anchor).node] = self._uses
        if self.model.recorded:
            backward_is_to_come(get_gradient_edge(anchor).node)
        return anchor

    def _leave(self, tensor: Tensor, anchor: Tensor | None) -> Tensor:
        if isinstance(tensor, DeferredLogits) and tensor.origin.has_loss and tensor.made is None:
            tensor.origin.later = self._later()
            return tensor
        tensor = with_real_logits(tensor)
        return _Exit.apply(tensor, anchor, self) if anchor is not None and tensor.requires_grad else tensor

    def _later(self) -> Later:
        """Returns the pass in which deferred logits are made (see ops/deferred_logits.py)."""
        before: list[Tensor] = []
        uses = self._uses
        self._to_note.append(before)
        autocast = AutocastState.now(self.model.device.type)  # that of the call, wherever logits are read

        def make_later(make: Callable[[], Tensor], *, learns: bool) -> Tensor:
            if self.model.in_pass:
                return make()
            self.settle()
            changed = any(now != then for now, then in zip(self._bits_of_head(), before, strict=True))
            # Sums of the flag: a slice that has not changed may be one of a head that has.
            if self.model.meet(ModelCall.LOGITS, num_targets=int(changed)):
                raise ConfigError(
                    "logits beside a loss are computed when they are first read, and the head's weights have changed "
                    "since the model was called. Read them before optimizer.step(), or call the model without labels"
                )
            as_called = torch.autocast(autocast.device_type, dtype=autocast.dtype, enabled=autocast.dtype is not None)
            with torch.set_grad_enabled(learns), as_called:
                return self._pass(
                    lambda _: self._leave(make(), self._anchor()), done=ModelCall.LOGITS_DONE, behind=uses
                )

        return make_later

    @torch.no_grad()
    def _bits_of_head(self) -> list[Tensor]:
        """Returns what tells this rank's part of the head from another one: an optimizer's step changes the sum."""
        return [sum_of_bits(held.local) for held in self._of_head]

    # ---------------------------------------------------------------- backward

    def begin_backward(self, anchor: Node) -> None:
        """Opens the backward pass at the first exit that a backward reaches, on all ranks.

        Args:
            anchor: the node of the weights at rest in this exit's graph.

        Raises:
            ConfigError: the backward is for the gradients of some weights.
        """
        self.settle()
        all_gradients = will_be_run(self._end)
        if not all_gradients and will_be_run(anchor):
            raise ConfigError(
                "backward(inputs=...) and torch.autograd.grad cannot ask for gradients of weights here: these arrive "
                "in all weights' .grad at once. Call loss.backward() and read parameter.grad, after "
                "requires_grad_(False) of weights that shall have none"
            )
        # That of inputs alone does not come to the weights.
        backward_has_come(lambda of: of is anchor or (isinstance(of, Node) and will_be_run(of)))
        if self._backward is None:
            leaves_sums = self._meet_for_backward()
            uses = sum((uses for node, uses in self._uses_of.items() if will_be_run(node)), Counter[str]())
            self._backward = _Backward(self.model, all_gradients=all_gradients, leaves_sums=leaves_sums, uses=uses)
            when_backward_ends(_AtEnd(self._end_backward, otherwise=self.settle))

    def _meet_for_backward(self) -> bool:
        """Waits for all ranks; returns True if this backward leaves its sums over replicas to a later one."""
        put_off = self.model.sharded.put_off
        asked = put_off is not None and not self.sums
        # Hooks see gradients of all ranks, so where any rank has one, every backward sums.
        are_hooked = put_off is not None and self.model.hooks.any
        doing = ModelCall.BACKWARD_UNSUMMED if asked else ModelCall.BACKWARD
        num_hooked = self.model.meet(doing, num_targets=int(are_hooked))
        trained = (held for held in self.model.weights.values() if held.parameter.grad is not None)
        if num_hooked and not all(held.is_summed() for held in trained):
            raise ConfigError(
                "no_sync: hooks of gradients see those of all ranks, and a rank has registered one while gradients of "
                "this step were not summed yet. Register hooks between steps"
            )
        return asked and not num_hooked

    def _end_backward(self) -> None:
        ended, self._backward = self._backward, None
        if ended is not None:
            ended.end()
            self._versions_then = self._versions()


class _AtEnd:
    """Called when a backward has ended. Autograd drops it uncalled if the backward breaks off, which nothing else says.

    Args:
        end: is called at the end.
        otherwise: is called if there is none.
    """

    def __init__(self, end: Callable[[], None], *, otherwise: Callable[[], None]) -> None:
        self._end, self._otherwise = end, otherwise
        self._has_ended = False

    def __call__(self) -> None:
        self._has_ended = True
        self._end()

    def __del__(self) -> None:
        # Here, before the loop gets the exception: what it does with gradients next must find them as they will stay.
        if not self._has_ended:
            self._otherwise()


class _Backward:
    """One backward pass in progress.

    Args:
        model: whose.
        all_gradients: it is for the weights' gradients; if not (`torch.autograd.grad` of inputs), they stay.
        leaves_sums: over replicas to a later one.
        uses: of the forwards that it comes back through.

    Attributes:
        task: autograd's number of it.
    """

    def __init__(
        self, model: ParallelModel, *, all_gradients: bool, leaves_sums: bool, uses: Mapping[str, int]
    ) -> None:
        self.task = graph_task()
        self._model = model
        self._before = [held.parameter for held in model.weights.values() if held.parameter.grad is not None]
        self._kept = None if all_gradients else _kept_gradients(model)
        self._unsharded = ExitStack()
        with self._breaking_off(), torch.enable_grad():
            self._unsharded.enter_context(model.hooks.called_after(all_gradients=all_gradients))
            self._unsharded.enter_context(model.unsharded(for_calls=True))
            if model.sharded.put_off is not None:
                self._unsharded.enter_context(model.sharded.put_off.asking(leaves_sums, changes=all_gradients))
            self._unused = UnusedWeights(model.sharded, mesh=model.mesh)
            model.sharded.start()
            # A step of one micro-batch: sums over replicas may leave under it.
            self._micro_batch = self._unsharded.enter_context(ExitStack())
            self._micro_batch.enter_context(model.sharded.micro_batch(last=all_gradients))
            if model.sharded.early_sums is not None:
                model.sharded.early_sums.has_used(uses)
        self._past = _GradientsPastThePass(model)

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._unsharded.__exit__(type(error), error, error.__traceback__)
            raise

    def end(self) -> None:
        """Completes gradients, and gives the module its parameters again. Weights may change afterwards."""
        self._past.take()
        with self._breaking_off(), torch.enable_grad():
            self._micro_batch.close()
            num_unused = self._unused.count()
            self._model.sharded.finish()
            self._unused.drop(self._model.meet(ModelCall.BACKWARD_DONE, num_targets=num_unused))
            self._past.add()  # before hooks, which see a backward's whole gradients
        self._unsharded.close()
        if self._kept is None:
            return
        for name, held in self._model.weights.items():
            before = self._kept.get(name)
            if before is None:
                held.parameter.grad = None
            elif held.local_grad is not None:
                held.local_grad.copy_(before)

    def break_off(self) -> None:
        """Ends the backward pass as after an exception in it; warns of the gradients lost by that."""
        self._past.take()
        error = RuntimeError("a backward pass broke off")
        with suppress(RuntimeError):  # what undoes a pass raises what broke it off
            self._unsharded.__exit__(RuntimeError, error, None)
        for note in getattr(error, "__notes__", ()):
            warnings.warn(f"{error}: {note}", stacklevel=2)
        if any(parameter.grad is None for parameter in self._before):
            warnings.warn(
                f"{error} while it added to earlier gradients, and earlier gradients are gone: an optimizer's step "
                "would be one without them. Call optimizer.zero_grad(), and begin with the step's first micro-batch",
                stacklevel=2,
            )


class _GradientsPastThePass:
    """Gradients that a loss gives weights at rest, as a penalty on weights does, within one backward pass.

    Autograd adds them to the parameters' own `.grad`, while the pass makes gradients in memory of its own that takes
    their place at its end. So earlier gradients are kept apart in between. To parameters that other code puts into the
    module (`fully_shard`) the pass adds as well: there autograd finds no gradient to add to, and what it puts into its
    place is taken away at once. Each rank has such gradients once: they are no part of what is summed over replicas.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._put_off = model.sharded.put_off
        self._before = [(held, held.parameter.grad) for held in model.weights.values() if held.sites]
        self._taken: list[tuple[ShardedWeight, DTensor]] = []
        for held, before in self._before:
            if before is not None:
                held.parameter.grad = None
        self._lifted: dict[str, Tensor | None] = {}
        """Gradients of the pass that autograd must not see in this moment."""
        self._handles: list[RemovableHandle] = []
        for held in model.weights.values():
            if not held.sites and held.parameter.requires_grad:
                self._handles.append(held.parameter.register_hook(partial(self._lift, held)))
                put_down = held.parameter.register_post_accumulate_grad_hook(partial(self._put_down, held))
                self._handles.append(put_down)

    def _lift(self, held: ShardedWeight, gradient: DTensor | None) -> None:
        if gradient is not None:  # not the anchor's
            # Its sum may be under way, so nothing may be added to it, not even zeros.
            self._lifted[held.name], held.parameter.grad = held.parameter.grad, None

    def _put_down(self, held: ShardedWeight, _: Tensor) -> None:
        if held.name in self._lifted:  # not called by fully_shard
            given = held.parameter.grad
            assert isinstance(given, DTensor)
            self._taken.append((held, given))
            held.parameter.grad = self._lifted.pop(held.name)

    def take(self) -> None:
        """Takes them off the parameters, which have their earlier gradients again. Once."""
        while self._handles:
            self._handles.pop().remove()
        for held, before in self._before:
            given = held.parameter.grad
            if given is not None:
                self._taken.append((held, given))
            if given is not before:
                held.parameter.grad = before
        self._before = []

    @torch.no_grad()
    def add(self) -> None:
        """Adds them to the gradients of the pass."""
        for held, gradient in self._taken:
            if gradient.placements != held.parameter.placements:
                gradient = gradient.redistribute(placements=held.parameter.placements)
            if self._put_off is not None and self._put_off.asked:
                gradient = self._put_off.part_of(gradient)
            if held.local_grad is None:
                held.parameter.grad = gradient
            else:
                held.local_grad.add_(gradient.to_local())


def _called(module: nn.Module, part: nn.Module | None, args: Any, kwargs: Any, *, at_root: bool) -> Any:
    """Output of the module, or of a part of it; `at_root`: with the hooks of the module around that of the part."""
    if part is None or not at_root:
        return (part or module)(*args, **kwargs)
    own = vars(module).copy()  # a user may have put a forward of one's own there
    vars(module)["forward"] = part
    try:
        return module(*args, **kwargs)
    finally:
        del vars(module)["forward"]
        vars(module).update({"forward": own["forward"]} if "forward" in own else {})


@contextmanager
def _gradients_kept(model: ParallelModel) -> Iterator[None]:
    """Leaves earlier gradients as they are after an exception in a forward: torch's `fully_shard` drops them."""
    before = [(held.parameter, held.parameter.grad) for held in model.weights.values()]
    try:
        yield
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise


def _kept_gradients(model: ParallelModel) -> dict[str, Tensor]:
    return {name: held.local_grad.clone() for name, held in model.weights.items() if held.local_grad is not None}


class _AtRest(torch.autograd.Function):
    """A scalar that depends on weights at rest in name only: it gives them no gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *weights: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        return (None,) * len(ctx.needs_input_grad)


class _Exit(torch.autograd.Function):
    """Identity in forward; in backward it opens the backward pass and scales the gradient (see [Note: means])."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, calls: PlainCalls) -> Tensor:
        ctx.calls, ctx.anchor = calls, get_gradient_edge(anchor).node
        return tensor.detach()  # no view: what the user writes into is seen by whoever has kept the tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        calls: PlainCalls = ctx.calls
        if torch.is_grad_enabled() and calls.model.mesh.size() > 1:
            raise ConfigError(
                "backward(create_graph=True): gradients of gradients would need slices to go round a third time, which "
                "no strategy here does. Compute such a penalty on one process, or leave it out"
            )
        calls.begin_backward(ctx.anchor)
        return grad if calls.scale == 1.0 else grad * calls.scale, None, None


class _Entrance(torch.autograd.Function):
    """Identity in forward; in backward it scales the gradient (see [Note: means])."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad * ctx.scale, None
