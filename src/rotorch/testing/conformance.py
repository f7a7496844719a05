"""Invariants of every layout, whatever its strategy: one function each, run on every rank of a real model.

An invariant is a function of an `Examination` that yields errors, in sentences. `examine` runs all of
`INVARIANTS` on the ranks of one layout. A strategy in `STRATEGIES` gets these tests; no code
here knows any strategy by name. The model's numbers come from a `Case`, made once per model on one process.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from rotorch.comm.meter import Meter
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import UnitKind
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.ops.partial_module import SEES_SLICES
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import parallelize
from rotorch.shard.materialize import on_meta, take_recipes
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.compare import gradient_errors, relative_error, value_errors
from rotorch.testing.parity import my_micro_batches, parallel_losses, parity_batch, reference_losses
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import fill, plain_config, reference_step
from rotorch.testing.traffic import expected_resident_bytes, micro_batch_of, traffic_problems

SEED = 1
NUM_STEPS = 2
UPDATE_BAR = 1e-6
"""Relative error in float32 of one optimizer step from the same gradients, under any strategy."""


@dataclass(frozen=True)
class Bars:
    """Largest relative errors against one process, in float32; the defaults are those of strategies that are exact.

    A layout that changes the model (`Strategy.changes_the_model`) is examined with bars of its own.

    Attributes:
        loss: of losses.
        gradient: of the gradient of each weight, and of logits.
    """

    loss: float = 1e-5
    gradient: float = 1e-4


@dataclass
class Case:
    """One model and its results on one process, in float32.

    Attributes:
        config: its Hugging Face configuration.
        names: of its parameters, tied ones once.
        weights: initial values for `SEED`, whole.
        gradients: of the first parity batch at those values, whole.
        losses: of `NUM_STEPS` AdamW steps.
        logits: of the token after the first row of the first parity batch.
        other_weights: other values, and the directory of a checkpoint that holds them.
    """

    config: Any
    names: list[str]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    logits: Tensor
    other_weights: dict[str, Tensor]
    checkpoint: Path

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def first_batch(self) -> dict[str, Tensor]:
        return parity_batch(step=0, vocab_size=self.vocab_size)

    def build(self) -> nn.Module:
        """The model on `meta`."""
        with on_meta():
            return causal_lm(self.config).train()


def make_case(config_path: str | Path, *, directory: Path, layers: int | None = 2) -> Case:
    """Runs a model, its first `layers` of them, on this process; writes a checkpoint into `directory`."""
    config = plain_config(config_path, layers=layers)
    with on_meta():
        watched = causal_lm(config)
    spec, recipes = describe(watched), take_recipes(watched)
    module = causal_lm(config).train()
    vocab_size = config.get_text_config().vocab_size
    batch = parity_batch(step=0, vocab_size=vocab_size)
    fill(module, spec=spec, recipes=recipes, seed=SEED + 1)
    other_weights = _values(module)
    with _alone():
        dcp.save(other_weights, checkpoint_id=directory, no_dist=True)
    fill(module, spec=spec, recipes=recipes, seed=SEED)
    weights = _values(module)
    reference_step(module, batch)
    with torch.no_grad():
        logits = module(input_ids=batch["input_ids"][:1], use_cache=False).logits[:, -1].clone()
    return Case(
        config=config,
        names=[name for name, _ in module.named_parameters()],
        weights=weights,
        gradients={name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None},
        losses=list(reference_losses(module, num_steps=NUM_STEPS, vocab_size=vocab_size)),
        logits=logits,
        other_weights=other_weights,
        checkpoint=directory,
    )


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@dataclass
class Examination:
    """One layout of one case, on this rank. An invariant finds `model` with its initial values and no gradients."""

    case: Case
    parallel: str
    model: ParallelModel
    scratch: Path
    bars: Bars = Bars()
    _initial: tuple[ParallelModel, dict[str, Tensor]] | None = field(default=None, init=False)

    @property
    def micro_batches(self) -> list[dict[str, Tensor]]:
        """This rank's part of the first batch."""
        return my_micro_batches(self.model, self.case.first_batch)

    @property
    def in_one(self) -> list[dict[str, Tensor]]:
        """The same in one micro-batch, which takes half as long: for what several do not show better."""
        return [{name: torch.cat([part[name] for part in self.micro_batches]) for name in self.case.first_batch}]

    def reset(self) -> None:
        """Initial values, no gradients. They are computed once, which takes longer than a step does.

        What gradients lay in holds no numbers from here on: whoever takes cleared gradients for zeros is found out.
        """
        if self._initial is None or self._initial[0] is not self.model:
            self.model.materialize(seed=SEED)
            self._initial = self.model, {name: held.local.clone() for name, held in self.model.weights.items()}
        else:
            for name, value in self._initial[1].items():
                self.model.weights[name].local.copy_(value)
            self.model.values_changed()
        self.clear_gradients()

    def clear_gradients(self, *, every: int = 1) -> None:
        """Clears every so many of the gradients, and overwrites the memory that they had."""
        for held in list(self.model.weights.values())[::every]:
            if held.local_grad is not None:
                held.local_grad.fill_(torch.nan)
            held.parameter.grad = None

    def first_step_problems(self, when: str, *, in_one: bool = False) -> Iterator[str]:
        """Computes the first step, in two micro-batches or in one, and says what differs from one process."""
        loss = float(self.model.forward_backward(self.in_one if in_one else self.micro_batches))
        yield from self.gradient_problems(when)
        if abs(loss - self.case.losses[0]) > self.bars.loss * abs(self.case.losses[0]):
            yield f"{when}: loss {loss}, on one process {self.case.losses[0]}"

    def gradient_problems(self, when: str, *, times: float = 1.0) -> Iterator[str]:
        """Says which gradients differ from those of one process, times a factor."""
        theirs = {name: grad * times for name, grad in self.case.gradients.items()}
        for name, error in gradient_errors(self.model.weights, theirs).items():
            if not error <= self.bars.gradient:
                yield f"{when}: gradient of {name} is off by {error:.1e}"

    def whole_problems(self, when: str, expected: Mapping[str, Tensor]) -> Iterator[str]:
        """Says which weights are not bit for bit the expected ones: all ranks together, and this rank's part."""
        for name, held in self.model.weights.items():
            whole = self.model.full_tensor(name)
            if not torch.equal(whole, expected[name]):
                yield f"{when}: {name} differs by {relative_error(whole, expected[name]):.1e}"
            elif not all(torch.equal(p.of_local(held.local), p.of_whole(whole)) for p in held.chunks):
                yield f"{when}: this rank's part of {name} is not what all ranks together have"


