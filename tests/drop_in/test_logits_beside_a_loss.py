"""Logits that come beside a loss: made when they are first read, with the weights that the loss was made with."""

import pytest
import torch
import torch.nn.functional as F
from idioms import Loop
from lockstep import BAR, build

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import load_config
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import gradient_errors, relative_error
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("fsdp=2", "rtp=2", "rtp=2[transport=send_receive]", "megatron=2")


def is_unread(logits):
    return isinstance(logits, DeferredLogits) and logits.made is None


def both_losses(model, batch):
    """The model's own loss, and two more of its logits."""
    output = model(**batch)
    logits = output.logits
    again = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1))
    losses = output.loss, 1e-2 * logits.logsumexp(-1).square().mean(), again
    sum(losses).backward()
    return torch.stack(losses).detach()


def read_late(config, layout):
    """Messages of a rank; all train on the same batch, so means over ranks are one process's numbers."""
    plain = build(config, seed=1)
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    batch = Loop(model, None, share=0, vocab_size=config.vocab_size).batch(0)
    told = {}
    with exact_arithmetic():
        output = model(**batch)
        output.loss.backward()
        told["unread"] = is_unread(output.logits)
        told["after backward"] = relative_error(output.logits.detach(), plain(**batch).logits.detach())
        told["made once"] = not is_unread(output.logits) and output.logits.data_ptr() == output.logits.data_ptr()
        model.zero_grad()
        told["losses"] = relative_error(both_losses(model, batch), both_losses(plain, batch))
        told["gradients"] = max(
            gradient_errors(model.weights, {n: p.grad for n, p in plain.named_parameters()}).values()
        )
        with torch.no_grad():
            output = model(**batch)
            told["cast"] = relative_error(output.logits.float().double(), plain(**batch).logits.float().double())
            told["data"] = relative_error(output.logits.data, plain(**batch).logits.detach())
        kept = model(**batch)
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
        try:
            told["stale"] = f"read {kept.logits.sum():.1f}"
        except ConfigError as error:
            told["stale"] = str(error)
        if told["unread"]:
            try:
                loss, logits = model(**batch).to_tuple()[:2]
                told["alone"] = f"read {logits.sum() if torch.distributed.get_rank() == 0 else loss.backward()}"
            except ConfigError as error:
                told["alone"] = str(error)
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_made_when_they_are_read(tiny, warm, layout):
    defers = not layout.startswith("fsdp")
    for told in run_ranks(read_late, load_config(tiny("llama")), layout, num_ranks=2, timeout_s=120):
        assert told["unread"] is defers and told["made once"]
        for what in ("after backward", "losses", "gradients", "cast", "data"):
            assert told[what] < BAR, (what, told)
        if defers:
            assert "Read them before optimizer.step(), or call the model without labels" in told["stale"]
            assert "rank 0 reads logits beside a loss, rank 1 calls backward" in told["alone"]
