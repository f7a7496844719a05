"""`nn.MultiheadAttention` by our own forward, beside torch's."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rotorch.core.spec import Range
from rotorch.ops.multihead import multihead_on_slice

HEADS, FEATURES, TOKENS = 3, 12, 5


def with_fused_calls(run):
    """Returns the result of `run`, and of each call of the fused kernel (it has a mask, it is causal)."""
    fused, calls = F.scaled_dot_product_attention, []

    def heard(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        calls.append((attn_mask is not None, is_causal))
        return fused(query, key, value, attn_mask, dropout_p, is_causal)

    with mock.patch.object(F, "scaled_dot_product_attention", heard):
        return run(), calls


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_kernel_makes_causal_masks_itself_where_torch_lets_it(is_causal, padded, need_weights):
    """A mask that it is given has the square of the length in memory, and takes the slower kernels."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True).double()
    x = torch.randn(2, TOKENS, FEATURES, dtype=torch.float64)
    given = {
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype),
        "key_padding_mask": torch.zeros(2, TOKENS, dtype=x.dtype) if padded else None,
        "is_causal": is_causal,
        "need_weights": need_weights,
    }
    (expected, maps), theirs = with_fused_calls(lambda: attention(x, x, x, **given))
    (got, own_maps), ours = with_fused_calls(lambda: multihead_on_slice(attention, Range(0, HEADS), x, x, x, **given))
    assert ours == theirs == ([] if need_weights else [(not is_causal or padded, is_causal and not padded)])
    torch.testing.assert_close(got + attention.out_proj.bias, expected)
    torch.testing.assert_close(own_maps, maps)
