"""`rotorch verify`: a model under a layout against the same model on one process, in float64, over a few steps.

[Note: where it begins]
    An error spoils all later results, so the first difference in the order of computation is reported.
    Initial weights come first; then in every step the outputs of modules in the order in which forward completes
    them, the loss, gradients, and the weights after the optimizer. Backward runs the other way: its first error is in
    the LAST module in forward order with a wrong gradient. A module of a unit that runs on slices counts
    only if the unit's own output is wrong too.

[Note: weights after a step]
    AdamW divides a gradient by its own size. Where the true gradient is 0 (the bias of keys without rotary embeddings)
    only rounding is left, and the two runs diverge at random. So an element is set aside while its reference
    gradient has been, in every step, 0 or below `_NOISE` of the model's largest one, and not 0 in all of them. The
    report counts these elements, and the verdict depends on the others. Errors are measured against a weight's largest
    element, or one full step (the learning rate) if that is larger: a bias that begins at 0 has no scale of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec, UnitKind
from rotorch.core.strategy import Strategy
from rotorch.mesh import check_world_size
from rotorch.models.describe import describe
from rotorch.models.held_warnings import held_warnings
from rotorch.models.trial.causality import why_not_trained
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import check_context_loss, load_step_code, parallelize
from rotorch.process.forking import gpu_in_sight, start_autograd
from rotorch.process.new_interpreter import call_fresh
from rotorch.shard.materialize import on_meta, take_recipes
from rotorch.strategies import (
    batch_ranks,
    cuts_context,
    cuts_features,
    cuts_tokens,
    format_parallel,
    num_ranks,
    parse_parallel,
)
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.batches import Rows, share_of
from rotorch.testing.compare import gradient_errors, gradients_along, relative_error, value_errors
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import has_weights, initialised_reference, loaded_reference, plain_config, reference_step
from rotorch.testing.subjects import NUM_MICRO_BATCHES, NUM_ROWS, CausalLM, Subject, compute_exactly
from rotorch.testing.trace import Calls, output_errors, recorded

BAR = 1e-10
"""Largest relative error that counts as the same result in float64."""

_ROUNDING = 1e-5
"""Above `BAR` and below this an error looks like float32 arithmetic somewhere; above it like a mistake."""

_VALUES_BAR = 1e-7
"""Of weights after a step: where a gradient is as small as its epsilon, AdamW divides rounding by next to nothing."""

_NOISE = 1e4 * torch.finfo(torch.float64).eps
"""Of the model's largest gradient; below lies what may be rounding alone (see [Note: weights after a step])."""

_LEARNING_RATE = 1e-3


@dataclass
class StepErrors:
    """Relative errors of one step, of one rank or all. Names are in the order of forward.

    Attributes:
        loss: the loss as the parallel model returned it, and as the reference did.
        outputs: of modules; None of one that does not compare, NaN of one that other ranks of a pipeline run.
        gradients: per weight.
        along: per weight: sums over its elements of ours * theirs, and theirs * theirs, to recognise a wrong factor.
        values: of weights after the optimizer's step.
        num_set_aside: elements of weights that `values` leaves out (see [Note: weights after a step]).
    """

    loss: tuple[float, float]
    outputs: dict[str, float | None]
    gradients: dict[str, float]
    along: dict[str, tuple[float, float]]
    values: dict[str, float]
    num_set_aside: int = 0


@dataclass
class Divergence:
    """First difference between two runs (see [Note: where it begins]). `step` counts from 1; 0 is before the first."""

    step: int
    what: str
    module: str
    rel_err: float


