"""megatron with activations cut along the sequence: exact, to the byte, less of them, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import rotorch
from rotorch._torch_private import TorchDispatchMode, tree_flatten
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.traffic import Kind, MicroBatch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict, load_config
from rotorch.models.trial.sequence import why_not_along_tokens
from rotorch.strategies import parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import micro_batch_of, sent_and_said
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("megatron=2[sequence_parallel=true]", "qwen3"),  # norms of heads inside of what is cut
        pytest.param(
            "megatron=2[sequence_parallel=true]", "gemma2", marks=pytest.mark.slow
        ),  # norms behind attentions and MLPs
        ("megatron=2[sequence_parallel=true]", "gpt_neox"),  # biases behind sums, layer norms side by side
        ("megatron=2[sequence_parallel=true]", "olmo2"),  # attentions that all ranks compute whole
        ("ddp=2,megatron=2[sequence_parallel=true]", "llama"),
        pytest.param("megatron=2[sequence_parallel=true,transport=messages]", "mixtral", marks=pytest.mark.slow),
        pytest.param("pp=2,megatron=2[sequence_parallel=true]", "olmo2", marks=pytest.mark.slow),
        pytest.param("megatron=3[sequence_parallel=true]", "olmo2", marks=pytest.mark.slow),
        pytest.param("megatron=4[sequence_parallel=true]", "gpt_neox", marks=pytest.mark.slow),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=1, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.num_modules_compared > 12  # also those inside of layers, which have a part of the tokens


def batch_for(config, *, num_tokens=8):
    sizes = {"num_rows": 2, "num_tokens": num_tokens, "vocab_size": config.get_text_config().vocab_size}
    return global_batch(seed=0, step=0, num_shares=1, num_micro_batches=1, **sizes)


def metered(config, parallel, num_tokens=8):
    """Bytes that a step sends, and what the formulas say."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    return sent_and_said(module, parallel, batch=batch_for(config, num_tokens=num_tokens))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2"])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 8), (4, 10)])
def test_bytes_are_the_formulas_to_the_byte(tiny, family, num_ranks, num_tokens):
    """Also where shards are not equally long. One process as one of the ranks: who it is does not matter."""
    config = load_config(tiny(family))
    with as_rank(1, num_ranks=num_ranks):
        sent, expected = metered(config, f"megatron={num_ranks}[sequence_parallel=true]", num_tokens)
    assert sent == expected
    assert sent[Kind.ALL_GATHER] > sent[Kind.REDUCE_SCATTER] > 0


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_in_parts_are_summed_where_their_rows_are(tiny, family, rank):
    config = load_config(tiny(family))
    with as_rank(rank, num_ranks=6):
        sent, expected = metered(config, "fsdp=3,megatron=2[sequence_parallel=true]")
    assert sent == expected


def test_a_layer_sends_as_much_as_without_but_for_what_it_gathers_again(tiny):
    config = load_config(tiny("llama"))
    with rotorch.on_meta():
        described = describe(causal_lm(config), tokens=True)
    batch, sent = MicroBatch(2, 8), {}
    for text in ("megatron=4", "megatron=4[sequence_parallel=true]"):
        (strategy,) = parse_parallel(text)
        spec = strategy.units_of(described)
        units = [u for u in spec.units if u.name.startswith("model.layers.1.")]
        sent[text] = sum(t.sent_bytes for u in units for t in strategy.activation_transfers(u, batch=batch))
    hidden_bytes = 2 * 8 * config.hidden_size * 4
    once, more = sent.values()
    assert once == 4 * 2 * 3 * hidden_bytes // 4
    assert more - once == 2 * 3 * hidden_bytes // 4  # inputs of an attention and an MLP, in backward


def slots_held(config, parallel):
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), parallel, device="cpu").materialize(seed=0)
    batch = batch_for(config, num_tokens=150)
    model.forward_backward(batch)
    held = sum(slot.nbytes for slot in model.sharded.slots())
    said = model.strategies[0].layout_of(model.spec, batch=micro_batch_of(model, batch))
    model.close()
    return held, said.slots_bytes


def test_slots_in_shared_memory_are_the_layouts_to_the_byte(tiny):
    values = {**json.loads(Path(tiny("llama")).read_text()), "num_hidden_layers": 1}
    layout = "megatron=2[sequence_parallel=true,transport=shared_memory]"
    for held, said in run_ranks(slots_held, config_from_dict(values, source="test"), layout, num_ranks=2):
        assert held == said > 0


# ---- what a rank keeps ---------------------------------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Memory that operations make, by address; hooks of autograd would change what is saved."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def live_bytes(self):
        """Bytes of what is alive, each piece once."""
        return sum({ref.cdata: num_bytes for ref, num_bytes in self.made if not ref.expired()}.values())


