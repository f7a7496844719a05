"""The way back to published tensors: what transformers saves, name by name and bit by bit."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from rotorch.models import published
from rotorch.models.published import as_published
from rotorch.testing.subjects import tiny_subject

EXPERTS_ONE_BY_ONE = ["MixtralConfig", "Qwen3MoeConfig", "DeepseekV3Config", "PhimoeConfig"]


def written(model):
    """All that the rules publish of a model, and how many of the model's tensors were needed for each group."""
    held = {name: p.data for name, p in model.state_dict(keep_vars=True).items()}
    tied = set(model.all_tied_weights_keys)
    values = {name: tensor for name, tensor in held.items() if name not in tied}
    made = as_published({name: torch.empty_like(t, device="meta") for name, t in values.items()}, module=model)
    tensors = {}
    for each in made:
        parts = each.make([values[source] for source in each.sources])
        assert {name: tuple(part.shape) for name, part in parts.items()} == each.shapes
        tensors |= parts
    return tensors, made


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", [*EXPERTS_ONE_BY_ONE, "LlamaConfig", "Gemma3TextConfig"])
def test_it_is_what_transformers_saves(name, tmp_path):
    torch.manual_seed(0)
    model = tiny_subject(getattr(transformers, name)).build()
    model.save_pretrained(tmp_path)
    ours, made = written(model)
    same(ours, load_file(tmp_path / "model.safetensors"))
    assert all(len(each.sources) == 1 for each in made)
    if name in EXPERTS_ONE_BY_ONE:
        assert any(".experts.3." in tensor for tensor in ours)


def test_experts_are_views_of_what_the_model_stacks():
    model = tiny_subject(transformers.MixtralConfig).build()
    parameters = {name: p.data for name, p in model.named_parameters()}
    _, made = written(model)
    stacked = next(each for each in made if each.sources[0].endswith("gate_up_proj"))
    source = parameters[stacked.sources[0]]
    assert len(stacked.shapes) == 2 * len(source)
    assert all(part.data_ptr() >= source.data_ptr() and part._is_view() for part in stacked.make([source]).values())


def no_way_back(*_args, **_kwargs):
    raise NotImplementedError("it has no reverse")


@pytest.mark.parametrize(
    ("broken", "by", "why"),
    [
        ("named_as_in_model", lambda stored, **_: dict(stored), r"\('model\.layers\.0\..*' would not be read again\)"),
        ("_reversed", no_way_back, r"\(NotImplementedError: it has no reverse\)"),
    ],
)
def test_what_would_not_be_read_again_is_published_as_it_is_and_said(monkeypatch, caplog, broken, by, why):
    model = tiny_subject(transformers.MixtralConfig).build()
    monkeypatch.setattr(published, broken, by)
    _, made = written(model)
    assert all(each.sources == tuple(each.shapes) for each in made)
    (record,) = [record for record in caplog.records if record.name == published.__name__]
    assert re.search(f"MixtralForCausalLM: tensors are written under the model's own names .* {why}", record.message)


def test_a_plain_module_is_published_as_it_is(caplog):
    held = {"weight": torch.empty(2, 3, device="meta")}
    (only,) = as_published(held, module=nn.Linear(3, 2))
    assert not caplog.records
    assert (only.sources, dict(only.shapes)) == (("weight",), {"weight": (2, 3)})
