"""Texts of models with an encoder, under layouts, are those of one process: the encoder alone is a pass, too."""

from functools import cache

import pytest
import torch
from foreign_models import t5, whisper

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", "rtp=2[transport=send_receive]", "megatron=2")
FEATURES = "atp=1x2"
"""A layout that cuts the encoder's output along its features."""

TEXTS = {"text": {}, "without a cache": {"use_cache": False}, "beams": {"num_beams": 2}}
OPTIONS = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}


MODELS = (t5, whisper)
QUICK = [(layout, t5) for layout in ("ddp=2", "rtp=2[transport=send_receive]", "megatron=2")]
QUICK += [(layout, whisper) for layout in ("fsdp=2", "rtp=2")]
SLOW = [(layout, make) for layout in LAYOUTS for make in MODELS if (layout, make) not in QUICK]
"""Those that repeat under each layout with the other model what the first has proved."""


def built(make):
    torch.manual_seed(0)
    model = widen(make()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def given(make, *, share):
    generator = torch.Generator().manual_seed(share)
    if make is whisper:
        return torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    return torch.randint(2, 91, (2, 5 + share), generator=generator)


def texts(model, make, *, share):
    found = {}
    with exact_arithmetic():
        for name, more in TEXTS.items():
            found[name] = model.generate(given(make, share=share), **OPTIONS, **more).tolist()
        found["lengths"] = lengths(model, make, share=share)
    return found


def lengths(model, make, *, share):
    """Numbers of tokens that pass the decoder at a time."""
    seen, decoder = [], model.get_decoder()
    last = next(m for n, m in decoder.named_children() if "norm" in n and "emb" not in n)
    handle = last.register_forward_hook(lambda _, x, __: seen.append(x[0].shape[1]))
    model.generate(given(make, share=share), **OPTIONS)
    handle.remove()
    return seen


def everything(cells):
    found = {}
    for layout, make in cells:
        model = rotorch.parallelize(built(make), layout, device="cpu")
        found[layout, make.__name__] = texts(model, make, share=model.batch_rank)
        found[layout, make.__name__]["with gradients"] = refusal(
            lambda model=model, make=make: model.get_encoder()(given(make, share=0))
        )
        model.close()
    found[FEATURES] = refusal(on_features)
    return found


def on_features():
    rotorch.parallelize(built(whisper), FEATURES, device="cpu").generate(given(whisper, share=0))


def refusal(call):
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def found():
    """Returns what each rank has found, of cells measured together."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "atp"])
    for make in MODELS:
        describe(make())

    @cache
    def measured(*, slow):
        return run_ranks(everything, SLOW if slow else QUICK, num_ranks=2, timeout_s=300)

    return measured


@pytest.fixture(scope="module")
def expected():
    return {(make.__name__, share): texts(built(make), make, share=share) for make in MODELS for share in range(2)}


@pytest.mark.parametrize(
    ("layout", "make"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_texts_are_those_of_one_process(found, expected, layout, make):
    for rank, of_rank in enumerate(found(slow=(layout, make) in SLOW)):
        share = rank if layout.startswith(("ddp", "fsdp", "rtp")) else 0
        said = of_rank[layout, make.__name__]
        assert {name: said[name] for name in said if name != "with gradients"} == expected[make.__name__, share]
    assert expected[make.__name__, 0]["lengths"] == [1, 1, 1, 1]  # keys and values are kept


def test_what_cannot_be_is_refused_in_one_line(found):
    for of_rank in found(slow=False):
        assert "features" in of_rank[FEATURES] and "\n" not in of_rank[FEATURES]
        for layout, make in QUICK:
            if make is t5:
                assert "or write torch.no_grad()" in of_rank[layout, "t5"]["with gradients"]


@pytest.mark.slow
def test_what_cannot_be_is_refused_under_other_layouts_too(found):
    for of_rank in found(slow=True):
        for layout, make in SLOW:
            if make is t5:
                assert "or write torch.no_grad()" in of_rank[layout, "t5"]["with gradients"]
