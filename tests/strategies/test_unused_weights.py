"""Weights that no loss reaches: they have no gradient under any layout, as in one process; other ranks' uses count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import configurations, tiny_subject
from rotorch.testing.verify import verify_subject


class Block(nn.Module):
    """One that knows which tokens count, by weights that no gradient reaches, as indexers of sparse attention do."""

    def __init__(self):
        super().__init__()
        self.up, self.index, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) * (self.index(x) > 0))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.spare = nn.LayerNorm(12), nn.Linear(12, 20)
        self.spare_norm, self.one_share, self.end = nn.LayerNorm(12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x, labels, more):
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        if more:
            x = self.one_share(x)
        return self.end(x)


def class_loss(module, batch, num_targets):
    return F.cross_entropy(module(**batch), batch["labels"], reduction="sum") / num_targets


PLAN = {"blocks.*.up": "colwise", "blocks.*.index": "colwise", "blocks.*.down": "rowwise"}
UNUSED = {*(f"blocks.{k}.index.{n}" for k in range(2) for n in ("weight", "bias"))}
UNUSED |= {f"{name}.{n}" for name in ("spare", "spare_norm") for n in ("weight", "bias")}
LAYOUTS = [
    "ddp=2",
    "fsdp=2",
    "rtp=2",
    pytest.param("rtp=3[transport=send_receive,recompute=slice]", marks=pytest.mark.slow),
    "osdp=2[memory=100KiB]",
    "megatron=2",
    "ddp=2,megatron=2",
    "rtp=2,megatron=2",
    pytest.param("fsdp=2,megatron=2", marks=pytest.mark.slow),
    pytest.param("ddp=2,rtp=2", marks=pytest.mark.slow),  # parts that shares leave out: below
]


def batch_of(share, step=0):
    generator = torch.Generator().manual_seed(10 * step + share)
    x = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (6,), generator=generator), "more": share % 2 == 1}


def without_gradient(layout):
    """Results of `trained` by forward_backward, and in a loop of one's own."""
    return [trained(layout, own_loop=own_loop) for own_loop in (False, True)]


