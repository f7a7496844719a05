"""Calls of flash attention under slices: heads and arguments of each, and how often positions are looked at.

There is no flash attention on CPU. A stand-in under a name of that kind notes its calls, looks at positions as
transformers' own does, and attends by torch's.
"""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers import modeling_flash_attention_utils as flash
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rotorch
from rotorch.models import packed_rows
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

NAME = "flash_of_a_test"
HEADS, KEY_HEADS, TOKENS = 8, 4, 16
LAYOUTS = {
    "single": [(HEADS, KEY_HEADS)],
    "rtp=2[transport=send_receive]": [(HEADS // 2, KEY_HEADS // 2)] * 2,
    "rtp=2[transport=send_receive,visits=1]": [(HEADS, KEY_HEADS)],
    "rtp=2[transport=send_receive,recompute=slice]": [(HEADS // 2, KEY_HEADS // 2)] * 4,  # in backward again
    "fsdp=2": [(HEADS, KEY_HEADS)],
    "megatron=2": [(HEADS // 2, KEY_HEADS // 2)],
}
"""Heads of queries and of keys in the calls of one attention of a rank and micro-batch."""


def gradients(path, layout, packed):
    """The calls of each micro-batch's attentions, looks at positions, and gradients, also without the stand-in."""
    calls, looks, look = [], [], flash._is_packed_sequence

    def attend(module, query, key, value, attention_mask, scaling, position_ids=None, cu_seq_lens_q=None, **_):
        flash._is_packed_sequence(position_ids, query.shape[0])
        calls.append((query.shape[1], key.shape[1], cu_seq_lens_q is not None))
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        if packed:
            mask &= torch.arange(TOKENS)[:, None] // (TOKENS // 2) == torch.arange(TOKENS) // (TOKENS // 2)
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def noted(position_ids, batch_size):
        looks.append(batch_size)
        return look(position_ids, batch_size)

    config = load_config(path)
    config.num_hidden_layers, config.use_cache = 2, False
    ids = torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found = []
    for name in (NAME, "sdpa"):
        calls.clear(), looks.clear()
        config._attn_implementation = "eager"
        with (
            mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {NAME: attend}),
            mock.patch.object(flash, "_is_packed_sequence", noted),
        ):
            with rotorch.on_meta():
                module = causal_lm(config).double()
            module.config._attn_implementation = name  # not before: transformers would look for a package
            model = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
            batch = {"input_ids": ids, "labels": ids}
            if packed:
                batch["position_ids"] = torch.arange(TOKENS).remainder(TOKENS // 2)[None]
                if name == NAME:
                    batch["cu_seq_lens_q"] = torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32)
            model.forward_backward([batch])
            first_looks = len(looks)
            calls.clear()
            model.forward_backward([dict(batch), dict(batch)], accumulate=True)
        grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
        found.append((list(calls), first_looks, grads))
        model.close()
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "layout",
    [layout if "send_receive]" in layout else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS],
)
def test_attention_gets_the_heads_of_a_slice_and_looks_at_positions_once(tiny, layout, packed):
    assert load_config(tiny("llama")).num_attention_heads == HEADS  # 4 of keys and values
    num_ranks = 1 if layout == "single" else 2
    for (calls, num_looks, grads), (_, _, expected) in run_ranks(
        gradients, tiny("llama"), layout, packed, num_ranks=num_ranks
    ):
        assert calls == [(*heads, packed) for heads in LAYOUTS[layout]] * 4  # of two layers and micro-batches
        assert num_looks == packed  # for all layers and slices, and none if positions are the model's own
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-11)


def test_positions_that_change_are_looked_at_again():
    looked = []
    look = packed_rows._LooksOnce(lambda positions, _: looked.append(1) or bool((positions.diff() < 0).any()))
    positions = torch.arange(6)[None]
    assert [look(positions, 1), look(positions, 1), len(looked)] == [False, False, 1]
    positions[0, 3:] = torch.arange(3)
    assert [look(positions, 1), look(positions, 1), len(looked)] == [True, True, 2]
    assert not look.that_finds_nothing(torch.arange(6)[None], 1)
    look(positions, 2)  # rows of their own, which transformers tells by the shape
    assert len(looked) == 3
