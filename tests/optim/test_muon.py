"""Muon on parts of weights: equal to torch's on one process, in as little memory and as few bytes as it says."""

from functools import cache, partial
from itertools import chain

import pytest
import torch
from muon_runs import config_of, memory_of_an_update, on_a_rank, on_one_process
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

BAR = 1e-10
BLOCK_NUMEL = 1 << 16
"""Elements of a block in which momentum is made what goes to the owner."""
CONFIGS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "gpt_neox": {"num_attention_heads": 8},  # queries, keys and values fused
}


def unclamped():
    """Options of the longest steps that torch's own has: 2.13 knows two ways to scale them, later ones three."""
    options = {"adjust_lr_fn": "spectral_unclamped"}
    try:
        torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], **options)
    except ValueError:
        return {"adjust_lr_fn": "original"}
    return options


CASES = {
    2: [
        ("llama", "rtp=2", {}),
        ("llama", "rtp=2[transport=send_receive]", {}),
        ("llama", "fsdp=2", {}),
        ("llama", "megatron=2", {}),
        ("llama", "ddp=2", {}),
        ("tied", "rtp=2", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        ("tied", "fsdp=2", {"momentum": 0.8, "ns_steps": 3, **unclamped()}),
        ("gpt_neox", "rtp=2", {}),
        ("tied", "megatron=2", {}),
        ("gpt_neox", "fsdp=2", {}),
        ("gpt_neox", "megatron=2", {}),
    ],
    3: [
        ("llama", "rtp=3", {}),
        ("llama", "rtp=3[transport=send_receive]", {}),
        ("llama", "fsdp=3", {}),
        ("llama", "megatron=3", {}),
        ("llama", "tesseract=1x1x3[zero=true]", {}),
        ("gpt_neox", "rtp=3", {}),
    ],
    4: [
        ("llama", "tesseract=2x2x1", {}),
        ("tied", "tesseract=2x2x1", {}),
        ("gpt_neox", "tesseract=2x2x1", {}),
        ("gpt_neox", "tesseract=1x1x4[zero=true]", {}),
        ("llama", "ddp=2,rtp=2", {}),
        ("tied", "ddp=2,fsdp=2", {}),
    ],
}
EVEN = ("rtp=2", "fsdp=2", "megatron=2", "tesseract=2x2x1")
"""Layouts that cut each matrix of "llama" into as many equal parts as there are ranks."""
QUICK = {
    ("rtp=2", "llama"),
    ("fsdp=2", "tied"),
    ("megatron=2", "gpt_neox"),
    ("ddp=2", "llama"),
    ("rtp=3[transport=send_receive]", "llama"),
    ("rtp=3", "gpt_neox"),
    ("tesseract=1x1x3[zero=true]", "llama"),
    ("tesseract=2x2x1", "tied"),
}
"""Each strategy, model, option and cut of these once, in three steps; all of them take twenty."""
CELLS = [
    pytest.param(steps, num_ranks, *case, marks=() if steps == 3 else pytest.mark.slow)
    for steps in (3, 20)
    for num_ranks, cases in CASES.items()
    for case in cases
    if steps == 20 or (case[1], case[0]) in QUICK
]


@pytest.fixture(scope="module")
def configs(tiny):
    paths = {"gpt_neox": "gpt_neox"}
    return {name: config_of(tiny(paths.get(name, "llama")), **changes) for name, changes in CONFIGS.items()}


@pytest.fixture(scope="module")
def found(configs):
    """Returns results of every rank after so many steps, by layout and model; one fork for all cases of a size."""
    return cache(partial(after_steps, configs))


def after_steps(configs, num_steps):
    chosen = {
        num_ranks: [case for case in cases if num_steps == 20 or (case[1], case[0]) in QUICK]
        for num_ranks, cases in CASES.items()
    }
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "tesseract"])
    expected = {}
    for name, _, muon in chain(*chosen.values()):
        key = name, tuple(muon.items())
        if key not in expected:
            expected[key] = on_one_process(configs[name], num_steps=num_steps, **muon)

    def everything(cases):
        return [
            on_a_rank(configs[name], layout, expected[name, tuple(muon.items())], num_steps=num_steps, **muon)
            for name, layout, muon in cases
        ]

    results = {}
    for num_ranks, cases in chosen.items():
        of_ranks = run_ranks(everything, cases, num_ranks=num_ranks)
        for number, (name, layout, _) in enumerate(cases):
            results[layout, name] = [of_rank[number] for of_rank in of_ranks]
    return results


