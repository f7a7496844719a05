"""State that models keep between forwards, and other ways in which a forward is more than a function."""

import dataclasses
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.losses import CausalLMLoss, OwnMeanLoss, loss_of
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.ranks import run_ranks

MESSAGES = "rtp=2[transport=send_receive]"
VOCAB, TOKENS = 64, 8


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for name in ("ddp", "fsdp", "rtp", "single"):
        importlib.import_module(f"rotorch.strategies.{name}.apply")
    importlib.import_module("torch._dynamo")
    llama()


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options})).double()


def tokens(number, *, rows=2, ignored=0):
    ids = torch.randint(VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[:, : 1 + ignored] = -100
    return {"input_ids": ids, "labels": labels}


def my_batches(model, *, num_micro_batches=2):
    """Micro-batches with unequal numbers of targets."""
    first = model.batch_rank * num_micro_batches
    return [tokens(n, ignored=n) for n in range(first, first + num_micro_batches)]


def gradients(model):
    return {name: model.full_tensor(name, grad=True) for name in model.weights}


def step(build, layout, prepare=None, batches=my_batches):
    """Loss and gradients of one step on this rank."""
    model = rotorch.parallelize(build(), layout, device="cpu")
    if prepare is not None:
        prepare(model)
    torch.manual_seed(7 + model.batch_rank)
    with exact_arithmetic():
        loss = model.forward_backward(batches(model))
    found = float(loss), gradients(model), torch.rand(1)
    model.close()
    return found


def on_ranks(build, layout, *args):
    return run_ranks(step, build, layout, *args, num_ranks=num_ranks(parse_parallel(layout)))


def dense(build, batches):
    """The same on one process, by the plain model: the sum of token losses over the number of all targets."""
    module = build()
    num_targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    total = 0.0
    with exact_arithmetic():
        for batch in batches:
            loss = module(**batch, num_items_in_batch=num_targets, use_cache=False).loss
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in module.named_parameters()}


def assert_same(found, expected):
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


ALL_BATCHES = [tokens(n, ignored=n) for n in range(4)]

# ---------------------------------------------------------------- caches


def caching():
    model = llama()
    model.config.use_cache = True
    return model


class Nested(nn.Module):
    """A model whose parts carry configurations of their own."""

    def __init__(self):
        super().__init__()
        self.decoder = caching()
        self.config = dataclasses.make_dataclass("Config", ["text_config", ("use_cache", bool, True)])(
            self.decoder.config
        )


def switched_off():
    module = Nested().float()
    rotorch.parallelize(module, "rtp=1", device="cpu", loss=lambda *_: None)
    return module.config.use_cache, module.config.text_config.use_cache, module.decoder.config.use_cache


def test_caches_are_switched_off_wherever_a_configuration_asks_for_one():
    assert run_ranks(switched_off, num_ranks=1) == [(False, False, False)]
    assert_same(on_ranks(caching, MESSAGES)[0], dense(llama, ALL_BATCHES))


def message_of(build, layout, batches=my_batches, **options):
    try:
        rotorch.parallelize(build(), layout, device="cpu", **options).forward_backward(batches(None))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_cache_in_a_batch_is_refused_where_slices_would_append_to_it():
    for message in run_ranks(
        message_of, llama, "rtp=2[recompute=slice]", lambda _: {**tokens(0), "use_cache": True}, num_ranks=2
    ):
        assert "'model.layers.0.self_attn' is given a cache of keys and values" in message


# ---------------------------------------------------------------- random numbers


def dropping():
    return llama(attention_dropout=0.3).train()


class DroppingOut(nn.Module):
    """A torch encoder with dropout in and around its attention, that returns its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 24, dropout=0.3, batch_first=True) for _ in range(2)
        )
        self.double()

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.ones_like(x))


ON_SLICES = ("rtp=2[transport=send_receive,recompute=none]", "rtp=2[transport=send_receive,recompute=slice]")
IN_BLOCKS = ("fsdp=2", "fsdp=2[recompute=block]")


@pytest.mark.parametrize(
    ("kept", "again", "build"),
    [
        (*ON_SLICES, dropping),
        (*IN_BLOCKS, DroppingOut),
        pytest.param(*ON_SLICES, DroppingOut, marks=pytest.mark.slow),
        pytest.param(*IN_BLOCKS, dropping, marks=pytest.mark.slow),
    ],
)
def test_dropout_drops_the_same_when_it_is_computed_again(build, kept, again):
    first, second = on_ranks(build, kept), on_ranks(build, again)
    for ours, theirs in zip(first, second, strict=True):
        assert_same(ours, theirs)
        assert torch.equal(ours[2], theirs[2])  # and random numbers go on alike


# ---------------------------------------------------------------- running statistics


class Normed(nn.Module):
    """Batch norms in blocks; returns a mean over rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()) for _ in range(2))
        self.double()

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


def rows(rank, step):
    x, y = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
    return {"x": x, "y": y}


