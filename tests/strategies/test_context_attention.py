"""Attentions of sequences that ranks share: run again by checkpoints, and masks only where tokens need them."""

import pytest
import torch
from context_models import MODELS, TINY, module_of, tiny_config
from small_configs import SIZES, config_of

import rotorch
from rotorch._torch_private import CPU_ATTENTION, TorchDispatchMode
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.models.hf import causal_lm
from rotorch.models.shared_sequence import SharedSequence, simplified
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import compute_exactly
from rotorch.testing.verify import BAR

pytestmark = pytest.mark.usefixtures("warm")


def with_a_checkpoint_of_its_own(config):
    model = rotorch.parallelize(module_of(config), "pp=2,tsp=2", device="cpu")
    model.module.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(16).view(1, -1)
    model.forward_backward([{"input_ids": ids, "labels": ids}] * 2)


def test_a_checkpoint_that_would_see_another_micro_batch_is_refused():
    module = module_of(tiny_config("llama"))
    module.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigError, match=r"see another sequence\. Call activation_checkpointing_disable"):
        rotorch.parallelize(module, "pp=2,tsp=2", device="cpu")
    with pytest.raises(RankFailure, match=r"after other micro-batches have passed\. Call activation_checkpointing"):
        run_ranks(with_a_checkpoint_of_its_own, tiny_config("llama"), num_ranks=4)


def with_checkpoints(batch, config, layout):
    """Gradients where the model's own checkpoints run each layer again."""
    with exact_arithmetic():
        module = module_of(config)
        module.activation_checkpointing_enable({"use_reentrant": False})
        model = rotorch.parallelize(module, layout, device="cpu")
        model.forward_backward(batch)
    gradients = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return gradients


@pytest.mark.parametrize("layout", ["tsp=2", "tsp=2[recompute=slice]"])
@pytest.mark.parametrize("model", ["mistral", "llama"])
def test_checkpoints_of_the_models_own_run_an_attention_again(model, layout):
    config = tiny_config(model)
    compute_exactly(config)
    batch = {name: torch.arange(48).view(2, -1) % 96 for name in ("input_ids", "labels")}
    with exact_arithmetic():
        reference = module_of(config)
        reference(**batch).loss.backward()
    for gradients in run_ranks(with_checkpoints, batch, config, layout, num_ranks=2):
        for name, parameter in reference.named_parameters():
            scale = max(float(parameter.grad.abs().max()), 1e-6)
            assert float((gradients[name] - parameter.grad).abs().max()) <= BAR * scale, name


class Counting(TorchDispatchMode):
    """Counts fused attentions, and masks."""

    def __init__(self):
        super().__init__()
        self.fused, self.masked = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is CPU_ATTENTION.default:
            self.fused += 1
            self.masked += (kwargs or {}).get("attn_mask") is not None
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("model", "added", "masked"),
    [
        ("llama", {}, False),
        ("llama", {"attention_mask": torch.ones(2, 64, dtype=torch.long)}, False),
        ("llama", {"position_ids": torch.arange(64).expand(2, -1)}, False),
        ("llama", {"attention_mask": torch.ones(2, 64, dtype=torch.long).tril()}, True),
        ("llama", {"position_ids": torch.arange(64).expand(2, -1) % 40}, True),  # documents
        ("mistral", {}, True),
        ("mistral_64", {}, False),  # its window is as long as the sequence
    ],
)
def test_attentions_need_masks_only_where_tokens_do_not_see_all_before_them(model, added, masked):
    """One rank as two, whose exchange gives it zeros for the other one's keys."""
    batch = {"input_ids": torch.arange(128).view(2, -1) % 96, **added}
    kind, _, window = model.partition("_")
    module = causal_lm(config_of(kind, **TINY, **{"sliding_window": int(window)} if window else MODELS[kind]))

    def exchange(x, moves, *, into=None):
        return x.new_zeros(*x.shape[:2], moves.num_made[1], x.shape[3])

    sequence = SharedSequence(module, rank=0, num_ranks=2, exchange=exchange)
    with sequence.attention(), torch.no_grad(), Counting() as counted:
        module(**sequence.take(simplified(batch)), use_cache=False)
    layers = SIZES["num_hidden_layers"]
    assert counted.fused > 3 * layers if masked else counted.fused == 3 * layers  # of two chunks, one is the first
    assert counted.masked == (counted.fused if masked else 0)
