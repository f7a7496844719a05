"""fsdp around megatron: exact whatever a model and its user do, to the byte, and with a part of a slice per rank."""

import pytest

from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("fsdp=3,megatron=2", "gpt_neox"),  # fused heads, of which rows are cut unevenly, and biases of few rows
        ("fsdp=2,megatron=3", "llama"),  # four groups of heads on three ranks
        ("fsdp=2[reshard=false],megatron=2[sequence_parallel=true]", "qwen3"),  # tied weights
        ("fsdp=2[recompute=block],megatron=2", "gemma2"),
        ("ddp=2,fsdp=2,megatron=2", "mixtral"),
        pytest.param("fsdp=2[recompute=block,reshard=false],megatron=2", "mixtral", marks=pytest.mark.slow),
        pytest.param("fsdp=2,megatron=2[transport=messages]", "olmo2", marks=pytest.mark.slow),
        pytest.param("fsdp=4,megatron=2", "gpt_neox", marks=pytest.mark.slow),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