def train_normed(layout):
    model = rotorch.parallelize(Normed(), layout, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(float(model.forward_backward(rows(model.batch_rank, number))))
        optimizer.step()
    buffers = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    held_out = model.evaluate(rows(5, 0)).loss
    model.close()
    return losses, buffers, held_out


def normed_in_turn(size):
    """One process: shares in turn, each beginning with the statistics of the last step; then their mean."""
    module = Normed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        ends, total = [], 0.0
        for rank in range(size):
            for name, buffer in module.named_buffers():
                buffer.copy_(start[name])
            loss = module(**rows(rank, number)) / size
            loss.backward()
            total += loss.item()
            ends.append({name: buffer.clone() for name, buffer in module.named_buffers()})
        for name, buffer in module.named_buffers():
            buffer.copy_(torch.stack([end[name].double() for end in ends]).mean(0))
        optimizer.step()
        losses.append(total)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return losses, buffers, module.eval()(**rows(5, 0)).item()


@pytest.mark.parametrize(
    "layout", ["rtp=2", "rtp=2[transport=send_receive,recompute=slice]", "ddp=2", "fsdp=2[recompute=block]", "single"]
)
def test_running_statistics_move_once_per_step_and_are_the_mean_over_ranks(layout):
    size = num_ranks(parse_parallel(layout))
    losses, buffers, held_out = normed_in_turn(size)
    for found in run_ranks(train_normed, layout, num_ranks=size):
        torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(found[1], buffers, rtol=1e-10, atol=1e-12)
        assert found[1]["blocks.0.1.num_batches_tracked"] == 3
        assert found[2] == pytest.approx(held_out, rel=1e-10)


class NormedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(6), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


class AroundNormedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = NormedUnit()
        self.double()

    def forward(self, x, y):
        return F.mse_loss(self.unit(x), y)


def refused_plan():
    plan = {"unit.up": "colwise", "unit.down": "rowwise"}
    return message_of(AroundNormedUnit, "rtp=2[recompute=slice]", lambda _: rows(0, 0), plan=plan)


def test_statistics_inside_of_a_unit_that_runs_on_slices_are_refused():
    for message in run_ranks(refused_plan, num_ranks=2):
        assert "'unit' writes its buffers in forward (running statistics): it would do so once per slice" in message


def test_a_table_that_renormalises_itself_is_refused_on_several_ranks():
    def table():
        return nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4))

    for layout in ("rtp=2", "ddp=2"):
        for message in run_ranks(message_of, table, layout, num_ranks=2):
            assert "'0' has max_norm=1.0: its forward rewrites the rows" in message


def opt(**options):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OPTConfig(max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0, **sizes, **options)
    return OPTForCausalLM(config).double()


