"""No call between the first and the last micro-batch of a step for which the host would wait for a GPU."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import rotorch
from rotorch.models.hf import causal_lm, load_config
from rotorch.models.losses import causal_lm_loss
from rotorch.testing.operations import waits_of_micro_batches
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

LAYOUTS = (
    "ddp=2",
    "fsdp=2",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,recompute=slice]",
    "rtp=2[transport=send_receive,visits=1]",
)
SHARING_A_BATCH = ("megatron=2", "megatron=2[sequence_parallel=true]")


class Classifier(nn.Module):
    """Returns a mean over labels, as task heads do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, labels):
        logits = self.down(torch.relu(self.up(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels, ignore_index=-100)}


def batches_of(model, rank):
    generator = torch.Generator().manual_seed(rank)
    if model == "classifier":
        labels = torch.randint(4, (6,), generator=generator)
        mine = {"x": torch.randn(6, 8, generator=generator), "labels": labels}
        return [mine, {**mine, "labels": torch.full((6,), -100)}]
    ids = torch.randint(300, (2, 16), generator=generator)
    return [{"input_ids": ids, "labels": ids}] * 2


def waits(models, layouts, precisions):
    """Calls that wait in a step of two micro-batches, by layout, model and precision; only those that have any."""
    found = {}
    for layout in layouts:
        for name, path in models.items():
            for precision in precisions if path is not None else ({},):
                torch.manual_seed(0)
                module = Classifier() if path is None else causal_lm(load_config(path))
                model = rotorch.parallelize(module, layout, device="cpu", **precision)
                batches = batches_of(name, model.batch_rank)
                model.forward_backward(batches)  # trials and first allocations are made once
                with waits_of_micro_batches(model) as of_step:
                    model.forward_backward(batches, accumulate=True)
                if of_step:
                    found[layout, name, *precision] = dict(of_step)
                model.close()
    return found


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"autocast_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16},
    ],
)
def test_a_step_waits_for_nothing(tiny, precision):
    """Under autocast a step does what it does without, and converts besides."""
    models = {"llama": tiny("llama"), "classifier": None}
    assert run_ranks(waits, models, ("single",), [precision], num_ranks=1, timeout_s=300) == [{}]
    assert run_ranks(waits, models, LAYOUTS, [precision], num_ranks=2, timeout_s=300) == [{}] * 2
    text = {"llama": tiny("llama")}
    assert run_ranks(waits, text, SHARING_A_BATCH, [precision], num_ranks=2, timeout_s=300) == [{}] * 2


def looks_at_a_value(path):
    module = causal_lm(load_config(path))
    module.model.norm.register_forward_hook(lambda _, __, output: None if bool(output.any()) else output)
    model = rotorch.parallelize(module, "single", device="cpu")
    with waits_of_micro_batches(model) as of_step:
        model.forward_backward(batches_of("llama", 0))
    return dict(of_step)


def test_one_look_at_a_value_is_found(tiny):
    assert run_ranks(looks_at_a_value, tiny("llama"), num_ranks=1) == [{"_local_scalar_dense": 2}]


def looks_for_packed_rows(path):
    """Losses of rows with and without positions, and the number of looks at these in a step of each."""
    found = {}
    ids = batches_of("llama", 0)[0]
    positions = torch.arange(16).expand(2, 16)
    for name, batch in {
        "plain": ids,
        "numbered": {**ids, "position_ids": positions},
        "packed": {**ids, "position_ids": positions % 8},
    }.items():
        torch.manual_seed(0)
        model = rotorch.parallelize(causal_lm(load_config(path)), "single", device="cpu")
        with waits_of_micro_batches(model) as of_step:
            loss = float(model.forward_backward(batch))
        found[name] = loss, sum(of_step.values())
    return found


def test_rows_that_may_be_packed_are_still_looked_at(tiny):
    (found,) = run_ranks(looks_for_packed_rows, tiny("llama"), num_ranks=1)
    assert found["plain"] == (found["numbered"][0], 0) and found["numbered"][1] == found["packed"][1] == 1
    assert found["packed"][0] != found["plain"][0]


def losses_of_rows_packed_later(path):
    """Losses of packed rows: told by the batch, by a loss of the user's own, and by a class of the user's own."""
    ids = batches_of("llama", 0)[0]
    positions = torch.arange(16).expand(2, 16) % 8

    def packing_loss(module, batch, num_targets):
        return causal_lm_loss(module, {**batch, "position_ids": positions}, num_targets)

    class Packing(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs, position_ids=positions)

    def loss_of(batch, *, cls=None, loss=None):
        torch.manual_seed(0)
        module = causal_lm(load_config(path))
        if cls is not None:
            module.__class__ = cls
        return float(rotorch.parallelize(module, "single", device="cpu").forward_backward(batch, loss=loss))

    told = loss_of({**ids, "position_ids": positions})
    return told, loss_of(ids, loss=packing_loss), loss_of(ids, cls=Packing), loss_of(ids)


def test_rows_that_are_packed_within_a_call_are_looked_at(tiny):
    ((told, by_loss, by_class, plain),) = run_ranks(losses_of_rows_packed_later, tiny("llama"), num_ranks=1)
    assert told == by_loss == by_class != plain
