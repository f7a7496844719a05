"""Modules without a plan under every strategy, held against one process that computes the ranks' shares in turn.

Shares in turn, because dropout and batch norms see a rank's share and not the global batch.
"""

import importlib
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

MESSAGES = "rtp=2[transport=send_receive]"
NUM_ROWS, NUM_STEPS = 12, 3


def more(*layouts):
    """More cells of the same."""
    return [pytest.param(layout, marks=pytest.mark.slow) for layout in layouts]


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for name in ("ddp", "fsdp", "rtp", "single"):
        importlib.import_module(f"rotorch.strategies.{name}.apply")
    importlib.import_module("torch._dynamo")


def batch_of(step, *, shape, dtype, rank=0, num_ranks=1):
    """A rank's rows of a global batch: `x`, and classes as labels."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_ROWS, *shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(5, (NUM_ROWS,), generator=generator)
    rows = slice(rank * NUM_ROWS // num_ranks, (rank + 1) * NUM_ROWS // num_ranks)
    return {"x": x[rows], "labels": labels[rows]}


def class_loss(module, batch, num_targets):
    return F.cross_entropy(module(batch["x"]), batch["labels"], reduction="sum") / num_targets


def seed_dropout(step, rank):
    torch.manual_seed(1000 + 10 * step + rank)


def built(build, dtype):
    torch.manual_seed(0)
    return build().to(dtype)


def in_turn(build, *, shape, size, dtype, loss):
    """Losses of one process, and the weights in the end."""
    module = built(build, dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(size):
            seed_dropout(step, rank)
            value = loss(module, batch_of(step, shape=shape, dtype=dtype, rank=rank, num_ranks=size), NUM_ROWS)
            value.backward()
            total += value.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in module.named_parameters()}


def trained(build, layout, shape, dtype, loss, record):
    """Every rank's work: the same steps with a parallel model."""
    model = rotorch.parallelize(built(build, dtype), layout, device="cpu", loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        seed_dropout(step, model.batch_rank)
        mine = batch_of(step, shape=shape, dtype=dtype, rank=model.batch_rank, num_ranks=model.num_batch_ranks)
        losses.append(float(model.forward_backward(mine)))
        optimizer.step()
    weights = {name: model.full_tensor(name) for name in model.weights}
    more = None if record is None else record(model)
    model.close()
    return losses, weights, more


def check(build, *layouts, shape, dtype=torch.float64, bar=1e-10, loss=class_loss, record=None):
    """Losses and weights as on one process; returns what `record` made of each rank's model in the last layout."""
    found = None
    for layout in layouts:
        size = num_ranks(parse_parallel(layout))
        losses, weights = in_turn(build, shape=shape, size=size, dtype=dtype, loss=loss)
        found = run_ranks(trained, build, layout, shape, dtype, loss, record, num_ranks=size)
        for got, got_weights, _ in found:
            assert got == pytest.approx(losses, rel=bar), layout
            for name, expected in weights.items():
                torch.testing.assert_close(
                    got_weights[name],
                    expected,
                    rtol=100 * bar,
                    atol=100 * bar,
                    msg=lambda m, at=f"{layout} {name}": f"{at}: {m}",
                )
    return [more for _, _, more in found]


# ---------------------------------------------------------------- the paper's tutorial


class MnistCNN(nn.Module):
    """conv, conv, fc, fc, with dropout and log-softmax."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, 1)
        self.conv2 = nn.Conv2d(6, 7, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(7 * 16, 9)
        self.fc2 = nn.Linear(9, 5)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def nll(module, batch, num_targets):
    return F.nll_loss(module(batch["x"]), batch["labels"], reduction="sum") / num_targets


@pytest.mark.parametrize(
    "layout",
    ["rtp=2", "rtp=3[transport=send_receive,buffering=in_place]", "fsdp=2", *more("ddp=2", "single", "ddp=2,rtp=2")],
)
def test_the_cnn_of_the_tutorial(layout):
    check(MnistCNN, layout, shape=(1, 12, 12), loss=nll)


@pytest.mark.slow  # an encoder in float32: below
def test_the_cnn_of_the_tutorial_in_float32():
    check(MnistCNN, "rtp=2", MESSAGES, shape=(1, 12, 12), loss=nll, dtype=torch.float32, bar=1e-5)


# ---------------------------------------------------------------- torch's transformer


class Encoder(nn.Module):
    def __init__(self, *, batch_first=True, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            12, 4, 20, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(12), enable_nested_tensor=not norm_first and batch_first
        )
        self.head = nn.Linear(12, 5)
        self.batch_first = batch_first

    def forward(self, x):
        padding = None
        if self.batch_first:  # in evaluation torch would turn padded batches into nested tensors
            padding = torch.arange(x.shape[1]) >= torch.arange(len(x))[:, None] % 3 + 4
        y = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        y = y if padding is None else y.masked_fill(padding[..., None], 0.0)
        return self.head(y.mean(1 if self.batch_first else 0))


class NormFirst(Encoder):
    def __init__(self):
        super().__init__(batch_first=False, norm_first=True)


@pytest.mark.parametrize(
    "layout",
    [
        "rtp=2",
        "rtp=3[transport=send_receive,recompute=slice]",
        "fsdp=2",
        *more("rtp=3[transport=send_receive]", "ddp=2"),
    ],
)
def test_a_transformer_encoder(layout):
    check(Encoder, layout, shape=(6, 12))


def test_a_transformer_encoder_of_another_order():
    check(NormFirst, "rtp=2", shape=(6, 12))


def test_a_transformer_encoder_in_float32():
    check(Encoder, "rtp=2", MESSAGES, shape=(6, 12), dtype=torch.float32, bar=1e-5)


class Translator(nn.Module):
    """Encoder and decoder, with masks."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(12, 4, 1, 2, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        padding = torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(x[..., 0] > 1.5, -torch.inf)
        y = self.transformer(x, x.flip(1), tgt_mask=causal, src_key_padding_mask=padding, tgt_is_causal=True)
        return self.head(y[:, -1])


def test_a_transformer_with_masks():
    check(Translator, "rtp=2", MESSAGES, shape=(6, 12))


class UsesMaps(nn.Module):
    """Everything that `nn.MultiheadAttention` can be asked: maps that are trained on, by head, masks by head."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, kdim=7, vdim=8, add_bias_kv=True, add_zero_attn=True)
        self.packed = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        query = x.transpose(0, 1)
        y, by_head = self.attention(query, query[..., :7], query[..., :8], average_attn_weights=False)
        mask = torch.zeros(3 * len(x), 6, 6, dtype=torch.bool)
        mask[1::3, :, 0] = True
        z, maps = self.packed(x, x, x, attn_mask=mask)
        one, _ = self.packed(x[0], x[0], x[0], need_weights=False)
        more = maps[:, 0, :5] + by_head.pow(2).sum((1, 3))[:, :5] + one.sum()
        return self.head((y.transpose(0, 1) + z).mean(1)) + more


def test_attention_maps_sum_over_slices_too():
    check(UsesMaps, "rtp=2", MESSAGES, shape=(6, 12))


def evaluations(model):
    """Losses in eval mode, where torch would take its fused path."""
    batch = batch_of(99, shape=(6, 12), dtype=torch.float64)
    return model.evaluate(batch).loss


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES, *more("fsdp=2")])
def test_evaluation_of_an_encoder(layout):
    for loss in check(Encoder, layout, shape=(6, 12), record=evaluations):
        module = built(Encoder, torch.float64)
        _, weights = in_turn(
            Encoder, shape=(6, 12), size=num_ranks(parse_parallel(layout)), dtype=torch.float64, loss=class_loss
        )
        module.load_state_dict(weights)
        expected = class_loss(module.eval(), batch_of(99, shape=(6, 12), dtype=torch.float64), NUM_ROWS).detach()
        assert loss == pytest.approx(float(expected), rel=1e-10)


# ---------------------------------------------------------------- convolutions


class Convolutions(nn.Module):
    """Every kind: groups that slices cut through, paddings by name, circular ones, transposed, 1d and 3d."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3, padding="same", groups=1, padding_mode="circular")
        self.grouped = nn.Conv2d(10, 15, (4, 3), padding="same", groups=5, dilation=(1, 2))
        self.depthwise = nn.Conv2d(15, 15, 3, stride=2, padding=1, groups=15, bias=False)
        self.up = nn.ConvTranspose2d(15, 6, 3, stride=2, padding=1, output_padding=1)
        self.up_grouped = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.line = nn.Conv1d(4, 6, 3, padding="valid")
        self.volume = nn.Conv3d(1, 3, 2)
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x = F.gelu(self.depthwise(self.grouped(x)))
        x = self.up_grouped(self.up(x)).flatten(2)
        x = torch.stack([self.line(row) for row in x])  # without a batch
        return self.head(self.volume(x[:, None, :, :27].unflatten(-1, (3, 9))).mean((2, 3, 4)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("layout", ["rtp=2", "rtp=3[transport=send_receive]"])
def test_convolutions_of_every_kind(layout):
    check(Convolutions, layout, shape=(3, 6, 6))


# ---------------------------------------------------------------- what is whole, and what is made whole


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its weights of its own, and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 7, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4, 7))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.head(y[:, -1] * self.scale.sum(0))


@pytest.mark.parametrize("layout", ["rtp=2", "fsdp=2", *more("ddp=2")])
def test_layers_without_a_rule_are_whole(layout):
    check(Recurrent, layout, shape=(4, 6))


class UsesWeights(nn.Module):
    """Looks into its layers: a penalty on a weight, a weight used by hand, the same layer twice, a tied one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)
        self.bilinear = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        x = x + F.gelu(self.up(x)) @ self.down.weight.t()
        x = torch.addmm(self.bilinear.bias, x, self.bilinear.weight) + self.bilinear(x)
        x = x + self.conv(x[..., None])[..., 0] * self.conv.weight.norm()
        return self.head(x) * (1 + self.up.weight.pow(2).mean())


@pytest.mark.parametrize("layout", ["rtp=2", *more(MESSAGES), "rtp=3[transport=send_receive,buffering=in_place]"])
def test_weights_that_are_used_otherwise_are_made_whole(layout):
    check(UsesWeights, layout, shape=(6,))


def warnings_of(build, layout, shape):
    """The warnings of two steps."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    trained(build, layout, shape, torch.float64, class_loss, None)
    return lines


@pytest.mark.parametrize("layout", [MESSAGES, "megatron=2"])
def test_the_log_says_once_what_is_made_whole(layout):
    """Weights alone that a function takes whole; neither they nor their biases where a layer is called."""
    for lines in run_ranks(warnings_of, UsesWeights, layout, (6,), num_ranks=2):
        made = sorted(line.split("'")[1] for line in lines if "takes no slices" in line)
        assert made == ["bilinear.bias", "bilinear.weight", "conv.weight", "up.weight"]  # `down.weight.t()` is followed


def test_the_log_says_what_is_kept_whole():
    for rank, lines in enumerate(run_ranks(warnings_of, Recurrent, "rtp=2", (4, 6), num_ranks=2)):
        said = [line for line in lines if "'rnn.weight_hh_l0' (1,568 bytes): no rule cuts a LSTM" in line]
        assert len(said) == (1 if rank == 0 else 0)


class Renormalises(nn.Module):
    """Changes a weight in forward."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return self.head(x)


def refusal(build, layout, shape):
    try:
        trained(build, layout, shape, torch.float64, class_loss, None)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_weight_that_is_changed_in_forward_is_refused():
    for message in run_ranks(refusal, Renormalises, "rtp=2", (6,), num_ranks=2):
        assert "'head.weight' is changed by 'clamp_' in forward" in message


class Transposes(nn.Module):
    """Multiplies with transposes of its weights, written in all the ways that people write it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))

    def forward(self, x):
        a, b, c, d, e, f = self.layers
        x = torch.tanh(x @ a.weight.T + a.bias)
        x = torch.tanh(torch.matmul(x, b.weight.t()))
        x = torch.tanh(torch.addmm(c.bias, x, c.weight.transpose(0, 1)))
        x = torch.tanh(torch.mm(x, d.weight.permute(1, 0)) + x @ d.weight.mT.mT)
        x = torch.tanh(torch.einsum("bi,io->bo", x, e.weight.T))  # takes no slices: whole for that time
        return x.matmul(f.weight.transpose(-2, -1))


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES, "megatron=2"])
def test_transposed_weights(layout):
    check(Transposes, layout, shape=(12,))


