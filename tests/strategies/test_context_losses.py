"""Losses of one's own on sequences that ranks share: summed over their parts, or refused by a trial."""

import re

import pytest
import torch
from context_models import module_of, tiny_config
from small_configs import SIZES

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.batches import global_batch
from rotorch.testing.compare import relative_error
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import compute_exactly
from rotorch.testing.verify import BAR

pytestmark = pytest.mark.usefixtures("warm")


def sum_over_tokens(module, batch, num_targets):
    """A loss of one's own: of the hidden states at targets, and a pair with what else it gives."""
    hidden = module(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"))[0]
    return (hidden.pow(3).sum(-1) * (batch["shift_labels"] != -100)).sum() / num_targets, hidden


def mean_over_tokens(module, batch, num_targets):
    return sum_over_tokens(module, batch, 1)[0] / (batch["shift_labels"] != -100).sum()


def of_labels(module, batch, num_targets):
    targets = batch["labels"][:, 1:]  # which a part has none of
    return (module(input_ids=batch["input_ids"])[0].sum(-1)[:, :-1] * (targets != -100)).sum() / num_targets


def without_head(config, loss, layout):
    """Loss and gradients of a model that has no loss itself, and what a loss for one call is told."""
    batch = global_batch(
        seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=11, vocab_size=SIZES["vocab_size"]
    )
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    with exact_arithmetic():
        module = module_of(config).model
        model = rotorch.parallelize(module, layout, device="cpu", loss=loss)
        total, _ = model.forward_backward(batch)
    gradients = {name: model.full_tensor(name, grad=True) for name in model.weights}
    said = ""
    if layout != "single":
        with pytest.raises(ConfigError) as caught:
            model.forward_backward(batch, loss=loss)
        said = str(caught.value)
    model.close()
    return float(total), gradients, said


def test_a_loss_of_ones_own_over_tokens_is_summed_over_ranks():
    config = tiny_config("gemma3_text")
    compute_exactly(config)
    ((expected, gradients, _),) = run_ranks(without_head, config, sum_over_tokens, "single", num_ranks=1)
    for total, found, said in run_ranks(without_head, config, sum_over_tokens, "tsp=2", num_ranks=2):
        assert total == pytest.approx(expected, rel=BAR)
        assert max(relative_error(found[name], of_one) for name, of_one in gradients.items()) <= BAR
        assert "Give loss=... to parallelize" in said


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (None, "LlamaModel has no loss of its own that is a sum over tokens. Write loss=..."),
        (mean_over_tokens, "the losses of parts do not add up to that of the whole"),
        (of_labels, "a tiny one's loss cannot be computed (KeyError: 'labels')"),
    ],
)
def test_a_loss_of_ones_own_that_is_no_sum_over_tokens_is_refused(loss, said):
    with rotorch.on_meta():
        module = causal_lm(tiny_config("llama")).model
    assert not try_shared(module).refused and not try_shared(module).has_loss
    with pytest.raises(ConfigError, match=re.escape(said)):
        rotorch.parallelize(module, "tsp=2", device="cpu", loss=loss)