Invariant = Callable[[Examination], Iterator[str]]


def at_rest_every_parameter_is_a_dtensor(e: Examination) -> Iterator[str]:
    """Every parameter is a DTensor over the rank's own shard, under the name that it had before."""
    found = dict(e.model.named_parameters())
    if list(found) != e.case.names:
        yield f"names differ: {sorted(set(found) ^ set(e.case.names)) or 'order'}"
    if sorted(e.model.weights) != sorted(e.case.names):
        yield f"weights differ: {sorted(set(e.model.weights) ^ set(e.case.names))}"
    for name, held in e.model.weights.items():
        parameter = found[name]
        if not isinstance(parameter, nn.Parameter) or not isinstance(parameter.data, DTensor):
            yield f"{name} is a {type(parameter.data).__name__}"
        elif parameter is not held.parameter:
            yield f"{name} is not the parameter in weights"
        elif held.local.numel() and parameter.to_local().data_ptr() != held.local.data_ptr():
            yield f"{name} does not share memory with what this rank holds"
        elif parameter.to_local().numel() != held.local.numel():
            yield f"{name} holds {parameter.to_local().numel()} elements, not {held.local.numel()}"


def initial_values_depend_on_the_seed_alone(e: Examination) -> Iterator[str]:
    """The same seed gives the same weights, bit for bit, under every layout; another seed gives others."""
    yield from e.whole_problems("materialize", e.case.weights)
    e.model.materialize(seed=SEED + 1)
    yield from e.whole_problems("another seed", e.case.other_weights)
    e.model.materialize(seed=SEED)
    yield from e.whole_problems("the first seed again", e.case.weights)


