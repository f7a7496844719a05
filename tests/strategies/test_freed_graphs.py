"""Graphs are freed with the last reference to them: of layers computed again, and of passes without a backward."""

import gc
import warnings

import pytest
import torch

import rotorch
from rotorch.models.hf import causal_lm, config_from_dict, load_config
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

LAYOUTS = (
    "ddp=2",
    "fsdp=2",
    "rtp=2",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,recompute=none]",
    "megatron=2[sequence_parallel=true]",
    "fsdp=1[recompute=block],megatron=2[sequence_parallel=true]",
)


def live_tensors():
    """Number of plain tensors that Python can see."""
    gc.collect()
    return sum(type(o) is torch.Tensor for o in gc.get_objects())


def model_of(config, layout, *, checkpoints):
    with rotorch.on_meta():
        module = causal_lm(config).train()
    if checkpoints:
        name = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"  # before v6
        getattr(module, f"{name}_checkpointing_enable")()
    return rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)


def numbers_of_tensors(config, layouts):
    """By layout: how many tensors there are after each of some steps, each behind a forward without a backward."""
    warnings.simplefilter("ignore")
    ids, found = torch.arange(2 * 16).view(2, 16), {}
    for layout in layouts:
        model = model_of(config, layout, checkpoints="recompute" not in layout or "none" in layout)
        numbers = []
        for step in range(4):
            model(input_ids=ids, labels=ids)
            model.forward_backward({"input_ids": ids, "labels": ids}, accumulate=True)
            if step >= 2:  # the first steps make what stays
                numbers.append(live_tensors())
        found[layout] = numbers
        model.close()
    return found


def test_no_step_leaves_tensors_behind(tiny):
    config = config_from_dict({**load_config(tiny("llama")).to_dict(), "num_hidden_layers": 2}, source="test")
    for found in run_ranks(numbers_of_tensors, config, LAYOUTS, num_ranks=2, timeout_s=400):
        assert {layout for layout, (before, after) in found.items() if after > before} == set()


def saved_under_hooks(config):
    """Numbers of tensors that hooks around a forward are given to save, without token shards and with them."""
    ids, found = torch.arange(2 * 16).view(2, 16), []
    for layout in ("megatron=2", "megatron=2[sequence_parallel=true]"):
        model, saved = model_of(config, layout, checkpoints=False), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.detach()), lambda _: None):
            model(input_ids=ids, labels=ids)
        found.append(len(saved))
        model.close()
    return found


def test_a_checkpoint_may_drop_all_of_a_layer_on_token_shards(tiny):
    """A checkpoint drops what its hooks are given: what others save inside of it stays."""
    config = config_from_dict({**load_config(tiny("llama")).to_dict(), "num_hidden_layers": 2}, source="test")
    for plain, shards in run_ranks(saved_under_hooks, config, num_ranks=2):
        assert shards >= plain > 20
