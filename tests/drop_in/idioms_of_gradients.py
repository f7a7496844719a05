"""More idioms: gradients that outlive a step, and weights that have none in some steps, or are frozen with some."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from idioms import MORE_STEPS, idiom


@idiom
def gradients_that_are_kept(loop):
    """As for variance reduction, or to compare tasks: gradients of one backward are used after another one."""
    kept: list[Any] = []

    def keep(model: Any, optimizer: torch.optim.Optimizer) -> None:
        kept[:] = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()

    def combine(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.grad = parameter.grad - 0.5 * before
        optimizer.step()
        optimizer.zero_grad()

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield keep
        loop.model(**loop.batch(step, part=1)).loss.backward()
        yield combine


@idiom
def a_part_that_is_frozen_between_micro_batches(loop):
    """Its gradient stays what the first micro-batch made it, and the optimizer's step uses that."""
    for step in range(MORE_STEPS):
        for parameter in loop.model.parameters():
            parameter.requires_grad_(True)
        loop.model(**loop.batch(step)).loss.backward()
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_("mlp" not in name and "norm" not in name)
        loop.model(**loop.batch(step, part=1)).loss.backward()
        yield
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


@idiom
def a_part_that_is_frozen_with_gradients_of_zero(loop):
    """With gradients of zero, momentum and decay go on moving it; without, nothing would."""

    def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for step in range(MORE_STEPS + 1):
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_(step == 0 or "attn" not in name)
        loop.model(**loop.batch(step)).loss.backward()
        yield update
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


@idiom
def weights_that_a_loss_leaves_out(loop):
    """They have no gradient, so neither decay nor the momentum of earlier steps moves them."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)

    def update(model: Any, _: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(MORE_STEPS + 1):
        output = loop.model(**loop.batch(step), output_hidden_states=True)
        (output.loss if step == 0 else output.hidden_states[1].pow(3).mean()).backward()
        yield update


@idiom
def accumulation_within_no_sync(loop):
    """As under DistributedDataParallel: only the last micro-batch of a step sends gradients."""
    no_sync = getattr(loop.model, "no_sync", nullcontext)
    for step in range(MORE_STEPS):
        for part in range(3):
            with no_sync() if part < 2 else nullcontext():
                loss = loop.model(**loop.batch(step, part)).loss / 3
                loss.backward()
            loop.say(loss)
        yield
