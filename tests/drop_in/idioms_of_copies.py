"""Further loops (see idioms.py): copies of a model, of its state and of its weights' averages, made by torch."""

import copy

import torch
import torch.nn.functional as F
from idioms import MORE_STEPS, idiom
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@idiom
def a_moving_average_by_torch(loop):
    """`AveragedModel` copies the model, and is called like it."""
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield
        average.update_parameters(loop.model)
        with torch.no_grad():
            loop.say(average(**loop.batch(step, 1)).loss)


@idiom
def an_equal_average_by_torch(loop):
    """The weights themselves are averaged, then set to their average, as stochastic weight averaging does it."""
    average = AveragedModel(loop.model)
    for step in range(MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield
        average.update_parameters(loop.model)
    yield lambda model, optimizer: None
    loop.model.load_state_dict(average.module.state_dict())
    loop.model(**loop.batch(MORE_STEPS)).loss.backward()
    yield


@idiom
def a_copy_as_a_target(loop):
    """A frozen copy of the model as it is after a step, as a target of further ones."""
    loop.model(**loop.batch(0)).loss.backward()
    yield
    target = copy.deepcopy(loop.model).requires_grad_(False)
    for step in range(1, 1 + MORE_STEPS):
        batch = loop.batch(step)
        output = loop.model(**batch)
        distance = F.mse_loss(output.logits, target(input_ids=batch["input_ids"]).logits)
        (output.loss + distance).backward()
        loop.say(distance)
        yield


@idiom
def the_best_state_is_kept(loop):
    loop.model(**loop.batch(0)).loss.backward()
    yield
    kept = copy.deepcopy(loop.model.state_dict())
    for step in range(1, 1 + MORE_STEPS):
        loop.model(**loop.batch(step)).loss.backward()
        yield
    loop.model.load_state_dict(kept)
    with torch.no_grad():
        loop.say(loop.model(**loop.batch(0, 1)).loss)
    loop.model(**loop.batch(0, 1)).loss.backward()
    yield