def given_values_are_kept(e: Examination) -> Iterator[str]:
    """A module that comes with values keeps them."""
    module = causal_lm(e.case.config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(e.case.other_weights[name])
    given = Examination(e.case, e.parallel, parallelize(module, e.parallel, device="cpu"), e.scratch)
    yield from given.whole_problems("given", e.case.other_weights)
    given.model.materialize(seed=SEED)
    yield from given.whole_problems("materialize after given", e.case.other_weights)
    given.model.close()


def loss_and_gradients_are_those_of_one_process(e: Examination) -> Iterator[str]:
    """One rule: sums over micro-batches of any size and ranks with different numbers of targets, divided once."""
    yield from e.first_step_problems("first step")


def losses_of_steps_are_those_of_one_process(e: Examination) -> Iterator[str]:
    """Several steps of AdamW in its fused form; of its `foreach` form tests/conformance/test_losses.py has twenty."""
    losses = parallel_losses(e.model, num_steps=NUM_STEPS, vocab_size=e.case.vocab_size, fused=True)
    for step, (loss, expected) in enumerate(zip(losses, e.case.losses, strict=True)):
        if not abs(loss - expected) <= e.bars.loss * abs(expected):
            yield f"step {step}: loss {loss}, on one process {expected}"


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW(fused)": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD(momentum)": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


def any_optimizer_and_clipping_work(e: Examination) -> Iterator[str]:
    """A step of torch's own optimizers and `clip_grad_norm_` do what they do to plain whole parameters."""
    for kind, make in _OPTIMIZERS.items():
        e.reset()
        plain = {name: nn.Parameter(value.clone()) for name, value in e.case.weights.items()}
        optimizers = [make(list(e.model.parameters())), make(list(plain.values()))]
        e.model.forward_backward(e.micro_batches)
        for name, parameter in plain.items():
            parameter.grad = e.model.full_tensor(name, grad=True)
        norms = [torch.nn.utils.clip_grad_norm_(list(p), 0.5) for p in (e.model.parameters(), plain.values())]
        ours, theirs = (float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms)
        if not abs(ours - theirs) <= UPDATE_BAR * theirs:
            yield f"{kind}: gradient norm {ours}, of plain parameters {theirs}"
        for optimizer in optimizers:
            optimizer.step()
        for name, error in value_errors(e.model.weights, {name: p.detach() for name, p in plain.items()}).items():
            if not error <= UPDATE_BAR:
                yield f"{kind}: {name} is off by {error:.1e}"


def gradients_add_up_until_cleared(e: Examination) -> Iterator[str]:
    """As a caller asks for it gradients add up, also over an evaluation; zeroed ones start again without a word."""
    batches = e.in_one
    e.model.forward_backward(batches)
    kept = {name: held.local_grad.clone() for name, held in e.model.weights.items() if held.local_grad is not None}
    e.model.evaluate(batches)
    for name, held in e.model.weights.items():
        if (held.local_grad is None) != (name not in kept):
            yield f"evaluation: gradient of {name} appeared or vanished"
        elif name in kept and not torch.equal(held.local_grad, kept[name]):
            yield f"evaluation changed the gradient of {name}"
    try:
        e.model.forward_backward(batches)
        yield "gradients of two means were added without a word"
    except ConfigError:
        pass
    e.model.forward_backward(e.micro_batches, accumulate=True)
    yield from e.gradient_problems("not cleared", times=2.0)
    for parameter in e.model.parameters():
        parameter.grad.zero_()
    e.model.forward_backward(batches)
    yield from e.gradient_problems("zeroed in place")
    for parameter in e.model.parameters():
        parameter.grad.zero_()
    e.clear_gradients(every=2)
    e.model.forward_backward(batches)
    yield from e.gradient_problems("some cleared, some zeroed")
    for parameter in e.model.parameters():
        parameter.grad = parameter.grad * 0.5  # as one that clips or scales out of place
    e.model.forward_backward(batches, accumulate=True)
    yield from e.gradient_problems("others in their place", times=1.5)


def evaluation_is_that_of_one_process(e: Examination) -> Iterator[str]:
    """Loss and number of targets over all ranks, the next token's logits on every rank; each module's mode returns."""
    before = _State(e.model)
    modules = dict(e.model.module.named_modules())
    for number, module in enumerate(modules.values()):
        module.training = number % 3 != 2  # parts of a model may be in evaluation mode for good
    modes = {name: module.training for name, module in modules.items()}
    with _modes_in_passes(set(modules.values())) as seen:
        found = e.model.evaluate(e.micro_batches)
        logits = e.model.next_token_logits(e.case.first_batch["input_ids"][:1])
    if True in seen:
        yield "a module was evaluated in training mode"
    if changed := [name for name, module in modules.items() if module.training != modes[name]]:
        yield f"another mode than before the evaluation: {', '.join(changed)}"
    e.model.module.train()
    num_targets = int((e.case.first_batch["labels"][:, 1:] != -100).sum())
    if found.num_targets != num_targets:
        yield f"{found.num_targets} targets, not {num_targets}"
    if not abs(found.loss - e.case.losses[0]) <= e.bars.loss * e.case.losses[0]:
        yield f"loss {found.loss}, on one process {e.case.losses[0]}"
    if logits.shape != e.case.logits.shape or relative_error(logits, e.case.logits) > e.bars.gradient:
        yield "logits of the next token differ"
    yield from before.problems("after evaluation")
    yield from e.first_step_problems("the step after evaluation", in_one=True)


@contextmanager
def _modes_in_passes(modules: Set[nn.Module]) -> Iterator[set[bool]]:
    """Collects `training` of those of a model's modules that are called; a strategy may put others in their places."""
    seen: set[bool] = set()

    def look(module: nn.Module, _: Any) -> None:
        if module in modules:
            seen.add(module.training)

    handle = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


class _State:
    """Snapshot of parameters and values at rest, to check later that all of them are back."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._values = {name: held.local.clone() for name, held in model.weights.items()}

    def problems(self, when: str) -> Iterator[str]:
        now = dict(self._model.named_parameters())
        if list(now) != list(self._parameters):
            yield f"{when}: names differ: {sorted(set(now) ^ set(self._parameters)) or 'order'}"
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                yield f"{when}: the module holds something else as {name}"
            elif not torch.equal(parameter.to_local().detach(), self._values[name]):
                yield f"{when}: the value of {name} changed"


def weights_are_home_after_a_step(e: Examination) -> Iterator[str]:
    """A step computes gradients and moves no value; the module holds the same DTensors after it."""
    before = _State(e.model)
    e.model.forward_backward(e.micro_batches)
    yield from before.problems("after a step")


class PlantedFault(Exception):
    """Raised in the middle of a pass, on purpose."""


def weights_are_home_after_an_exception(e: Examination) -> Iterator[str]:
    """Wherever a pass breaks off, on all ranks alike, weights are home and the next step is right."""
    block = _last_block(e.model.module)
    inner = next(child for child in block.modules() if getattr(getattr(child, "weight", None), "ndim", 0) == 2)
    places = {
        "forward, between blocks": (block, 1, False),
        "forward, inside a unit": (inner, 2, False),
        "backward, between blocks": (block, 1, True),
        "backward, inside a unit": (inner, 1, True),
    }
    e.model.forward_backward(e.micro_batches)  # what a strategy makes on first use is there
    for place, (module, call, in_backward) in places.items():
        e.reset()
        before = _State(e.model)
        try:
            with _raising(module, call=call, in_backward=in_backward) as runs_here:
                e.model.forward_backward(e.micro_batches)
            yield f"{place}: the exception did not come through"
        except PlantedFault:
            pass
        except RankFailure:  # what ranks of other stages hear
            if runs_here():
                raise
        yield from before.problems(f"after an exception in {place}")
        e.reset()
        last = place == list(places)[-1]
        yield from e.first_step_problems(f"the step after an exception in {place}", in_one=not last)


def _last_block(module: nn.Module) -> nn.Module:
    return next(m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)[-1]


@contextmanager
def _raising(module: nn.Module, *, call: int, in_backward: bool) -> Iterator[Callable[[], bool]]:
    """Makes the n-th call of a module raise, or the backward of it; yields what tells whether this rank has it run."""
    calls = 0

    def fail(*_: Any) -> None:
        raise PlantedFault

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if not in_backward and calls == call:
            raise PlantedFault
        first = output[0] if isinstance(output, tuple) else output
        if in_backward and first.requires_grad:
            first.register_hook(fail)

    setattr(hook, SEES_SLICES, True)  # it looks at no value
    handle = module.register_forward_hook(hook)
    try:
        yield lambda: calls > 0
    finally:
        handle.remove()


def resident_bytes_are_the_layouts(e: Examination) -> Iterator[str]:
    """Resident bytes of each unit on this rank equal, to the byte, those of the Layout at its position."""
    for unit in e.model.spec.units:
        expected = expected_resident_bytes(e.model, unit)
        held = [e.model.weights[w.name].local for w in unit.weights]
        found = sum(t.numel() * t.element_size() for t in held)
        if found != expected:
            yield f"{unit.name}: holds {found} bytes, the Layout says {expected}"


def sent_bytes_are_the_layouts(e: Examination) -> Iterator[str]:
    """Bytes on the wire of one micro-batch equal the sum over the Layouts."""
    for _ in range(2):  # what a library exchanges once is no part of a step
        e.model.forward_backward(e.micro_batches[:1], accumulate=True)
    with Meter() as measured:
        e.model.forward_backward(e.micro_batches[:1], accumulate=True)
    yield from traffic_problems(e.model, measured, batch=micro_batch_of(e.model, e.micro_batches[0]))


def checkpoints_hold_whole_weights(e: Examination) -> Iterator[str]:
    """A checkpoint holds whole weights and no trace of the layout; one saved without any layout loads."""
    dcp.save(e.model.chunks(), checkpoint_id=e.scratch)
    read = {name: torch.full_like(value, float("nan")) for name, value in e.case.weights.items()}
    with _alone():
        dcp.load(read, checkpoint_id=e.scratch, no_dist=True)
    for name, value in e.case.weights.items():
        if not torch.equal(read[name], value):
            yield f"saved: {name} differs"
    dcp.load(e.model.chunks(), checkpoint_id=e.case.checkpoint)
    e.model.values_changed()
    yield from e.whole_problems("loaded", e.case.other_weights)


@contextmanager
def _alone() -> Iterator[None]:
    """Torch warns that it guesses, though `no_dist` says it: one process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def frozen_weights_get_no_gradient(e: Examination) -> Iterator[str]:
    """Weights that do not require a gradient get none, and the others get theirs. Units are frozen whole."""
    module = e.case.build()
    frozen = _every_second(e)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    other = Examination(e.case, e.parallel, parallelize(module, e.parallel, device="cpu"), e.scratch, e.bars)
    other.reset()
    other.model.forward_backward(other.micro_batches)
    weights = other.model.weights
    for name in frozen:
        if weights[name].parameter.requires_grad or weights[name].local_grad is not None:
            yield f"{name} is frozen, but has a gradient"
    trained = {name: held for name, held in weights.items() if name not in frozen}
    for name, error in gradient_errors(trained, e.case.gradients).items():
        if not error <= e.bars.gradient:
            yield f"gradient of {name} is off by {error:.1e}"
    other.model.close()


def _every_second(e: Examination) -> set[str]:
    """Every second unit whole, and of the uncut weights every second one."""
    cut = {w.name for unit in e.model.spec.cut_units[::2] for w in unit.weights}
    whole = [w.name for unit in e.model.spec.units if unit.kind is UnitKind.REPLICATED for w in unit.weights]
    return cut | set(whole[::2])


INVARIANTS: dict[str, Invariant] = {
    f.__name__: f
    for f in (
        at_rest_every_parameter_is_a_dtensor,
        initial_values_depend_on_the_seed_alone,
        given_values_are_kept,
        loss_and_gradients_are_those_of_one_process,
        losses_of_steps_are_those_of_one_process,
        any_optimizer_and_clipping_work,
        gradients_add_up_until_cleared,
        evaluation_is_that_of_one_process,
        weights_are_home_after_a_step,
        resident_bytes_are_the_layouts,
        sent_bytes_are_the_layouts,
        checkpoints_hold_whole_weights,
        frozen_weights_get_no_gradient,
        weights_are_home_after_an_exception,  # last: what it breaks, if it does, breaks no other
    )
}


def examine(
    case: Case, *, parallel: str, scratch: Path, bars: Bars | None = None, timeout_s: float = 300.0
) -> dict[str, list[str]]:
    """Runs all of `INVARIANTS` on forked ranks; returns the failures of each, the rank first. One process calls it.

    An exception that all ranks raise alike is a problem of the invariant that raised it, and the next one starts with a
    new model. One that only some ranks raise leaves the others waiting, and ends the examination.

    Args:
        case: a model, and its results on one process.
        parallel: the layout.
        scratch: an empty directory; it is made if it is not there.
        bars: largest errors of losses and gradients, for a layout that changes the model; None: those of exact ones.
            The other invariants (bytes held and sent, weights back at rest, checkpoints) are the same for every layout.
        timeout_s: after this long the ranks are ended.

    Raises:
        RankFailure: some ranks raised, or hung.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    by_rank = run_ranks(
        _examine,
        case,
        parallel,
        scratch,
        Bars() if bars is None else bars,
        num_ranks=num_ranks(parse_parallel(parallel)),
        timeout_s=timeout_s,
    )
    return {
        name: [f"rank {rank}: {problem}" for rank, found in enumerate(by_rank) for problem in found[name]]
        for name in INVARIANTS
    }


def _examine(case: Case, parallel: str, scratch: Path, bars: Bars) -> dict[str, list[str]]:
    examination = Examination(case, parallel, parallelize(case.build(), parallel, device="cpu"), scratch, bars)
    found: dict[str, list[str]] = {}
    for name, invariant in INVARIANTS.items():
        found[name] = []
        try:
            examination.reset()
            found[name].extend(invariant(examination))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            error.add_note(f"in the invariant {name} under {parallel}")
            if not _all_raised(examination, name=name):
                raise
            found[name].append(traceback.format_exc())
            examination.model = parallelize(case.build(), parallel, device="cpu")
    examination.model.close()
    return found


def _all_raised(examination: Examination, *, name: str, patience_s: float = 5.0) -> bool:
    """True if all ranks come here for the same invariant. Through files: after an exception no message is safe."""
    mesh, folder = examination.model.mesh, examination.scratch / "raised"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.{mesh.get_rank()}").touch()
    pause_s = 0.02
    for _ in range(round(patience_s / pause_s)):  # not by the clock: a machine may sleep in between
        if len(list(folder.glob(f"{name}.*"))) == mesh.size():
            return True
        time.sleep(pause_s)
    return False