def trained(layout, *, own_loop):
    """Names of weights without gradients, by step; values in the end; number of shares of a batch."""
    torch.manual_seed(0)
    model = rotorch.parallelize(Classifier().double(), layout, device="cpu", loss=class_loss, plan=PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    found = []
    for step in range(3):
        batch = batch_of(model.batch_rank, step)
        if own_loop:
            class_loss(model, batch, 6).backward()
        else:
            model.forward_backward(batch)
        found.append({name for name, parameter in model.named_parameters() if parameter.grad is None})
        optimizer.step()
        optimizer.zero_grad()
    values = {name: model.full_tensor(name) for name in model.weights}
    model.close()
    return found, values, model.num_batch_ranks


def on_one_process(num_shares):
    torch.manual_seed(0)
    module = Classifier().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        for share in range(num_shares):
            (class_loss(module, batch_of(share, step), 6) / num_shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_no_loss_reaches_have_no_gradient(layout):
    for loops in run_ranks(without_gradient, layout, num_ranks=num_ranks(parse_parallel(layout))):
        for found, values, num_shares in loops:
            of_one_share = {f"one_share.{n}" for n in ("weight", "bias")} if num_shares == 1 else set()
            assert found == [UNUSED | of_one_share] * 3
            for name, expected in on_one_process(num_shares).items():
                assert torch.allclose(values[name], expected, rtol=1e-9, atol=1e-11), name


class SkipsParts(Classifier):
    """Leaves out a norm, or a block, or the end, by a number in the batch."""

    def forward(self, x, labels, more):
        x = x + self.blocks[0](x)
        if more != 1:
            x = x + self.blocks[1](x)
        if more == 2:
            x = self.one_share(x)
        return x[:, :5] if more == 3 else self.end(self.norm(x))


PARTS = {
    "ddp=2": [[0, 0], [2, 0], [0, 2], [1, 3]],
    "fsdp=2": [[0, 0], [2, 0], [0, 3]],
    "ddp=2,rtp=2": [[0, 0], [1, 0], [0, 1]],
    "ddp=2,fsdp=2": [[0, 0], [1, 0], [0, 1]],
}
"""By layout, what each replica leaves out in each step."""


def gradients_of_parts(layout):
    torch.manual_seed(0)
    model = rotorch.parallelize(SkipsParts().double(), layout, device="cpu", loss=class_loss)
    found = []
    for number, step in enumerate(PARTS[layout]):
        halves = halves_of(layout, model.batch_rank, number, step)
        model.forward_backward(halves)
        found.append(
            {n: None if p.grad is None else model.full_tensor(n, grad=True) for n, p in model.named_parameters()}
        )
        model.module.zero_grad()
    model.close()
    return found


def halves_of(layout, share, number, step):
    """Two micro-batches of a share; under `ddp` alone they differ in what they leave out."""
    replica = share if layout in ("ddp=2", "fsdp=2") else share // 2
    second = step[1 - replica] if layout == "ddp=2" else step[replica]
    return [{**batch_of(2 * share + half, number), "more": more} for half, more in enumerate((step[replica], second))]


@pytest.mark.parametrize("layout", PARTS)
def test_parts_that_some_shares_leave_out_have_the_gradients_of_the_others(layout):
    count = num_ranks(parse_parallel(layout))
    by_rank = run_ranks(gradients_of_parts, layout, num_ranks=count)
    torch.manual_seed(0)
    module = SkipsParts().double()
    for number, step in enumerate(PARTS[layout]):
        module.zero_grad()
        for share in range(count):
            for half in halves_of(layout, share, number, step):
                class_loss(module, half, 12 * count).backward()
        for found in by_rank:
            for name, parameter in module.named_parameters():
                assert (found[number][name] is None) == (parameter.grad is None), (number, name)
                if parameter.grad is not None:
                    assert torch.allclose(found[number][name], parameter.grad, rtol=1e-9, atol=1e-12), (number, name)


class WithoutSpares(Classifier):
    def __init__(self):
        super().__init__()
        self.blocks, self.spare, self.spare_norm = nn.ModuleList(), None, None


def later_steps_leave_more_out():
    torch.manual_seed(0)
    model = rotorch.parallelize(WithoutSpares().double(), "ddp=2", device="cpu", loss=class_loss)
    for step in range(2):
        model.forward_backward({**batch_of(model.batch_rank, step), "more": True})
        model.module.zero_grad()
    with pytest.raises(ConfigError) as caught:
        model.forward_backward([{**batch_of(model.batch_rank, 2), "more": more} for more in (True, False)])
    return str(caught.value)


def test_a_step_that_leaves_out_what_the_first_did_not_is_refused_under_ddp():
    for message in run_ranks(later_steps_leave_more_out, num_ranks=2):
        assert "the last micro-batch of this step leaves out weights that the first step used" in message


def penalised(layout):
    torch.manual_seed(0)
    model = rotorch.parallelize(Classifier().double(), layout, device="cpu", loss=class_loss, plan=PLAN)
    penalty = (model.spare.weight**2).sum()
    (
        class_loss(model, batch_of(0), 6) + (penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty)
    ).backward()
    return model.full_tensor("spare.weight", grad=True), model.full_tensor("spare.weight")


@pytest.mark.parametrize("layout", ["ddp=2", "fsdp=2", "rtp=2"])
def test_a_penalty_on_a_weight_that_no_pass_uses_is_kept(layout):
    for gradient, values in run_ranks(penalised, layout, num_ranks=2):
        assert torch.allclose(gradient, 2 * values)


def with_spare(tiny):
    torch.manual_seed(0)
    module = causal_lm(load_config(tiny)).double()
    module.model.layers[1].spare = type(module.model.norm)(module.config.hidden_size).double()
    return module


def spare_gradients(tiny, layout):
    model = rotorch.parallelize(with_spare(tiny), layout, device="cpu")
    generator, found = torch.Generator().manual_seed(model.batch_rank), []
    for _ in range(2):
        ids = torch.randint(90, (2, 8), generator=generator)
        model.forward_backward([{"input_ids": ids, "labels": ids}] * 2)
        found.append({name for name, held in model.weights.items() if held.parameter.grad is None})
        model.module.zero_grad()
    model.close()
    return found


@pytest.mark.parametrize("layout", ["summa=2x2", "tesseract=1x1x2", "atp=1x2", "pp=2", "zeropp=2x2", "pp=2,rtp=2"])
def test_weights_that_no_loss_reaches_have_no_gradient_on_grids_and_in_pipelines(tiny, layout):
    count = num_ranks(parse_parallel(layout))
    assert (
        run_ranks(spare_gradients, tiny("llama"), layout, num_ranks=count)
        == [[{"model.layers.1.spare.weight"}] * 2] * count
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("rtp=2[recompute=slice]", marks=pytest.mark.slow),
        "rtp=3[transport=send_receive,recompute=slice]",
    ],
)
def test_whole_weights_that_a_module_uses_without_gradients_have_none(layout, warm):
    """DeepSeek's indexers choose tokens under `no_grad`, with weights gathered for attentions that run on slices."""
    (config,) = (found for found in configurations() if found.__name__ == "DeepseekV32Config")
    report = verify_subject(tiny_subject(config), name="indexers", parallel=layout, steps=1)
    assert report.ok, (report.verdict, report.first_divergence)
