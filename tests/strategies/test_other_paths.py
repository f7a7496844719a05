"""Ranks that run different parts of a model, as many each: under rtp one would take a part's weights for another's."""

import pytest
import torch
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.testing.ranks import run_ranks

REFUSED = "ranks have run different parts of the model in a pass, or in another order"


class Experts(nn.Module):
    """Runs two of its four experts, in an order of its own."""

    def __init__(self):
        super().__init__()
        self.experts, self.end = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x, chosen):
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return self.end(x)


def loss_of(module, batch, num_targets):
    return module(batch["x"], batch["chosen"]).square().sum()


def look(model, batch):
    with torch.no_grad():
        model(**batch)


def learn(model, batch):
    model(**batch).sum().backward()


def step(model, batch):
    model.forward_backward({**batch, "labels": torch.zeros(2, dtype=torch.int64)})


def evaluate(model, batch):
    model.evaluate({**batch, "labels": torch.zeros(2, dtype=torch.int64)})


def predict(model, batch):
    model.predict(batch)


RUNS = (look, learn, step, evaluate, predict)


def made(layout):
    torch.manual_seed(0)
    return rotorch.parallelize(Experts().double(), layout, device="cpu", loss=loss_of)


def batch_of(chosen):
    """This rank's."""
    rank = torch.distributed.get_rank()
    return {"x": torch.ones(2, 6, dtype=torch.float64), "chosen": chosen[rank % len(chosen)]}


def messages_of(layout, chosen):
    """Messages of this rank for each of `RUNS`, and for weights that are asked for afterwards."""
    found = []
    for run in RUNS:
        model = made(layout)
        for call in (lambda model=model, run=run: run(model, batch_of(chosen)), model.full_state_dict):
            try:
                call()
            except ConfigError as error:
                found.append(str(error))
            else:
                found.append("")
        model.close()
    return found


MESSAGES = "rtp=2[transport=send_receive]"


@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        (MESSAGES, ((0, 2), (1, 2))),
        (MESSAGES, ((0, 2), (2, 0))),
        ("rtp=2[transport=send_receive,buffering=in_place]", ((0, 2), (1, 2))),
        ("rtp=3[transport=send_receive]", ((1,), (2,), (0,))),  # as far above as below the first one's
    ],
)
def test_a_pass_is_refused_on_all_ranks_and_the_model_from_then_on(layout, chosen):
    for found in run_ranks(messages_of, layout, chosen, num_ranks=len(chosen)):
        assert [message.startswith(REFUSED) for message in found] == [True] * 2 * len(RUNS)


@pytest.mark.parametrize("layout", [MESSAGES, "rtp=2", "ddp=2"])
def test_ranks_that_run_the_same_parts_are_right(layout):
    for found in run_ranks(messages_of, layout, ((3, 1),), num_ranks=2):
        assert found == [""] * 2 * len(RUNS)


def test_replicas_of_a_ring_may_differ():
    """Ranks 0 and 1 are a ring, and 2 and 3 are another one."""
    for found in run_ranks(messages_of, f"ddp=2,{MESSAGES}", ((0, 2), (0, 2), (1, 3), (1, 3)), num_ranks=4):
        assert found == [""] * 2 * len(RUNS)


def gradients_of(chosen):
    model = made("rtp=2")
    learn(model, batch_of(chosen))
    return {name: model.full_tensor(name, grad=True) for name in model.weights}


def test_shared_memory_finds_slices_in_any_order():
    chosen = (0, 2), (2, 0)
    torch.manual_seed(0)
    module = Experts().double()
    for of_rank in chosen:
        (module(torch.ones(2, 6, dtype=torch.float64), of_rank).sum() / 2).backward()
    for found in run_ranks(gradients_of, chosen, num_ranks=2):
        for name in ("experts.0.weight", "experts.2.bias", "end.weight"):
            assert torch.allclose(found[name], module.get_parameter(name).grad, rtol=1e-10)
