"""First values: recipes recorded on meta, replayed on any slice, the same for every layout."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import init

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Weight
from rotorch.models.hf import causal_lm, load_config
from rotorch.shard.materialize import initialise, take_recipes
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks


class Made(nn.Module):
    """One weight of a shape, initialised by a function in the constructor."""

    def __init__(self, fill, shape=(64, 48)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            fill(self.weight)


def recipes_of(build):
    with rotorch.on_meta():
        module = build()
    assert all(p.is_meta for p in module.parameters())
    return module, take_recipes(module)


def values(build, *, seed=0, cut=None, num_slices=1, index=0, dtype=torch.float32, name="weight"):
    """A rank's part of one weight after `initialise`."""
    module, recipes = recipes_of(build)
    parameter = dict(module.named_parameters())[name]
    weight = Weight(name, tuple(parameter.shape), dtype.itemsize, cut)
    local = torch.full(weight.slice_shape(num_slices=num_slices, index=index), float("nan"), dtype=dtype)
    held = ShardedWeight(weight, local, cut_chunks(weight, num_slices=num_slices, index=index), nn.Parameter(local))
    initialise({name: held}, recipes=recipes, seed=seed)
    return local


# ---- every recipe does what torch's own code does -------------------------------------------------------------------


def same_distribution(found: Tensor, cdf) -> None:
    """Kolmogorov and Smirnov: how far the empirical distribution is from the true one; 2 / sqrt(n) is far."""
    ordered = found.double().flatten().sort().values
    n = ordered.numel()
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf(ordered) - steps).abs(), (cdf(ordered) - steps + 1 / n).abs()).max()
    assert distance < 2 / math.sqrt(n)


def normal_cdf(mean, std):
    return lambda x: 0.5 * (1 + torch.erf((x - mean) / (std * math.sqrt(2))))


def uniform_cdf(low, high):
    return lambda x: ((x - low) / (high - low)).clamp(0, 1)


SHAPE = (200, 150)


@pytest.mark.parametrize(
    ("fill", "mean", "std"),
    [
        (lambda w: w.normal_(), 0, 1),
        (lambda w: w.normal_(0.5), 0.5, 1),
        (lambda w: init.normal_(w, mean=0.0, std=0.02), 0, 0.02),
        (lambda w: init.normal_(w, mean=-3.0, std=0.5), -3, 0.5),
        (lambda w: w.data.normal_(std=0.1), 0, 0.1),
        (lambda w: init.xavier_normal_(w), 0, math.sqrt(2 / 350)),
        (lambda w: init.kaiming_normal_(w), 0, math.sqrt(2 / 150)),
        (lambda w: w.normal_(0, 1).mul_(0.3).add_(1.0), 1, 0.3),
    ],
)
def test_normal(fill, mean, std):
    found = values(lambda: Made(fill, SHAPE))
    assert float(found.mean()) == pytest.approx(mean, abs=5 * std / math.sqrt(found.numel()))
    assert float(found.std()) == pytest.approx(std, rel=0.02)
    same_distribution(found, normal_cdf(mean, std))


@pytest.mark.parametrize(
    ("fill", "low", "high"),
    [
        (lambda w: w.uniform_(), 0, 1),
        (lambda w: w.uniform_(0.25), 0.25, 1),
        (lambda w: init.uniform_(w, -1.0, 1.0), -1, 1),
        (lambda w: init.uniform_(w, -0.1, 0.3), -0.1, 0.3),
        (lambda w: init.xavier_uniform_(w), -math.sqrt(6 / 350), math.sqrt(6 / 350)),
        (lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)), -1 / math.sqrt(150), 1 / math.sqrt(150)),
    ],
)
def test_uniform(fill, low, high):
    found = values(lambda: Made(fill, SHAPE))
    assert low <= float(found.min()) < float(found.max()) <= high
    same_distribution(found, uniform_cdf(low, high))


def test_truncated_normal():
    found = values(lambda: Made(lambda w: init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03), SHAPE))
    low, high = (0.5 * (1 + math.erf(x / 0.02 / math.sqrt(2))) for x in (-0.03, 0.03))
    assert float(found.abs().max()) <= 0.03
    same_distribution(found, lambda x: (normal_cdf(0, 0.02)(x) - low) / (high - low))


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (init.zeros_, torch.zeros(4, 6)),
        (init.ones_, torch.ones(4, 6)),
        (lambda w: init.constant_(w, 0.25), torch.full((4, 6), 0.25)),
        (lambda w: w.fill_(2).mul_(3).sub_(1).div_(2).neg_(), torch.full((4, 6), -2.5)),
        (lambda w: w.fill_(4).sqrt_().clamp_(max=1.5), torch.full((4, 6), 1.5)),
        (lambda w: w.zero_()[1].fill_(7), torch.zeros(4, 6).index_fill_(0, torch.tensor(1), 7)),
        (lambda w: w.copy_(torch.arange(24.0).view(4, 6)), torch.arange(24.0).view(4, 6)),
        (lambda w: w.data.copy_(torch.ones(6)), torch.ones(4, 6)),
        (lambda w: w.fill_(torch.tensor(3.0)), torch.full((4, 6), 3.0)),
        (lambda w: w.fill_(1.0).add_(2.0, alpha=3.0), torch.full((4, 6), 7.0)),
        (init.dirac_, torch.eye(4, 6)),
        (init.eye_, torch.eye(4, 6)),
    ],
)
def test_constants(fill, expected):
    """Exactly, or refused: never something else."""
    shape = (4, 6, 1) if fill is init.dirac_ else (4, 6)
    try:
        found = values(lambda: Made(fill, shape))
    except ConfigError as error:
        assert "'weight'" in str(error)
    else:
        assert torch.equal(found, expected.view(shape))


