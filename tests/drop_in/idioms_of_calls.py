"""Further idioms (see idioms.py): what calls are given and give, kinds of backward, and updates of all kinds."""

from typing import Any

import torch
import torch.nn.functional as F
from idioms import MORE_STEPS, NUM_ROWS, NUM_STEPS, NUM_TOKENS, cross_entropy, idiom
from torch import Tensor

# ---- what a call is given, and gives


@idiom
def positional_input(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        cross_entropy(loop.model(batch["input_ids"]).logits, batch["labels"]).backward()
        yield


@idiom
def a_padding_mask_and_positions(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :3] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        loss = loop.model(**batch, attention_mask=mask, position_ids=positions).loss
        loss.backward()
        loop.say(loss)
        yield


@idiom
def autocast_which_leaves_float64_alone(loop):
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = loop.model(**loop.batch(step))
            loop.say(output.loss, output.logits[:, -1])
        output.loss.backward()
        yield


@idiom
def a_loss_on_hidden_states(loop):
    """As of embeddings of sentences, and of distillation by layers."""
    for step in range(NUM_STEPS):
        hidden = loop.model(**loop.batch(step), output_hidden_states=True).hidden_states
        pooled = hidden[-1].mean(1)
        (F.normalize(pooled, dim=-1).prod(0).sum() + hidden[1].pow(2).mean()).backward()
        loop.say(pooled)
        yield


@idiom
def a_loss_on_attention_maps(loop):
    before = loop.model.config._attn_implementation
    loop.model.config._attn_implementation = "eager"  # the only one that has maps
    try:
        output = loop.model(**loop.batch(0), output_attentions=True)
    finally:
        loop.model.config._attn_implementation = before
    entropy = -(output.attentions[0] * (output.attentions[0] + 1e-6).log()).sum(-1).mean()
    (output.loss + entropy).backward()
    loop.say(entropy)
    yield


@idiom
def the_last_logits_alone(loop):
    for step in range(NUM_STEPS):
        logits = loop.model(input_ids=loop.batch(step)["input_ids"], logits_to_keep=3).logits
        logits.logsumexp(-1).mean().backward()
        loop.say(logits)
        yield


@idiom
def weights_of_tokens(loop):
    for step in range(NUM_STEPS):
        batch = loop.batch(step)
        logits = loop.model(input_ids=batch["input_ids"]).logits
        each = cross_entropy(logits, batch["labels"], reduction="none")
        importance = torch.linspace(0.5, 1.5, len(each), dtype=each.dtype)
        ((each * importance).sum() / importance.sum()).backward()
        yield


# ---- backward


@idiom
def a_graph_that_is_kept(loop):
    """Two losses of one forward, one backward each: the first one keeps the graph."""
    for step in range(NUM_STEPS):
        logits = loop.model(input_ids=loop.batch(step)["input_ids"]).logits
        logits.pow(2).mean().backward(retain_graph=True)
        logits.logsumexp(-1).mean().backward()
        yield


@idiom
def a_second_backward_of_one_graph(loop):
    """An error of torch's, on one process and on ranks; after `zero_grad` it is as if it had not been."""
    for step in range(NUM_STEPS):
        loss = loop.model(**loop.batch(step)).loss
        before = {name: None if p.grad is None else p.grad.clone() for name, p in loop.model.named_parameters()}
        loss.backward()
        message = ""
        try:
            loss.backward()
        except RuntimeError as error:
            message = str(error)
        assert "backward through the graph a second time" in message, message
        for name, parameter in loop.model.named_parameters():
            parameter.grad = before[name]
        loop.model(**loop.batch(step, 1)).loss.backward()
        yield lambda model, optimizer: (optimizer.step(), optimizer.zero_grad())[0]


@idiom
def accumulation_over_uneven_micro_batches(loop):
    for step in range(MORE_STEPS):
        for part, length in enumerate((10, 7, 4)):
            batch = {name: rows[:, :length] for name, rows in loop.batch(step, part).items()}
            (cross_entropy(loop.model(batch["input_ids"]).logits, batch["labels"], reduction="sum") / 20).backward()
        yield


@idiom
def checkpointed_activations(loop):
    name = "activation" if hasattr(loop.model, "activation_checkpointing_enable") else "gradient"  # before v6
    getattr(loop.model, f"{name}_checkpointing_enable")()
    try:
        for step in range(MORE_STEPS):
            loss = loop.model(**loop.batch(step)).loss
            loss.backward()
            loop.say(loss)
            yield
    finally:
        getattr(loop.model, f"{name}_checkpointing_disable")()


@idiom
def a_penalty_on_gradients(loop):
    """A backward of a backward."""
    generator = torch.Generator().manual_seed(loop.share)
    width = loop.model.config.hidden_size
    given = torch.randn(NUM_ROWS, NUM_TOKENS, width, generator=generator, dtype=torch.float64).requires_grad_()
    before = loop.model.config._attn_implementation
    loop.model.config._attn_implementation = "eager"  # torch's own kernel has no second derivative
    try:
        logits = loop.model(inputs_embeds=given).logits
    finally:
        loop.model.config._attn_implementation = before
    (grad,) = torch.autograd.grad(logits.logsumexp(-1).mean(), [given], create_graph=True)
    grad.pow(2).sum().backward()
    loop.say(grad)
    yield


# ---- other updates


@idiom
def a_moving_average_by_data(loop):
    """Kept beside the weights, swapped in for an evaluation, and out again."""
    average = [p.data.clone() for p in loop.model.parameters()]
    kept: list[Any] = []

    def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.mul_(0.5).add_(parameter.data, alpha=0.5)
        kept[:] = [p.data.clone() for p in model.parameters()]
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.data.copy_(mean)

    def back(model: Any, optimizer: Any) -> None:
        for value, parameter in zip(kept, model.parameters(), strict=True):
            parameter.data.copy_(value)

    for step in range(NUM_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update
        with torch.no_grad():
            loop.say(loop.model(**loop.batch(step, 1)).loss)
        yield back
    loop.model(**loop.batch(NUM_STEPS)).loss.backward()
    yield


@idiom
def two_optimizers(loop):
    """One for matrices, one for the rest, each with its own rate."""
    several = [
        torch.optim.SGD([p for p in loop.model.parameters() if (p.dim() >= 2) == matrices], lr=rate, momentum=0.9)
        for matrices, rate in ((True, 0.05), (False, 0.2))
    ]

    def update(model: Any, _: Any) -> None:
        for each in several:
            each.step()
            each.zero_grad()

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def groups_by_name(loop):
    decayed = [p for n, p in loop.model.named_parameters() if n.endswith("weight") and "norm" not in n]
    others = [p for n, p in loop.model.named_parameters() if not (n.endswith("weight") and "norm" not in n)]
    optimizer = torch.optim.Adagrad([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.1)

    def update(model: Any, _: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def a_schedule_of_rates(loop):
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)

    def update(model: Any, _: Any) -> None:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def gradients_that_are_changed_by_hand(loop):
    def update(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def decay_by_hand(loop):
    def update(model: Any, _: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99).sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update


@idiom
def adam(loop):
    """As everybody has it, in its single form; `epsilon` keeps gradients of 0 from being divided by 0."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, eps=1e-3)

    def update(model: Any, _: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield update