@pytest.mark.parametrize(("steps", "num_ranks", "name", "layout", "muon"), CELLS)
def test_steps_equal_those_of_one_process(found, steps, num_ranks, name, layout, muon):
    for of_rank in found(steps)[layout, name]:
        assert of_rank["error"][1] <= BAR, of_rank["error"]
        assert of_rank["state_is_cut"]


@pytest.mark.parametrize(("steps", "num_ranks", "name", "layout", "muon"), CELLS)
def test_each_part_goes_to_the_owner_and_comes_back_once(found, steps, num_ranks, name, layout, muon):
    """To the byte, in bfloat16: to the owner what it lacks of one copy, back what each rank holds."""
    of_ranks = found(steps)[layout, name]
    there, back = {}, {}
    for matrix, numel in of_ranks[0]["numels"].items():
        parts = [of_rank["parts"][matrix] for of_rank in of_ranks]
        own = {part for part in parts if part}
        there[matrix], back[matrix] = {numel - part for part in own}, {sum(parts) - part for part in own}
    least, most = (sum(2 * (end(there[matrix]) + end(back[matrix])) for matrix in there) for end in (min, max))
    assert least <= sum(of_rank["sent"] for of_rank in of_ranks) <= most
    assert not any(of_rank["not_counted"] for of_rank in of_ranks)
    if layout in EVEN and name == "llama":  # 2 (n-1)/n of them
        assert least == most == 2 * 2 * (num_ranks - 1) * sum(of_ranks[0]["numels"].values()) // num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (2, ["rtp=2", "fsdp=2"]),
        pytest.param(2, ["ddp=2", "megatron=2"], marks=pytest.mark.slow),
        pytest.param(4, ["tesseract=2x2x1"], marks=pytest.mark.slow),
    ],
)
def test_an_update_takes_at_most_one_whole_matrix_and_its_gram_matrix(configs, num_ranks, layouts):
    config = config_of_size(configs["llama"], hidden_size=256, intermediate_size=768)
    for of_layouts in run_ranks(memory_of_an_update, config, layouts, num_ranks=num_ranks):
        for found in of_layouts:
            largest = max(found["numels"][name] + found["grams"][name] for name in found["numels"])
            assert found["most_bytes"] <= 4 * (largest + BLOCK_NUMEL), found["most_bytes"] / (4 * largest)


def config_of_size(config, **sizes):
    changed = type(config)(**config.to_dict())
    for name, size in sizes.items():
        setattr(changed, name, size)
    return changed


def test_plain_parameters_are_updated_as_torch_does():
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(12, 7)), nn.Parameter(torch.zeros(12, 7))
    theirs.data.copy_(ours)
    mine, torchs = rotorch.optim.Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1)
    for _ in range(3):
        ours.grad = torch.randn(12, 7)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
        mine.load_state_dict(mine.state_dict())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        ((3,), {}, "is no matrix. Give it to AdamW"),
        ((3, 3), {"lr": -1.0}, "lr=-1.0: write 0 or more"),
        ((3, 3), {"adjust_lr_fn": "rms"}, "write one of original, match_rms_adamw, spectral_unclamped"),
        ((3, 3), {"ns_steps": 100}, "write fewer than 100"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(shape, settings, said):
    with pytest.raises(ConfigError, match="Muon: .*" + said):
        rotorch.optim.Muon([nn.Parameter(torch.zeros(shape))], **settings)