@dataclass
class VerifyReport:
    """Result of `rotorch verify`. `ok`: loss and gradients agree to `BAR` in all steps, and weights after them.

    Attributes:
        max_rel_err_loss: over all steps.
        max_rel_err_grad: over all steps and weights (see testing/compare.py, [Note: errors]).
        max_rel_err_weights: after the optimizer's steps, of the elements that count.
        first_divergent_module: name of the module to look at, or None.
        first_divergence: the same with step, kind and size.
        verdict: one sentence.
        worst_weights: the five with the largest gradient error: name, error.
        per_step: loss and errors of every step.
        num_modules_compared: number of modules with compared outputs.
        num_elements_set_aside: of weights, whose gradient was rounding alone (see [Note: weights after a step]).
        note: why `rotorch train` refuses this model though the two runs agree; "" if it does not.
    """

    model: str
    parallel: str
    nproc: int
    steps: int
    max_rel_err_loss: float
    max_rel_err_grad: float
    max_rel_err_weights: float
    first_divergent_module: str | None
    ok: bool
    verdict: str
    dtype: str = "float64"
    bar: float = BAR
    first_divergence: Divergence | None = None
    worst_weights: list[tuple[str, float]] = field(default_factory=list)
    per_step: list[dict[str, float]] = field(default_factory=list)
    num_modules_compared: int = 0
    num_elements_set_aside: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


@held_warnings()
def verify(
    model_path: str,
    *,
    parallel: str,
    nproc: int | None = None,
    steps: int = 3,
    seed: int = 0,
    layers: int | None = None,
    micro_batches: int = NUM_MICRO_BATCHES,
    documents: bool = False,
    timeout_s: float = 1800.0,
    device: str = "cpu",
) -> VerifyReport:
    """Holds a model under a layout against one process. Starts its own ranks on this machine; call it from one process.

    Loss, gradients, module outputs and weights of every AdamW step are compared in float64 (see testing/compare.py,
    [Note: errors]). Every rank has different data, with different numbers of targets, in some micro-batches; the
    reference sees all of it at once. Ranks on CPU share what it gave in every step (each on a GPU runs it for itself):
    for a large model, compare its first `layers`.

    Args:
        model_path: a Hugging Face directory, whose weights are loaded, or a `config.json`, then they are initialised.
        parallel: the layout, e.g. `"ddp=2,rtp=2"`.
        nproc: number of ranks, to be checked against the layout; None takes what the layout needs.
        steps: number of optimizer steps.
        seed: of weights and data.
        layers: keep only the first so many layers; weights are then initialised.
        micro_batches: of each rank and step.
        documents: rows of every second step hold several documents, which are kept apart.
        timeout_s: after this long the ranks are ended.
        device: "cpu", or "cuda": ranks take the GPUs in turn, several share one where there are fewer, and the calling
            process must not have touched CUDA before.

    Raises:
        ConfigError: the model cannot be read, the layout cannot hold it, or `nproc` does not fit; before any rank
        starts. RankFailure: a rank failed or hung while running.
    """
    if device == "cpu" and gpu_in_sight():  # the reference would start threads for it
        arguments = dict(nproc=nproc, steps=steps, seed=seed, layers=layers, micro_batches=micro_batches)
        arguments |= dict(timeout_s=timeout_s, parallel=parallel, documents=documents)
        return call_fresh(verify, model_path, why="a GPU is in sight", hide_gpus=True, **arguments)
    for what, number, least in (
        ("steps", steps, 1), ("layers", layers, 1), ("micro-batches", micro_batches, 1), ("seed", seed, 0)
    ):  # fmt: skip
        if number is not None and number < least:
            raise ConfigError(f"verify: {what} {number}: write {least} or more")
    strategies = parse_parallel(parallel)
    check_world_size(strategies, world_size=num_ranks(strategies) if nproc is None else nproc)
    config = plain_config(model_path, layers=layers)
    why = why_not_trained(config)
    compute_exactly(config)
    report = verify_subject(
        CausalLM(config, micro_batches, documents),
        name=model_path,
        parallel=parallel,
        steps=steps,
        seed=seed,
        timeout_s=timeout_s,
        device=device,
        directory=model_path if has_weights(model_path) and layers is None else None,
    )
    return replace(report, note=f"rotorch train refuses this model: {why}" if why else "")