def wav2vec2():
    """Its layers ask the configuration."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heard = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 8}
    return Wav2Vec2Model(Wav2Vec2Config(num_conv_pos_embedding_groups=4, **sizes, **heard))


@pytest.mark.parametrize("layout", ["fsdp=2", "rtp=2", "megatron=2"])
@pytest.mark.parametrize(("build", "said"), [(lambda: opt(layerdrop=0.25), "=0.25"), (wav2vec2, "=0.1")])
def test_layers_that_each_rank_leaves_out_by_chance_are_refused(build, said, layout):
    with pytest.raises(ConfigError, match=f"layerdrop{said}.*each rank would leave out other layers"):
        rotorch.parallelize(build(), layout, device="cpu")


def test_layers_may_be_left_out_where_ranks_have_whole_weights():
    rotorch.parallelize(opt(layerdrop=0.25), "single", device="cpu").close()
    rotorch.parallelize(opt(layerdrop=0.0), "single", device="cpu").close()


# ---------------------------------------------------------------- losses


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
        experts_implementation="eager",  # others know no float64
    )  # fmt: skip
    return MixtralForCausalLM(config).double()


def mixtral_in_shares():
    """Cross-entropy of all, and the auxiliary loss of each micro-batch weighted with its share of the targets."""
    module = mixtral()
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in ALL_BATCHES]
    total = 0.0
    with exact_arithmetic():
        for batch, count in zip(ALL_BATCHES, counts, strict=True):
            output = module(**batch, num_items_in_batch=sum(counts), use_cache=False)
            tokens_only = output.loss - 0.5 * output.aux_loss
            loss = tokens_only + 0.5 * output.aux_loss * count / sum(counts)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("layout", [pytest.param("rtp=2", marks=pytest.mark.slow), MESSAGES, "fsdp=2"])
def test_the_routers_loss_counts_once(layout):
    expected = mixtral_in_shares()
    for found in on_ranks(mixtral, layout):
        assert_same(found, expected)


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class OwnLoss(nn.Module):
    """Returns its own loss, in the form that it is told."""

    form = "tensor"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.double()

    def forward(self, x, labels):
        logits = self.layer(x)
        loss = F.cross_entropy(logits, labels)
        return {
            "tensor": loss,
            "tuple": (loss, logits),
            "dict": {"logits": logits, "loss": loss},
            "dataclass": Output(loss, logits),
        }[self.form]


def own_loss(form, without_targets=False):
    module = OwnLoss()
    module.form = form
    model = rotorch.parallelize(module, "rtp=2", device="cpu")
    loss = model.forward_backward(classes(model.batch_rank, without_targets=without_targets))
    found = float(loss), gradients(model)
    model.close()
    return found


def classes(rank, *, without_targets=False):
    generator = torch.Generator().manual_seed(rank)
    x, labels = torch.randn(6, 6, generator=generator, dtype=torch.float64), torch.randint(5, (6,), generator=generator)
    labels[: (6 if without_targets else 3) * rank] = -100
    return {"x": x, "labels": labels}


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "dataclass"])
def test_a_model_that_returns_its_own_mean(form):
    module = OwnLoss()
    both = {name: torch.cat([classes(0)[name], classes(1)[name]]) for name in classes(0)}
    loss = module(**both)
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    for found in run_ranks(own_loss, form, num_ranks=2):
        assert_same(found, (loss.item(), grads))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "dataclass"])
def test_a_share_without_targets_adds_nothing(form):
    module = OwnLoss()
    loss = module(**classes(0))
    loss.backward()
    for found in run_ranks(own_loss, form, True, num_ranks=2):
        assert_same(found, (loss.item(), {name: p.grad for name, p in module.named_parameters()}))


def test_a_model_without_a_loss_is_refused():
    for message in run_ranks(message_of, Silent, "rtp=1", lambda _: {"x": torch.ones(2, 6)}, num_ranks=1):
        assert "Silent returns no loss (a Tensor)" in message and "loss=" in message


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        return self.layer(x)


def test_which_loss_a_model_has():
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert isinstance(loss_of(llama()), CausalLMLoss)
    assert isinstance(loss_of(BertForMaskedLM(BertConfig(**sizes, intermediate_size=8))), OwnMeanLoss)
    t5 = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert isinstance(loss_of(T5ForConditionalGeneration(t5)), OwnMeanLoss)
    assert isinstance(loss_of(nn.Linear(1, 1)), OwnMeanLoss)


def its_own_way():
    """A causal language model that takes no notice of num_items_in_batch."""
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, num_items_in_batch=None, **_: logits.sum()
    forward = model.forward
    model.forward = lambda num_items_in_batch=None, **batch: forward(**batch)
    return model


def test_a_causal_model_that_divides_by_itself_is_refused():
    for message in run_ranks(message_of, its_own_way, "rtp=1", lambda _: tokens(0), num_ranks=1):
        assert "LlamaForCausalLM computes its loss without num_items_in_batch" in message


def gpt2():
    """Declares no plan, and keeps its linear layers' weights the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


@pytest.mark.parametrize("layout", ["rtp=2", pytest.param(MESSAGES, marks=pytest.mark.slow)])
def test_a_causal_model_without_a_plan(layout):
    expected = dense(gpt2, ALL_BATCHES)
    for found in on_ranks(gpt2, layout):
        assert_same(found, expected)


# ---------------------------------------------------------------- the model's own ways of attention and recompute


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["rtp=2[transport=send_receive]"])
def test_attention_implementations(implementation, layout):
    def build():
        return llama(attn_implementation=implementation)

    expected = dense(build, ALL_BATCHES)
    for found in on_ranks(build, layout):
        assert_same(found, expected)


def test_flex_attention_is_refused_where_torch_has_no_backward_for_it():
    def flexible():
        return llama(attn_implementation="flex_attention")

    for layout in ("rtp=2", "fsdp=2"):
        for message in run_ranks(message_of, flexible, layout, num_ranks=2):
            assert "flex_attention has no backward on cpu" in message and "'sdpa'" in message


def checkpointing():
    model = llama().train()
    model.activation_checkpointing_enable()
    return model


def checkpointing_reentrant():
    model = llama().train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return model


MOVING = "rtp=3[transport=send_receive]"


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (checkpointing, "rtp=2"),
        pytest.param(checkpointing, MOVING, marks=pytest.mark.slow),
        (checkpointing_reentrant, MOVING),
        (checkpointing, "fsdp=2"),
        pytest.param(checkpointing, "ddp=2", marks=pytest.mark.slow),
        pytest.param(checkpointing, "rtp=2[transport=send_receive,recompute=slice]", marks=pytest.mark.slow),
        pytest.param(checkpointing_reentrant, "rtp=2", marks=pytest.mark.slow),
        pytest.param(checkpointing_reentrant, "fsdp=2", marks=pytest.mark.slow),
        pytest.param(checkpointing_reentrant, "ddp=2", marks=pytest.mark.slow),
    ],
)
def test_gradient_checkpointing_that_the_model_does_itself(build, layout):
    def batches(model):
        return [tokens(n, ignored=n) for n in range(6) if n % model.num_batch_ranks == model.batch_rank]

    expected = dense(llama, [tokens(n, ignored=n) for n in range(6)])
    for found in on_ranks(build, layout, None, batches):
        assert_same(found, expected)
