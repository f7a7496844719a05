"""Models that `peft.get_peft_model` has wrapped: cut as they are without it, exact, and saved as peft saves them."""

import gc
import weakref
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks

MESSAGES = "rtp=2[transport=send_receive]"
LAYOUTS = ("rtp=2", MESSAGES, "fsdp=2", "ddp=2", "megatron=2")
IDS = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(0))
ADAPTED = {
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "all layers": {"target_modules": "all-linear"},
    "a head that is trained": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "with magnitudes": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
}


def wrapped(adapted):
    """Grouped queries, and a vocabulary that two ranks cannot cut evenly; adapters that add something."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=61, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).double()
    module = peft.get_peft_model(module, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTED[adapted])).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return module


def two_steps(model, optimizer, shares, *, scale):
    """Losses and gradients of two steps of plain code."""
    losses, grads = [], {}
    for _ in range(2):
        optimizer.zero_grad()
        for share in shares:
            logits = model(input_ids=share).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), share[:, 1:].flatten())
            (loss * scale).backward()
            losses.append(loss.item())
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads


def on_one_process(adapted, num_shares, out):
    model = wrapped(adapted)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses, grads = two_steps(model, optimizer, IDS.chunk(num_shares), scale=1 / num_shares)
    model.save_pretrained(out)
    with torch.no_grad(), model.disable_adapter():
        without = model(input_ids=IDS).logits
    said = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False).tolist()
    return losses, {n: g.numpy() for n, g in grads.items()}, without.numpy(), said


def on_ranks(layout, directory):
    found = {}
    for adapted in ADAPTED:
        model = rotorch.parallelize(wrapped(adapted), layout, device="cpu")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        losses, grads = two_steps(model, optimizer, [IDS.chunk(model.num_batch_ranks)[model.batch_rank]], scale=1.0)
        grads = {n: model.full_tensor(n, grad=True).numpy() for n in model.weights if n in grads}
        with torch.no_grad(), model.disable_adapter():
            without = model(input_ids=IDS).logits
        said = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False).tolist()
        model.save_pretrained(directory / adapted)
        held = {n: (h.local.numel(), h.weight.numel) for n, h in model.weights.items() if "base_layer" in n}
        found[adapted] = losses, grads, without.numpy(), said, held, (model.batch_rank, model.num_batch_ranks)
        model.close()
    return found


@pytest.fixture(scope="module")
def warmed():
    load_step_code(["rtp", "fsdp", "ddp", "megatron"])
    describe(wrapped("some layers"))


@pytest.fixture(scope="module")
def of_one_process(warmed, tmp_path_factory):
    """Returns what one process finds by kind of adapters, of a batch in so many shares, and where it saves them."""

    def each(num_shares, folder):
        return {adapted: on_one_process(adapted, num_shares, folder / adapted) for adapted in ADAPTED}

    @cache
    def of(num_shares):
        folder = tmp_path_factory.mktemp("alone")
        return run_ranks(each, num_shares, folder, num_ranks=1)[0], folder

    return of


def quick(*layouts):
    """All layouts, of which these are quick; the file has each of the first three somewhere."""
    return [layout if layout in layouts else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", quick("rtp=2", "fsdp=2"))
def test_ranks_do_as_one_process(of_one_process, tmp_path, layout):
    expected, folder = of_one_process(1 if layout.startswith("megatron") else 2)
    ranks = run_ranks(on_ranks, layout, tmp_path / "ranks", num_ranks=2)
    for adapted in ADAPTED:
        losses, grads, without, said = expected[adapted]
        for found in ranks:
            theirs, their_grads, their_without, they_said, held, (share, num_shares) = found[adapted]
            assert theirs == pytest.approx(losses[share::num_shares], rel=1e-10), adapted
            assert grads.keys() == their_grads.keys(), adapted
            for name, grad in grads.items():
                assert abs(their_grads[name] - grad).max() <= 1e-10 * max(abs(grad).max(), 1e-3), (adapted, name)
            assert abs(their_without - without).max() <= 1e-10 * abs(without).max(), adapted
            assert they_said == said, adapted
            assert layout == "ddp=2" or all(2 * own == whole for own, whole in held.values()), adapted
        ours, alone = (peft.load_peft_weights(path / adapted) for path in (tmp_path / "ranks", folder))
        assert ours.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-10), (adapted, name)


ADAPTERS = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])


def adapters_afterwards(layout, directory):
    """As `on_ranks`, but the adapters of "some layers" come when the model is parallel, from those files."""
    base = wrapped("some layers").unload().requires_grad_(True)
    parallel = rotorch.parallelize(base, layout, device="cpu")
    shares = [IDS.chunk(parallel.num_batch_ranks)[parallel.batch_rank]]
    with torch.no_grad():
        before = parallel(input_ids=IDS).logits
    torch.manual_seed(torch.distributed.get_rank())  # ranks would draw different adapters
    model = peft.get_peft_model(parallel, ADAPTERS)
    with torch.no_grad():
        same_as_before = torch.equal(model(input_ids=IDS).logits, before)
    drawn = {n: w.detach().clone() for n, w in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(directory / "given"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses, _ = two_steps(model, optimizer, shares, scale=1.0)
    with torch.no_grad(), model.disable_adapter():
        without = model(input_ids=IDS).logits
    said = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False).tolist()
    model.save_pretrained(directory / "saved" / str(torch.distributed.get_rank()))
    held = {n: (h.local.numel(), h.weight.numel) for n, h in parallel.weights.items() if "base_layer" in n}
    rest = {name: getattr(model, name) for name in ("batch_rank", "num_batch_ranks")}
    parallel.close()
    return losses, without.numpy(), said, held, rest, same_as_before, {n: w.numpy() for n, w in drawn.items()}


@pytest.mark.parametrize("layout", quick(MESSAGES, "fsdp=2"))
def test_adapters_may_come_after_parallelize(of_one_process, tmp_path, layout):
    wrapped("some layers").save_pretrained(tmp_path / "given")
    ranks = run_ranks(adapters_afterwards, layout, tmp_path, num_ranks=2)
    expected, folder = of_one_process(1 if layout.startswith("megatron") else 2)
    losses, _, without, said = expected["some layers"]
    alone = peft.load_peft_weights(folder / "some layers")
    for rank, (theirs, their_without, they_said, held, rest, same_as_before, drawn) in enumerate(ranks):
        assert same_as_before  # new adapters add nothing
        assert all((drawn[name] == value).all() for name, value in ranks[0][-1].items())
        assert {name for name, value in drawn.items() if value.any()} == {name for name in drawn if "lora_A" in name}
        assert theirs == pytest.approx(losses[rest["batch_rank"] :: rest["num_batch_ranks"]], rel=1e-10)
        assert abs(their_without - without).max() <= 1e-10 * abs(without).max()
        assert they_said == said
        assert held and (layout == "ddp=2" or all(2 * own == whole for own, whole in held.values()))
        ours = peft.load_peft_weights(tmp_path / "saved" / str(rank))
        assert ours.keys() == alone.keys()
        assert all(torch.allclose(ours[name], value, rtol=0, atol=1e-10) for name, value in alone.items())


LATE = {
    "magnitudes": (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "mixed torch.Tensor and DTensor"),
    "some tokens": (
        peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1]),
        "alora_invocation_tokens=[1]: into a model that is",
    ),
    "whole copies": (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "cannot be copied"),
    "another kind": (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "peft_type="),
}


def late_adapters_that_do_not_go():
    said = {}
    for name, (config, _) in LATE.items():
        model = rotorch.parallelize(wrapped("some layers").unload(), "rtp=2", device="cpu")
        try:
            peft.inject_adapter_in_model(config, model)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        model.close()
    model = rotorch.parallelize(wrapped("some layers").unload(), "rtp=2", device="cpu")
    try:
        model.load_adapter("saved")
    except ConfigError as error:
        said["transformers' own"] = str(error)
    for name in ("first", "second"):
        try:
            peft.inject_adapter_in_model(ADAPTERS, model, adapter_name=name)
            with torch.no_grad():
                model(input_ids=IDS)
        except ConfigError as error:
            said[name] = str(error)
    return said


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_adapters_that_need_whole_weights_are_refused_after_parallelize(warmed):
    for said in run_ranks(late_adapters_that_do_not_go, num_ranks=2):
        for name, (_, expected) in LATE.items():
            assert expected in said[name], name
        assert "load_adapter('saved') of a LlamaForCausalLM that is spread over ranks" in said["transformers' own"]
        assert "first" not in said and "further adapters" in said["second"]


def test_adapters_of_another_kind_are_refused():
    module = wrapped("some layers").merge_and_unload()
    module = peft.get_peft_model(module, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="PROMPT_TUNING: ranks can cut adapters of LoRA only"):
        rotorch.parallelize(module, "rtp=2", device="cpu")


def test_a_model_called_in_a_plain_loop_keeps_no_losses():
    module, seen = wrapped("some layers").merge_and_unload().requires_grad_(True), []
    own = module.loss_function

    def seeing(*args, **kwargs):
        loss = own(*args, **kwargs)
        seen.append(weakref.ref(loss))
        return loss

    module.loss_function = seeing
    model = rotorch.parallelize(module, "single", device="cpu")
    model(input_ids=IDS, labels=IDS, num_items_in_batch=torch.tensor(44)).loss.backward()
    gc.collect()
    assert [kept() for kept in seen] == [None]
