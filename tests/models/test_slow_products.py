"""The warning of products in float32 on GPUs, which torch makes without tensor cores unless TF32 is allowed."""

import pytest
import torch

from rotorch.models.checks import slow_products


@pytest.mark.parametrize(
    ("dtypes", "device_type", "allowed", "warns"),
    [
        ({torch.float32}, "cuda", "highest", True),
        ({torch.float32}, "cuda", "high", False),
        ({torch.float32}, "cpu", "highest", False),
        ({torch.bfloat16}, "cuda", "highest", False),
        (set(), "cuda", "highest", False),
    ],
)
def test_products_without_tensor_cores_are_told_of(monkeypatch, dtypes, device_type, allowed, warns):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    said = slow_products(dtypes, device_type=device_type)
    assert ("Write precision=" in said and "allow TF32" in said) == warns == bool(said)