def verify_subject(
    subject: Subject,
    *,
    name: str,
    parallel: str,
    steps: int = 3,
    seed: int = 0,
    timeout_s: float = 1800.0,
    device: str = "cpu",
    directory: str | None = None,
) -> VerifyReport:
    """Verifies any model that a `Subject` describes, like `verify`.

    Args:
        subject: construction of the model, its data and its loss.
        name: of the model, for the report.
        parallel: the layout.
        steps: number of optimizer steps.
        seed: of weights and data.
        timeout_s: after this long the ranks are ended.
        device: "cpu" or "cuda".
        directory: of the weights, for a causal language model; None: they are initialised.

    Raises:
        ConfigError: the layout cannot hold the model. RankFailure: a rank failed or hung.
    """
    strategies = parse_parallel(parallel)
    start_autograd()  # the reference computes gradients here, and ranks are forked after that
    with on_meta():
        module = widen(subject.build()).train()
    spec = describe(
        module,
        features=cuts_features(strategies),
        tokens=cuts_tokens(strategies),
        context=cuts_context(strategies),
    )
    for strategy in strategies:
        if strategy.changes_the_model:
            raise ConfigError(
                f"verify: {strategy} is another model than one process computes ({strategy.changes_the_model}), so the "
                "two are not to be equal. Leave that option out"
            )
        strategy.at_precision(None).on_device(device).check(spec)
        strategy.check_micro_batches(subject.num_micro_batches)
    if cuts_context(strategies):
        check_context_loss(module, subject.loss)
    if directory is None:
        try:
            reference = initialised_reference(subject.build(), spec=spec, recipes=take_recipes(module), seed=seed)
        except ConfigError:  # values that only the constructor knows how to make: then both sides get the same ones
            module = _constructed(subject, seed=seed)
            reference = copy.deepcopy(module)
    else:
        reference = loaded_reference(directory, module=module, spec=spec)
    comparison = _Comparison(
        subject=subject, strategies=strategies, directory=directory, steps=steps, seed=seed, device=device
    )
    load_step_code(strategy.kind for strategy in strategies)
    expected: Iterable[_Expected] = comparison.expected(reference)
    if device == "cpu":  # once, for all ranks; a process that has used a GPU cannot be forked
        expected = list(expected)
    found = run_ranks(comparison.run, module, expected, num_ranks=num_ranks(strategies), timeout_s=timeout_s)
    return _report(found, spec=spec, model=name, parallel=format_parallel(strategies))


