"""Attention of spans of a sequence, against all scores with a mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from rotorch.core.spec import Range
from rotorch.models.attend_last import Span, attend_spans, can_fuse, of_tokens


def attend_last(query, key, value, *, scale):
    """Of the last tokens."""
    span = Span(Range(0, query.shape[2]), Range(0, key.shape[2]))
    return attend_spans(query, key, value, spans=[span], scale=scale).transpose(1, 2)


def by_mask(query, key, value, scale):
    before = key.shape[2] - query.shape[2]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(before)
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def by_lower_right(query, key, value, scale):
    """As on a device whose kernels know it."""
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=True)


def given_tensors(*, queries, tokens, heads=4, key_heads=2, dtype=torch.float64):
    """Keys and values are parts of one tensor, and queries come as views, as models give them."""
    torch.manual_seed(0)
    query = torch.randn(2, queries, heads, 8, dtype=dtype, requires_grad=True)
    both = torch.randn(2, key_heads, tokens, 16, dtype=dtype, requires_grad=True)
    return query, both, torch.randn(2, heads, queries, 8, dtype=dtype)


def outputs_and_gradients(attend, query, both, grad, *, scale=0.3):
    key, value = both.split(8, dim=-1)
    output = attend(query.transpose(1, 2), key, value, scale)
    return output.detach(), *torch.autograd.grad(output, (query, both), grad)


@given(
    queries=st.integers(1, 40), before=st.integers(0, 70), key_heads=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_is_attention_with_a_mask(queries, before, key_heads, scale):
    tensors = given_tensors(queries=queries, tokens=before + queries, key_heads=key_heads)
    expected = outputs_and_gradients(by_mask, *tensors, scale=scale)
    for attend in (lambda q, k, v, scale: attend_last(q, k, v, scale=scale), by_lower_right):
        for found, right in zip(outputs_and_gradients(attend, *tensors, scale=scale), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    gaps=st.lists(st.integers(0, 20), min_size=3, max_size=3),
)
def test_spans_attend_each_to_all_tokens_up_to_its_own(lengths, gaps):
    """Keys that several spans see get the sum of their gradients; those that none sees, zeros."""
    spans, queries, tokens = [], 0, 0
    for length, gap in zip(lengths, gaps, strict=False):
        tokens += gap + length
        spans.append(Span(Range(queries, length), Range(0, tokens)))
        queries += length
    tensors = given_tensors(queries=queries, tokens=tokens + 1)

    def at_once(query, key, value, scale):
        return attend_spans(query, key, value, spans=spans, scale=scale).transpose(1, 2)

    def one_by_one(query, key, value, scale):
        return torch.cat(
            [
                by_mask(of_tokens(query, s.queries), of_tokens(key, s.keys), of_tokens(value, s.keys), scale)
                for s in spans
            ],
            dim=2,
        )

    found, right = (outputs_and_gradients(attend, *tensors) for attend in (at_once, one_by_one))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_features_need_not_lie_side_by_side():
    torch.manual_seed(0)
    tensors = [
        torch.randn(2, heads, 8, n, dtype=torch.float64).transpose(2, 3) for heads, n in ((4, 5), (2, 9), (2, 9))
    ]
    torch.testing.assert_close(attend_last(*tensors, scale=None), by_mask(*tensors, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "features", "of_values", "fits"),
    [
        ("cpu", torch.float64, 300, 300, True),
        ("cpu", torch.float32, 64, 32, False),
        ("meta", torch.bfloat16, 128, 128, True),  # in the place of a GPU
        ("meta", torch.bfloat16, 264, 264, False),
        ("meta", torch.float32, 128, 128, False),
    ],
)
def test_only_what_a_kernel_takes_without_all_scores_is_fused(device, dtype, features, of_values, fits):
    query, value = (torch.empty(1, 2, 4, n, dtype=dtype, device=device) for n in (features, of_values))
    assert can_fuse(query, value) == fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_as_near_to_the_truth_as_the_kernel_with_a_mask(dtype):
    tensors = given_tensors(queries=64, tokens=256, dtype=dtype)
    truth = outputs_and_gradients(by_mask, *(x.detach().double().requires_grad_() for x in tensors))
    of_kernel = outputs_and_gradients(by_mask, *tensors)
    found = outputs_and_gradients(lambda q, k, v, scale: attend_last(q, k, v, scale=scale), *tensors)
    for one, kernel, right in zip(found, of_kernel, truth, strict=True):
        assert one.dtype == dtype
        assert float((one - right).norm()) <= 1.5 * float((kernel - right).norm())
