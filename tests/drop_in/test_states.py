"""State dicts, published directories and texts of parallel modules, held against one process."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lockstep import build
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM

import rotorch
from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", "rtp=2[transport=send_receive]", "megatron=2", "atp=2x1", "pp=2")
THROUGH_TORCH = ("fsdp=2", "rtp=2", "pp=2")  # cut as torch cuts, unevenly, and by layers
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
GRIDS = ("summa=2x2", "tesseract=2x2x1")
TEXTS = {"text": {}, "without a cache": {"use_cache": False}, "beams": {"num_beams": 2}}
AS_LONG = ([[5, 9, 2, 7]], [[3, 1, 4, 1]])  # rows of a grid need batches of one shape
PROMPTS = ([[5, 9, 2, 7]], [[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture(scope="module")
def config(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 91
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 96, 6, 3  # uneven over two ranks
    config.tie_word_embeddings = True
    return config


@pytest.fixture(scope="module")
def said(config, tmp_path_factory):
    """Results of each rank, by layout."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "atp", "pp"])
    folder = tmp_path_factory.mktemp("states")
    return run_ranks(everything, config, folder, num_ranks=2, timeout_s=300), folder


def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def everything(config, folder):
    return {layout: of_layout(config, layout, folder / str(number)) for number, layout in enumerate(LAYOUTS)}


