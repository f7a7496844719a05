"""Loops as people write them, each the same code for a plain module on one process and for a parallel one on a rank.

An idiom is a generator over a `Loop`. It yields where gradients of all ranks are due; what it yields says how weights
are updated (`None`: a step of the optimizer). On one process the ranks' generators take turns over one module, and
gradients are divided by their number: the mean over ranks, as torch's DDP makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_ROWS, NUM_TOKENS = 2, 10
NUM_STEPS, MORE_STEPS = 1, 2
LEARNING_RATE = 0.1


@dataclass
class Loop:
    """Input of an idiom: a model, and the data of one share of the ranks.

    Attributes:
        model: plain or parallel.
        make: makes another model of the same kind from a seed, plain or parallel as this one is.
        share: whose data.
        said: numbers and tensors of this share that are compared.
    """

    model: Any
    make: Callable[[int], Any]
    share: int
    vocab_size: int
    said: list[Tensor] = field(default_factory=list)

    def batch(self, step: int, part: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * self.share + part)
        ids = torch.randint(self.vocab_size, (NUM_ROWS, NUM_TOKENS), generator=generator)
        labels = ids.clone()
        labels[:, : 2 + (self.share + part) % 3] = -100
        return {"input_ids": ids, "labels": labels}

    def say(self, *values: Tensor) -> None:
        self.said += [value.detach().clone().double() for value in values]


Idiom = Callable[[Loop], Iterator[Any]]
IDIOMS: dict[str, Idiom] = {}


def idiom(function: Idiom) -> Idiom:
    IDIOMS[function.__name__] = function
    return function


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), **options)


def per_token(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


# ---- losses


@idiom
def the_loss_of_the_model(loop):
    for step in range(MORE_STEPS):
        output = loop.model(**loop.batch(step))
        output.loss.backward()
        loop.say(output.loss)
        yield


@idiom
def cross_entropy_on_logits(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        loss = cross_entropy(loop.model(input_ids=batch["input_ids"]).logits, batch["labels"])
        loss.backward()
        loop.say(loss)
        yield


@idiom
def label_smoothing_and_z_loss(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        logits = loop.model(input_ids=batch["input_ids"]).logits
        z_loss = torch.logsumexp(logits, -1).pow(2).mean()
        (cross_entropy(logits, batch["labels"], label_smoothing=0.1) + 1e-2 * z_loss).backward()
        loop.say(z_loss)
        yield


@idiom
def the_models_loss_and_its_logits(loop):
    for step in range(NUM_STEPS):
        output = loop.model(**loop.batch(step))
        (output.loss + 1e-3 * output.logits.pow(2).mean()).backward()
        loop.say(output.logits[:, -1])
        yield


@idiom
def logits_in_cat_and_stack(loop):
    for step in range(NUM_STEPS):
        parts = [loop.model(input_ids=loop.batch(step, part)["input_ids"]).logits for part in range(2)]
        both, stacked = torch.cat(parts), torch.stack(parts)
        (both.pow(2).mean() + stacked.softmax(-1).std()).backward()
        loop.say(both[:, -1])
        yield


@idiom
def outputs_as_a_tuple(loop):
    for step in range(NUM_STEPS):
        loss, logits = loop.model(**loop.batch(step), return_dict=False)[:2]
        loss.backward()
        loop.say(loss, logits[:, 0])
        yield


@idiom
def logits_that_are_written_into(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        logits = loop.model(input_ids=batch["input_ids"]).logits
        logits.div_(2.0)
        logits[..., 0] = 0.0
        cross_entropy(logits, batch["labels"]).backward()
        loop.say(logits[:, -1])
        yield


@idiom
def logits_ask_for_their_gradient(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        logits = loop.model(input_ids=batch["input_ids"]).logits
        assert logits.requires_grad and logits.grad_fn is not None
        logits.retain_grad()
        cross_entropy(logits, batch["labels"]).backward()
        loop.say(logits.grad)
        yield


@idiom
def logits_beside_a_loss_ask_for_their_gradient(loop):
    output = loop.model(**loop.batch(0))
    assert output.logits.requires_grad and output.logits.grad_fn is not None
    (grad,) = torch.autograd.grad(output.logits.mean(), [output.logits], retain_graph=True)
    output.loss.backward()
    loop.say(grad)
    yield


@idiom
def a_sum_over_sequences(loop):
    """As of policy gradients: a sum over rows, of tokens' logarithms times a reward."""
    for step in range(NUM_STEPS):
        ids = loop.batch(step)["input_ids"]
        reward = torch.tensor([1.0, -0.5], dtype=torch.float64)
        (-(per_token(loop.model(input_ids=ids).logits, ids).sum(-1) * reward).sum()).backward()
        yield


