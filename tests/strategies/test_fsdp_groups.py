"""Groups of `fsdp` outside of blocks: a table and a head by themselves, as FSDP2 is used; the rest in one."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import rotorch
from rotorch.core.gathered import OwnGroup
from rotorch.core.traffic import Kind, Phase
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import FSDP
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BAR = 1e-10


class Plain(nn.Module):
    """A model without a pipeline plan, which multiplies with its table as well."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x @ self.table.weight.T


def units_of(module):
    return {unit.name: unit for unit in FSDP(size=2).units_of(describe(module)).units}


def own_groups(module):
    found = {name: unit.note(OwnGroup) for name, unit in units_of(module).items()}
    return {name: note.again for name, note in found.items() if note is not None}


def test_a_table_and_a_head_have_groups_of_their_own_unless_something_else_uses_them(tiny):
    with rotorch.on_meta():
        assert own_groups(causal_lm(load_config(tiny("llama")))) == {TABLE: True, HEAD: False}
        assert own_groups(causal_lm(load_config(tiny("qwen3")))) == {}  # tied
        assert own_groups(Plain()) == {}  # nothing says that it only calls its table
        frozen = causal_lm(load_config(tiny("llama")))
        frozen.model.embed_tokens.requires_grad_(False)  # backward does not come to it
        assert own_groups(frozen) == {TABLE: False, HEAD: False}


def test_only_blocks_and_the_table_come_again_for_backward(tiny):
    with rotorch.on_meta():
        units = units_of(causal_lm(load_config(tiny("llama"))))

    def gathered(strategy, name):
        """Bytes by phase that a rank hands to all-gathers of a unit."""
        transfers = strategy.layout(units[name]).transfers
        found = dict.fromkeys(Phase, 0)
        for transfer in transfers:
            found[transfer.phase] += transfer.payload_bytes * (transfer.kind is Kind.ALL_GATHER)
        return found[Phase.FORWARD], found[Phase.BACKWARD]

    again, once = FSDP(size=2), FSDP(size=2, reshard=False)
    half, norm = units[HEAD].num_bytes // 2, 128 * 4 // 2
    assert gathered(again, TABLE) == (half, half)
    assert gathered(again, HEAD) == gathered(once, TABLE) == (half, 0)
    assert gathered(again, "model.layers.0.mlp") == (gathered(once, "model.layers.0.mlp")[0],) * 2
    in_forward, in_backward = gathered(again, "replicated")
    assert in_forward - in_backward == norm  # the last one, which is in the root's group


def what_is_whole(path, layout):
    """By moment of a step: is the table whole, is the head."""
    torch.manual_seed(0)
    model = rotorch.parallelize(causal_lm(load_config(path)), layout, device="cpu")
    module, found = model.module, {}
    table, head, (first, *_, last) = module.model.embed_tokens, module.lm_head, module.model.layers

    def are_whole():
        return tuple(not isinstance(part.weight, DTensor) for part in (table, head))

    def look(moment):
        return lambda *_: found.update({moment: are_whole()})

    first.register_forward_hook(look("first layer's forward"))
    last.register_forward_hook(look("last layer's forward"))
    last.register_full_backward_pre_hook(look("last layer's backward"))
    first.register_full_backward_hook(look("end of the first layer's backward"))
    table.register_forward_hook(lambda _, __, output: output.register_hook(look("table's backward")) and None)
    ids = torch.arange(16)[None] + model.batch_rank
    model.forward_backward({"input_ids": ids, "labels": ids})
    look("between steps")()
    return found


@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("fsdp=2", 2), pytest.param("ddp=2,fsdp=2", 4, marks=pytest.mark.slow)]
)
def test_a_table_is_whole_where_it_is_looked_up_and_a_head_until_its_backward_has_been(tiny, layout, num_ranks):
    for found in run_ranks(what_is_whole, tiny("llama"), layout, num_ranks=num_ranks):
        assert found == {
            "first layer's forward": (False, True),
            "last layer's forward": (False, True),
            "last layer's backward": (False, False),
            "end of the first layer's backward": (False, False),
            "table's backward": (True, False),
            "between steps": (False, False),
        }


def fused(self, input_ids, labels=None, **_):
    """A forward such as fused losses put in place: it reads the head's weight, and never calls the head."""
    states = self.model(input_ids).last_hidden_state
    logits = F.linear(states[:, :-1], self.lm_head.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="sum") / 15
    return types.SimpleNamespace(loss=loss) if labels is None else {"loss": loss}


def losses_and_errors(config, expected, layout, calls):
    torch.manual_seed(0)
    module = widen(causal_lm(config))
    module.forward = types.MethodType(fused, module)
    model = rotorch.parallelize(module, layout, device="cpu")
    found = []
    with exact_arithmetic():
        for step, (losses, gradients) in enumerate(expected):
            ids = ids_of(config, step)[model.batch_rank][None]
            loss = model(input_ids=ids, labels=ids)["loss"]
            if calls == 2:  # both graphs are there at once
                loss = (loss + model(input_ids=ids, labels=ids)["loss"]) / 2
            loss.backward()
            found.append(abs(loss.item() - losses[model.batch_rank]))
            found.append(max(gradient_errors(model.weights, gradients).values()))
            model.zero_grad()
    return found


def ids_of(config, step):
    return torch.randint(config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_fused_loss_may_read_the_weight_of_the_head_in_a_loop_of_ones_own(tiny, calls):
    config = load_config(tiny("llama"))
    torch.manual_seed(0)
    module, expected = widen(causal_lm(config)), []
    with exact_arithmetic():
        for step in range(2):
            losses = [fused(module, ids[None]).loss for ids in ids_of(config, step)]
            (sum(losses) / 2).backward()
            gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
            expected.append(([loss.item() for loss in losses], gradients))
            module.zero_grad()
    for found in run_ranks(losses_and_errors, config, expected, "fsdp=2", calls, num_ranks=2):
        assert max(found) < BAR