class InputsFirst(nn.Module):
    """Linear layers whose weights lie with their inputs first, in all the ways that these are multiplied with."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(17, 12), Conv1D(12, 17)
        self.alone = Conv1D(13, 12)
        self.alone.bias = None
        self.head = nn.Linear(13, 5)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        x = torch.tanh(F.linear(x, self.up.weight.T, self.up.bias)) @ torch.ones(17, 12, dtype=x.dtype)
        x = torch.tanh(x @ self.alone.weight) + F.linear(x[:, None], self.alone.weight.t())[:, 0]
        return self.head(x)


@pytest.mark.parametrize("layout", ["rtp=2", "rtp=3[transport=send_receive]", "megatron=3"])
def test_linear_layers_with_their_inputs_first(layout):
    check(InputsFirst, layout, shape=(12,))


@pytest.mark.parametrize("layout", [MESSAGES, "megatron=2"])
def test_linear_layers_with_their_inputs_first_are_not_made_whole(layout):
    for lines in run_ranks(warnings_of, InputsFirst, layout, (12,), num_ranks=2):
        assert not [line for line in lines if "takes no slices" in line]


class LooksUpColumns(nn.Module):
    """Looks rows up in a weight that is cut along its columns."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = Conv1D(12, 6), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(F.embedding(x.argmax(-1), self.mix.weight) + self.mix(x))


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES])
def test_rows_of_what_is_cut_along_columns_are_looked_up_in_the_whole_weight(layout):
    check(LooksUpColumns, layout, shape=(6,))


