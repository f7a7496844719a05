"""Weights outside of blocks under `fsdp`: gathered once, and used however a model likes, on some ranks or on all."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import rotorch
from rotorch.core.traffic import Kind, Phase
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import FSDP
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

BAR, LENGTH, STEPS = 1e-10, 16, 2


def test_only_blocks_come_again_for_backward(tiny):
    with rotorch.on_meta():
        spec = FSDP(size=2).units_of(describe(causal_lm(load_config(tiny("llama")))))
    units = {unit.name: unit for unit in spec.units}

    def gathered(strategy, name):
        """Bytes that a rank hands to all-gathers of a unit, in forward and in backward."""
        found = dict.fromkeys(Phase, 0)
        for transfer in strategy.layout(units[name]).transfers:
            found[transfer.phase] += transfer.payload_bytes * (transfer.kind is Kind.ALL_GATHER)
        return found[Phase.FORWARD], found[Phase.BACKWARD]

    again, once = FSDP(size=2), FSDP(size=2, reshard=False)
    half, norm = units["lm_head.weight"].num_bytes // 2, 128 * 4 // 2
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert gathered(again, name) == gathered(once, name) == (half, 0)
    of_block, _ = gathered(once, "model.layers.0.mlp")
    assert gathered(again, "model.layers.0.mlp") == (of_block, of_block)
    in_forward, in_backward = gathered(again, "replicated")
    assert in_forward - in_backward == norm  # the last one


def what_is_whole(path):
    """By moment of a step: is the table whole, is a weight of the first layer."""
    torch.manual_seed(0)
    model = rotorch.parallelize(causal_lm(load_config(path)), "fsdp=2", device="cpu")
    module, found = model.module, {}
    parts = (module.model.embed_tokens, module.model.layers[0].mlp.up_proj)

    def look(moment):
        return lambda *_: found.update({moment: tuple(not isinstance(part.weight, DTensor) for part in parts)})

    module.model.layers[-1].register_forward_hook(look("last layer's forward"))
    module.model.layers[-1].register_full_backward_pre_hook(look("last layer's backward"))
    ids = torch.arange(LENGTH)[None] + model.batch_rank
    model.forward_backward({"input_ids": ids, "labels": ids})
    look("between steps")()
    return found


def test_it_is_whole_from_the_beginning_of_a_forward_to_the_end_of_its_backward(tiny):
    for found in run_ranks(what_is_whole, tiny("llama"), num_ranks=2):
        assert found == {
            "last layer's forward": (True, False),
            "last layer's backward": (True, False),
            "between steps": (False, False),
        }


def cross_entropy(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def fused(module, states, ids):
    """As losses that never call a head."""
    return cross_entropy(F.linear(states, module.lm_head.weight), ids)


def called_and_read(module, states, ids):
    return fused(module, states, ids) + module.lm_head(states[:, -1:]).square().mean()


def called_and_read_without_its_values(module, states, ids):
    """The read needs no weight in backward, which comes behind the call's."""
    probe = F.linear(states.detach(), module.lm_head.weight)
    return cross_entropy(probe, ids) + module.lm_head(states[:, -1:]).square().mean()


def in_chunks(module, states, ids, number=2):
    return cross_entropy(torch.cat([module.lm_head(chunk) for chunk in states.chunk(number, dim=1)], dim=1), ids)


def in_more_chunks(module, states, ids):
    return in_chunks(module, states, ids, number=4)


def without_a_head(module, states, ids):
    return states.square().mean()


CASES = [
    (fused, fused),
    (called_and_read, called_and_read),
    (called_and_read_without_its_values, called_and_read_without_its_values),
    (in_chunks, in_more_chunks),
    (fused, without_a_head),
    (in_chunks, without_a_head),
]


def forward(self, input_ids, **_):
    states = self.model(input_ids).last_hidden_state
    return {"loss": self.loss_of_states(self, states, input_ids)}


def share(config, step, rank):
    ids = torch.randint(config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids[rank : rank + 1]


def built(config, loss_of_states):
    torch.manual_seed(0)
    module = widen(causal_lm(config))
    module.forward, module.loss_of_states = types.MethodType(forward, module), loss_of_states
    return module


def name_of(case):
    return " and ".join(each.__name__ for each in case)


def expected_of(config, case):
    """Of one process, by step: losses of both shares, and the mean's gradients."""
    found, module = [], built(config, None)
    for step in range(STEPS):
        losses = []
        for rank, module.loss_of_states in enumerate(case):
            losses.append(module(share(config, step, rank))["loss"])
        (sum(losses) / 2).backward()
        found.append(([loss.item() for loss in losses], {n: p.grad.clone() for n, p in module.named_parameters()}))
        module.zero_grad()
    return found


def errors(config, expected, own_loop):
    """By case: the largest error of a loss or a gradient."""
    found = {}
    with exact_arithmetic():
        for case in CASES:
            model = rotorch.parallelize(
                built(config, None),
                "fsdp=2",
                device="cpu",
                loss=lambda module, batch, _: module(batch["input_ids"])["loss"] / 2,
            )
            rank, worst = model.batch_rank, 0.0
            model.module.loss_of_states = case[rank]
            for step, (losses, gradients) in enumerate(expected[name_of(case)]):
                ids = share(config, step, rank)
                if own_loop:
                    loss, true = model(input_ids=ids)["loss"], losses[rank]
                    loss.backward()
                else:
                    loss, true = model.forward_backward({"input_ids": ids, "labels": ids}), sum(losses) / 2
                worst = max(worst, abs(float(loss.detach()) - true))
                worst = max(worst, *gradient_errors(model.weights, gradients).values())
                model.zero_grad()
            found[name_of(case)] = worst
            model.close()
    return found


@pytest.fixture(scope="module")
def measured(tiny, warm):
    """By kind of loop: what both ranks found."""
    config = load_config(tiny("llama"))
    with exact_arithmetic():
        expected = {name_of(case): expected_of(config, case) for case in CASES}
    return {own_loop: run_ranks(errors, config, expected, own_loop, num_ranks=2) for own_loop in (False, True)}


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_head_is_used_by_its_call_or_by_its_weight_and_not_alike_on_all_ranks(measured, case, own_loop):
    assert all(found[name_of(case)] < BAR for found in measured[own_loop])
