"""Changes of a module's weights between steps are seen, also after many checks that found none."""

import pytest
import torch
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.shard.at_rest import AtRest


def model():
    return nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))})


def replace_a_weight(made):
    made["a"].weight = nn.Parameter(made["a"].weight.detach())


def replace_a_bias_by_nothing(made):
    made["a"].bias = None


def assign_data(made):
    made["b"][1].weight.data = torch.zeros(2)


def replace_a_part(made):
    made["b"][0] = nn.Linear(2, 2)


def take_a_part_out(made):
    del made["b"][1]


def add_a_weight(made):
    made["b"].extra = nn.Parameter(torch.zeros(1))


def add_a_part_to_a_part(made):
    made["a"].extra = nn.Linear(1, 1)


def give_a_part_another_state(made):
    vars(made["a"]).update(vars(nn.Linear(3, 2)))


CHANGES = {
    give_a_part_another_state: "'a.weight' was replaced by another object",
    replace_a_weight: "'a.weight' was replaced by another object",
    replace_a_bias_by_nothing: "'a.bias' was replaced by another object",
    assign_data: "b.1.weight.data was assigned",
    replace_a_part: "the part of the model with 'b.0.weight' was taken out or replaced",
    take_a_part_out: "the part of the model with 'b.1.weight' was taken out or replaced",
    add_a_weight: "'b.extra' was put into the model after parallelize",
    add_a_part_to_a_part: "'a.extra.weight' was put into the model after parallelize",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_at_each_check(change):
    made = model()
    at_rest = AtRest(made)
    at_rest.check()
    at_rest.check()
    change(made)
    for _ in range(2):
        with pytest.raises(ConfigError, match=CHANGES[change]):
            at_rest.check()


def test_what_is_frozen_may_come_and_is_named_once_it_is_to_be_trained():
    made = model()
    at_rest = AtRest(made)
    made["extra"] = nn.Linear(1, 1).requires_grad_(False)
    at_rest.check()
    at_rest.check()
    made["extra"].bias.requires_grad_()
    with pytest.raises(ConfigError, match=r"'extra.bias' was put into the model after parallelize"):
        at_rest.check()


def test_values_may_change_in_place():
    made = model()
    at_rest = AtRest(made)
    with torch.no_grad():
        made["a"].weight.mul_(2)
    made["a"].weight.data.zero_()
    at_rest.check()