def kept(config, parallel, num_tokens):
    """Bytes that autograd keeps of a forward pass, each storage once, without weights."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=0)
    batch = batch_for(config, num_tokens=num_tokens)
    with model.parallel.unsharded() as callee:
        model.sharded.start()
        with Storages() as storages:
            output = callee(input_ids=batch["input_ids"], use_cache=False)
        found = storages.live_bytes()
    assert output.logits is not None
    model.close()
    return found


def test_a_rank_keeps_less_of_a_sequence(tiny):
    """Of what a layer keeps outside of attention and MLP, a half: five of its tensors of [tokens, hidden] are whole
    without it (two norms' inputs, their results before the scale, the residual sum)."""
    values = json.loads(Path(tiny("llama")).read_text())
    two, three = (config_from_dict({**values, "num_hidden_layers": n}, source="test") for n in (2, 3))
    whole, cut = (
        [run_ranks(kept, config, layout, 64, num_ranks=2)[1] for config in (two, three)]
        for layout in ("megatron=2", "megatron=2[sequence_parallel=true]")
    )
    of_tokens = 2 * 64 * two.hidden_size * 4
    # What is gathered behind all layers is kept once, however many there are.
    assert (whole[1] - whole[0]) - (cut[1] - cut[0]) >= 5 * of_tokens // 2
    assert cut[1] > cut[0]


# ---- who drops what ------------------------------------------------------------------------------------------------


def drawn(config, parallel, num_steps):
    """Losses, copies of weights that are whole, and what a dropout between two modules left of the tokens of a step."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=0)
    torch.manual_seed(100 + torch.distributed.get_rank())
    between = []
    layer = module.get_submodule("gpt_neox.layers.0.post_attention_dropout")
    layer.register_forward_hook(lambda _, __, output: between.append((output == 0).float().mean(-1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(float(model.forward_backward(batch_for(config, num_tokens=7))))
        optimizer.step()
    whole = {name: h.local.clone() for name, h in model.weights.items() if h.num_holders > 1}
    model.close()
    return losses, whole, between[0]


def test_shards_drop_apart_and_ranks_go_on_alike(tiny):
    config = load_config(tiny("gpt_neox"))
    config.hidden_dropout, config.attention_dropout, config.num_hidden_layers = 0.5, 0.2, 2
    first, second = run_ranks(drawn, config, "megatron=2[sequence_parallel=true]", 3, num_ranks=2)
    assert first[0] == second[0] and len(set(first[0])) == 3
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert (first[2].shape, second[2].shape) == ((2, 4), (2, 3))
    assert not torch.equal(first[2][:, :3], second[2])


def with_and_without_recomputation(config):
    """Loss and gradients of the same step, without and with the model's own gradient checkpointing."""
    found = []
    for is_recomputed in (False, True):
        with rotorch.on_meta():
            module = causal_lm(config).train()
        if is_recomputed:
            name = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"  # before v6
            getattr(module, f"{name}_checkpointing_enable")()
        model = rotorch.parallelize(module, "megatron=2[sequence_parallel=true]", device="cpu").materialize(seed=0)
        torch.manual_seed(5)
        loss = float(model.forward_backward(batch_for(config, num_tokens=7)))
        found.append((loss, {name: h.local_grad.clone() for name, h in model.weights.items()}))
        model.close()
    return found


def test_what_is_computed_again_drops_the_same_again(tiny):
    values = {**json.loads(Path(tiny("olmo2")).read_text()), "num_hidden_layers": 2, "attention_dropout": 0.5}
    config = config_from_dict(values, source="test")
    for kept, recomputed in run_ranks(with_and_without_recomputation, config, num_ranks=2):
        assert recomputed[0] == kept[0]
        for name, grad in kept[1].items():
            assert torch.allclose(recomputed[1][name], grad, rtol=1e-5, atol=1e-7), name


def one_step_of_other_lengths(config, layout):
    """Loss and gradients of micro-batches of other lengths."""
    torch.manual_seed(0)
    model = rotorch.parallelize(causal_lm(config).double(), layout, device="cpu")
    batches = [torch.arange(2 * num_tokens).view(2, num_tokens) for num_tokens in (7, 8, 12)]
    loss = float(model.forward_backward([{"input_ids": ids, "labels": ids} for ids in batches]))
    found = {name: model.full_tensor(name, grad=True) for name, _ in model.named_parameters()}
    model.close()
    return loss, found


def test_stages_compute_layers_again_between_passes_of_other_lengths(tiny):
    values = {**json.loads(Path(tiny("llama")).read_text()), "num_hidden_layers": 2}
    config = config_from_dict(values, source="test")
    layout = "pp=2,fsdp=1[recompute=block],megatron=2[sequence_parallel=true]"
    ((expected_loss, expected),) = run_ranks(one_step_of_other_lengths, config, "single", num_ranks=1)
    for loss, found in run_ranks(one_step_of_other_lengths, config, layout, num_ranks=4):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def two_passes_and_one_backward(config, layout):
    """Gradients of two losses of sequences of other lengths, in a loop of one's own."""
    torch.manual_seed(0)
    module = causal_lm(config).double()
    model = rotorch.parallelize(module, layout, device="cpu")
    losses = []
    for num_tokens in (7, 8):  # on two ranks a first shard of four tokens each
        ids = torch.arange(2 * num_tokens).view(2, num_tokens)
        losses.append(model(input_ids=ids, labels=ids).loss)
    total = sum(losses)
    total.backward(retain_graph=True)
    total.backward()
    found = {name: model.full_tensor(name, grad=True) for name, _ in model.named_parameters()}
    model.close()
    return found


def test_layers_are_computed_again_on_the_tokens_of_their_own_pass(tiny):
    values = {**json.loads(Path(tiny("llama")).read_text()), "num_hidden_layers": 2}
    config, layout = (
        config_from_dict(values, source="test"),
        "fsdp=1[recompute=block],megatron=2[sequence_parallel=true]",
    )
    (expected,) = run_ranks(two_passes_and_one_backward, config, "single", num_ranks=1)
    for found in run_ranks(two_passes_and_one_backward, config, layout, num_ranks=2):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)  # norms of llama are float32