class LeavesBiasesOut(nn.Module):
    """Uses matrices and kernels of layers without their biases, or adds these by itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.a.weight) + 2 * self.a.bias)
        x = torch.tanh(F.linear(x, self.b.weight) - self.b(x))
        return (F.conv1d(x[:, None], self.c.weight, padding=1).sum(1) + self.c.bias.sum()).tanh()


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES, "megatron=2"])
def test_layers_without_their_biases(layout):
    check(LeavesBiasesOut, layout, shape=(12,))


class Modes(nn.Module):
    """Drops in training; one part is in evaluation mode for good; says what it was told, and may fail."""

    def __init__(self):
        super().__init__()
        self.up, self.frozen = nn.Linear(6, 5), nn.Sequential(nn.Dropout(0.5)).eval()
        self.told, self.fails = [], False

    def train(self, mode=True):
        self.told.append(mode)
        return super().train(mode)

    def forward(self, x):
        if self.fails:
            raise ValueError("on purpose")
        return self.frozen(F.dropout(self.up(x), 0.5, self.training))


def modes_after_passes():
    module = Modes()
    model = rotorch.parallelize(module, "single", device="cpu", loss=class_loss)
    batch = batch_of(0, shape=(6,), dtype=torch.float32, rank=0, num_ranks=1)
    passes = {
        "evaluate": lambda: float(model.evaluate(batch).loss),
        "predict": lambda: model.predict({"x": batch["x"]}),
    }
    found = {}
    for name, run in passes.items():
        module.told.clear()
        first, again = run(), run()
        module.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            run()
        module.fails = False
        same = torch.equal(torch.as_tensor(first), torch.as_tensor(again))
        found[name] = same, module.told, [part.training for part in (module, module.up, *module.frozen.modules())]
    model.close()
    return found


def test_passes_without_gradients_drop_nothing_and_leave_every_part_in_its_mode():
    (found,) = run_ranks(modes_after_passes, num_ranks=1)
    expected = True, [False, True] * 3, [True, True, False, False]
    assert found == {"evaluate": expected, "predict": expected}


class AddsItself(nn.Linear):
    """As Falcon's layers: the bias is added apart."""

    def forward(self, x):
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


class OfOwnLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = AddsItself(12, 16), AddsItself(16, 12, bias=False), nn.Linear(12, 12)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES, "megatron=2"])
def test_layers_of_an_own_kind_that_add_their_bias_apart(layout):
    check(OfOwnLayers, layout, shape=(12,))
    units = {unit.name: len(unit.weights) for unit in describe(OfOwnLayers()).cut_units}
    assert units == {"a.weight": 1, "b.weight": 1, "c.weight": 2}


class Head(nn.Linear):
    """A head that is used without its bias, which it has all the same."""

    def forward(self, x):
        return F.linear(x, self.weight)


class ModelWithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(12, 12), Head(12, 12)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x))) + 0 * self.head.bias.sum()


@pytest.mark.parametrize("layout", ["rtp=2", MESSAGES, "megatron=2"])
def test_a_head_whose_bias_is_not_asked_for(layout):
    check(ModelWithHead, layout, shape=(12,))


class Scaled(nn.Linear):
    def forward(self, scale, x, labels):
        return scale * super().forward(x)


class Entries(dict):
    """A batch of a user's own kind."""


def batches_that_a_loss_is_given():
    """True for each that is the user's own."""
    batch, given = Entries(scale=2.0, x=torch.ones(2, 12), labels=torch.zeros(2, dtype=torch.int64)), []

    def loss_of(module, batch, num_targets):
        given.append(batch)
        return module(**batch).sum() / num_targets

    model = rotorch.parallelize(Scaled(12, 12), "single", device="cpu", loss=loss_of)
    model.forward_backward(batch)
    model.evaluate(batch)
    model.close()
    return [each is batch for each in given]


def test_a_loss_is_given_the_batch_as_it_is():
    assert run_ranks(batches_that_a_loss_is_given, num_ranks=1) == [[True, True]]