def _constructed(subject: Subject, *, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return widen(subject.build()).train()


@dataclass
class _Expected:
    """Reference values of one process: before the first step only `values`, then of each step.

    Attributes:
        values: of all weights, whole; after the optimizer's step.
        loss: per target.
        outputs: of all modules.
        gradients: per weight; None of one that takes no part.
        set_aside: elements of weights that do not count after the step (see [Note: weights after a step]).
    """

    values: dict[str, Tensor]
    loss: float = 0.0
    outputs: Calls = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    set_aside: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Comparison:
    """Comparison that every rank runs."""

    subject: Subject
    strategies: Sequence[Strategy]
    directory: str | None
    steps: int
    seed: int
    device: str

    def expected(self, reference: nn.Module) -> Iterator[_Expected]:
        """Runs the reference, a step whenever the next one is asked for."""
        reference.to(self.device)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=_LEARNING_RATE)
        num_parts = batch_ranks(self.strategies) * self.subject.num_micro_batches
        yield _Expected(_values(reference))
        largest: dict[str, Tensor] = {}  # of each element's gradients so far, relative to the model's largest
        for step in range(self.steps):
            with exact_arithmetic(), recorded(reference) as whole:
                loss = reference_step(reference, self._batch(step), loss=self.subject.loss, num_parts=num_parts)
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in reference.named_parameters()}
            optimizer.step()
            _raise_to(largest, gradients)
            set_aside = {name: (part > 0) & (part < _NOISE) for name, part in largest.items()}
            yield _Expected(_values(reference), float(loss), whole[0], gradients, set_aside)

    def run(self, module: nn.Module, expected: Iterable[_Expected]) -> list[StepErrors]:
        """Runs the parallel side on this rank; the first entry of the result is the state before the first step."""
        model = parallelize(module, self.strategies, device=self.device, loss=self.subject.loss)
        if self.directory is None:
            model.materialize(seed=self.seed)
        else:
            model.load(self.directory)
        # As `rotorch train` has it. Any optimizer over the DTensors is held by testing/conformance.py.
        optimizer = torch.optim.AdamW([held.local_parameter for held in model.weights.values()], lr=_LEARNING_RATE)
        found: list[StepErrors] = []
        for number, theirs in enumerate(expected):
            if number == 0:
                found.append(StepErrors((0.0, 0.0), {}, {}, {}, value_errors(model.weights, theirs.values)))
                continue
            with exact_arithmetic():
                found.append(self._passes(model, theirs, step=number - 1))
            optimizer.step()
            found[-1].values = value_errors(
                model.weights, theirs.values, floor=_LEARNING_RATE, set_aside=theirs.set_aside
            )
            found[-1].num_set_aside = sum(int(mask.sum()) for mask in theirs.set_aside.values())
            optimizer.zero_grad()
        model.close()
        return found

    def _batch(self, step: int) -> Rows:
        batch = self.subject.batch(seed=self.seed, step=step, num_shares=batch_ranks(self.strategies))
        return {name: rows.to(self.device) for name, rows in batch.items()}

    def _passes(self, model: ParallelModel, theirs: _Expected, *, step: int) -> StepErrors:
        number, batch = self.subject.num_micro_batches, self._batch(step)
        mine = share_of(batch, share=model.batch_rank, num_shares=model.num_batch_ranks, num_micro_batches=number)
        with recorded(model.module) as passes:
            loss = model.forward_backward(mine)
        first = model.batch_rank * number * NUM_ROWS
        errors = output_errors(
            passes,
            theirs.outputs,
            first_rows=[first + place * NUM_ROWS for place in range(number)],
            num_rows=NUM_ROWS,
            total_rows=len(batch["labels"]),
            features=(model.feature_rank, model.num_feature_ranks),
            tokens=(model.token_rank, model.num_token_ranks),
            context=(model.context_rank, model.num_context_ranks),
        )
        ran = {name for calls in passes for name, outputs_of in calls.items() if outputs_of}
        outputs = {name: errors.get(name) if name in ran else math.nan for name in theirs.outputs}
        order = {name: place for place, name in enumerate(theirs.outputs)}
        weights = dict(sorted(model.weights.items(), key=lambda item: order.get(item[0].rpartition(".")[0], -1)))
        gradients = gradient_errors(weights, theirs.gradients)
        along = gradients_along(weights, theirs.gradients)
        return StepErrors((float(loss), theirs.loss), outputs, gradients, along, {})


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _raise_to(largest: dict[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
    """Keeps the largest magnitude of each element's gradients, each relative to the model's largest of its step."""
    known = {name: gradient.abs() for name, gradient in gradients.items() if gradient is not None}
    scale = max((float(gradient.max()) for gradient in known.values() if gradient.numel()), default=0.0) or 1.0
    for name, gradient in known.items():
        part = gradient / scale
        largest[name] = torch.maximum(largest[name], part) if name in largest else part


# ---- in the parent: from what the ranks found to one report -------------------------------------------------------


def _report(by_rank: list[list[StepErrors]], *, spec: ModelSpec, model: str, parallel: str) -> VerifyReport:
    steps = [_merge(list(found)) for found in zip(*by_rank, strict=True)]
    first = next((d for n, s in enumerate(steps) if (d := _divergence(n, s, spec=spec)) is not None), None)
    per_step = [
        {
            "step": number,
            "loss": step.loss[0],
            "rel_err_loss": _loss_error(step.loss),
            "rel_err_grad": max(step.gradients.values(), default=0.0),
            "rel_err_weights": max(step.values.values(), default=0.0),
        }
        for number, step in enumerate(steps)
    ]
    worst: dict[str, float] = {}
    for step in steps:
        for name, error in step.gradients.items():
            worst[name] = max(worst.get(name, 0.0), error)
    max_loss = max(row["rel_err_loss"] for row in per_step)
    max_grad = max(worst.values(), default=0.0)
    max_values = max(row["rel_err_weights"] for row in per_step)
    ok = max_loss <= BAR and max_grad <= BAR and max_values <= _VALUES_BAR
    return VerifyReport(
        model=model,
        parallel=parallel,
        nproc=len(by_rank),
        steps=len(steps) - 1,
        max_rel_err_loss=max_loss,
        max_rel_err_grad=max_grad,
        max_rel_err_weights=max_values,
        first_divergent_module=None if ok or first is None else first.module,
        ok=ok,
        verdict=_verdict(first, steps, ok=ok, max_error=max(max_loss, max_grad, max_values)),
        first_divergence=None if ok else first,
        worst_weights=sorted(worst.items(), key=lambda item: -item[1])[:5],
        per_step=per_step[1:],
        num_modules_compared=len(steps[-1].outputs),
        num_elements_set_aside=max(step.num_set_aside for step in steps),
    )


def _merge(found: list[StepErrors]) -> StepErrors:
    """The worst of all ranks; a module counts only if it compares on every rank that ran it."""

    def worst(attribute: str) -> dict[str, Any]:
        each = [getattr(f, attribute) for f in found]
        ran = {name: [e[name] for e in each if e[name] is None or not math.isnan(e[name])] for name in each[0]}
        return {name: max(errors) for name, errors in ran.items() if errors and None not in errors}

    along = {
        name: (sum(f.along[name][0] for f in found), sum(f.along[name][1] for f in found)) for name in found[0].along
    }
    loss = max((f.loss for f in found), key=_loss_error)
    return StepErrors(loss, worst("outputs"), worst("gradients"), along, worst("values"), found[0].num_set_aside)


def _loss_error(loss: tuple[float, float]) -> float:
    ours, theirs = (torch.tensor(value, dtype=torch.float64) for value in loss)
    return relative_error(ours, theirs)


def _divergence(number: int, step: StepErrors, *, spec: ModelSpec) -> Divergence | None:
    """Finds the first difference within a step (see [Note: where it begins]); None if there is none."""
    units = [u.name for u in spec.units if u.kind is UnitKind.MODULE]
    for name, error in step.outputs.items():
        around = [u for u in units if name.startswith(f"{u}.")]
        if error is None or error <= BAR:
            continue
        units_own = [found for u in around if (found := step.outputs.get(u)) is not None]
        if all(found > BAR for found in units_own):
            return Divergence(number, "output", name, error)
    if (error := _loss_error(step.loss)) > BAR:
        return Divergence(number, "loss", "loss", error)
    for name, error in reversed(step.gradients.items()):
        if error > BAR:
            return Divergence(number, "gradient", name.rpartition(".")[0], error)
    for name, error in step.values.items():
        if error > (_VALUES_BAR if number else BAR):
            what = "weight after the optimizer's step" if number else "initial weight"
            return Divergence(number, what, name.rpartition(".")[0], error)
    return None


def _verdict(first: Divergence | None, steps: list[StepErrors], *, ok: bool, max_error: float) -> str:
    if ok:
        return "the same as one process, up to float64 rounding"
    if first is None:
        return f"errors up to {max_error:.1e} that begin nowhere in particular: rounding that adds up"
    where = f"the {first.what} of {first.module!r}" if first.what != "loss" else "the loss"
    begins = f"first differs in {where}" + (f", step {first.step}" if first.step else "")
    if first.rel_err < _ROUNDING:
        return f"{begins}, by {first.rel_err:.1e}: looks like float32 arithmetic somewhere, not like a mistake"
    factor = _common_factor(steps[first.step]) if first.what == "gradient" else None
    if factor is not None:
        return f"{begins}: all wrong gradients are {factor:.6g} times the reference's: a wrong sum or division"
    return f"{begins}, by {first.rel_err:.1e}: a mistake, not rounding"


def _common_factor(step: StepErrors) -> float | None:
    """The factor by which all wrong gradients are too large, if there is one."""
    wrong = [name for name, error in step.gradients.items() if error > BAR and step.along[name][1] > 0]
    factors = [step.along[name][0] / step.along[name][1] for name in wrong]
    if not factors or max(factors) - min(factors) > 1e-6 * abs(factors[0]):
        return None
    # The same projection is not yet the same direction: the error must be all that the factor explains.
    explained = all(abs(step.gradients[n] - abs(factors[0] - 1)) <= 1e-3 * abs(factors[0] - 1) for n in wrong)
    return factors[0] if explained else None