# ---- accumulation


@idiom
def accumulation(loop):
    for step in range(MORE_STEPS):
        for part in range(3):
            loss = loop.model(**loop.batch(step, part)).loss / 3
            loss.backward()
            loop.say(loss)
        yield


@idiom
def two_forwards_one_backward(loop):
    for step in range(NUM_STEPS):
        losses = [loop.model(**loop.batch(step, part)).loss for part in range(2)]
        (losses[0] + 2 * losses[1]).backward()
        loop.say(*losses)
        yield


@idiom
def two_forwards_then_two_backwards(loop):
    for step in range(NUM_STEPS):
        losses = [loop.model(**loop.batch(step, part)).loss for part in range(2)]
        losses[0].backward()
        losses[1].backward()
        yield


@idiom
def two_forwards_then_backwards_the_other_way_round(loop):
    for step in range(NUM_STEPS):
        losses = [loop.model(**loop.batch(step, part)).loss for part in range(2)]
        losses[1].backward()
        losses[0].backward()
        yield


@idiom
def zeroed_gradients(loop):
    def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def gradients_that_are_not_cleared(loop):
    for step in range(NUM_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield lambda model, optimizer: None
        loop.model(**loop.batch(step, 1)).loss.backward()
        yield


# ---- updates


@idiom
def clipping(loop):
    def update(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def a_frozen_part_of_a_layer(loop):
    """BitFit and its like: some weights of one layer learn, others do not."""
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_("q_proj.weight" in name or "up_proj.bias" in name or "norm" in name)
    for step in range(NUM_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


@idiom
def values_that_are_copied_in_between(loop):
    """As of weights' moving averages that are swapped in for an evaluation, by `copy_`."""
    loop.model(**loop.batch(0)).loss.backward()
    yield

    def swap(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter * 0.5)

    yield swap
    with torch.no_grad():
        loop.say(loop.model(**loop.batch(1)).loss)
    loop.model(**loop.batch(1)).loss.backward()
    yield


# ---- passes without a backward


@idiom
def an_evaluation_in_between(loop):
    for step in range(NUM_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        loop.model.eval()
        with torch.no_grad():
            output = loop.model(**loop.batch(step, 1))
            loop.say(output.loss, output.logits[:, -1].argmax(-1))
        with torch.inference_mode():
            loop.say(loop.model(input_ids=loop.batch(step, 2)["input_ids"]).logits[:, -1])
        loop.model.train()
        yield


@idiom
def an_evaluation_between_forward_and_backward(loop):
    for step in range(NUM_STEPS):
        loss = loop.model(**loop.batch(step)).loss
        with torch.no_grad():
            loop.say(loop.model(**loop.batch(step, 1)).loss)
        loss.backward()
        yield


@idiom
def forwards_that_no_backward_follows(loop):
    for step in range(NUM_STEPS):
        loop.say(loop.model(**loop.batch(step, 1)).loss)
        loop.model(**loop.batch(step)).loss.backward()
        loop.model(input_ids=loop.batch(step, 2)["input_ids"])
        yield


@idiom
def an_exception_between_forward_and_backward(loop):
    for step in range(NUM_STEPS):
        for attempt in range(2):
            try:
                loss = loop.model(**loop.batch(step)).loss
                if attempt == 0:
                    raise KeyError("no such metric")
                loss.backward()
            except KeyError:
                pass
        yield


@idiom
def an_exception_in_forward(loop):
    for step in range(NUM_STEPS):
        try:
            loop.model(**loop.batch(step), unheard_of=1.0)
            loop.model(input_ids="no ids")
        except (TypeError, AttributeError, ValueError):
            pass
        loop.model(**loop.batch(step)).loss.backward()
        yield


@idiom
def an_exception_in_backward(loop):
    def fail(_):
        raise KeyError("hook")

    for step in range(NUM_STEPS):
        handle = loop.model.get_input_embeddings().register_forward_hook(
            lambda _, __, output: output.register_hook(fail) and None
        )
        before = {name: None if p.grad is None else p.grad.clone() for name, p in loop.model.named_parameters()}
        loss = loop.model(**loop.batch(step)).loss
        handle.remove()
        with suppress(KeyError):
            loss.backward()
        for name, parameter in loop.model.named_parameters():
            parameter.grad = before[name]
        loop.model(**loop.batch(step)).loss.backward()
        yield lambda model, optimizer: (optimizer.step(), optimizer.zero_grad())[0]


# ---- gradients of other things


@idiom
def gradients_of_inputs(loop):
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step + 100 * loop.share)
        width = loop.model.config.hidden_size
        given = torch.randn(NUM_ROWS, NUM_TOKENS, width, generator=generator, dtype=torch.float64).requires_grad_()
        cross_entropy(loop.model(inputs_embeds=given).logits, loop.batch(step)["labels"]).backward()
        loop.say(given.grad)
        yield


@idiom
def gradients_of_inputs_alone(loop):
    """As of attacks and attributions: `torch.autograd.grad` of inputs leaves those of weights as they are."""
    for step in range(NUM_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        generator = torch.Generator().manual_seed(step + 100 * loop.share)
        width = loop.model.config.hidden_size
        given = torch.randn(NUM_ROWS, NUM_TOKENS, width, generator=generator, dtype=torch.float64).requires_grad_()
        loss = cross_entropy(loop.model(inputs_embeds=given).logits, loop.batch(step)["labels"])
        loop.say(*torch.autograd.grad(loss, [given]))
        yield


# ---- hooks


@idiom
def hooks_on_parameters(loop):
    first, second = list(loop.model.parameters())[:2]
    for step in range(MORE_STEPS):
        heard = []
        handles = [
            first.register_hook(lambda grad: grad * 2.0),
            second.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad is not None)),  # noqa: B023
        ]
        for part in range(2):
            loop.model(**loop.batch(step, part)).loss.backward()
        assert heard == [True, True], heard
        for handle in handles:
            handle.remove()
        yield


@idiom
def hooks_on_the_head(loop):
    head = loop.model.get_output_embeddings()
    for step in range(NUM_STEPS):
        seen = []
        handles = [
            head.register_forward_hook(lambda _, __, output: seen.append(output.detach().abs().sum())),  # noqa: B023
            head.register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].abs().sum() > 0)),  # noqa: B023
        ]
        loop.model(**loop.batch(step)).loss.backward()
        loop.say(*seen)
        assert len(seen) == 2
        for handle in handles:
            handle.remove()
        yield