# ---- what it refuses -----------------------------------------------------------------------------------------------


def shifted_llama(config):
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class ShiftedLayer(LlamaDecoderLayer):
        """Mixes each token with the one before it, outside of attention and MLP."""

        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states + 0.5 * hidden_states.roll(1, dims=1), *args, **kwargs)

    class ShiftedLlama(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for number in range(config.num_hidden_layers):
                self.model.layers[number] = ShiftedLayer(config, number)

    return ShiftedLlama(config)


def test_layers_that_mix_tokens_are_refused_by_trial(tiny):
    config = load_config(tiny("llama"))
    with rotorch.on_meta():
        plain, shifted = causal_lm(config), shifted_llama(config)
    assert why_not_along_tokens(plain) == ""
    with pytest.raises(ConfigError, match="its layers do more there than treat every token alike") as caught:
        rotorch.parallelize(shifted, "megatron=2[sequence_parallel=true]", device="cpu")
    assert "ShiftedLlama" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2", "mixtral"])
def test_models_that_treat_every_token_alike_are_known(tiny, family):
    with rotorch.on_meta():
        assert why_not_along_tokens(causal_lm(load_config(tiny(family)))) == ""


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("megatron=5[sequence_parallel=true]", "q_proj.weight' has 4 groups (heads) for 5 ranks"),
        ("megatron=2[sequence_parallel=true,sync_fraction=0.5]", "sums only some channels. Write one of the two"),
    ],
)
def test_mistakes_are_one_clear_line(tiny, layout, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught, rotorch.on_meta():
        rotorch.parallelize(causal_lm(load_config(tiny("llama"))), layout, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_model_without_known_layers_is_refused():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16)
    with (
        pytest.raises(ConfigError, match="cannot be cut along the sequence: it has no pipeline plan"),
        rotorch.on_meta(),
    ):
        rotorch.parallelize(BertForMaskedLM(config), "megatron=2[sequence_parallel=true]", device="cpu")


def short_passes(config, parallel, asked):
    """Logits behind one token, and what a pass says that is asked for hidden states or has too few tokens."""
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), parallel, device="cpu").materialize(seed=0)
    ids = torch.tensor([[5]])
    logits = model.next_token_logits(ids)
    if asked == "hidden states":
        model.predict({"input_ids": torch.arange(6).view(1, 6), "output_hidden_states": True})
    elif asked == "gradients":
        model.forward_backward({"input_ids": ids, "labels": ids})
    model.close()
    return logits


def test_fewer_tokens_than_ranks_only_without_gradients(tiny):
    values = {**json.loads(Path(tiny("llama")).read_text()), "num_hidden_layers": 1}
    config, layout = config_from_dict(values, source="test"), "megatron=2[sequence_parallel=true]"
    (expected,) = run_ranks(short_passes, config, "single", "", num_ranks=1)
    for logits in run_ranks(short_passes, config, layout, "", num_ranks=2):
        assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RankFailure, match="sequences of 1 tokens over 2 ranks leave some without any"):
        run_ranks(short_passes, config, layout, "gradients", num_ranks=2)
    with pytest.raises(RankFailure, match="Leave output_hidden_states out"):
        run_ranks(short_passes, config, layout, "hidden states", num_ranks=2)


def test_with_one_rank_it_does_nothing(tiny):
    with rotorch.on_meta():
        module = causal_lm(load_config(tiny("llama")))
    (strategy,) = parse_parallel("megatron=1[sequence_parallel=true]")
    spec = describe(module)
    assert strategy.units_of(spec) is spec
    assert not strategy.token_axes
