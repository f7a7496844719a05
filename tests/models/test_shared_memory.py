"""Parameters that share memory and are not one: refused where ranks' parts would share none."""

import copy

import pytest
import torch
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.shared_memory import refuse_shared_memory
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self, *, device="cpu", rows=8):
        super().__init__()
        self.embed = nn.Embedding(8, 4, device=device)
        self.head = nn.Linear(4, rows, bias=False, device=device)
        self.norm = nn.LayerNorm(4, device=device)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def by_data(**options):
    model = Tied(**options)
    model.head.weight.data = model.embed.weight.data
    return model


def by_views(first, second):
    """Two weights that are views of one tensor."""
    model, whole = Tied(), torch.randn(16, 8)
    model.embed.weight.data, model.head.weight.data = first(whole), second(whole)
    return model


def from_one_array():
    model, array = Tied(), torch.randn(8, 4).numpy()
    model.embed.weight.data, model.head.weight.data = torch.from_numpy(array), torch.from_numpy(array)
    return model


def by_identity():
    model = Tied()
    model.head.weight = model.embed.weight
    return model


def frozen():
    return by_data().requires_grad_(False)


def half_frozen():
    model = by_data()
    model.embed.weight.requires_grad_(False)
    return model


def empty():
    model = Tied()
    model.head.weight.data = model.embed.weight.data[:0]
    return model


def freed():
    model = Tied()
    for parameter in (model.embed.weight, model.head.weight):
        parameter.data.untyped_storage().resize_(0)
    return model


def of_two_dtypes():
    """Two weights of unequal element sizes, over one memory."""
    model = Tied()
    model.head.weight.data = model.embed.weight.data.view(torch.bfloat16)[:, :4]
    return model


SHARED = {
    "data": by_data,
    "on meta": lambda: by_data(device="meta"),
    "one array": from_one_array,
    "overlapping rows": lambda: by_views(lambda w: w[:8, :4], lambda w: w[7:15, :4]),
    "transposed": lambda: by_views(lambda w: w[:8, :4], lambda w: w[:4, :8].t()),
    "half frozen": half_frozen,
    "two dtypes": of_two_dtypes,
}
APART = {
    "nothing": Tied,
    "on meta": lambda: Tied(device="meta"),
    "identity": by_identity,
    "rows side by side": lambda: by_views(lambda w: w[:8, :4], lambda w: w[8:, :4]),
    "columns side by side": lambda: by_views(lambda w: w[:8, :4], lambda w: w[:8, 4:]),
    "flat buffer": lambda: by_views(lambda w: w.view(-1)[:32].view(8, 4), lambda w: w.view(-1)[32:64].view(8, 4)),
    "frozen": frozen,
    "empty": empty,
    "freed": freed,
}


@pytest.mark.parametrize("name", SHARED)
def test_weights_that_share_memory_are_refused_by_name(name):
    with pytest.raises(ConfigError) as caught:
        refuse_shared_memory(SHARED[name]())
    said = str(caught.value)
    assert "'head.weight'" in said and "'embed.weight'" in said and "\n" not in said
    # A tie is proposed for the same elements alone.
    assert ("head.weight = embed.weight" in said) is (name in ("data", "on meta", "one array", "half frozen"))
    assert "head.weight.data.clone()" in said


@pytest.mark.parametrize("name", APART)
def test_weights_without_an_element_in_common_are_not(name):
    refuse_shared_memory(APART[name]())


def test_a_third_weight_within_a_long_one_is_found_behind_a_short_one():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    whole = torch.randn(64)
    for part, (start, end) in zip(model, [(0, 64), (0, 0), (32, 48)], strict=True):
        part.weight.data = whole[start:end].view(-1, 4) if end else torch.randn(4, 4)
    with pytest.raises(ConfigError, match=r"'2\.weight' and '0\.weight'"):
        refuse_shared_memory(model)


def told(layouts):
    """Refusals on a rank, by layout; None where there is none."""
    found = []
    for layout in layouts:
        model = by_data()
        before = copy.deepcopy(model.state_dict())
        try:
            rotorch.parallelize(model, layout, device="cpu")
            found.append(None)
        except ConfigError as error:
            same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            found.append(str(error) if same and type(model) is Tied else "changed")
    return found


def test_so_they_are_where_ranks_have_parts_alone():
    load_step_code(["ddp", "fsdp", "rtp"])
    for of_ddp, *others in run_ranks(told, ("ddp=2", "fsdp=2", "rtp=2"), num_ranks=2):
        assert of_ddp is None
        assert all("'head.weight' and 'embed.weight' share memory" in said for said in others)