# ---- several models


@idiom
def distillation(loop):
    teacher = loop.make(7)
    for step in range(MORE_STEPS):
        batch = loop.batch(step)
        with torch.no_grad():
            theirs = teacher(input_ids=batch["input_ids"]).logits
        output = loop.model(**batch)
        soft = F.kl_div(output.logits.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
        (0.5 * output.loss + 0.5 * soft).backward()
        loop.say(soft)
        yield


@idiom
def preferences_with_a_reference(loop):
    """DPO: two forwards of the policy, two of a frozen reference, one loss."""
    reference = loop.make(7)
    for step in range(NUM_STEPS):
        chosen, rejected = (loop.batch(step, part)["input_ids"] for part in range(2))
        margins = []
        for model in (loop.model, reference):
            with torch.set_grad_enabled(model is loop.model):
                logs = [per_token(model(input_ids=ids).logits, ids).sum(-1) for ids in (chosen, rejected)]
            margins.append(logs[0] - logs[1])
        loss = -F.logsigmoid(0.1 * (margins[0] - margins[1])).mean()
        loss.backward()
        loop.say(loss)
        yield


@idiom
def two_models_that_learn(loop):
    """Both are in one loss; the second is not updated."""
    other = loop.make(7)
    for step in range(NUM_STEPS):
        ids = loop.batch(step)["input_ids"]
        difference = loop.model(input_ids=ids).logits - other(input_ids=ids).logits
        difference.pow(2).mean().backward()
        loop.say(difference[:, -1])
        yield


# ---- what learns


@idiom
def weights_that_are_frozen_later(loop):
    for step in range(MORE_STEPS):
        if step == 1:
            for name, parameter in loop.model.named_parameters():
                parameter.requires_grad_("mlp" not in name)
        loop.model(**loop.batch(step)).loss.backward()
        yield
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


@idiom
def a_phase_in_which_nothing_learns_but_the_head(loop):
    """As of a head that is warmed up: all else is frozen, and then not any more."""
    head = {id(p) for p in loop.model.get_output_embeddings().parameters()}
    for step in range(MORE_STEPS):
        for parameter in loop.model.parameters():
            parameter.requires_grad_(step == 1 or id(parameter) in head)
        loop.model(**loop.batch(step)).loss.backward()
        yield