def copies(model):
    """True for each copy (of the model, its average, its state) that keeps the values when the model's change."""
    values = model.full_state_dict(all_ranks=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    both, average = copy.deepcopy({"model": model, "optimizer": optimizer}), AveragedModel(model)
    copied, owned = both["model"], both["optimizer"].param_groups[0]["params"]
    average.update_parameters(model)
    with torch.no_grad():
        kept = copy.deepcopy(list(model.parameters()))
        for parameter, value in zip(model.parameters(), kept, strict=True):
            value.add_(parameter)  # an average of one's own
    states = copy.deepcopy(model.state_dict()), {n: t.detach().clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    found = [copied.full_state_dict(all_ranks=True), average.module.full_state_dict(all_ranks=True)]
    for state in states:
        model.load_state_dict(state)
        found.append(model.full_state_dict(all_ranks=True))
    same = [all(torch.equal(values[name], value) for name, value in each.items()) for each in found]
    pairs = zip(kept, model.parameters(), strict=True)
    same.append(all(torch.equal(average.full_tensor(), 2 * own.full_tensor()) for average, own in pairs))
    same.append(all(a is b for a, b in zip(owned, copied.parameters(), strict=True)))
    named = [isinstance(each, LlamaForCausalLM) for each in (copied, average.module)]
    copied.close()
    average.module.close()
    return same + named


def through_torch(model, whole, folder):
    """True for each way of torch's `state_dict` functions that ends with the values of `whole`."""
    first, empty = torch.distributed.get_rank() == 0, {n: torch.zeros_like(t) for n, t in whole.items()}

    def arrived():
        found = get_model_state_dict(model, options=FULL)
        same = found.keys() == whole.keys() and all(torch.equal(found[name], value) for name, value in whole.items())
        model.load_state_dict(empty)
        return same

    found = {}
    set_model_state_dict(model, {n: t.clone() for n, t in whole.items()}, options=FULL)
    found["set on all ranks"] = arrived()
    set_model_state_dict(model, {n: t.clone() for n, t in whole.items()} if first else {}, options=BROADCAST)
    found["set by the first rank"] = arrived()
    model.load_state_dict(whole)
    dcp.async_save(model.state_dict(), checkpoint_id=folder / "async").result()
    model.load_state_dict(empty)
    dcp.load(model.state_dict(), checkpoint_id=folder / "async")
    model.values_changed()
    found["saved in the background"] = arrived()
    on_one = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found["on the first rank alone"] = (on_one.keys() == whole.keys()) == first
    return found


def moments_through_torch(model):
    """True for each way of setting moments that ends with those of another optimizer, and with its next step."""
    first, ids = torch.distributed.get_rank() == 0, torch.tensor(AS_LONG[model.batch_rank])

    def step(optimizer):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(optimizer)
    moments, weights = get_optimizer_state_dict(model, optimizer, options=FULL), model.full_state_dict(all_ranks=True)
    step(optimizer)
    stepped, found = model.full_state_dict(all_ranks=True), {}
    for how, options, given in (
        ("on all ranks", FULL, moments),
        ("by the first rank", BROADCAST, moments if first else {}),
    ):
        model.load_state_dict(weights)
        another = torch.optim.AdamW(model.parameters(), lr=1e-2)
        set_optimizer_state_dict(model, another, copy.deepcopy(given), options=options)
        got = get_optimizer_state_dict(model, another, options=FULL)["state"]
        found[f"moments set {how}"] = all(
            torch.equal(got[name][key], value) for name, of in moments["state"].items() for key, value in of.items()
        )
        step(another)
        now = model.full_state_dict(all_ranks=True)
        found[f"a step from moments set {how}"] = all(torch.allclose(now[n], t, rtol=1e-6) for n, t in stepped.items())
    return found


def lengths(model, ids):
    """Numbers of tokens that pass a layer at a time."""
    seen = []
    handle = model.model.norm.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    handle.remove()
    return seen


def of_layout(config, layout, folder):
    config = copy.deepcopy(config)  # parallelize changes that of the model
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    other = build(config, seed=2)
    said = {"full": model.full_state_dict()}
    model.save_pretrained(folder / "published")
    said["use_cache"] = LlamaConfig.from_pretrained(folder / "published").use_cache, model.config.use_cache
    said["safetensors"] = refusal(lambda: save_file(model.state_dict(), folder / "parts.safetensors"))
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
    said["torch.save"] = refusal(lambda: torch.save(model.state_dict(), io.BytesIO()))
    said["copies"] = copies(model)
    if layout in THROUGH_TORCH:
        said["through torch"] = through_torch(model, build(config, seed=3).state_dict(), folder)
        if not layout.startswith("pp"):
            said["through torch"] |= moments_through_torch(model)
        model.load_state_dict(build(config, seed=1).state_dict())
    said["strict"] = refusal(lambda: model.load_state_dict({**other.state_dict(), "unheard.of": torch.ones(1)}))
    said["shape"] = refusal(lambda: model.load_state_dict({"model.norm.weight": torch.ones(3)}, strict=False))
    said["half"] = refusal(model.half)
    model.load_state_dict(other.state_dict())
    said["loaded"] = model.full_state_dict(all_ranks=True)
    dcp.load(model.state_dict(), checkpoint_id=folder / "dcp")
    model.values_changed()
    said["again"] = model.full_state_dict(all_ranks=True)
    if not layout.startswith("pp"):
        said |= texts(model, PROMPTS[model.batch_rank])
    model.close()
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in said.items()}


def texts(model, prompt):
    said, ids = {}, torch.tensor(prompt)
    with exact_arithmetic():
        model.eval()
        for name, more in TEXTS.items():
            said[name] = model.generate(ids, max_new_tokens=4 + model.batch_rank, do_sample=False, **more).numpy()
        said["lengths"] = lengths(model, ids)
    return said


def texts_of_grids(config):
    models = {layout: rotorch.parallelize(build(config, seed=1), layout, device="cpu") for layout in GRIDS}
    return {layout: texts(model, AS_LONG[model.batch_rank]) for layout, model in models.items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_states_come_and_go(said, config, layout):
    ranks, _ = said
    first, second = (build(config, seed=seed).state_dict() for seed in (1, 2))
    same(ranks[0][layout]["full"], first)
    assert ranks[1][layout]["full"] == {}
    for rank in ranks:
        same(rank[layout]["loaded"], second)
        same(rank[layout]["again"], first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_directories_are_those_of_one_process(said, config, layout):
    from transformers import AutoModelForCausalLM

    _, folder = said
    published = folder / str(LAYOUTS.index(layout)) / "published"
    same(
        AutoModelForCausalLM.from_pretrained(published, dtype="float64").state_dict(),
        build(config, seed=1).state_dict(),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_have_the_values_and_go_their_own_ways(said, layout):
    assert [rank[layout]["copies"] for rank in said[0]] == [[True] * 8] * 2


@pytest.mark.parametrize("layout", THROUGH_TORCH)
def test_states_of_torch_are_whole_if_asked_for(said, layout):
    for rank in said[0]:
        assert {how for how, right in rank[layout]["through torch"].items() if not right} == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_is_refused_in_one_line(said, layout):
    for rank in said[0]:
        found = rank[layout]
        assert found["use_cache"] == (True, False)
        assert layout == "ddp=2" or "write model.full_state_dict()" in found["safetensors"]
        assert layout == "ddp=2" or "write model.full_state_dict()" in found["torch.save"]
        assert "unheard.of" in found["strict"]
        assert "size mismatch for model.norm.weight" in found["shape"]
        assert "would become torch.float16" in found["half"]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("pp")])
def test_texts_are_those_of_one_process(said, config, layout):
    for number, rank in enumerate(said[0]):
        share = number if layout.startswith(("ddp", "fsdp", "rtp")) else 0
        check_texts(rank[layout], config, PROMPTS[share], share=share)


@pytest.mark.slow
def test_texts_of_grids_are_those_of_one_process(config):
    config = copy.deepcopy(config)
    config.vocab_size, config.num_attention_heads, config.num_key_value_heads = 92, 8, 2
    load_step_code(["summa", "tesseract"])
    for rank, found in enumerate(run_ranks(texts_of_grids, config, num_ranks=4)):
        for layout in GRIDS:
            check_texts(found[layout], config, AS_LONG[rank // 2], share=rank // 2)


def check_texts(found, config, prompt, *, share):
    model, ids = build(config, seed=1).eval(), torch.tensor(prompt)
    for name, more in TEXTS.items():
        with exact_arithmetic():
            expected = model.generate(ids, max_new_tokens=4 + share, do_sample=False, **more)
        assert found[name].tolist() == expected.tolist(), name
    assert found["lengths"] == [ids.shape[1], 1, 1]  # keys and values are kept