class Ready(nn.Module):
    def __init__(self):
        super().__init__()
        self.ones = nn.Parameter(torch.ones(5))
        self.steps = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.number = nn.Parameter(torch.tensor(1.5))


def test_values_that_constructors_write_directly():
    assert torch.equal(values(Ready, name="ones"), torch.ones(5))
    assert torch.equal(values(Ready, name="steps"), torch.arange(6.0).view(2, 3))
    assert torch.equal(values(Ready, name="number"), torch.tensor(1.5))
    assert torch.equal(
        values(Ready, name="steps", cut=Cut(1, 3), num_slices=2, index=0), torch.tensor([[0.0, 1], [3, 4]])
    )


def test_a_padding_row_stays_zero():
    found = values(lambda: nn.Embedding(9, 4, padding_idx=3))
    assert torch.equal(found[3], torch.zeros(4))
    assert (found[[0, 1, 2, 4, 5, 6, 7, 8]] != 0).all()
    assert torch.equal(
        values(lambda: nn.Embedding(9, 4, padding_idx=3), cut=Cut(0, 9), num_slices=2, index=0), found[:5]
    )


def test_values_drawn_in_a_constructor_are_the_same_on_every_rank():
    """Ranks come with different states of torch's own generator."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(50) * 0.1)

    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(values(Drawn))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(state)))
    assert torch.equal(*found)
    assert 0.05 < float(found[0].std()) < 0.2


# ---- what is not known is refused by name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Made(init.orthogonal_), r"'weight' is initialised \(its constructor calls 'orthogonal_'\)"),
        (lambda: Made(lambda w: init.sparse_(w.normal_(), 0.5)), r"'weight'.*'sparse_'"),
        (lambda: Made(lambda w: w.cauchy_()), r"'weight'.*'cauchy_'"),
        (lambda: Made(lambda w: w.zero_().T[1:3].fill_(1)), r"'weight'.*'fill_'"),
        (lambda: Made(lambda w: w.normal_().mul_(torch.arange(48.0))), r"'weight'.*'mul_'"),
        (lambda: Made(lambda w: w), r"'weight' is initialised \(nothing sets it\)"),
        (lambda: Made(lambda w: w[0].zero_()), "'weight'"),
        (lambda: Made(lambda w: w, (1024, 1024)), r"'weight' is initialised \(nothing sets it\)"),
    ],
)
def test_unknown_initialisation_names_the_weight(build, words):
    with pytest.raises(ConfigError, match=words) as caught:
        values(build)
    assert "\n" not in str(caught.value)


# ---- slices -------------------------------------------------------------------------------------------------------

FILLS = {
    "normal": lambda w: w.normal_(0, 0.02),
    "uniform": lambda w: w.uniform_(-1, 2),
    "truncated": lambda w: init.trunc_normal_(w),
    "row": lambda w: w.normal_()[-1].zero_(),
    "given": lambda w: w.copy_(torch.arange(w.numel(), dtype=torch.float32).view(w.shape)),
}


@settings(max_examples=40, deadline=None)
@given(
    fill=st.sampled_from(sorted(FILLS)),
    dim=st.integers(0, 2),
    groups=st.integers(1, 5),
    blocks=st.integers(1, 2),
    num_slices=st.integers(1, 6),
)
def test_slices_are_bit_for_bit_what_the_whole_has_there(fill, dim, groups, blocks, num_slices):
    shape = tuple(groups * blocks * 2 if d == dim else 3 + d for d in range(3))
    cut = Cut(dim, groups, blocks)
    whole = values(lambda: Made(FILLS[fill], shape))
    assert not whole.isnan().any()
    weight = Weight("weight", shape, 4, cut)
    for index in range(num_slices):
        local = values(lambda: Made(FILLS[fill], shape), cut=cut, num_slices=num_slices, index=index)
        for chunk in cut_chunks(weight, num_slices=num_slices, index=index):
            assert torch.equal(chunk.of_local(local), chunk.of_whole(whole))


def test_large_weights_are_filled_in_chunks_alike(monkeypatch):
    whole = values(lambda: Made(FILLS["normal"], (50, 30)))
    monkeypatch.setattr("rotorch.shard.materialize._BOX_ELEMENTS", 70)
    monkeypatch.setattr("rotorch.shard.materialize._THREAD_ELEMENTS", 70)
    assert torch.equal(values(lambda: Made(FILLS["normal"], (50, 30))), whole)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4, 5)])
def test_any_number_of_dims(shape):
    assert values(lambda: Made(lambda w: w.normal_(), shape)).isfinite().all()


# ---- seeds, names and dtypes ----------------------------------------------------------------------------------------


class TwoAlike(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(20, 30)
        self.b = nn.Linear(20, 30)


def test_values_are_a_function_of_seed_and_name():
    assert torch.equal(values(TwoAlike, name="a.weight"), values(TwoAlike, name="a.weight"))
    a, b = (values(TwoAlike, name=f"{n}.weight") for n in "ab")
    other = values(TwoAlike, name="a.weight", seed=1)
    for x, y in ((a, b), (a, other)):
        assert not torch.equal(x, y)
        assert abs(float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])) < 0.15


def test_neighbours_do_not_depend_on_each_other():
    found = values(lambda: Made(FILLS["normal"], SHAPE)).flatten()
    for step in (1, 2, SHAPE[1]):
        pairs = torch.stack([found[:-step], found[step:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.03
    assert found.unique().numel() > 0.99 * found.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_hold_the_same_numbers_rounded(dtype):
    exact = values(lambda: Made(FILLS["normal"]), dtype=torch.float64)
    assert torch.equal(values(lambda: Made(FILLS["normal"]), dtype=dtype), exact.to(dtype))


# ---- building on meta ---------------------------------------------------------------------------------------------


def test_buffers_are_real_and_parameters_are_not(tiny):
    with rotorch.on_meta():
        module = causal_lm(load_config(tiny("llama")))
    assert all(p.is_meta for p in module.parameters())
    assert all(not b.is_meta and b.isfinite().all() for b in module.buffers())


def test_nothing_of_it_stays_after_an_error():
    register = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), rotorch.on_meta():
        raise ZeroDivisionError
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_requires_grad_and_attributes_are_kept():
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            parameter = nn.Parameter(torch.ones(3), requires_grad=False)
            parameter.tag = "kept"
            self.weight = parameter

    module, _ = recipes_of(Tagged)
    assert module.weight.tag == "kept"
    assert not module.weight.requires_grad


def test_one_parameter_in_two_places_stays_one():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(3))
            self.first = weight
            self.second = weight
            self.third = self.first

    module, recipes = recipes_of(Shared)
    assert module.first is module.second is module.third
    assert list(recipes) == ["first"]


def test_a_model_built_on_torchs_own_meta_device_has_recipes_too():
    with torch.device("meta"):
        module = TwoAlike()
    recipes = take_recipes(module)
    assert sorted(recipes) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    watched = recipes_of(TwoAlike)[1]
    assert [(i.op, i.args) for i in recipes["a.weight"]] == [(i.op, i.args) for i in watched["a.weight"]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2", "mixtral"])
def test_families_are_initialised_as_their_own_code_does(tiny, family):
    config = load_config(tiny(family))
    with rotorch.on_meta():
        module = causal_lm(config)
    recipes = take_recipes(module)
    torch.manual_seed(0)
    theirs = {name: p.detach() for name, p in causal_lm(config).named_parameters()}
    assert sorted(recipes) == sorted(theirs)
    for name, parameter in theirs.items():
        weight = Weight(name, tuple(parameter.shape), 4)
        local = torch.empty(weight.shape)
        held = ShardedWeight(weight, local, cut_chunks(weight, num_slices=1, index=0), nn.Parameter(local))
        initialise({name: held}, recipes=recipes, seed=0)
        if float(parameter.std()) == 0:
            assert torch.equal(local, parameter), name
        else:
            assert float(local.mean()) == pytest.approx(float(parameter.mean()), abs=0.01), name
            assert float(local.std()) == pytest.approx(float(parameter.std()), rel=0.1), name


@pytest.mark.parametrize("fill", [init.normal_, init.uniform_, init.trunc_normal_])
@pytest.mark.parametrize(("shape", "dim", "index"), [((3, 17001), 1, 1), ((5, 7, 1003), 0, 2), ((16411,), 0, 0)])
def test_values_larger_than_a_box_have_the_same_bits_under_any_cut(fill, shape, dim, index):
    """float64 shows the last bit of the functions that make them, which depends on where torch's vectors end."""

    def build():
        return Made(fill, shape)

    cut = Cut(dim, shape[dim])
    whole = values(build, dtype=torch.float64)
    (rows,) = cut.ranges(shape[dim], num_slices=3, index=index)
    got = values(build, cut=cut, num_slices=3, index=index, dtype=torch.float64)
    assert torch.equal(got, whole.narrow(dim, rows.start, rows.length))
    assert len(got.unique()) == got.numel()


def test_values_that_are_there_stay_beside_weights_on_meta(tiny):
    with torch.device("meta"):
        module = causal_lm(load_config(tiny("llama")))
    module.lm_head = nn.Linear(3, 2)
    before = module.lm_head.weight.detach().clone()
    recipes = take_recipes(module)
    assert torch.equal(module.lm_head.weight, before)
    assert recipes["model.embed_tokens.weight"] and "lm_head.weight" not in recipes
